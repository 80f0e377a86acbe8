"""Rotary positions between a fused query-key-value projection and attention.

reference.py specifies the op, kernels.py computes it on a GPU, op.py is what layers call.
"""

from coat_kernels.rope.kernels import rotate_qkv_backward_triton, rotate_qkv_triton
from coat_kernels.rope.op import (
    rotate_qkv,
    rotate_qkv_backward,
    rotate_qkv_backward_operands,
    rotate_qkv_forward,
)
from coat_kernels.rope.reference import (
    no_rotation,
    rotate,
    rotate_back,
    rotate_qkv_backward_reference,
    rotate_qkv_reference,
)

__all__ = [
    "no_rotation",
    "rotate",
    "rotate_back",
    "rotate_qkv",
    "rotate_qkv_backward",
    "rotate_qkv_backward_operands",
    "rotate_qkv_backward_reference",
    "rotate_qkv_backward_triton",
    "rotate_qkv_forward",
    "rotate_qkv_reference",
    "rotate_qkv_triton",
]
