"""Activations, plain and gated, that save their input in 8 bits.

reference.py specifies the ops, kernels.py computes them on a GPU, op.py is what layers call.
"""

from coat_kernels.activation.op import activation
from coat_kernels.activation.reference import KINDS, value_and_slope_reference

__all__ = ["KINDS", "activation", "value_and_slope_reference"]
