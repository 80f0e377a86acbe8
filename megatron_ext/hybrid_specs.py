"""The stack spec for `--spec megatron_ext.hybrid_specs coat_hybrid_stack_spec` and for `HybridModel`.

Attention, feed-forward and experts ('*', '-' and 'E' in `--hybrid-layer-pattern`) are parts of the layer of
`coat_layer_spec`. All other kinds of layers stay Megatron's own, in BF16, and need Transformer Engine. Before
megatron-core 0.18 the model is called `MambaModel`.
"""

from dataclasses import fields, replace

from .layer_specs import coat_bias_dropout_add, coat_parts

try:
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    from .torch_norm import HAVE_TE, replace_final_norm

    try:
        from megatron.core.models.hybrid import hybrid_block
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    except ImportError:
        from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec as hybrid_stack_spec
        from megatron.core.ssm import mamba_block as hybrid_block
except ImportError as error:
    raise RuntimeError(f"megatron_ext.hybrid_specs could not be imported: {error}") from error

_NO_ATTENTION = {
    "input_layernorm": IdentityOp,
    "self_attention": IdentityOp,
    "self_attn_bda": IdentityFuncOp,
}
_NO_MLP = {
    # no norm behind it makes the sum
    "self_attn_bda": coat_bias_dropout_add,
    "pre_mlp_layernorm": IdentityOp,
    "mlp": IdentityOp,
    "mlp_bda": IdentityFuncOp,
}


class CoatAttentionLayer(TransformerLayer):
    """The attention of a COAT layer, '*'."""

    def __init__(self, config, submodules=None, *args, **kwargs):
        super().__init__(config, replace(coat_parts(config, experts=False), **_NO_MLP), *args, **kwargs)


class CoatMLPLayer(MLPLayer):
    """The feed-forward part of a COAT layer, '-'."""

    def __init__(self, config, submodules=None, *args, **kwargs):
        super().__init__(config, replace(coat_parts(config, experts=False), **_NO_ATTENTION), *args, **kwargs)


class CoatExpertsLayer(TransformerLayer):
    """The experts of a COAT layer, 'E'."""

    def __init__(self, config, submodules=None, *args, **kwargs):
        super().__init__(config, replace(coat_parts(config, experts=True), **_NO_ATTENTION), *args, **kwargs)


class _NeedsTransformerEngine:
    def __init__(self, *_, **__):
        raise ValueError(
            "coat_hybrid_stack_spec: layers other than attention, feed-forward and experts are Megatron's, "
            "and need Transformer Engine. Use only '*', '-' and 'E' in --hybrid-layer-pattern, or install it."
        )


def _layer(module: type) -> ModuleSpec:
    return ModuleSpec(module=module, submodules=TransformerLayerSubmodules())


_ours = {
    "attention_layer": _layer(CoatAttentionLayer),
    "mlp_layer": _layer(CoatMLPLayer),
    "moe_layer": _layer(CoatExpertsLayer),
}
_others = {
    field.name: _NeedsTransformerEngine
    for field in fields(hybrid_stack_spec.submodules)
    if field.name.endswith("_layer") and not HAVE_TE
}

replace_final_norm(hybrid_block, "TENorm")
coat_hybrid_stack_spec = replace(
    hybrid_stack_spec, submodules=replace(hybrid_stack_spec.submodules, **(_others | _ours))
)
