"""RMSNorm of every head of queries and keys, and their rotary positions, in one pass.

It may import `norm`, `rope`, `groups`, `autograd` and the files of `coat_kernels`. Start at op.py, which
layers call; reference.py specifies the op, and kernels.py computes it on a GPU.
"""

from coat_kernels.head_norm.op import head_norm

__all__ = ["head_norm"]
