"""Attention of transformers' models through AttentionInterface, saved in the format of the coat block.

"coat" replaces "sdpa" and FlashAttention, and "eager" in models with sinks. Causal attention over whole
sequences uses the fastest backend of torch's scaled_dot_product_attention; packed documents, sliding windows
and sinks use torch's variable-length attention. All other attention (masks, decoding with a cache, attention
in both directions) calls transformers' own function for "sdpa". All are saved in the same way, and the output
projection reads what attention has saved, instead of saving its input a second time. With sinks, other
attention saves what torch saves.
"""

import contextlib
import functools
import inspect
import re
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from coat_ds.config import ActivationsConfig
from coat_ds.layers.modules.converted_forward import DTYPES, autocast_dtype, is_evaluated
from coat_ds.layers.modules.packed import coat_mask, documents_of, packed_mask, traced_mask
from coat_ds.log import log_once
from coat_kernels.attention import (
    Documents,
    additive_mask,
    causal_attention,
    custom_attention,
    packed_attention,
    switched_on,
    takes_packed,
)
from coat_kernels.autograd.origin import ATTENDED, Origin, note, noted, origin_of

NAME = "coat"
# transformers' implementation with the same arithmetic
STOCK = "sdpa"
# parts of the names of FlashAttention, of its package or from the Hub
_FLASH = re.compile("flash_attention|flash-attn")
SAVING = "coat_attention"
# marks attention modules of a converted model that are not converted
NOT_CONVERTED = "coat_left_attention"
WITHOUT_CUDNN = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
# arguments that change what transformers' function computes, or that it refuses
_CHANGING = ("position_bias", "softcap", "cache")


@dataclass(frozen=True, slots=True)
class AttentionSaving:
    """The attribute `coat_attention` of a converted attention module: how it saves q, k, v and the output.
    saved_format: None saves them unchanged. evaluates_stock: evaluation calls
    transformers' function. loaded: the implementation that the model was loaded with."""

    saved_format: str | None
    evaluates_stock: bool
    loaded: str = STOCK


def attention_saving(activations: ActivationsConfig) -> AttentionSaving:
    """How attention is saved by the keys of the block. Only whole layers can recompute: outside of them
    "recompute" saves q, k, v and the output."""
    fmt, evaluates_stock = activations.attention_format, activations.evaluation == "stock"
    if fmt == "bf16":
        return AttentionSaving(None, evaluates_stock)
    saved_format = activations.saved_format if fmt == "recompute" else fmt
    return AttentionSaving(saved_format, evaluates_stock)


def is_flash(implementation: str | None) -> bool:
    """Whether the name is one of FlashAttention's."""
    return implementation is not None and _FLASH.search(implementation) is not None


def why_keep_flash(module: torch.nn.Module) -> str | None:
    """Why a module that was loaded with FlashAttention keeps it; None if COAT's attention computes the
    same."""
    if any("softcap" in name and value is not None for name, value in vars(module).items()):
        return "FlashAttention stays, since its scores are soft-capped"
    return None if getattr(module, "is_causal", True) else "FlashAttention stays, since it is not causal"


def why_not(module: torch.nn.Module, implementation: str | None) -> str | None:
    """Why a module that was loaded with another `implementation` than FlashAttention keeps it; None if it can
    be converted."""
    # GPT-OSS: each head has a score that the softmax of each row counts, for which transformers has no "sdpa"
    has_sinks = "sinks" in module._parameters and getattr(module, "is_causal", True)
    if implementation not in (STOCK, NAME) and not (implementation == "eager" and has_sinks):
        return f"its implementation is {implementation!r}, not {STOCK!r} or FlashAttention"
    # as DeepSeek-V4's, which adds to the scores of "eager": the masks of "sdpa" are boolean, or None
    if implementation == "eager" and _changes_mask(type(module)):
        return "its forward may change the attention mask"
    # as of Gemma 4, or of DeepSeek-V3.2, which tests it against a list of names; such code takes another path
    # for any other name
    return f"its model asks for {STOCK!r} by name" if _compares(type(module).__module__) else None


@functools.cache
def _changes_mask(cls: type) -> bool:
    """Whether the forward of this class does more with its mask than hand it on, or has no source."""
    try:
        source = inspect.getsource(cls.forward)
    except (OSError, TypeError):
        return True
    return re.search(r"\battention_mask(\.| = )", source) is not None


@functools.cache
def _compares(name: str) -> bool:
    """Whether the code of this module compares an implementation's name with `STOCK`."""
    try:
        source = inspect.getsource(sys.modules[name])
    # modules without source, such as notebooks and compiled ones, are not from transformers
    except (OSError, TypeError, KeyError):
        return False
    asked = rf"_attn_implementation\s*([!=]=|(not\s+)?in\s*[\[({{][^\])}}]*)\s*[\"']{STOCK}[\"']"
    return re.search(asked, source) is not None


