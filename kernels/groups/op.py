"""Quantizing and dequantizing groups."""

import torch

from coat_kernels.device import uses_kernels
from coat_kernels.groups.kernels import dequantize_groups_triton, quantize_groups_triton
from coat_kernels.groups.reference import (
    DEFAULT_FORMAT,
    Grouped,
    dequantize_groups_reference,
    quantize_groups_reference,
)


def quantize_groups(x: torch.Tensor, group_size: int, fmt: str = DEFAULT_FORMAT) -> Grouped:
    """`x` [rows, columns], contiguous, in groups along its columns; on CUDA by the kernel."""
    return (quantize_groups_triton if uses_kernels(x) else quantize_groups_reference)(x, group_size, fmt)


def dequantize_groups(q: Grouped, group_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values [rows, columns] in `dtype`; on CUDA by the kernel."""
    if uses_kernels(q.codes):
        return dequantize_groups_triton(q, group_size, dtype)
    return dequantize_groups_reference(q, group_size).to(dtype)
