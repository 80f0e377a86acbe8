"""Layer specs for `--spec megatron_ext.layer_specs <name>` and for `GPTModel(config, <spec>, ...)`.

`coat_layer_spec`: linear layers compute in FP8 and what is kept for backward is FP8, except attention.
`sdpa_layer_spec`: Megatron's own layer on scaled_dot_product_attention: the BF16 layer to compare with.

Each is one module-level ModuleSpec, the only form that every supported Megatron accepts. Its layer class
derives the parts from `config` by rewriting Megatron's own local spec, so that both follow Megatron's
arguments and versions. The final norm stays Megatron's, made to work under sequence parallelism where it
refuses that (`torch_norm.py`). Under context parallelism core attention is Transformer Engine's.
"""

from dataclasses import replace

_OLDEST = "0.16.1"

try:
    from megatron import core
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
    from packaging.version import Version

    from .attention import CoatCoreAttention, CoatSelfAttention, SDPACoreAttention, core_attention_of
    from .linear import CoatColumnParallelLinear, CoatRowParallelLinear
    from .mlp import CoatMLP
    from .norm import CoatNorm, coat_bias_dropout_add
    from .torch_norm import ParallelTorchNorm, replace_final_norm
except ImportError as error:
    # Megatron 0.16 logs an ImportError of a spec's module and goes on without the spec
    raise RuntimeError(
        f"megatron_ext.layer_specs could not be imported: {error}. It needs megatron-core {_OLDEST} or newer "
        'and this project installed beside it: pip install "coat-train[megatron]".'
    ) from error
if Version(core.__version__) < Version(_OLDEST):
    raise RuntimeError(
        f"megatron_ext.layer_specs needs megatron-core {_OLDEST} or newer, found {core.__version__}"
    )


def _local_parts(config) -> TransformerLayerSubmodules:
    """The parts of Megatron's own dense layer for `config`, with attention on SDPA."""
    unsupported = {
        "--num-experts": config.num_moe_experts,
        "--multi-latent-attention": config.multi_latent_attention,
        "--fp8-format (coat_layer_spec brings its own FP8, without Transformer Engine)": config.fp8,
        "--fp4-format": getattr(config, "fp4", None),
    }
    for argument, found in unsupported.items():
        if found:
            raise ValueError(f"megatron_ext.layer_specs: {argument} is not supported; remove it")
    parts = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, qk_l2_norm=config.qk_l2_norm, normalization=config.normalization
    ).submodules
    parts = _with_attention(parts, core_attention=core_attention_of(config, SDPACoreAttention))
    if not config.sequence_parallel:
        return parts
    attention = parts.self_attention.submodules
    norms = {
        name: ParallelTorchNorm
        for name in ("q_layernorm", "k_layernorm")
        if getattr(attention, name) is WrappedTorchNorm
    }
    parts = _with_attention(parts, **norms)
    norms = {
        name: ParallelTorchNorm
        for name in ("input_layernorm", "pre_mlp_layernorm")
        if getattr(parts, name) is WrappedTorchNorm
    }
    return replace(parts, **norms)


def _with_attention(parts: TransformerLayerSubmodules, **modules) -> TransformerLayerSubmodules:
    """`parts` with other modules inside self-attention."""
    attention = parts.self_attention
    return replace(
        parts, self_attention=replace(attention, submodules=replace(attention.submodules, **modules))
    )


class SDPATransformerLayer(TransformerLayer):
    """Megatron's own local layer with `SDPACoreAttention` as its core attention."""

    def __init__(self, config, submodules=None, *args, **kwargs):
        super().__init__(config, _local_parts(config), *args, **kwargs)


class CoatTransformerLayer(TransformerLayer):
    """Megatron's own local layer with FP8 linears, norms and feed-forward; q and k norms stay Megatron's.

    Raises ValueError at construction for what its parts do not support, naming the argument to change.
    """

    def __init__(self, config, submodules=None, *args, **kwargs):
        if config.recompute_granularity == "selective" and "layernorm" in config.recompute_modules:
            raise ValueError(
                "coat_layer_spec: recomputing 'layernorm' saves nothing, the outputs of norms are not kept. "
                "Remove it from --recompute-modules."
            )
        parts = _with_attention(
            _local_parts(config),
            linear_qkv=CoatColumnParallelLinear,
            linear_proj=CoatRowParallelLinear,
            core_attention=core_attention_of(config, CoatCoreAttention),
        )
        parts = replace(
            parts,
            input_layernorm=CoatNorm,
            pre_mlp_layernorm=CoatNorm,
            self_attention=replace(parts.self_attention, module=CoatSelfAttention),
            self_attn_bda=coat_bias_dropout_add,
            mlp=CoatMLP,
            mlp_bda=coat_bias_dropout_add,
        )
        super().__init__(config, parts, *args, **kwargs)


replace_final_norm()
coat_layer_spec = ModuleSpec(module=CoatTransformerLayer, submodules=TransformerLayerSubmodules())
sdpa_layer_spec = ModuleSpec(module=SDPATransformerLayer, submodules=TransformerLayerSubmodules())
