"""FP8 with one scale per tensor, just in time, as FP8 matrix products take it.

The scale comes in two stages (COAT, section 5.2: group scaling): maxima of parts of the tensor, written
by the kernel that produces it or, where there is none, by a pass of their own; then the maximum of those.
value = code * scale. The scale is 2^e over the format's largest magnitude, so 8/7 of a power of two, and
depends on the largest finite magnitude alone:

- E4M3: the smallest e with largest <= 2^e. A scale that changes seldom can be predicted, and costs a
  floating-point format no precision, only up to one binade at the lower end of its range. It is no power of
  two because BF16 values, of 8 bits, would then lie half way between two codes, of 4, once in 16 times: that
  makes the error of rounding 1.004 times as large.
- E5M2, whose normal numbers span 30 binades: e is also rounded up to one of every four. Gradients seldom need
  them all.

Zero tensors have scale 1, and its exponent is at least -126: scales and their inverses are normal numbers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from coat_kernels.fp8 import Fp8Format, finite_or_nan, fp8_format, to_fp8, to_fp8_words, uses_kernels
from coat_kernels.launch import PreparedKernel, cdiv, tiling
from coat_kernels.ops import compilable
from coat_kernels.origin import maxima_of

# scaled matrix products contract over multiples of 16
ALIGNMENT = 16
# elements of a program that goes along memory
BLOCK = 16384
# rows and columns of a program that transposes, and of one that also writes rows
COLUMNS_TILE, BOTH_TILE = (128, 128), (64, 128)
# programs of a second launch, one for each multiprocessor of an H200: every one reads all maxima
CORRECTING_PROGRAMS = 132
# maxima that a program reads at a time, and so many that of a launch over all tiles every one may read them
FOUND, FEW_MAXIMA = tl.constexpr(4096), 1024


class Quantized(NamedTuple):
    """Codes [m, n] or None, their transpose [n, m'] or None, the scale, FP32 [1], and the sums of the columns
    before they were quantized, FP32 [n], or None.

    m' is m rounded up to a multiple of 16, the rest zeros: it is a dimension that products contract over.
    """

    rows: torch.Tensor | None
    columns: torch.Tensor | None
    scale: torch.Tensor
    sums: torch.Tensor | None = None

    @property
    def is_e5m2(self) -> bool:
        """As `Fp8Format.is_e5m2`, of the codes."""
        return (self.columns if self.rows is None else self.rows).dtype == torch.float8_e5m2


def maxima_reference(x: torch.Tensor) -> torch.Tensor:
    """Largest finite magnitudes of the parts of `x` (any shape), FP32; here the whole is one part."""
    magnitude = x.float().abs()
    return largest_of_maxima_reference(torch.where(magnitude.isfinite(), magnitude, 0))


def largest_of_maxima_reference(maxima: torch.Tensor) -> torch.Tensor:
    """The largest of `maxima` (any shape), FP32 [1]; 0 of none."""
    return maxima.amax().reshape(1) if maxima.numel() else maxima.new_zeros(1)


@triton.jit
def finite_max(b_x):
    """The largest finite magnitude of a tile, FP32."""
    b_abs = tl.abs(b_x.to(tl.float32))
    return tl.max(tl.ravel(tl.where(b_abs < float("inf"), b_abs, 0.0)), axis=0)


@PreparedKernel
@triton.jit
def maxima_kernel(p_x, p_maxima, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    o_x = pid * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_maxima + pid, finite_max(tl.load(p_x + o_x, mask=o_x < n, other=0.0)))


def maxima_triton(x: torch.Tensor) -> torch.Tensor:
    """`maxima_reference` with one maximum for each block of a contiguous tensor."""
    maxima = torch.empty(cdiv(x.numel(), BLOCK), dtype=torch.float32, device=x.device)
    maxima_kernel[(len(maxima),)](x, maxima, x.numel(), BLOCK=BLOCK, num_warps=8)
    return maxima


@PreparedKernel
@triton.jit
def largest_kernel(p_maxima, p_largest, n, BLOCK: tl.constexpr):
    b_largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        o_maxima = start + tl.arange(0, BLOCK)
        b_largest = tl.maximum(b_largest, tl.load(p_maxima + o_maxima, mask=o_maxima < n, other=0.0))
    tl.store(p_largest, tl.max(b_largest, axis=0))


def largest_triton(maxima: torch.Tensor) -> torch.Tensor:
    """The largest of `maxima`, FP32 [1], by one program: torch's own reduction takes three times as long."""
    largest = torch.empty(1, dtype=torch.float32, device=maxima.device)
    largest_kernel[(1,)](maxima, largest, len(maxima), BLOCK=8192, num_warps=16)
    return largest


def largest_of_maxima(maxima: torch.Tensor) -> torch.Tensor:
    """The largest of `maxima`, FP32 [1]; on CUDA by the kernel."""
    return (largest_triton if uses_kernels(maxima) else largest_of_maxima_reference)(maxima)


@compilable(lambda x: x.new_empty(1, dtype=torch.float32))
def largest_of(x: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude of a contiguous tensor, FP32 [1], by a pass over it."""
    return largest_of_maxima(maxima_triton(x) if uses_kernels(x) else maxima_reference(x))


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude of `x`, FP32 [1]; from its producer's maxima where there are any."""
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    maxima = maxima_of(x)
    return largest_of(x.contiguous()) if maxima is None else largest_of_maxima(maxima)


def tensor_scale_reference(largest: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """The scale of a tensor whose largest magnitude is `largest`, FP32 [1]."""
    mantissa, power = torch.frexp(largest)
    # both formats' largest magnitude is 7/8 * 2^m, and a power of two has mantissa 1/2
    _, m = torch.frexp(torch.tensor(fmt.max))
    e = power - (mantissa == 0.5).int() - m
    if fmt.is_e5m2:
        e = (e + 3) // 4 * 4
    return torch.where(largest > 0, torch.ldexp(torch.full_like(largest, 8 / 7), e.clamp_min(-126)), 1.0)


def quantize_tensor_reference(
    x: torch.Tensor,
    largest: torch.Tensor,
    fmt: Fp8Format,
    rows: bool = True,
    columns: bool = False,
    sums: bool = False,
) -> Quantized:
    """`x` [m, n] whose largest magnitude is `largest`, by rows and by columns, and summed, as asked for."""
    scale = tensor_scale_reference(largest, fmt)
    codes = to_tensor_codes_reference(x, scale, fmt)
    return Quantized(
        codes if rows else None,
        transpose_codes_reference(codes) if columns else None,
        scale,
        x.sum(0, dtype=torch.float32) if sums else None,
    )


def to_tensor_codes_reference(x: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Codes of `x` with the tensor's scale; beyond the format's largest magnitude they saturate."""
    value = (x.float() * (1 / scale)).clamp(-fmt.max, fmt.max)
    return torch.where(x.isfinite(), value, torch.nan).to(fmt.dtype)


@triton.jit
def tensor_scale(largest, E5M2: tl.constexpr):
    """`tensor_scale_reference` of a scalar."""
    # 127 + the scale's exponent, off that of the largest magnitude
    bits = largest.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - (16 if E5M2 else 9) + ((bits & 0x7FFFFF) > 0).to(tl.int32)
    if E5M2:
        # the bit operation rounds down, negative numbers too
        exponent = ((exponent - 127 + 3) & -4) + 127
    # 0x124925 is the mantissa of 8/7
    scale = ((tl.maximum(exponent, 1) << 23) | 0x124925).to(tl.float32, bitcast=True)
    return tl.where(largest > 0.0, scale, 1.0)


@triton.jit
def to_tensor_codes(b_x, scale, E5M2: tl.constexpr):
    """`to_tensor_codes_reference` of an FP32 tile."""
    return to_fp8(finite_or_nan(b_x) * tl.div_rn(1.0, scale), E5M2)


@triton.jit
def to_tensor_words(b_x, scale, E5M2: tl.constexpr):
    """`to_tensor_codes` as int32."""
    return to_fp8_words(finite_or_nan(b_x) * tl.div_rn(1.0, scale), E5M2)


class Scales(NamedTuple):
    """The scales of a launch, FP32 [1] each, and the `maxima` that it gets, FP32 [count].

    The first of two launches quantizes with `predicted`, copies it to `used`, and finds maxima. The second
    gets those, writes the largest to `largest` if asked for, the scale that belongs to it to `true` and
    `predicted`, and the codes again if `used` is another. A launch that gets maxima and no prediction does
    all at once.
    """

    predicted: torch.Tensor | None = None
    used: torch.Tensor | None = None
    maxima: torch.Tensor | None = None
    count: int | None = None
    largest: torch.Tensor | None = None
    true: torch.Tensor | None = None

    @property
    def corrects(self) -> bool:
        """Whether this is the second launch."""
        return self.maxima is not None and self.used is not None

    def programs(self, tiles: int) -> int:
        """Programs of a launch over `tiles`; each goes through those that `scale_and_tiles` tells it."""
        if tiles > CORRECTING_PROGRAMS and self.maxima is not None and self.used is not None:
            return CORRECTING_PROGRAMS
        return tiles or 1


# of a launch that writes no codes
NO_SCALES = Scales()


@triton.jit
def scale_and_tiles(p_predicted, p_used, p_found, found, p_largest, p_true, tiles, E5M2: tl.constexpr):
    """The scale of a launch, and how many tiles it has to write. Every program stores the same."""
    todo = tiles
    if p_found is not None:
        if found == 1:
            # which the compiler knows
            largest = tl.load(p_found)
        else:
            b_largest = tl.zeros([FOUND], dtype=tl.float32)
            for start in range(0, found, FOUND):
                o_found = start + tl.arange(0, FOUND)
                b_found = tl.load(p_found + o_found, mask=o_found < found, other=0.0)
                b_largest = tl.maximum(b_largest, b_found)
            largest = tl.max(b_largest, axis=0)
        scale = tensor_scale(largest, E5M2)
        tl.store(p_true, scale)
        if p_largest is not None:
            tl.store(p_largest, largest)
        if p_predicted is not None:
            tl.store(p_predicted, scale)
            todo = tl.where(tl.load(p_used) == scale, 0, tiles)
    elif p_predicted is not None:
        scale = tl.load(p_predicted)
        tl.store(p_used, scale)
    else:
        scale = 1.0
    return scale, todo


@PreparedKernel
@triton.jit
def quantize_rows_kernel(p_x, p_rows, p_maxima, p_predicted, p_used, p_found, found, p_largest, p_true,
                         n, tiles, E5M2: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Codes and, where asked for, the maximum of each tile."""
    scale, todo = scale_and_tiles(p_predicted, p_used, p_found, found, p_largest, p_true, tiles, E5M2)
    for tile in range(tl.program_id(0), todo, tl.num_programs(0)):
        o_x = tl.cast(tile, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        b_x = tl.load(p_x + o_x, mask=o_x < n, other=0.0).to(tl.float32)
        tl.store(p_rows + o_x, to_tensor_codes(b_x, scale, E5M2), mask=o_x < n)
        if p_maxima is not None:
            tl.store(p_maxima + tile, finite_max(b_x))


@PreparedKernel
@triton.jit
def quantize_columns_kernel(p_x, p_rows, p_columns, p_sums, p_maxima,
                            p_predicted, p_used, p_found, found, p_largest, p_true, m, n, padded_m, pitch,
                            tiles, E5M2: tl.constexpr, M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Codes by rows and by columns, `pitch` bytes from one column to the next, and, for each row of tiles,
    sums of columns, and for each tile its maximum, as asked for."""
    scale, todo = scale_and_tiles(p_predicted, p_used, p_found, found, p_largest, p_true, tiles, E5M2)
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
                # maxima pass over NaN
                b_most = tl.maximum(b_most, tl.abs(finite_or_nan(b_x)))
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


@triton.jit
def store_words(p_columns, b_words, o_word, o_n, n, padded_m, EVEN: tl.constexpr = False, pitch=None):
    """Stores codes of a tile transposed, into [n, padded_m] seen as words of four rows; `pitch` bytes lie
    between the starts of two, padded_m without it.

    b_words int32 [words, columns]: the codes of rows 4 w to 4 w + 3, the first in the lowest byte; 0 past the
    end. So the exchange between threads moves words, not bytes, of which each would take an instruction.
    EVEN: every tile lies inside.
    """
    words = padded_m // 4
    step = words if pitch is None else pitch // 4
    p_words = p_columns + o_n.to(tl.int64)[:, None] * step + o_word[None, :]
    if EVEN:
        tl.store(p_words, tl.trans(b_words))
    else:
        tl.store(p_words, tl.trans(b_words), mask=(o_n[:, None] < n) & (o_word[None, :] < words))


def empty_columns(m: int, n: int, fmt: Fp8Format, device: torch.device) -> torch.Tensor:
    """Uninitialised codes for the transpose of [m, n]."""
    return torch.empty(n, m + -m % ALIGNMENT, dtype=fmt.dtype, device=device)


def empty_operands(
    m: int, n: int, fmt: Fp8Format, device: torch.device, rows: bool, columns: bool, sums: bool
) -> Quantized:
    """Uninitialised operands of [m, n], as asked for."""
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
    """Writes the operands of a contiguous `x` [m, n], all from one read of it: sums, in two stages, in any
    but a second launch. Returns maxima if there were none. Columns may be a part [n, m'] of longer ones,
    `pitch` elements each."""
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
    largest: torch.Tensor | None = None,
) -> Quantized:
    """`quantize_tensor_reference` as a kernel: codes bit for bit, sums in two stages. Of many `maxima` it
    takes the largest, which goes to `largest` if there is one."""
    out = empty_operands(*x.shape, fmt, x.device, rows, columns, sums)
    launch_quantize(x, out, Scales(None, None, maxima, maxima.numel(), largest, out.scale))
    return out


def _no_codes(x: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    return torch.empty(0, dtype=fmt.dtype, device=x.device)


def _no_sums(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float32, device=x.device)


def _quantize_fake(x, largest, fmt, rows, columns, sums):
    fmt, (m, n) = fp8_format(fmt), x.shape
    return (
        torch.empty(m, n, dtype=fmt.dtype, device=x.device) if rows else _no_codes(x, fmt),
        empty_columns(m, n, fmt, x.device) if columns else _no_codes(x, fmt),
        torch.empty(1, dtype=torch.float32, device=x.device),
        torch.empty(n, dtype=torch.float32, device=x.device) if sums else _no_sums(x),
    )


@compilable(_quantize_fake)
def quantize_codes(
    x: torch.Tensor, largest: torch.Tensor, fmt: str, rows: bool, columns: bool, sums: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """CUDA tensors take the kernel, others the reference; what is not wanted is an empty tensor."""
    quantize = quantize_tensor_triton if uses_kernels(x) else quantize_tensor_reference
    by_rows, by_columns, scale, summed = quantize(x, largest, fp8_format(fmt), rows, columns, sums)
    fmt = fp8_format(fmt)
    return (
        _no_codes(x, fmt) if by_rows is None else by_rows,
        _no_codes(x, fmt) if by_columns is None else by_columns,
        scale,
        _no_sums(x) if summed is None else summed,
    )


def quantize_tensor(
    x: torch.Tensor,
    largest: torch.Tensor,
    fmt: Fp8Format,
    rows: bool = True,
    columns: bool = False,
    sums: bool = False,
) -> Quantized:
    """`x` [m, n], contiguous, whose largest magnitude is `largest`, by rows and by columns, and its columns'
    `sums`, as asked for."""
    if not torch.compiler.is_compiling():
        quantize = quantize_tensor_triton if uses_kernels(x) else quantize_tensor_reference
        return quantize(x, largest, fmt, rows, columns, sums)
    by_rows, by_columns, scale, summed = quantize_codes(x, largest, fmt.name, rows, columns, sums)
    return Quantized(
        by_rows if rows else None, by_columns if columns else None, scale, summed if sums else None
    )


@PreparedKernel
@triton.jit
def transpose_kernel(p_rows, p_columns, m, n, padded_m, M: tl.constexpr, N: tl.constexpr):
    o_word = tl.program_id(1) * (M // 4) + tl.arange(0, M // 4)
    o_n = tl.program_id(0) * N + tl.arange(0, N)
    b_words = tl.zeros([M // 4, N], dtype=tl.int32)
    for i in tl.static_range(4):
        o_m = o_word.to(tl.int64) * 4 + i
        m_x = (o_m[:, None] < m) & (o_n[None, :] < n)
        b_codes = tl.load(p_rows + o_m[:, None] * n + o_n[None, :], mask=m_x, other=0)
        b_words |= b_codes.to(tl.int32) << (8 * i)
    store_words(p_columns, b_words, o_word, o_n, n, padded_m)


def transpose_codes_reference(codes: torch.Tensor) -> torch.Tensor:
    """Codes [m, n] by columns, [n, m'], as in `Quantized`."""
    m, n = codes.shape
    columns = torch.zeros(n, m + -m % ALIGNMENT, dtype=codes.dtype, device=codes.device)
    columns[:, :m] = codes.t()
    return columns


def transpose_codes_triton(codes: torch.Tensor) -> torch.Tensor:
    """`transpose_codes_reference` as a kernel."""
    m, n = codes.shape
    columns = torch.empty(n, m + -m % ALIGNMENT, dtype=codes.dtype, device=codes.device)
    tile_m, tile_n = COLUMNS_TILE
    grid = max(cdiv(n, tile_n), 1), max(cdiv(columns.shape[1], tile_m), 1)
    transpose_kernel[grid](
        codes.view(torch.uint8), columns.view(torch.int32), m, n, columns.shape[1], M=tile_m, N=tile_n
    )
    return columns


def transpose_codes(codes: torch.Tensor) -> torch.Tensor:
    """Codes [m, n], contiguous, by columns; on CUDA by the kernel."""
    return (transpose_codes_triton if uses_kernels(codes) else transpose_codes_reference)(codes)
