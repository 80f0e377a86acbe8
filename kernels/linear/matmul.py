"""FP8 GEMMs: into a new tensor, or added to an existing one."""

import torch

from coat_kernels.device import capability, uses_kernels
from coat_kernels.linear.kernels import (
    K_TILE,
    N_TILE,
    TILES_PER_PROCESSOR,
    accumulate_matmul_triton,
    add_triton,
    multiprocessors,
)
from coat_kernels.linear.reference import accumulate_matmul_reference, scaled_matmul_reference
from coat_kernels.ops import compilable
from coat_kernels.prepared import cdiv


@compilable(
    lambda a, b, scale_a, scale_b, bias, dtype, fast: a.new_empty(a.shape[0], b.shape[0], dtype=dtype)
)
def scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """`scaled_matmul_reference` plus `bias` [n]; by cuBLASLt on CUDA. `fast` as in `LinearFormats`."""
    kernels = uses_kernels(a)
    in_epilogue = kernels and bias is not None and bias.dtype == dtype == torch.bfloat16
    if kernels:
        epilogue = bias if in_epilogue else None
        y = torch._scaled_mm(a, b.t(), scale_a, scale_b, bias=epilogue, out_dtype=dtype, use_fast_accum=fast)
    else:
        y = scaled_matmul_reference(a, b, scale_a, scale_b, dtype)
    return y if bias is None or in_epilogue else y.add_(bias)


def add_into(out: torch.Tensor, x: torch.Tensor) -> None:
    """Adds `x` to `out`, of the same shape and any floating-point types; by the kernel on CUDA."""
    if uses_kernels(out) and out.is_contiguous():
        add_triton(out, x)
    else:
        out.add_(x)


def _adds_itself(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the GEMM adds to `out` without first writing its result elsewhere."""
    if out.dtype != torch.float32 or not uses_kernels(a):
        return out.dtype == torch.float32
    tiles = cdiv(a.shape[0], N_TILE) * cdiv(b.shape[0], K_TILE)
    return (
        capability(out.device)[0] == 9
        and tiles >= TILES_PER_PROCESSOR * multiprocessors(out.device)
        and a.shape[1] > 0
        and out.is_contiguous()
        # Megatron may pack a parameter after one of odd size, at an unaligned address
        and out.data_ptr() % 16 == 0
    )


@compilable(lambda *_: None, mutates=("out",))
def accumulate_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out: torch.Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> None:
    """`accumulate_matmul_reference` for `out` of any floating-point dtype; `fast` as in `LinearFormats`.

    With fast accumulation, Hopper adds large results to FP32 directly from the tensor cores. All other
    results are first rounded to `dtype`.
    """
    if fast and _adds_itself(a, b, out):
        accumulate = accumulate_matmul_triton if uses_kernels(a) else accumulate_matmul_reference
        accumulate(a, b, scale_a, scale_b, out)
    else:
        add_into(out, scaled_matmul(a, b, scale_a, scale_b, None, dtype, fast))
