"""Linear layers in FP8.

matmul.py runs the GEMMs by cuBLASLt, kernels.py or, without a GPU, reference.py; op.py is the layer, or
several layers that read the same input as one GEMM.
"""

from coat_kernels.linear.matmul import scaled_matmul
from coat_kernels.linear.op import LinearFormats, LinearOptions, fp8_linear
from coat_kernels.linear.reference import scaled_matmul_reference

__all__ = [
    "LinearFormats",
    "LinearOptions",
    "fp8_linear",
    "scaled_matmul",
    "scaled_matmul_reference",
]
