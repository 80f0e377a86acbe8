"""FP8 with one scale per tensor, just in time, as FP8 matrix products take it.

The scale comes in two stages (COAT, section 5.2: group scaling): maxima of parts of the tensor, written
by the kernel that produces it or, where there is none, by a pass of their own; then the maximum of those.
value = code * scale, scale = largest finite magnitude / largest magnitude of the format. Zero tensors have
scale 1, and scales stay normal numbers, so that their inverses are finite.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from coat_kernels.fp8 import Fp8Format, to_fp8

# scaled matrix products contract over multiples of 16
ALIGNMENT = 16
BLOCK = 8192


class Quantized(NamedTuple):
    """Codes [m, n] or None, their transpose [n, m'] or None, and the scale, FP32 [1].

    m' is m rounded up to a multiple of 16, the rest zeros: it is a dimension that products contract over.
    """

    rows: torch.Tensor | None
    columns: torch.Tensor | None
    scale: torch.Tensor


def maxima_reference(x: torch.Tensor) -> torch.Tensor:
    """Largest finite magnitudes of the parts of `x` (any shape), FP32; here the whole is one part."""
    magnitude = x.float().abs()
    return torch.where(magnitude.isfinite(), magnitude, 0).amax().reshape(1)


@triton.jit
def maxima_kernel(p_x, p_maxima, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    o_x = pid * BLOCK + tl.arange(0, BLOCK)
    b_abs = tl.abs(tl.load(p_x + o_x, mask=o_x < n, other=0.0).to(tl.float32))
    tl.store(p_maxima + pid, tl.max(tl.where(b_abs < float("inf"), b_abs, 0.0), axis=0))


def maxima_triton(x: torch.Tensor) -> torch.Tensor:
    """`maxima_reference` with one maximum for each block of a contiguous tensor."""
    maxima = torch.empty(triton.cdiv(x.numel(), BLOCK), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        maxima_kernel[(len(maxima),)](x, maxima, x.numel(), BLOCK=BLOCK, num_warps=8)
    return maxima


def largest_magnitude(x: torch.Tensor, maxima: torch.Tensor | None = None) -> torch.Tensor:
    """The largest finite magnitude of `x` (contiguous), FP32 [1]; from `maxima` where there are any."""
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    if maxima is None:
        maxima = maxima_triton(x) if x.is_cuda else maxima_reference(x)
    return maxima.amax(0, keepdim=True)


def quantize_tensor_reference(
    x: torch.Tensor, largest: torch.Tensor, fmt: Fp8Format, rows: bool = True, columns: bool = False
) -> Quantized:
    """`x` [m, n] whose largest magnitude is `largest`, by rows and by columns as asked for."""
    scale = torch.where(largest > 0, (largest * (1 / fmt.max)).clamp_min(2.0**-126), 1.0)
    value = (x.float() * (1 / scale)).clamp(-fmt.max, fmt.max)
    codes = torch.where(x.isfinite(), value, torch.nan).to(fmt.dtype)
    if not columns:
        return Quantized(codes, None, scale)
    padded = torch.zeros(x.shape[1], x.shape[0] + -x.shape[0] % ALIGNMENT, dtype=fmt.dtype, device=x.device)
    padded[:, : x.shape[0]] = codes.t()
    return Quantized(codes if rows else None, padded, scale)


@triton.jit
def quantize_tensor_kernel(p_x, p_largest, p_rows, p_columns, p_scale, m, n, padded_m,
                           E5M2: tl.constexpr, WRITE_ROWS: tl.constexpr, WRITE_COLUMNS: tl.constexpr,
                           M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    MAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    INVERSE_MAX: tl.constexpr = 1.0 / 57344.0 if E5M2 else 1.0 / 448.0
    largest = tl.load(p_largest)
    scale = tl.where(largest > 0.0, tl.maximum(largest * INVERSE_MAX, 2.0**-126), 1.0)
    # every program stores the same scale
    tl.store(p_scale, scale)
    o_m = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    o_n = tl.program_id(1).to(tl.int64) * N + tl.arange(0, N)
    m_x = (o_m[:, None] < m) & (o_n[None, :] < n)
    b_x = tl.load(p_x + o_m[:, None] * n + o_n[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_y = b_x * tl.div_rn(1.0, scale)
    b_y = tl.minimum(tl.maximum(b_y, -MAX), MAX)
    b_codes = to_fp8(tl.where(tl.abs(b_x) < float("inf"), b_y, float("nan")), E5M2)
    if WRITE_ROWS:
        tl.store(p_rows + o_m[:, None] * n + o_n[None, :], b_codes, mask=m_x)
    if WRITE_COLUMNS:
        m_columns = (o_n[:, None] < n) & (o_m[None, :] < padded_m)
        tl.store(p_columns + o_n[:, None] * padded_m + o_m[None, :], tl.trans(b_codes), mask=m_columns)


def quantize_tensor_triton(
    x: torch.Tensor, largest: torch.Tensor, fmt: Fp8Format, rows: bool = True, columns: bool = False
) -> Quantized:
    """`quantize_tensor_reference` as a kernel, bit for bit: both layouts from one read of a contiguous x."""
    m, n = x.shape
    padded_m = m + -m % ALIGNMENT
    out = Quantized(
        torch.empty(m, n, dtype=fmt.dtype, device=x.device) if rows else None,
        torch.empty(n, padded_m, dtype=fmt.dtype, device=x.device) if columns else None,
        torch.empty(1, dtype=torch.float32, device=x.device),
    )
    # an empty tensor still has a scale
    grid = max(triton.cdiv(padded_m, 64), 1), max(triton.cdiv(n, 64), 1)
    with torch.cuda.device_of(x):
        quantize_tensor_kernel[grid](
            x,
            largest,
            out.rows.view(torch.uint8) if rows else x,
            out.columns.view(torch.uint8) if columns else x,
            out.scale,
            m,
            n,
            padded_m,
            E5M2=fmt.is_e5m2,
            WRITE_ROWS=rows,
            WRITE_COLUMNS=columns,
            M=64,
            N=64,
        )
    return out


def quantize_tensor(
    x: torch.Tensor, largest: torch.Tensor, fmt: Fp8Format, rows: bool = True, columns: bool = False
) -> Quantized:
    """CUDA tensors take the kernel, others the reference."""
    return (quantize_tensor_triton if x.is_cuda else quantize_tensor_reference)(
        x, largest, fmt, rows, columns
    )
