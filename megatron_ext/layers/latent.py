"""Multi-latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) with FP8 linear layers.

Megatron's own layer with other parts. Queries, keys and values are projected up from tensors of few channels.
Norms save these tensors in 8 bits; a linear layer that follows a norm saves nothing.
"""

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from coat_ds.config import ActivationsConfig
from coat_ds.layers.modules.hooks import forget_if_pre_hooked
from coat_ds.patches import Patch
from coat_kernels.autograd.derivatives import once_differentiable
from coat_kernels.parallel import all_reduce
from megatron_ext.layers.attention import check_context_parallel
from megatron_ext.layers.linear import CoatColumnParallelLinear, CoatRowParallelLinear, add_bias_in_gemm
from megatron_ext.layers.norm import CoatNorm
from megatron_ext.layers.settings import Configurable

HAS_TE = Patch(
    "latent attention without Transformer Engine",
    "megatron.core.transformer.multi_latent_attention:HAVE_TE",
    "megatron-core 0.16 takes its placeholders for Transformer Engine's classes",
)


def repair_latent_attention() -> None:
    """Makes latent attention of megatron-core 0.16 detect an absent Transformer Engine, as later versions do:
    0.16 takes placeholders of its classes for classes. May be called repeatedly."""
    if multi_latent_attention.HAVE_TE != HAVE_TE:
        HAS_TE.apply(lambda _: HAVE_TE)


class _SummedGradient(torch.autograd.Function):
    """Identity. The gradient of the last `count` channels is summed over the ranks of `group`: each rank has
    the gradient of its own heads."""

    @staticmethod
    def forward(ctx, y, count, group):
        ctx.count, ctx.group = count, group
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        whole, parts = grad.split([grad.shape[-1] - ctx.count, ctx.count], -1)
        return torch.cat([whole, all_reduce(parts.contiguous(), ctx.group)()], -1), None, None


class CoatDownProjection(CoatColumnParallelLinear):
    """The projection to compressed queries, or to compressed keys and values and the keys' positions. Each
    tensor-parallel rank holds some rows of the weight, but returns all channels, under sequence parallelism
    for its own tokens, as Megatron expects of a layer whose weight is whole on every rank.

    Megatron's own gather omits what the heads of other ranks add to the gradient of the positions.
    """

    # the number of last channels, which the heads of all ranks read unchanged
    shared = 0

    def forward(self, input_: torch.Tensor, *args, **kwargs):
        y, bias = super().forward(input_, *args, **kwargs)
        group = self.tp_group
        if group.size() == 1:
            return y, bias
        y = gather_from_tensor_model_parallel_region(y, group)
        if self.sequence_parallel:
            # Megatron gathers the positions of all tokens, and sums their gradient
            return scatter_to_sequence_parallel_region(y, group), bias
        return (_SummedGradient.apply(y, self.shared, group) if self.shared else y), bias


class CoatMLASelfAttention(Configurable, MLASelfAttention):
    """Megatron's MLASelfAttention with FP8 linear layers; names and checkpoints stay Megatron's.

    Raises ValueError at construction for an `attention_format` that is not supported, or that saves what
    Megatron recomputes.
    """

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        add_bias_in_gemm(self.linear_proj)
        # Megatron accepts only its own classes for them
        if config.q_lora_rank is not None:
            CoatDownProjection.take_over(self.linear_q_down_proj, "q_down_proj")
        CoatDownProjection.take_over(self.linear_kv_down_proj, "kv_down_proj")
        self.linear_kv_down_proj.shared = config.qk_pos_emb_head_dim
        if config.q_lora_rank is not None and not config.sequence_parallel:
            # Megatron takes it, by its name, for a norm of each rank's own heads and sums its gradients over
            # the ranks. The gradients are whole on each rank: their mean is each rank's gradient.
            for parameter in self.q_layernorm.parameters():
                parameter.average_gradients_across_tp_domain = True
        self.apply_activations(ActivationsConfig())

    def apply_activations(self, activations: ActivationsConfig) -> None:
        super().apply_activations(activations)
        check_context_parallel(self.config, activations)
        saved = activations.attention_format
        if saved == "recompute":
            raise ValueError(
                'attention_format is "recompute", which multi-latent attention does not support. Set '
                '"activations": {"attention_format": "sqrt8"}, or leave it out and give '
                "--recompute-granularity selective --recompute-modules mla_up_proj."
            )
        if saved != "bf16" and self.recompute_up_proj:
            raise ValueError(
                "--recompute-modules has mla_up_proj, which recomputes queries, keys and values, and "
                f'attention_format is "{saved}", which saves them. Remove one of the two.'
            )

    def forward(self, hidden_states, *args, **kwargs):
        forget_if_pre_hooked(self, hidden_states)
        return super().forward(hidden_states, *args, **kwargs)


def latent_parts(attention) -> dict[str, type]:
    """COAT's modules for latent attention, by the names that they have in `attention`, Megatron's
    MLASelfAttentionSubmodules."""
    linears = "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj"
    norms = [name for name in ("q_layernorm", "kv_layernorm") if getattr(attention, name) is not IdentityOp]
    return {
        **dict.fromkeys(linears, CoatColumnParallelLinear),
        "linear_proj": CoatRowParallelLinear,
        **dict.fromkeys(norms, CoatNorm),
    }
