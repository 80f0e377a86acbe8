"""Linear layers in FP8.

matmul.py multiplies, by cuBLASLt or kernels.py, or where there is no GPU by reference.py; op.py is the layer;
merge.py gives several layers that read the same input one GEMM.
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
