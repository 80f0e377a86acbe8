"""Rotary positions between a fused query-key-value projection and attention.

It may import `tensorwise`, `autograd` and the files of `coat_kernels`. Start at op.py, which layers call;
reference.py specifies the op, and kernels.py computes it on a GPU.
"""

from coat_kernels.rope.op import rotate_qkv
from coat_kernels.rope.reference import no_rotation, rotate

__all__ = ["no_rotation", "rotate", "rotate_qkv"]
