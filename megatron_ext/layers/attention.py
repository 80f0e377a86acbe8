"""Causal attention on torch's scaled_dot_product_attention and its variable-length attention, for Megatron's
core-attention slot.

Megatron's own `DotProductAttention` saves the whole matrix of scores for backward. This module saves q, k, v,
the output and one FP32 number per row. The COAT spec can save them in 8 bits (`attention_format`).
"""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch.nn.attention import SDPBackend

from coat_ds.config import ActivationsConfig
from coat_ds.layers.conversion import describe_attention, describe_saved
from coat_ds.layers.inventory import Part
from coat_ds.layers.modules.hooks import forget_if_hooked
from coat_ds.log import log_once
from coat_kernels.attention import BACKENDS, Documents, causal_attention, packed_attention, takes_packed
from coat_kernels.autograd.origin import ATTENDED, note, origin_of
from megatron_ext import options
from megatron_ext.layers.packed import is_thd, masked_documents, packed_sequences
from megatron_ext.layers.settings import Configurable

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
    """
    if config.context_parallel_size == 1:
        return own
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return TEDotProductAttention


def check_context_parallel(config, activations: ActivationsConfig) -> None:
    """Raises ValueError for an `attention_format` that Transformer Engine's attention does not support."""
    saved, size = activations.attention_format, config.context_parallel_size
    if size > 1 and saved != "bf16":
        raise ValueError(
            f"--context-parallel-size is {size}, for which attention is Transformer Engine's, and "
            f'attention_format is "{saved}". Set "activations": {{"attention_format": "bf16"}}, or remove '
            "--context-parallel-size."
        )


def _own_storage(x: torch.Tensor) -> torch.Tensor:
    """`x`, copied if it is a view of a larger storage: otherwise the whole storage stays alive until
    backward."""
    if x.untyped_storage().nbytes() == x.nbytes:
        return x
    return x.clone(memory_format=torch.contiguous_format)


