"""Multi-latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) with FP8 linear layers.

Megatron's own layer with other parts. Queries, keys and values are projected up from tensors of few channels,
which go through norms that keep them in 8 bits; each linear layer behind a norm keeps nothing.
"""

import torch
from megatron.core import __version__
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from coat_ds.config import ActivationsConfig
from coat_ds.layers.modules.hooks import after_pre_hooks
from coat_ds.patches import Patch
from coat_kernels.autograd.derivatives import once_differentiable
from coat_kernels.parallel import all_reduce
from megatron_ext.layers.attention import check_context_parallel
from megatron_ext.layers.linear import CoatColumnParallelLinear, CoatRowParallelLinear, keep_bias
from megatron_ext.layers.norm import CoatNorm
from megatron_ext.layers.settings import TakesActivations

# since megatron-core 0.19 also those that are not compressed
NORMS_ALL_QUERIES = hasattr(MLASelfAttention, "_resolve_qk_norm_config")


def check_latent_attention(config) -> None:
    """Raises ValueError, naming the argument, for what Megatron's latent attention has and COAT's layers and
    `sdpa_layer_spec` do not."""
    for argument, found in {
        "--cache-mla-latents (decoding)": config.cache_mla_latents,
        "--mla-down-proj-fusion": getattr(config, "mla_down_proj_fusion", False),
    }.items():
        if found:
            raise ValueError(f"megatron_ext.layer_specs: {argument} is not supported; remove it")
    if NORMS_ALL_QUERIES and config.qk_layernorm and config.q_lora_rank is None:
        raise ValueError(
            "megatron_ext.layer_specs: --qk-layernorm without --q-lora-rank norms queries in a layer of "
            f"Transformer Engine's in megatron-core {__version__}. Give --q-lora-rank, remove "
            "--qk-layernorm, or take megatron-core 0.18, which norms keys and values alone."
        )


HAS_TE = Patch(
    "latent attention without Transformer Engine",
    "megatron-core",
    "megatron.core.transformer.multi_latent_attention:HAVE_TE",
    "megatron-core 0.16 takes stand-ins of Transformer Engine's classes for classes",
)


def repair_latent_attention() -> None:
    """Tells latent attention of megatron-core 0.16 whether Transformer Engine is there, as later versions do.
    It takes stand-ins of its classes for classes. May be called again."""
    if multi_latent_attention.HAVE_TE != HAVE_TE:
        HAS_TE.apply(lambda _: HAVE_TE)


class _SummedGradient(torch.autograd.Function):
    """`y` itself. The gradient of its last `count` channels is summed over the ranks of `group`, each of
    which has that of its own heads."""

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
    tensor-parallel rank holds some rows of the weight, but gives all channels, under sequence parallelism of
    its own tokens, as Megatron expects of a layer whose weight is whole on every rank.

    Megatron's own gather leaves out what the heads of other ranks add to the gradient of the positions.
    """

    # the last channels, which the heads of all ranks read as they are
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


class CoatMLASelfAttention(TakesActivations, MLASelfAttention):
    """Megatron's MLASelfAttention with FP8 linear layers; names and checkpoints stay Megatron's.

    Raises ValueError at construction for an `attention_format` that it does not know, or that keeps what
    Megatron recomputes.
    """

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        keep_bias(self.linear_proj)
        # Megatron takes no class but its own for them
        if config.q_lora_rank is not None:
            CoatDownProjection.take_over(self.linear_q_down_proj, "q_down_proj")
        CoatDownProjection.take_over(self.linear_kv_down_proj, "kv_down_proj")
        self.linear_kv_down_proj.shared = config.qk_pos_emb_head_dim
        if config.q_lora_rank is not None and not config.sequence_parallel:
            # By its name Megatron takes it for a norm of each rank's own heads, whose gradients it sums over
            # the ranks. They are whole: their mean is what each rank has.
            for parameter in self.q_layernorm.parameters():
                parameter.average_gradients_across_tp_domain = True
        self.begin_with(config)

    def take_activations(self, activations: ActivationsConfig) -> None:
        super().take_activations(activations)
        check_context_parallel(self.config, activations)
        kept = activations.attention_format
        if kept == "recompute":
            raise ValueError(
                'attention_format is "recompute", which multi-latent attention does not know. Set '
                '"activations": {"attention_format": "sqrt8"}, or leave it out and give '
                "--recompute-granularity selective --recompute-modules mla_up_proj."
            )
        if kept != "bf16" and self.recompute_up_proj:
            raise ValueError(
                "--recompute-modules has mla_up_proj, which makes queries, keys and values again, and "
                f'attention_format is "{kept}", which keeps them. Remove one of the two.'
            )

    def forward(self, hidden_states, *args, **kwargs):
        after_pre_hooks(self, hidden_states)
        return super().forward(hidden_states, *args, **kwargs)


def latent_parts(attention) -> dict[str, type]:
    """The parts of COAT's latent attention in the place of those of `attention`, Megatron's
    MLASelfAttentionSubmodules."""
    linears = "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj"
    norms = [name for name in ("q_layernorm", "kv_layernorm") if getattr(attention, name) is not IdentityOp]
    return {
        **dict.fromkeys(linears, CoatColumnParallelLinear),
        "linear_proj": CoatRowParallelLinear,
        **dict.fromkeys(norms, CoatNorm),
    }
