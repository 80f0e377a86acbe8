"""Tensors as FP8 codes with one scale, row-major and column-major."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from coat_kernels.device import uses_kernels
from coat_kernels.fp8 import ALIGNMENT, Fp8Format, finite_or_nan, fp8_format, to_fp8, to_fp8_words
from coat_kernels.ops import compilable
from coat_kernels.prepared import PreparedKernel, cdiv, tiling
from coat_kernels.tensorwise.scale import BLOCK, Scales, scale_and_tiles, tensor_scale_reference
from coat_kernels.tensorwise.transpose import (
    BOTH_TILE,
    COLUMNS_TILE,
    store_words,
    transpose_codes_reference,
)
from coat_kernels.tiles import finite_abs, finite_max


class Quantized(NamedTuple):
    """A tensor [m, n] as FP8 codes: row-major [m, n] or None, column-major (the transpose) [n, m'] or None,
    the scale, FP32 [1], and the column sums before quantizing, FP32 [n], or None.

    m' is m rounded up to a multiple of 16. The padding is zero, because GEMMs sum over it.
    """

    rows: torch.Tensor | None
    columns: torch.Tensor | None
    scale: torch.Tensor
    sums: torch.Tensor | None = None

    @property
    def is_e5m2(self) -> bool:
        """Whether the codes are E5M2, as `Fp8Format.is_e5m2`."""
        return (self.columns if self.rows is None else self.rows).dtype == torch.float8_e5m2


def quantize_tensor_reference(
    x: torch.Tensor,
    amax: torch.Tensor,
    fmt: Fp8Format,
    rows: bool = True,
    columns: bool = False,
    sums: bool = False,
) -> Quantized:
    """`x` [m, n] with the amax `amax`, as row-major and column-major codes and column sums, as
    requested."""
    scale = tensor_scale_reference(amax, fmt)
    codes = to_tensor_codes_reference(x, scale, fmt)
    return Quantized(
        codes if rows else None,
        transpose_codes_reference(codes) if columns else None,
        scale,
        x.sum(0, dtype=torch.float32) if sums else None,
    )


def to_tensor_codes_reference(x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Codes of `x` with the tensor's scale; they saturate at the format's largest magnitude."""
    value = (x.float() * (1 / scale)).clamp(-fmt.max, fmt.max)
    return torch.where(x.isfinite(), value, torch.nan).to(fmt.dtype)


@triton.jit
def to_tensor_codes(b_x, scale, E5M2: tl.constexpr):
    """`to_tensor_codes_reference` for an FP32 tile."""
    return to_fp8(finite_or_nan(b_x) * tl.div_rn(1.0, scale), E5M2)


@triton.jit
def to_tensor_words(b_x, scale, E5M2: tl.constexpr):
    """`to_tensor_codes` as int32."""
    return to_fp8_words(finite_or_nan(b_x) * tl.div_rn(1.0, scale), E5M2)


@PreparedKernel
@triton.jit
def quantize_rows_kernel(p_x, p_rows, p_maxima, p_predicted, p_used, p_found, found, p_amax, p_true,
                         n, tiles, E5M2: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Codes and, if requested, the maximum of each tile."""
    scale, todo = scale_and_tiles(p_predicted, p_used, p_found, found, p_amax, p_true, tiles, E5M2)
    for tile in range(tl.program_id(0), todo, tl.num_programs(0)):
        o_x = tl.cast(tile, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        b_x = tl.load(p_x + o_x, mask=o_x < n, other=0.0).to(tl.float32)
        tl.store(p_rows + o_x, to_tensor_codes(b_x, scale, E5M2), mask=o_x < n)
        if p_maxima is not None:
            tl.store(p_maxima + tile, finite_max(b_x))


@PreparedKernel
@triton.jit
def quantize_columns_kernel(p_x, p_rows, p_columns, p_sums, p_maxima,
                            p_predicted, p_used, p_found, found, p_amax, p_true, m, n, padded_m, pitch,
                            tiles, E5M2: tl.constexpr, M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Row-major and column-major codes, column sums for each row of tiles, and the amax of each tile, as
    requested. `pitch`: bytes from one column to the next."""
    scale, todo = scale_and_tiles(p_predicted, p_used, p_found, found, p_amax, p_true, tiles, E5M2)
    across = tl.maximum(tl.cdiv(n, N), 1)
    for tile in range(tl.program_id(0), todo, tl.num_programs(0)):
        o_word = (tile // across) * (M // 4) + tl.arange(0, M // 4)
        o_n = (tile % across) * N + tl.arange(0, N)
        b_words = tl.zeros([M // 4, N], dtype=tl.int32)
        b_sums = tl.zeros([M // 4, N], dtype=tl.float32)
        b_most = tl.zeros([M // 4, N], dtype=tl.float32)
        for i in tl.static_range(4):
            o_m = o_word.to(tl.int64) * 4 + i
            m_x = (o_m[:, None] < m) & (o_n[None, :] < n)
            b_x = tl.load(p_x + o_m[:, None] * n + o_n[None, :], mask=m_x, other=0.0).to(tl.float32)
            if p_sums is not None:
                b_sums += b_x
            if p_maxima is not None:
                b_most = tl.maximum(b_most, finite_abs(b_x))
            if p_rows is not None:
                b_codes = to_tensor_codes(b_x, scale, E5M2)
                tl.store(p_rows + o_m[:, None] * n + o_n[None, :], b_codes, mask=m_x)
            b_words |= to_tensor_words(b_x, scale, E5M2) << (8 * i)
        if p_columns is not None:
            store_words(p_columns, b_words, o_word, o_n, n, padded_m, False, pitch)
        if p_sums is not None:
            p_part = p_sums + (tile // across).to(tl.int64) * n
            tl.store(p_part + o_n, tl.sum(b_sums, axis=0), mask=o_n < n)
        if p_maxima is not None:
            tl.store(p_maxima + tile, finite_max(b_most))


def empty_operands(
    m: int, n: int, fmt: Fp8Format, device: torch.device, rows: bool, columns: bool, sums: bool
) -> Quantized:
    """Uninitialised operands of [m, n], as requested."""
    dtype = fmt.dtype
    return Quantized(
        torch.empty(m, n, dtype=dtype, device=device) if rows else None,
        torch.empty(n, m + -m % ALIGNMENT, dtype=dtype, device=device) if columns else None,
        torch.empty(1, dtype=torch.float32, device=device),
        torch.empty(n, dtype=torch.float32, device=device) if sums else None,
    )


def launch_quantize(
    x: torch.Tensor, out: Quantized, scales: Scales, pitch: int | None = None
) -> torch.Tensor | None:
    """Quantizes a contiguous `x` [m, n] with one read. The first launch also writes column sums, in two
    stages. Returns maxima if `scales` has none. Columns may be a part [n, m'] of longer ones, which are
    `pitch` elements long."""
    m, n = x.shape
    by_columns = out.columns is not None or out.sums is not None
    if by_columns:
        padded_m = m + -m % ALIGNMENT
        tile_m, tile_n = BOTH_TILE if out.rows is not None else COLUMNS_TILE
        down, across = tiling(padded_m, n, tile_m, tile_n)
        tiles = down * across
    else:
        tiles = cdiv(m * n, BLOCK) or 1
    maxima = None
    if scales.maxima is None:
        maxima = torch.empty(tiles, dtype=torch.float32, device=x.device)
    rows = None if out.rows is None else out.rows.view(torch.uint8)
    if by_columns:
        partial = None
        if out.sums is not None and not scales.corrects:
            partial = torch.empty(down, n, dtype=torch.float32, device=x.device)
        quantize_columns_kernel[(scales.programs(tiles),)](
            x,
            rows,
            None if out.columns is None else out.columns.view(torch.int32),
            partial,
            maxima,
            *scales,
            m,
            n,
            padded_m,
            padded_m if pitch is None else pitch,
            tiles,
            E5M2=out.is_e5m2,
            M=tile_m,
            N=tile_n,
            num_warps=4,
        )
        if partial is not None:
            torch.sum(partial, 0, out=out.sums)
    else:
        quantize_rows_kernel[(scales.programs(tiles),)](
            x, rows, maxima, *scales, m * n, tiles, E5M2=out.is_e5m2, BLOCK=BLOCK, num_warps=8
        )
    return maxima


def quantize_tensor_triton(
    x: torch.Tensor,
    maxima: torch.Tensor,
    fmt: Fp8Format,
    rows: bool = True,
    columns: bool = False,
    sums: bool = False,
    amax: torch.Tensor | None = None,
) -> Quantized:
    """`quantize_tensor_reference` as a kernel, with the same codes bit for bit, and sums in two stages. The
    amax is the largest of `maxima`; it is written to `amax` if that is given."""
    out = empty_operands(*x.shape, fmt, x.device, rows, columns, sums)
    launch_quantize(x, out, Scales.known(maxima, out.scale, amax))
    return out


def _quantize_fake(x, amax, fmt, *requested):
    return tuple(empty_operands(*x.shape, fp8_format(fmt), x.device, *requested))


@compilable(_quantize_fake)
def quantize_codes(
    x: torch.Tensor, amax: torch.Tensor, fmt: str, rows: bool, columns: bool, sums: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs the kernel for CUDA tensors, else the reference. Results that are not requested are None."""
    quantize = quantize_tensor_triton if uses_kernels(x) else quantize_tensor_reference
    return tuple(quantize(x, amax, fp8_format(fmt), rows, columns, sums))


def quantize_tensor(
    x: torch.Tensor,
    amax: torch.Tensor,
    fmt: Fp8Format,
    rows: bool = True,
    columns: bool = False,
    sums: bool = False,
) -> Quantized:
    """`x` [m, n], contiguous, with the amax `amax`, as row-major and column-major codes, and its column
    sums, as requested."""
    if not torch.compiler.is_compiling():
        quantize = quantize_tensor_triton if uses_kernels(x) else quantize_tensor_reference
        return quantize(x, amax, fmt, rows, columns, sums)
    by_rows, by_columns, scale, summed = quantize_codes(x, amax, fmt.name, rows, columns, sums)
    return Quantized(
        by_rows if rows else None, by_columns if columns else None, scale, summed if sums else None
    )
