"""Translates `coat.activations` into options of the layers."""

from coat_ds.config import ActivationsConfig
from coat_kernels.fp8 import fp8_format
from coat_kernels.linear import LinearFormats


def linear_formats(activations: ActivationsConfig, precise_wgrad: bool = False) -> LinearFormats:
    """The FP8 formats of a linear layer. precise_wgrad: large terms cancel in its weight's gradient."""
    fast_backward = activations.fast_accumulation == "all"
    return LinearFormats(
        fp8_format(activations.backward_format),
        fast_forward=activations.fast_accumulation != "none",
        fast_input_grad=fast_backward,
        fast_weight_grad=fast_backward and not precise_wgrad,
    )
