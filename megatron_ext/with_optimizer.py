"""`--spec megatron_ext.with_optimizer coat_layer_spec`: the layers, and FP8 states in Megatron's optimizers.
`sdpa_layer_spec` brings the FP8 states alone. The hybrid stack's specs are `coat_hybrid_stack_spec` and
`sdpa_hybrid_stack_spec`."""

from megatron_ext.hybrid_specs import coat_hybrid_stack_spec, sdpa_hybrid_stack_spec
from megatron_ext.installing import install
from megatron_ext.layer_specs import coat_layer_spec, sdpa_layer_spec

__all__ = ["coat_hybrid_stack_spec", "coat_layer_spec", "sdpa_hybrid_stack_spec", "sdpa_layer_spec"]

install(optimizer=True)
