"""Linear layers in FP8.

It may import `tensorwise`, `autograd` and the files of `coat_kernels`. Start at op.py, the layer, or several
layers that read the same input as one GEMM. matmul.py runs the GEMMs by cuBLASLt, kernels.py or, without a
GPU, reference.py.
"""

from coat_kernels.linear.matmul import scaled_matmul
from coat_kernels.linear.op import LinearFormats, LinearOptions, LinearState, fp8_linear
from coat_kernels.linear.reference import scaled_matmul_reference

__all__ = [
    "LinearFormats",
    "LinearOptions",
    "LinearState",
    "fp8_linear",
    "scaled_matmul",
    "scaled_matmul_reference",
]