class SDPACoreAttention(torch.nn.Module):
    """Causal core attention with grouped queries, windows, dropout and `softmax_scale`, of whole sequences,
    of packed sequences (THD) and of documents (`--reset-attention-mask`); sinks by `--softmax-type`.

    Documents, windows and sinks use torch's variable-length attention, without a mask.
    The output carries an `Origin`, the tensor that attention itself saves, so that the projection after it
    saves no second copy.
    `megatron_ext.unsupported` checks Megatron's arguments about it before a layer is built.
    """

    # the format in which q, k, v and the output are saved; None saves them unchanged
    saved_format: str | None = None
    # a score of each head on this rank that every softmax counts, and that has no value
    softmax_offset: torch.Tensor | None

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
        **_,
    ):
        super().__init__()
        # the number of earlier tokens that each token attends to; None for all
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] if windowed else None
        self.backends = _BACKENDS[getattr(config, "attention_backend", AttnBackend.auto)]
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        script = options.megatron_lm()
        # a mask that the model gets has documents, which attention reads from it
        self.resets = script is not None and getattr(script.get_args(), "reset_attention_mask", False)
        self._add_sinks(config, pg_collection)
        # each tensor-parallel rank drops other scores; under sequence parallelism Megatron's block handles it
        self._draws_by_rank = self.dropout > 0 and not config.sequence_parallel
        # apply_query_key_layer_scaling needs nothing: softmax multiplies back what it divides scores by
        self.softmax_scale = softmax_scale

    def _add_sinks(self, config, pg_collection) -> None:
        """Megatron's parameter of `--softmax-type`, by its name in Megatron's own attention."""
        kind = getattr(config, "softmax_type", "vanilla")
        if kind == "vanilla":
            self.softmax_offset = None
            return
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        self.tp_group = pg_collection.tp
        sinks = torch.zeros(config.num_attention_heads, dtype=config.params_dtype, device=device)
        if kind == "learnable" and config.perform_initialization:
            # all ranks draw the numbers of all heads
            config.init_method(sinks)
        sinks = sinks.chunk(self.tp_group.size())[self.tp_group.rank()].clone()
        if kind == "off-by-one":
            self.register_buffer("softmax_offset", sinks, persistent=False)
        else:
            self.softmax_offset = torch.nn.Parameter(sinks)
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets=(), metadata=None) -> dict:
        """As of Megatron's own attention: each tensor-parallel rank holds the sinks of its heads."""
        state = self.state_dict(prefix="", keep_vars=True)
        if not state:
            return {}
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_,
    ) -> torch.Tensor:
        """query [s, b, n, d], key [s, b, groups, d], value [s, b, groups, e] -> [s, b, n * e], of one dtype.
        Packed sequences may have no dimension b.

        `attention_mask` is read only with --reset-attention-mask: causality is the mask.
        Raises ValueError for an attention bias, a non-causal mask type, keys of another length than the
        queries (decoding), and for documents that cannot be attended to.
        """
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
            # Megatron's name for causal attention inside of documents
            in_documents = is_thd(packed_seq_params) and attn_mask_type == AttnMaskType.padding_causal
            if attn_mask_type != AttnMaskType.causal and not in_documents:
                raise ValueError(
                    f"SDPACoreAttention: attn_mask_type must be causal, found {attn_mask_type.name}"
                )
        squeezed = query.dim() == 3
        if squeezed:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        packed = self.documents(*query.shape[:2], attention_mask, packed_seq_params)
        # compressed copies have their own storages
        qkv = (query, key, value) if self.saved_format else map(_own_storage, (query, key, value))
        if self.training and self._draws_by_rank:
            with get_cuda_rng_tracker().fork():
                y = self.attend(*qkv, packed, self.softmax_offset, self.saved_format)
        else:
            y = self.attend(*qkv, packed, self.softmax_offset, self.saved_format)
        if squeezed and (origin := origin_of(y)) is not None:
            # Megatron's projection reads y through a view, which is another tensor object
            note(y if y._base is None else y._base, ATTENDED, origin)
        forget_if_hooked(self, y)
        return y

    def documents(
        self,
        s: int,
        b: int,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Documents | None:
        """The documents of `b` sequences of `s` tokens; None for whole sequences."""
        if packed_seq_params is not None:
            if self.dropout or SDPBackend.FLASH_ATTENTION not in self.backends:
                raise ValueError(
                    "SDPACoreAttention: packed_seq_params runs on FlashAttention: expected no dropout of "
                    f"attention and --attention-backend auto or flash, found dropout {self.dropout} and "
                    f"{[backend.name for backend in self.backends]}. Set --attention-dropout to 0 and "
                    "--attention-backend to auto."
                )
            return packed_sequences(packed_seq_params, s * b)
        return masked_documents(attention_mask, s, b) if self.resets else None

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        packed: Documents | None = None,
        sinks: torch.Tensor | None = None,
        saved_format: str | None = None,
    ) -> torch.Tensor:
        """Attention itself, which saves its tensors in `saved_format`, or uncompressed if None."""
        how = {"scale": self.softmax_scale, "saved_format": saved_format}
        dropout = self.dropout if self.training else 0.0
        max_seqlen = q.shape[0] if packed is None else packed.max_seqlen
        windowed = self.window is not None and max_seqlen > self.window + 1
        if packed is None:
            if sinks is None and not windowed:
                return causal_attention(q, k, v, **how, dropout=dropout, backends=self.backends)
            packed = Documents.whole(q.shape[1], q.shape[0], q.device)
        if not takes_packed(q.dtype, q.device, q.shape[-1], v.shape[-1]):
            raise ValueError(
                "SDPACoreAttention: documents, windows and sinks run on FlashAttention, which takes BF16 and "
                "heads of one width, at most 256 channels and a multiple of 8; found "
                f"{q.dtype}, {q.shape[-1]} channels of keys and {v.shape[-1]} of values. Train on whole "
                "sequences, without --window-size, and with --softmax-type vanilla."
            )
        if windowed:
            packed = packed._replace(window=self.window)
        return packed_attention(q, k, v, packed, sinks=sinks, backends=self.backends, **how)


class CoatCoreAttention(Configurable, SDPACoreAttention):
    """`SDPACoreAttention` that saves its tensors in 8 bits if the block's `attention_format` is a format.

    With "recompute" q, k and v are recomputed in backward, and only the output is saved, in 8 bits. Only the
    fused layer can recompute them; where the modules run one by one, all four are saved in 8
    bits.
    """

    recomputes = False

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.apply_activations(ActivationsConfig())

    def apply_activations(self, activations: ActivationsConfig) -> None:
        super().apply_activations(activations)
        saved = activations.attention_format
        self.recomputes = saved == "recompute"
        self.saved_format = {"bf16": None, "recompute": activations.saved_format}.get(saved, saved)

    def coat_part(self) -> Part:
        if self.recomputes:
            return Part("attention", f"recompute their inputs, {describe_saved(self.activations)}")
        return Part("attention", describe_attention(self.activations))

    def forward(self, *args, **kwargs) -> torch.Tensor:
        if self.recomputes and torch.is_grad_enabled():
            log_once(
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
