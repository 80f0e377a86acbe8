"""Activations, plain and gated, that save their input in 8 bits.

It may import `tensorwise`, `groups`, `autograd` and the files of `coat_kernels`. Start at op.py, which layers
call; reference.py specifies the ops, and kernels.py computes them on a GPU.
"""

from coat_kernels.activation.op import ActivationOptions, activation
from coat_kernels.activation.reference import KINDS, value_and_slope_reference

__all__ = ["KINDS", "ActivationOptions", "activation", "value_and_slope_reference"]
