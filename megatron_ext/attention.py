"""Causal attention on `torch.nn.functional.scaled_dot_product_attention` for Megatron's core-attention slot.

Megatron's own `DotProductAttention` keeps the whole matrix of scores for backward. This one keeps q, k, v,
the output and one FP32 number per row.
"""

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType

from coat_kernels.origin import Origin, with_origin


def _own_storage(x: torch.Tensor) -> torch.Tensor:
    """`x`, copied if it is part of a larger storage, all of which would be kept for backward."""
    if x.untyped_storage().nbytes() == x.nbytes:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _heads_to_sequence(output: torch.Tensor) -> torch.Tensor:
    """[b, n, s, d] as [s, b, n * d]; a view if memory is in that order already."""
    return output.permute(2, 0, 1, 3).flatten(2)


class SDPACoreAttention(torch.nn.Module):
    """Causal core attention with grouped queries, dropout and `softmax_scale`, over whole sequences.

    The output carries an `Origin`, the tensor attention itself keeps, so that the projection behind it
    keeps no second copy.
    Raises ValueError at construction for a mask that is not causal or a context-parallel size above 1.
    """

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
        if config.context_parallel_size > 1:
            raise ValueError(
                f"SDPACoreAttention: context_parallel_size is {config.context_parallel_size}, only 1 works. "
                "Remove --context-parallel-size, or use a spec with Transformer Engine's attention."
            )
        if attention_type != "self":
            raise ValueError(f"SDPACoreAttention: attention_type must be 'self', found {attention_type!r}")
        for option in ("window_size", "softmax_type"):
            value = getattr(config, option, None)
            if value not in (None, "vanilla"):
                raise ValueError(
                    f"SDPACoreAttention: {option} is {value!r}, which is not supported; leave it unset"
                )
        _require_causal(attn_mask_type)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        # apply_query_key_layer_scaling needs nothing: what it divides scores by, softmax multiplies back
        self.softmax_scale = softmax_scale

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
        """query [s, b, n, d], key and value [s, b, groups, d] -> [s, b, n * d], all of one dtype.

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
        if attn_mask_type is not None:
            _require_causal(attn_mask_type)
        if key.shape[0] != query.shape[0]:
            raise ValueError(
                f"SDPACoreAttention: {query.shape[0]} queries and {key.shape[0]} keys, expected as many: "
                "decoding with a key-value cache is not supported"
            )
        q, k, v = (_own_storage(x).permute(1, 2, 0, 3) for x in (query, key, value))
        output = F.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return with_origin(_heads_to_sequence(output), Origin((output.detach(),), _heads_to_sequence))


def _require_causal(mask: AttnMaskType) -> None:
    if mask != AttnMaskType.causal:
        raise ValueError(f"SDPACoreAttention: attn_mask_type must be causal, found {mask.name}")
