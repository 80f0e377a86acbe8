"""Linear layers in FP8.

matmul.py runs the GEMMs by cuBLASLt, kernels.py or, without a GPU, reference.py; op.py is the layer; merge.py
runs several layers that read the same input as one GEMM.
"""

from coat_kernels.linear.matmul import accumulate_matmul, add_into, scaled_matmul
from coat_kernels.linear.merge import MergedCache, merged
from coat_kernels.linear.op import (
    DEFAULT_FORMATS,
    LinearFormats,
    LinearOptions,
    fp8_linear,
    gathered_columns,
    multiply,
    multiply_backward,
    quantized_grad,
)
from coat_kernels.linear.reference import accumulate_matmul_reference, scaled_matmul_reference

__all__ = [
    "DEFAULT_FORMATS",
    "LinearFormats",
    "LinearOptions",
    "MergedCache",
    "accumulate_matmul",
    "accumulate_matmul_reference",
    "add_into",
    "fp8_linear",
    "gathered_columns",
    "merged",
    "multiply",
    "multiply_backward",
    "quantized_grad",
    "scaled_matmul",
    "scaled_matmul_reference",
]
