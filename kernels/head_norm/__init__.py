"""RMSNorm of every head of queries and keys, and their rotary positions, in one pass.

reference.py specifies the op, kernels.py computes it on a GPU, op.py is what layers call.
"""

from coat_kernels.head_norm.kernels import head_norm_backward_triton, head_norm_forward_triton
from coat_kernels.head_norm.op import head_norm
from coat_kernels.head_norm.reference import head_norm_backward_reference, head_norm_forward_reference

__all__ = [
    "head_norm",
    "head_norm_backward_reference",
    "head_norm_backward_triton",
    "head_norm_forward_reference",
    "head_norm_forward_triton",
]
