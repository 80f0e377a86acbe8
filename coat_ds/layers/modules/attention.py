"""Attention of transformers' models through its AttentionInterface, saved in the format that the block says.

"coat" is torch's scaled_dot_product_attention, where a model had "sdpa". Causal attention over whole
sequences takes the fastest backend there is; any other (masks, packed sequences, sliding windows, decoding
with a cache, attention in both directions) is what transformers makes of it. Both are saved in the same way,
and the projection behind reads what attention has saved, instead of saving its input once more.
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
from coat_ds.layers.log import say_once
from coat_ds.layers.modules.replaced import DTYPES, autocast_dtype, is_evaluated
from coat_kernels.attention import additive_mask, causal_attention, kept_attention, switched_on
from coat_kernels.autograd.origin import Origin, note, noted, origin_of
from coat_kernels.groups.reference import DEFAULT_FORMAT

NAME = "coat"
# of the implementations of transformers the one whose arithmetic it is
STOCK = "sdpa"
STATE = "coat_attention"
# on attention modules of a converted model that stay as they are
LEFT = "coat_left_attention"
WITHOUT_CUDNN = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
# arguments of transformers' function that change what attention computes, or are refused there
_CHANGING = ("position_bias", "softcap", "cache")


@dataclass(frozen=True, slots=True)
class KeptAttention:
    """On a converted attention module, as its attribute `coat_attention`: how it saves q, k, v and the
    output, in groups of `group_size` or as they are. evaluates_stock: transformers' function evaluates."""

    group_size: int | None
    saved_format: str
    evaluates_stock: bool


def kept_attention_of(activations: ActivationsConfig) -> KeptAttention:
    """What the block says of attention. "recompute" is of whole layers: by itself attention is saved."""
    fmt, evaluates_stock = activations.attention_format, activations.evaluation == "stock"
    if fmt == "bf16":
        return KeptAttention(None, activations.saved_format, evaluates_stock)
    saved_format = activations.saved_format if fmt == "recompute" else fmt
    return KeptAttention(activations.group_size, saved_format, evaluates_stock)


def uses_interface(module: torch.nn.Module) -> bool:
    """Whether the module's forward asks transformers which attention it takes."""
    forward = inspect.unwrap(type(module).forward)
    return "ALL_ATTENTION_FUNCTIONS" in getattr(getattr(forward, "__code__", None), "co_names", ())


def asks_for_stock(module: torch.nn.Module) -> bool:
    """Whether the code of its model compares the implementation with "sdpa", as Gemma 4's, or looks for it
    among names, as DeepSeek-V3.2's. It would take another path for any other name."""
    return _compares(type(module).__module__)


@functools.cache
def _compares(name: str) -> bool:
    try:
        source = inspect.getsource(sys.modules[name])
    # a model that was typed into a notebook or compiled has no source, and is none of transformers'
    except (OSError, TypeError, KeyError):
        return False
    asked = rf"_attn_implementation\s*([!=]=|(not\s+)?in\s*[\[({{][^\])}}]*)\s*[\"']{STOCK}[\"']"
    return re.search(asked, source) is not None


def register() -> None:
    """Tells transformers of "coat"; may be called again."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, coat_attention)
    # the same masks, and none where the mask is causality itself
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[STOCK])


def is_transformers_own() -> bool:
    """Whether attention is what transformers and we have registered. DeepSpeed's Ulysses puts functions in
    their places that hand heads on between ranks: whoever goes around them attends to a rank's part alone."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    stock, ours = ALL_ATTENTION_FUNCTIONS[STOCK], ALL_ATTENTION_FUNCTIONS[NAME]
    return stock is sdpa_attention_forward and ours is coat_attention


def _own_storages(*heads: torch.Tensor) -> list[torch.Tensor]:
    """`heads`, copied where backward would keep a much larger storage for them. The values of a fused
    projection are such a part of a storage: queries and keys have been rotated into new ones."""
    used: dict[int, int] = {}
    for x in heads:
        address = x.untyped_storage().data_ptr()
        used[address] = used.get(address, 0) + x.nbytes

    def wastes(x: torch.Tensor) -> bool:
        storage = x.untyped_storage()
        return x.requires_grad and storage.nbytes() > used[storage.data_ptr()]

    return [x.clone(memory_format=torch.preserve_format) if wastes(x) else x for x in heads]


