"""Causal attention on `torch.nn.functional.scaled_dot_product_attention` for Megatron's core-attention slot.

Megatron's own `DotProductAttention` saves the whole matrix of scores for backward. This module saves q, k, v,
the output and one FP32 number per row. The COAT spec can save them in 8 bits (`attention_format`).
"""

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.utils import is_layer_window_attention
from torch.nn.attention import SDPBackend

from coat_ds.config import ActivationsConfig
from coat_ds.layers.conversion import attended, grouped
from coat_ds.layers.inventory import Part
from coat_ds.layers.modules.hooks import before_hooks
from coat_ds.log import say_once
from coat_kernels.attention import BACKENDS, causal_attention
from coat_kernels.groups import DEFAULT_FORMAT
from megatron_ext import options
from megatron_ext.layers.settings import TakesActivations, activations_of

# --attention-backend
_BACKENDS = {
    AttnBackend.auto: BACKENDS,
    AttnBackend.fused: (SDPBackend.CUDNN_ATTENTION,),
    AttnBackend.flash: (SDPBackend.FLASH_ATTENTION,),
    AttnBackend.unfused: (SDPBackend.MATH,),
    AttnBackend.local: BACKENDS,
}


def core_attention_of(config, own: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The class of the core attention: `own`, or under context parallelism Transformer Engine's, the only one
    for sequences that are split over ranks.

    Under context parallelism raises ValueError if Transformer Engine is missing, or for an `attention_format`
    that its attention does not support.
    """
    if config.context_parallel_size == 1:
        return own
    found = f"--context-parallel-size is {config.context_parallel_size}"
    from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention

    if not HAVE_TE:
        raise ValueError(
            f"{found}, for which attention is Transformer Engine's, and that could not be imported. Remove "
            "--context-parallel-size, or install Transformer Engine: pip install transformer-engine[pytorch]."
        )
    if own is CoatCoreAttention:
        check_context_parallel(config, activations_of(config))
    return TEDotProductAttention


def check_context_parallel(config, activations: ActivationsConfig) -> None:
    """Raises ValueError for an `attention_format` that Transformer Engine's attention does not support."""
    kept, size = activations.attention_format, config.context_parallel_size
    if size > 1 and kept != "bf16":
        raise ValueError(
            f"--context-parallel-size is {size}, for which attention is Transformer Engine's, and "
            f'attention_format is "{kept}". Set "activations": {{"attention_format": "bf16"}}, or remove '
            "--context-parallel-size."
        )


def _own_storage(x: torch.Tensor) -> torch.Tensor:
    """`x`, copied if it is a view of a larger storage: otherwise the whole storage stays alive until
    backward."""
    if x.untyped_storage().nbytes() == x.nbytes:
        return x
    return x.clone(memory_format=torch.contiguous_format)


class SDPACoreAttention(torch.nn.Module):
    """Causal core attention with grouped queries, windows, dropout and `softmax_scale`, of whole sequences.

    The output carries an `Origin`, the tensor that attention itself saves, so that the projection after it
    saves no second copy.
    Raises ValueError at construction for a mask that is not causal, a window of later tokens, a
    context-parallel size above 1, and for windows, or value heads of another width than key heads
    (`v_channels`, `k_channels`), with a backend that does not support them.
    """

    # q, k, v and the output are saved in groups of this size, or uncompressed if None
    group_size: int | None = None
    saved_format = DEFAULT_FORMAT

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection=None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **_,
    ):
        super().__init__()
        if config.context_parallel_size > 1:
            raise ValueError(
                f"SDPACoreAttention: context_parallel_size is {config.context_parallel_size}, only 1 works. "
                "Remove --context-parallel-size, or use Transformer Engine's attention (`core_attention_of`)."
            )
        if attention_type != "self":
            raise ValueError(f"SDPACoreAttention: attention_type must be 'self', found {attention_type!r}")
        for option in ("softmax_type", "qk_clip", "log_max_attention_logit"):
            value = getattr(config, option, None)
            if value not in (None, False, "vanilla"):
                raise ValueError(
                    f"SDPACoreAttention: {option} is {value!r}, which is not supported; leave it unset"
                )
        host = options.megatron_lm()
        if host is not None and getattr(host.get_args(), "reset_attention_mask", False):
            raise ValueError(
                "SDPACoreAttention: --reset-attention-mask is not supported, tokens attend to earlier "
                "documents of their sequence; remove it"
            )
        _require_causal(attn_mask_type)
        self.window = _window_of(config, layer_number)
        backend = getattr(config, "attention_backend", AttnBackend.auto)
        if backend == AttnBackend.flash and k_channels != v_channels:
            raise ValueError(
                f"SDPACoreAttention: --attention-backend flash takes heads of one width, found {k_channels} "
                f"channels of keys and {v_channels} of values. Take --attention-backend auto or fused."
            )
        if backend == AttnBackend.flash and self.window is not None:
            raise ValueError(
                "SDPACoreAttention: --attention-backend flash takes no --window-size. Take "
                "--attention-backend auto or fused."
            )
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        # each tensor-parallel rank drops other scores; under sequence parallelism Megatron's block handles it
        self._draws_by_rank = self.dropout > 0 and not config.sequence_parallel
        # apply_query_key_layer_scaling needs nothing: softmax multiplies back what it divides scores by
        self.softmax_scale = softmax_scale
        self.backends = _BACKENDS[backend]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params=None,
        **_,
    ) -> torch.Tensor:
        """query [s, b, n, d], key [s, b, groups, d], value [s, b, groups, e] -> [s, b, n * e], of one dtype.

        `attention_mask` is not read: causality is the mask.
        Raises ValueError for packed sequences, an attention bias, a non-causal mask type, or keys of another
        length than the queries (decoding).
        """
        if packed_seq_params is not None:
            raise ValueError(
                "SDPACoreAttention: packed_seq_params is not supported; pad sequences to one length"
            )
        if attention_bias is not None:
            raise ValueError("SDPACoreAttention: attention_bias is not supported; use rotary positions")
        # before the mask check: Megatron drops the mask when it decodes
        if key.shape[0] != query.shape[0]:
            raise ValueError(
                f"SDPACoreAttention: {query.shape[0]} queries and {key.shape[0]} keys, expected the same. "
                "Decoding with a key-value cache is not supported. Give no inference_context, so that each "
                "token is computed from the whole sequence, or load the weights into Megatron's own layers."
            )
        if attn_mask_type is not None:
            _require_causal(attn_mask_type)
        # compressed copies have their own storages
        qkv = (query, key, value) if self.group_size else map(_own_storage, (query, key, value))
        if self.training and self._draws_by_rank:
            with get_cuda_rng_tracker().fork():
                y = self.attend(*qkv, group_size=self.group_size)
        else:
            y = self.attend(*qkv, group_size=self.group_size)
        before_hooks(self, y)
        return y

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group_size: int | None = None
    ) -> torch.Tensor:
        """Attention itself, which saves its tensors in groups of `group_size`, or uncompressed if None."""
        return causal_attention(
            q,
            k,
            v,
            scale=self.softmax_scale,
            dropout=self.dropout if self.training else 0.0,
            window=self.window,
            group_size=group_size,
            saved_format=self.saved_format,
            backends=self.backends,
        )


