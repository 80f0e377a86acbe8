"""`--spec megatron_ext.with_checkpoints coat_layer_spec`: the layers, and FP8 inputs of recomputed regions.
`sdpa_layer_spec` brings the FP8 inputs alone. The hybrid stack's specs are `coat_hybrid_stack_spec` and
`sdpa_hybrid_stack_spec`."""

from megatron_ext.hybrid_specs import coat_hybrid_stack_spec, sdpa_hybrid_stack_spec
from megatron_ext.installing import install
from megatron_ext.layer_specs import coat_layer_spec, sdpa_layer_spec

__all__ = ["coat_hybrid_stack_spec", "coat_layer_spec", "sdpa_hybrid_stack_spec", "sdpa_layer_spec"]

install(checkpoints=True)