def register() -> None:
    """Registers "coat" in transformers. Further calls have no effect."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, coat_attention)
    AttentionMaskInterface.register(NAME, coat_mask)


def is_transformers_own() -> bool:
    """Whether the registered attention functions are transformers' and COAT's own. DeepSpeed's Ulysses
    replaces them by functions that exchange heads between ranks; bypassing these functions would attend only
    to the rank's own part of the sequence."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    stock, ours = ALL_ATTENTION_FUNCTIONS[STOCK], ALL_ATTENTION_FUNCTIONS[NAME]
    return stock is sdpa_attention_forward and ours is coat_attention


def _own_storages(*heads: torch.Tensor) -> list[torch.Tensor]:
    """`heads`, copied if backward would otherwise keep a much larger storage alive. This happens to the
    values of a fused projection: they are a view, while queries and keys were rotated into new tensors."""
    used: dict[int, int] = {}
    for x in heads:
        address = x.untyped_storage().data_ptr()
        used[address] = used.get(address, 0) + x.nbytes

    def wastes(x: torch.Tensor) -> bool:
        storage = x.untyped_storage()
        return x.requires_grad and storage.nbytes() > used[storage.data_ptr()]

    return [x.clone(memory_format=torch.preserve_format) if wastes(x) else x for x in heads]


def _is_plain_causal(module, query, key, is_causal, rest) -> bool:
    """Whether transformers' own function would compute causal attention, with equally long queries and keys,
    if it gets no mask."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    return (
        bool(is_causal)
        and 1 < query.shape[2] == key.shape[2]
        and query.shape[1] % key.shape[1] == 0
        and not any(rest.get(name) is not None for name in _CHANGING)
    )


def coat_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **rest,
) -> tuple[torch.Tensor, None]:
    """query [b, n, s, d], key and value [b, groups, s, d] -> [b, s, n, d] and no weights, as transformers'
    `sdpa_attention_forward`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    saving, registered = module.__dict__.get(SAVING), ALL_ATTENTION_FUNCTIONS[STOCK]
    arguments = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **rest}
    if registered is not sdpa_attention_forward:
        return registered(module, query, key, value, attention_mask, **arguments)
    compiling = torch.compiler.is_compiling()
    _warn(module, saving, compiling)
    causal = _is_plain_causal(module, query, key, is_causal, rest)
    b, s = query.shape[0], query.shape[2]
    sinks = rest.get("s_aux")
    attend = sdpa_attention_forward if sinks is None else _sdpa_with_sinks
    # torch.compile does not see notes, and tensors on "meta" have no values
    if compiling or query.is_meta:
        mask = traced_mask(attention_mask, rest, b, s) if causal else attention_mask
        return attend(module, query, key, value, mask, **arguments)
    flash = saving is not None and is_flash(saving.loaded)
    mask = packed_mask(attention_mask, rest, b, s, flash) if causal else attention_mask
    stock = saving is None or (saving.evaluates_stock and is_evaluated(module))
    dtype = autocast_dtype(query)
    if dtype is not None and query.dtype in DTYPES:
        # autocast would cast inside torch's function, and the saved casts could not be recognised as heads
        query, key, value = (x.to(dtype) for x in (query, key, value))
    takes = takes_packed(query.dtype, query.device, query.shape[-1], value.shape[-1])
    takes = takes and causal and not dropout
    # "stock" attends by the stock model's mask, to the bit
    readable = takes and (saving is None or not stock or flash or sinks is not None)
    packed, mask = documents_of(mask, readable)
    if packed is None and mask is None and takes and sinks is not None:
        packed = Documents.whole(b, s, query.device)
    if packed is None and (stock or sinks is not None):
        return attend(module, query, key, value, mask, **arguments)
    saved_format = None if stock else saving.saved_format
    if saved_format is None:
        query, key, value = _own_storages(query, key, value)
    heads = [x.transpose(1, 2) for x in (query, key, value)]
    how = {"scale": scaling, "saved_format": saved_format, "batch_first": True}
    if packed is not None:
        y = packed_attention(*heads, packed, sinks=sinks, **how)
    elif causal and mask is None:
        y = causal_attention(*heads, dropout=dropout, **how)
    else:
        y = any_attention(module, query, key, value, mask, arguments, saved_format=saved_format)
    if (origin := origin_of(y)) is not None:
        # the module reads y through views, which are other tensor objects
        note(y if y._base is None else y._base, ATTENDED, origin)
    return y.view(*y.shape[:2], -1, value.shape[-1]), None