def _is_plain_causal(module, query, key, mask, is_causal, rest) -> bool:
    """Whether transformers' own function would ask for causality over as many keys as queries."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    return (
        mask is None
        and bool(is_causal)
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

    kept, registered = module.__dict__.get(STATE), ALL_ATTENTION_FUNCTIONS[STOCK]
    arguments = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **rest}
    if registered is not sdpa_attention_forward:
        return registered(module, query, key, value, attention_mask, **arguments)
    compiling = torch.compiler.is_compiling()
    if kept is not None and kept.group_size is not None and compiling and torch.is_grad_enabled():
        say_once(
            "coat.activations.attention_format: of no effect under torch.compile: attention saves what it "
            "saved before it was converted. Write 'bf16'."
        )
    if kept is None and not compiling and LEFT not in module.__dict__:
        say_once(
            "a model that was not converted has the config of one that was, as the reference model that TRL "
            "loads for DPO. It runs in BF16, and its log-probabilities are not those of FP8 layers with the "
            "same weights. Call coat_ds.convert on it, too."
        )
    # the compiler sees no notes, and on "meta" there are no numbers
    if kept is None or compiling or query.is_meta or (kept.evaluates_stock and is_evaluated(module)):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    dtype = autocast_dtype(query)
    if dtype is not None and query.dtype in DTYPES:
        # autocast would do so inside torch's function, and what that saves would not be known as heads
        query, key, value = (x.to(dtype) for x in (query, key, value))
    if kept.group_size is None:
        query, key, value = _own_storages(query, key, value)
    how = {"group_size": kept.group_size, "saved_format": kept.saved_format}
    if _is_plain_causal(module, query, key, attention_mask, is_causal, rest):
        heads = [x.transpose(1, 2) for x in (query, key, value)]
        y = causal_attention(*heads, scale=scaling, dropout=dropout, batch_first=True, **how)
    else:
        y = any_attention(module, query, key, value, attention_mask, arguments, **how)
    if (origin := origin_of(y)) is not None:
        # the module reads it through views, which are other tensor objects
        note(y if y._base is None else y._base, "attended", origin)
    return y.view(*y.shape[:2], -1, value.shape[-1]), None


def any_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    arguments: dict,
    *,
    group_size: int | None = None,
    saved_format: str = DEFAULT_FORMAT,
) -> torch.Tensor:
    """What transformers' own function makes of heads as in `coat_attention`, of `mask` and of further
    `arguments`: [b, s, n * d], carrying its origin. Saved as by `kept_attention`; all layers share a mask."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    times = 1
    if _is_only_masked(query, key, mask, arguments):
        times = query.shape[1] // key.shape[1]
        mask = additive_mask(mask, query.dtype)
        # a boolean one has rows that see nothing, for which cuDNN's backward gives NaN (torch 2.11)
        chooses = mask.dtype == torch.bool and mask.is_cuda

        def attend(*heads):
            dropout, scale = arguments.get("dropout", 0.0), arguments.get("scaling")
            choice = contextlib.nullcontext()
            if chooses:
                # torch's operations are always there
                choice = sdpa_kernel(switched_on(WITHOUT_CUDNN) or [SDPBackend.MATH])
            with choice:
                return F.scaled_dot_product_attention(*heads, attn_mask=mask, dropout_p=dropout, scale=scale)
    else:

        def attend(*heads):
            return sdpa_attention_forward(module, *heads, mask, **arguments)[0].transpose(1, 2)

    biased = mask is not None or arguments.get("position_bias") is not None
    if biased and key.shape[2] in (query.shape[-1], value.shape[-1]):
        # what is added to the scores could be taken for a head
        group_size = None
    how = {"group_size": group_size, "saved_format": saved_format}
    return kept_attention(attend, query, key, value, times=times, **how)


def _is_only_masked(query, key, mask, arguments) -> bool:
    """Whether transformers' own function would repeat keys and values for all heads, and then call torch's
    with `mask`."""
    return (
        mask is not None
        and mask.dim() == 4
        and query.shape[2] > 1
        and query.shape[1] % key.shape[1] == 0
        and not any(arguments.get(name) is not None for name in _CHANGING)
    )


def attended_origin(x: torch.Tensor) -> Origin | None:
    """The origin of attention's output where `x` [..., n * d] is a view of it, row by row."""
    base = x._base
    if base is None or torch.compiler.is_compiling():
        return None
    origin = noted(base, "attended")
    if (
        origin is None
        or x.numel() != base.numel()
        or x.data_ptr() != base.data_ptr()
        or not x.is_contiguous()
    ):
        return None
    kept = origin.tensors[0]
    width = kept.shape[1] * kept.shape[3] if kept.ndim == 4 else kept.shape[1]
    return origin if x.shape[-1] == width else None
