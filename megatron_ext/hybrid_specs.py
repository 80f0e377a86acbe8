"""Stack specs, for `megatron_ext.spec` and for scripts with `HybridModel`.

`coat_hybrid_stack_spec`, `sdpa_hybrid_stack_spec`: attention, feed-forward and experts ('*', '-' and 'E' in
`--hybrid-layer-pattern`) are parts of the layers of `coat_layer_spec` and `sdpa_layer_spec`. All other kinds
of layers stay Megatron's own, in BF16, and need Transformer Engine. In megatron-core older than 0.18 the
model is called `MambaModel`.
"""

from collections.abc import Callable
from dataclasses import fields, replace

import torch

from megatron_ext import unsupported
from megatron_ext.layer_specs import coat_parts, configure_layer, sdpa_parts

try:
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    from megatron_ext.layers.torch_norm import HAVE_TE, OF_STACKS, replace_final_norm

    try:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    except ImportError:
        from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec as hybrid_stack_spec
except ImportError as error:
    raise RuntimeError(f"megatron_ext.hybrid_specs could not be imported: {error}") from error

_NO_ATTENTION = {
    "input_layernorm": IdentityOp,
    "self_attention": IdentityOp,
    "self_attn_bda": IdentityFuncOp,
}
_NO_MLP = {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}


class _Layer(torch.nn.Module):
    """A part of a whole layer, mixed in before Megatron's class.

    parts: returns the parts of a whole layer for a config, with experts or without.
    activations, source: as of `configure_layer`.
    """

    experts = False

    def __init__(
        self, config, submodules=None, *args, parts: Callable, activations=None, source=None, **kwargs
    ):
        unsupported.check_layers(config, parts is coat_parts, whole=False)
        super().__init__(config, self.own_parts(parts(config, self.experts)), *args, **kwargs)
        if parts is coat_parts:
            configure_layer(self, activations, source)

    def own_parts(self, whole: TransformerLayerSubmodules) -> TransformerLayerSubmodules:
        """The parts of this layer, from those of a whole one."""
        return replace(whole, **_NO_ATTENTION)


class AttentionLayer(_Layer, TransformerLayer):
    """The attention of a layer, '*'."""

    def own_parts(self, whole: TransformerLayerSubmodules) -> TransformerLayerSubmodules:
        # in a whole layer the addition may be fused with the next norm; here, as after the MLP, none follows
        return replace(whole, self_attn_bda=whole.mlp_bda, **_NO_MLP)


class FeedForwardLayer(_Layer, MLPLayer):
    """The feed-forward part of a layer, '-'."""


class ExpertsLayer(_Layer, TransformerLayer):
    """The experts of a layer, 'E'."""

    experts = True


class _NeedsTransformerEngine:
    def __init__(self, *_, **__):
        raise ValueError(
            "megatron_ext.hybrid_specs: layers other than attention, feed-forward and experts are Megatron's "
            "and need Transformer Engine. Use only '*', '-' and 'E' in --hybrid-layer-pattern, or install it."
        )


_LAYERS = {"attention_layer": AttentionLayer, "mlp_layer": FeedForwardLayer, "moe_layer": ExpertsLayer}
_others = {
    field.name: _NeedsTransformerEngine
    for field in fields(hybrid_stack_spec.submodules)
    if field.name.endswith("_layer") and not HAVE_TE
}


def stack_spec(parts: Callable, **settings) -> ModuleSpec:
    """Megatron's stack with layers made of `parts`. settings: `activations` and `source` of its layers."""
    ours = {
        name: ModuleSpec(module, params={"parts": parts, **settings}, submodules=TransformerLayerSubmodules())
        for name, module in _LAYERS.items()
    }
    return replace(hybrid_stack_spec, submodules=replace(hybrid_stack_spec.submodules, **(_others | ours)))


replace_final_norm(OF_STACKS)
coat_hybrid_stack_spec = stack_spec(coat_parts)
sdpa_hybrid_stack_spec = stack_spec(sdpa_parts)