class CoatCoreAttention(TakesActivations, SDPACoreAttention):
    """`SDPACoreAttention` that saves its tensors in 8 bits if the block's `attention_format` is a format.

    With "recompute" q, k and v are recomputed in backward, and only the output is saved, in 8 bits. Only the
    fused layer can recompute them; where the modules run one by one, all four are saved in 8
    bits.
    """

    recomputes = False

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.begin_with(config)

    def take_activations(self, activations: ActivationsConfig) -> None:
        super().take_activations(activations)
        kept = activations.attention_format
        self.recomputes = kept == "recompute"
        self.group_size = None if kept == "bf16" else activations.group_size
        self.saved_format = activations.saved_format if kept in ("bf16", "recompute") else kept

    def coat_part(self) -> Part:
        if self.recomputes:
            return Part("attention", f"recompute their inputs, {grouped(self.activations)}")
        return Part("attention", attended(self.activations))

    def forward(self, *args, **kwargs) -> torch.Tensor:
        if self.recomputes and torch.is_grad_enabled():
            say_once(
                'coat.activations.attention_format: "recompute" needs dense layers of COAT modules alone, '
                "without dropout, hooks, frozen parameters or LayerNorms of queries and keys. Other layers "
                "keep q, k, v and attention's output in 8 bits instead."
            )
        return super().forward(*args, **kwargs)


class NoCrossAttention(IdentityOp):
    """An empty cross-attention slot. Raises ValueError if it receives an encoder's output."""

    def forward(self, x, *args, key_value_states=None, **kwargs):
        if key_value_states is not None:
            raise ValueError(
                "megatron_ext.layer_specs: an encoder's output (context) is not supported: layers have no "
                "cross-attention. Take Megatron's own layers for the encoder, too, whose attention is not "
                "causal."
            )
        return x


def _window_of(config, layer_number: int) -> int | None:
    """The number of earlier tokens that each token of a layer attends to (`--window-size`,
    `--window-attn-skip-freq`); None for all."""
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    earlier, later = config.window_size
    if earlier < 0 or later != 0:
        raise ValueError(
            "SDPACoreAttention: --window-size: expected a number of earlier tokens and 0 later ones, since "
            f"attention is causal, found {earlier},{later}. Write 128,0, for one."
        )
    return earlier


def _require_causal(mask: AttnMaskType) -> None:
    if mask != AttnMaskType.causal:
        raise ValueError(f"SDPACoreAttention: attn_mask_type must be causal, found {mask.name}")
