"""Activations, plain and gated, that save their input in 8 bits.

reference.py specifies the ops, kernels.py computes them on a GPU, op.py is what layers call.
"""

from coat_kernels.activation.kernels import (
    activation_backward_triton,
    activation_columns_triton,
    activation_forward_triton,
)
from coat_kernels.activation.op import (
    activation,
    activation_backward,
    activation_backward_operands,
    activation_columns,
    activation_forward,
    activation_operands,
)
from coat_kernels.activation.reference import (
    KINDS,
    activation_backward_reference,
    activation_columns_reference,
    activation_forward_reference,
    value_and_slope_reference,
)

__all__ = [
    "KINDS",
    "activation",
    "activation_backward",
    "activation_backward_operands",
    "activation_backward_reference",
    "activation_backward_triton",
    "activation_columns",
    "activation_columns_reference",
    "activation_columns_triton",
    "activation_forward",
    "activation_forward_reference",
    "activation_forward_triton",
    "activation_operands",
    "value_and_slope_reference",
]
