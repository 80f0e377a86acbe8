"""The dense transformer layer as two fused blocks around attention, one autograd function each.

It may import `norm`, `linear`, `rope`, `activation`, `tensorwise`, `autograd` and the files of
`coat_kernels`. Start at qkv.py.

    qkv_block    norm, qkv projection, rotary positions; with attention, it saves the norm's input alone
    mlp_block    output projection, residual addition, norm, fc1, activation, fc2, residual addition

Each is a flat sequence of launches, forward and backward. Local variables pass results from one launch to the
next. Activations that only an FP8 GEMM reads exist only as FP8 codes. Backward saves the norms' inputs, the
activation's input and what attention saves of its output, each once and in 8 bits. The rest is recomputed.

The results are bit-identical to those of the separate operations (`norm`, `linear`, `rope`, `activation`).
The blocks need every parameter to be trained. Layers with features that the blocks lack, such as dropout
between the operations, use the separate operations.
"""

from coat_kernels.activation import ActivationOptions
from coat_kernels.blocks.mlp import MlpOptions, mlp_block
from coat_kernels.blocks.qkv import QkvOptions, qkv_block
from coat_kernels.norm import NormOptions

__all__ = [
    "ActivationOptions",
    "MlpOptions",
    "NormOptions",
    "QkvOptions",
    "mlp_block",
    "qkv_block",
]
