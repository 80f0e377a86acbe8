"""RMSNorm of every head of queries and keys, and their rotary positions, in one pass.

reference.py specifies the op, kernels.py computes it on a GPU, op.py is what layers call.
"""

from coat_kernels.head_norm.op import head_norm

__all__ = ["head_norm"]