def _warn(module: torch.nn.Module, saving: AttentionSaving | None, compiling: bool) -> None:
    """Warns of attention that does not save what the block says, and of a model that was not converted."""
    if saving is not None and saving.saved_format is not None and compiling and torch.is_grad_enabled():
        log_once(
            "coat.activations.attention_format: of no effect under torch.compile: attention saves what it "
            "saved before it was converted. Write 'bf16'."
        )
    if saving is None and not compiling and NOT_CONVERTED not in module.__dict__:
        log_once(
            "a model that was not converted has the config of one that was, as the reference model that TRL "
            "loads for DPO. It runs in BF16, and its log-probabilities are not those of FP8 layers with the "
            "same weights. Call coat_ds.convert on it, too."
        )


def _sdpa_with_sinks(
    module, query, key, value, attention_mask, *, dropout=0.0, scaling=None, is_causal=None, s_aux, **rest
) -> tuple[torch.Tensor, None]:
    """`sdpa_attention_forward` with sinks: scores of a key and a value of zeros, which the mask adds."""
    b, n, s, _ = query.shape
    t = key.shape[2]
    if attention_mask is None:
        attention_mask = torch.ones(s, t, dtype=torch.bool, device=query.device)
        causal = is_causal is not False and getattr(module, "is_causal", True) and s > 1
        attention_mask = attention_mask.tril() if causal else attention_mask
    if attention_mask.dtype == torch.bool:
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(
            ~attention_mask, -torch.inf
        )
    scores = (
        attention_mask[..., :t].expand(b, n, s, t),
        s_aux.to(query.dtype).view(n, 1, 1).expand(b, n, s, 1),
    )
    key, value = (F.pad(x, (0, 0, 0, 1)).repeat_interleave(n // x.shape[1], 1) for x in (key, value))
    y = F.scaled_dot_product_attention(
        query, key, value, attn_mask=torch.cat(scores, -1), dropout_p=dropout, scale=scaling
    )
    return y.transpose(1, 2).contiguous(), None


def any_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    arguments: dict,
    *,
    saved_format: str | None,
) -> torch.Tensor:
    """The output of transformers' own function for heads as in `coat_attention`, `mask` and further
    `arguments`: [b, s, n * d], with a note of its origin. Saved as in `custom_attention`; all layers share
    the mask."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    times = 1
    if _is_only_masked(query, key, mask, arguments):
        times = query.shape[1] // key.shape[1]
        mask = additive_mask(mask, query.dtype)
        # a boolean mask may have rows without any key, for which cuDNN's backward gives NaN (torch 2.11)
        chooses = mask.dtype == torch.bool and mask.is_cuda

        def attend(*heads):
            dropout, scale = arguments.get("dropout", 0.0), arguments.get("scaling")
            choice = contextlib.nullcontext()
            if chooses:
                # the MATH backend is always available
                choice = sdpa_kernel(switched_on(WITHOUT_CUDNN) or [SDPBackend.MATH])
            with choice:
                return F.scaled_dot_product_attention(*heads, attn_mask=mask, dropout_p=dropout, scale=scale)
    else:

        def attend(*heads):
            return sdpa_attention_forward(module, *heads, mask, **arguments)[0].transpose(1, 2)

    biased = mask is not None or arguments.get("position_bias") is not None
    if biased and key.shape[2] in (query.shape[-1], value.shape[-1]):
        # with such a shape, the saved bias of the scores could be mistaken for a head
        saved_format = None
    return custom_attention(attend, query, key, value, times=times, saved_format=saved_format)


def _is_only_masked(query, key, mask, arguments) -> bool:
    """Whether transformers' own function would only repeat keys and values for all heads and call torch's
    function with `mask`."""
    return (
        mask is not None
        and mask.dim() == 4
        and query.shape[2] > 1
        and query.shape[1] % key.shape[1] == 0
        and not any(arguments.get(name) is not None for name in _CHANGING)
    )


def attended_origin(x: torch.Tensor) -> Origin | None:
    """The origin of attention's output if `x` [..., n * d] is a view of all its rows; else None."""
    base = x._base
    if base is None or torch.compiler.is_compiling():
        return None
    origin = noted(base, ATTENDED)
    if (
        origin is None
        or x.numel() != base.numel()
        or x.data_ptr() != base.data_ptr()
        or not x.is_contiguous()
    ):
        return None
    saved = origin.tensors[0]
    width = saved.shape[1] if saved.ndim == 2 else saved.shape[1] * saved.shape[-1]
    return origin if x.shape[-1] == width else None
