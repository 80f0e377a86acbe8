"""Rotary positions between a fused query-key-value projection and attention.

reference.py specifies the op, kernels.py computes it on a GPU, op.py is what layers call.
"""

from coat_kernels.rope.op import rotate_qkv
from coat_kernels.rope.reference import no_rotation, rotate

__all__ = ["no_rotation", "rotate", "rotate_qkv"]
