"""RMSNorm and LayerNorm that save their input in 8 bits, and the residual addition before them.

reference.py specifies the ops, kernels.py computes them on a GPU, op.py is what layers call.
"""

from coat_kernels.norm.kernels import norm_backward_triton, norm_columns_triton, norm_forward_triton
from coat_kernels.norm.op import (
    NormOptions,
    layer_norm,
    norm_backward,
    norm_columns,
    norm_forward,
    norm_gradients,
    norm_operands,
    rms_norm,
)
from coat_kernels.norm.reference import (
    norm_backward_reference,
    norm_columns_reference,
    norm_forward_reference,
)
from coat_kernels.norm.residual import Addends, residual_add_reference

__all__ = [
    "Addends",
    "NormOptions",
    "layer_norm",
    "norm_backward",
    "norm_backward_reference",
    "norm_backward_triton",
    "norm_columns",
    "norm_columns_reference",
    "norm_columns_triton",
    "norm_forward",
    "norm_forward_reference",
    "norm_forward_triton",
    "norm_gradients",
    "norm_operands",
    "residual_add_reference",
    "rms_norm",
]
