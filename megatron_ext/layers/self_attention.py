"""Megatron's self-attention with rotary positions in one pass."""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp

from coat_ds.config import ActivationsConfig
from coat_ds.layers.modules.hooks import forget_if_pre_hooked
from coat_kernels.autograd.origin import TABLES, note, noted
from coat_kernels.rope import no_rotation, rotate_qkv
from megatron_ext.layers.attention import check_context_parallel
from megatron_ext.layers.linear import add_bias_in_gemm
from megatron_ext.layers.norm import CoatHeadNorm
from megatron_ext.layers.packed import Tables, by_token, packed_sequences
from megatron_ext.layers.settings import Configurable

_NORMS = (type(None), IdentityOp, CoatHeadNorm)


class CoatSelfAttention(Configurable, SelfAttention):
    """Megatron's SelfAttention, which applies plain rotary positions to the fused projection's output in one
    pass, or in one pass after the norms of queries and keys. Megatron's own path runs in all other cases:
    inference, gated queries, other norms of queries and keys, interleaved, scaled, partial or multimodal
    rotary positions, a model under torch.compile.
    """

    _tables = None

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        add_bias_in_gemm(self.linear_proj)
        self.apply_activations(ActivationsConfig())

    def apply_activations(self, activations: ActivationsConfig) -> None:
        super().apply_activations(activations)
        check_context_parallel(self.config, activations)

    def forward(
        self,
        hidden_states,
        attention_mask,
        *args,
        rotary_pos_emb=None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs,
    ):
        forget_if_pre_hooked(self, hidden_states)
        others = args or [name for name in kwargs if name != "attention_bias" and kwargs[name] is not None]
        if not others:
            self._tables = self.rotary_tables(rotary_pos_emb, packed_seq_params, hidden_states)
        try:
            if self._tables is not None:
                rotary_pos_emb = None
            kwargs["packed_seq_params"] = packed_seq_params
            return super().forward(
                hidden_states, attention_mask, *args, rotary_pos_emb=rotary_pos_emb, **kwargs
            )
        finally:
            self._tables = None

    def get_query_key_value_tensors(self, hidden_states, *args, **kwargs):
        if self._tables is None:
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        mixed, _ = self.linear_qkv(hidden_states)
        cos, sin = self._tables
        # norms of heads come before the angles
        normed = type(self.q_layernorm) is CoatHeadNorm
        q, k, v = rotate_qkv(
            mixed,
            *(no_rotation(cos, sin) if normed else (cos, sin)),
            self.num_query_groups_per_partition,
            self.hidden_size_per_attention_head,
        )
        if normed:
            q, k = self.q_layernorm(q, cos, sin), self.k_layernorm(k, cos, sin)
        return q, k, v

    def rotary_tables(self, angles, packed_seq_params: PackedSeqParams | None, x) -> Tables | None:
        """Cosines and sines [s, d] of rotary angles [s, 1, 1, d], empty tensors without angles; of packed
        sequences, [tokens, d] for the layer's input `x`. None for a layer or angles that the fused path does
        not support."""
        config = self.config
        unusual = (
            (packed_seq_params is not None and config.context_parallel_size > 1)
            or torch.compiler.is_compiling()
            or config.rotary_interleaved
            or config.attention_output_gate
            or config.no_rope_freq
            or config.mrope_section
            or hasattr(config, "yarn_rotary_scaling_factor")
            # the forward of a subclass, such as one that torch's parametrizations create, has to run
            or type(self.q_layernorm) not in _NORMS
            or type(self.k_layernorm) is not type(self.q_layernorm)
            or config.num_query_groups < self.world_size
        )
        if unusual:
            return None
        d = self.hidden_size_per_attention_head
        if angles is None and d % 2 == 0:
            nothing = torch.empty(0, 0, device=self.linear_qkv.weight.device)
            return nothing, nothing
        # partial rotary positions leave some channels unrotated
        if not isinstance(angles, torch.Tensor) or angles.shape[-1] != d:
            return None
        if angles.numel() != angles.shape[0] * d:
            return None
        # all layers of a forward receive the same tensor
        tables = noted(angles, TABLES)
        if tables is None:
            # Megatron keeps the angles of an inference for training, whose backward cannot use tables that
            # are inference tensors
            with torch.inference_mode(False):
                flat = angles.detach().flatten(1).float()
                tables = flat.cos(), flat.sin()
            note(angles, TABLES, tables)
        if packed_seq_params is None:
            return tables
        tokens = x.shape[0] * (self.world_size if config.sequence_parallel else 1)
        return by_token(tables, packed_sequences(packed_seq_params, tokens), tokens)
