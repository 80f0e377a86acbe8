"""RMSNorm and LayerNorm that save their input in 8 bits, and the residual addition before them.

It may import `tensorwise`, `groups`, `autograd` and the files of `coat_kernels`. Start at op.py, which layers
call; reference.py specifies the ops, and kernels.py computes them on a GPU.
"""

from coat_kernels.norm.op import NormOptions, normalize

__all__ = ["NormOptions", "normalize"]
