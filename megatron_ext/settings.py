"""How the block's `activations` reach the layers: as an attribute of Megatron's config."""

from coat_ds.config import ActivationsConfig
from coat_ds.layers.formats import formats
from coat_kernels.fp8 import set_emulation
from coat_kernels.linear import LinearFormats

from . import options


def set_activations(config, activations: ActivationsConfig) -> None:
    """Notes `activations` on Megatron's TransformerConfig, before the model is built from it."""
    config.coat_activations = activations
    set_emulation(activations.emulate)


def activations_of(config) -> ActivationsConfig:
    """What was noted on Megatron's config; if nothing was, as by `--spec` alone, what `COAT_CONFIG` says."""
    if not hasattr(config, "coat_activations"):
        set_activations(config, options.activations())
    return config.coat_activations


def formats_of(config) -> LinearFormats:
    """The FP8 formats of the linear layers."""
    return formats(activations_of(config))
