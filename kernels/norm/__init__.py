"""RMSNorm and LayerNorm that save their input in 8 bits, and the residual addition before them.

reference.py specifies the ops, kernels.py computes them on a GPU, op.py is what layers call.
"""

from coat_kernels.norm.op import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
