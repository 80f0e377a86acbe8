"""The activations' kernels and their launchers."""

import functools

import torch
import triton
import triton.language as tl

from coat_kernels.activation.reference import CUBE, FLAT, NORMAL, QUICK, SQRT_HALF, TWO_SQRT_2_OVER_PI
from coat_kernels.fast_math import fast_exp2, fast_reciprocal
from coat_kernels.fp8 import ALIGNMENT, Fp8Format, cast, round_to, widen
from coat_kernels.groups.kernels import load_group_tile, store_group_tile
from coat_kernels.groups.reference import GROUP_SIZE, Grouped, empty_grouped
from coat_kernels.prepared import PreparedKernel, cdiv, tiling
from coat_kernels.tensorwise.quantize import Quantized, to_tensor_codes, to_tensor_words
from coat_kernels.tensorwise.scale import NO_SCALES, Scales, scale_and_tiles, tensor_scale
from coat_kernels.tensorwise.transpose import empty_columns, store_words
from coat_kernels.tiles import finite_abs, load_tile, store_tile, stored_max, tile_mask

# rows, columns and warps of a program's tile
FORWARD_ROWS, FORWARD_COLUMNS, FORWARD_WARPS = 8, 256, 4
BACKWARD_ROWS, BACKWARD_COLUMNS, BACKWARD_WARPS = 4, 256, 4
# the same for a backward program that also writes column-major codes; rows are a multiple of 16
OPERANDS_ROWS, OPERANDS_COLUMNS, OPERANDS_WARPS = 32, 128, 4
# the same for a program that writes column-major codes only
COLUMNS_M, COLUMNS_N, COLUMNS_WARPS = 32, 256, 4
# rows that one backward program adds to its column sums, if column sums are requested
SUMMED_ROWS = 128
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(b_x):
    # the exponential may overflow to infinity; the reciprocal of infinity is zero
    return fast_reciprocal(1.0 + fast_exp2(b_x * -LOG2_E))


@triton.jit
def value_and_slope(b_x, KIND: tl.constexpr):
    """`value_and_slope_reference`. A kernel that uses only one of the two results does not compute the
    other."""
    if KIND == "silu":
        b_s = sigmoid(b_x)
        b_value = b_x * b_s
        b_slope = b_s + b_value * (1.0 - b_s)
    elif KIND == "gelu":
        b_below = 0.5 + 0.5 * tl.erf(b_x * SQRT_HALF)
        b_value = b_x * b_below
        b_slope = b_below + b_x * (fast_exp2(b_x * b_x * (-0.5 * LOG2_E)) * NORMAL)
    elif KIND == "gelu_tanh":
        b_s = sigmoid((b_x + b_x * b_x * b_x * CUBE) * TWO_SQRT_2_OVER_PI)
        b_near = tl.minimum(tl.maximum(b_x, -FLAT), FLAT)
        b_value = b_x * b_s
        b_turn = (b_near + b_near * b_near * b_near * (3.0 * CUBE)) * TWO_SQRT_2_OVER_PI
        b_slope = b_s + b_s * (1.0 - b_s) * b_turn
    elif KIND == "quick_gelu":
        b_s = sigmoid(b_x * QUICK)
        b_value = b_x * b_s
        b_slope = b_s + b_value * (1.0 - b_s) * QUICK
    else:
        # written so that NaN stays NaN
        b_positive = tl.where(b_x < 0.0, 0.0, b_x)
        if KIND == "relu":
            b_value = b_positive
            b_slope = tl.where(b_x > 0.0, 1.0, b_positive * 0.0)
        else:
            b_value = b_positive * b_positive
            b_slope = 2.0 * b_positive
    return b_value, b_slope


@PreparedKernel
@triton.jit
def activation_forward_kernel(p_x, p_y, p_rows, p_codes, p_exponent, p_maxima,
                              p_predicted, p_used, p_found, found, p_amax, p_true,
                              rows, f, groups, tiles,
                              KIND: tl.constexpr, PARTS: tl.constexpr,
                              E5M2: tl.constexpr, TO_CODES: tl.constexpr, EVEN: tl.constexpr,
                              ROWS: tl.constexpr, COLUMNS: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """Writes y, or its row-major FP8 codes; also the saved input and the maxima, if requested."""
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    scale, todo = scale_and_tiles(p_predicted, p_used, p_found, found, p_amax, p_true, tiles, E5M2)
    across = tl.cdiv(f, COLUMNS)
    for tile in range(tl.program_id(0), todo, tl.num_programs(0)):
        o_row = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = (tile % across) * COLUMNS
        o_f = column + tl.arange(0, COLUMNS)
        m_x = tile_mask(o_row, o_f, rows, f)
        o_x = o_row[:, None] * (PARTS * f) + o_f[None, :]
        o_y = o_row[:, None] * f + o_f[None, :]
        b_x = widen(load_tile(p_x, o_x, m_x, not EVEN))
        b_y, _ = value_and_slope(b_x, KIND)
        if PARTS == 2:
            b_up = widen(load_tile(p_x + f, o_x, m_x, not EVEN))
            b_y *= b_up
        if p_y is not None:
            store_tile(p_y, o_y, cast(b_y, DTYPE), m_x, not EVEN)
        else:
            store_tile(p_rows, o_y, to_tensor_codes(round_to(b_y, DTYPE), scale, E5M2), m_x, not EVEN)
        if p_maxima is not None:
            # a(0) is 0: masked elements do not change the maximum
            tl.store(p_maxima + tile, stored_max(b_y, DTYPE))
        if p_codes is not None:
            store_group_tile(b_x, p_codes, p_exponent, o_row, column, rows, f, PARTS * f, PARTS * groups,
                             TO_CODES, G, EVEN)  # fmt: skip
            if PARTS == 2:
                store_group_tile(b_up, p_codes + f, p_exponent + groups, o_row, column, rows, f, PARTS * f,
                                 PARTS * groups, TO_CODES, G, EVEN)  # fmt: skip


@triton.jit
def load_parts(p_codes, p_exponent, o_row, column, rows, f, groups, PARTS: tl.constexpr,
               COLUMNS: tl.constexpr, FROM_CODES: tl.constexpr, G: tl.constexpr,
               EVEN: tl.constexpr):  # fmt: skip
    """The saved gate and up; without a gate, the same tile twice."""
    b_x = load_group_tile(p_codes, p_exponent, o_row, column, rows, f, PARTS * f, PARTS * groups,
                          COLUMNS, FROM_CODES, G, EVEN)  # fmt: skip
    if PARTS == 2:
        b_up = load_group_tile(p_codes + f, p_exponent + groups, o_row, column, rows, f, PARTS * f,
                               PARTS * groups, COLUMNS, FROM_CODES, G, EVEN)  # fmt: skip
    else:
        b_up = b_x
    return b_x, b_up


@PreparedKernel
@triton.jit
def activation_backward_kernel(p_grad_y, p_codes, p_exponent, p_grad_x, p_rows, p_columns, p_sums,
                               p_maxima, p_predicted, p_used, p_found, found, p_amax, p_true,
                               rows, f, groups, padded_rows, tiles,
                               KIND: tl.constexpr, PARTS: tl.constexpr, E5M2: tl.constexpr,
                               FROM_CODES: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
                               COLUMNS: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """Writes the gradient, or its row-major and column-major FP8 codes, as requested. Each program sums
    columns over its rows. For column sums, the number of programs is a multiple of `across`, so each program
    stays in its columns."""
    DTYPE: tl.constexpr = p_grad_y.dtype.element_ty
    # columns are transposed in words of four rows
    TURNS: tl.constexpr = 1 if p_columns is None else 4
    HEIGHT: tl.constexpr = ROWS // TURNS
    scale, todo = scale_and_tiles(p_predicted, p_used, p_found, found, p_amax, p_true, tiles, E5M2)
    across = tl.cdiv(f, COLUMNS)
    b_sums = tl.zeros([HEIGHT, COLUMNS], dtype=tl.float32)
    b_up_sums = b_sums
    for tile in range(tl.program_id(0), todo, tl.num_programs(0)):
        o_word = (tile // across) * HEIGHT + tl.arange(0, HEIGHT)
        column = (tile % across) * COLUMNS
        o_f = column + tl.arange(0, COLUMNS)
        b_most = tl.zeros([HEIGHT, COLUMNS], dtype=tl.float32)
        b_words = tl.zeros([HEIGHT, COLUMNS], dtype=tl.int32)
        b_up_words = b_words
        for i in tl.static_range(TURNS):
            o_row = o_word.to(tl.int64) * TURNS + i
            m_x = tile_mask(o_row, o_f, rows, f)
            o_x = o_row[:, None] * (PARTS * f) + o_f[None, :]
            b_grad = widen(load_tile(p_grad_y, o_row[:, None] * f + o_f[None, :], m_x, not EVEN))
            b_x, b_up = load_parts(p_codes, p_exponent, o_row, column, rows, f, groups, PARTS, COLUMNS,
                                   FROM_CODES, G, EVEN)  # fmt: skip
            b_value, b_slope = value_and_slope(b_x, KIND)
            b_grad_x = b_grad * b_slope
            if PARTS == 2:
                b_grad_x *= b_up
            # the gradients of masked elements are 0
            if p_sums is not None:
                b_sums += round_to(b_grad_x, DTYPE)
            b_most = tl.maximum(b_most, finite_abs(b_grad_x))
            b_code = store_rows(b_grad_x, p_grad_x, p_rows, o_x, m_x, scale, DTYPE, E5M2, EVEN)
            b_words |= b_code << (8 * i)
            if PARTS == 2:
                b_grad_up = b_grad * b_value
                if p_sums is not None:
                    b_up_sums += round_to(b_grad_up, DTYPE)
                b_most = tl.maximum(b_most, finite_abs(b_grad_up))
                b_code = store_rows(b_grad_up, p_grad_x, p_rows, o_x + f, m_x, scale, DTYPE, E5M2, EVEN)
                b_up_words |= b_code << (8 * i)
        if p_columns is not None:
            o_column = o_f.to(tl.int64)
            store_words(p_columns, b_words, o_word, o_column, f, padded_rows, EVEN)
            if PARTS == 2:
                p_up = p_columns + f.to(tl.int64) * (padded_rows // 4)
                store_words(p_up, b_up_words, o_word, o_column, f, padded_rows, EVEN)
        if p_maxima is not None:
            tl.store(p_maxima + tile, stored_max(b_most, DTYPE))
    if p_sums is not None:
        o_f = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
        p_sums += (tl.program_id(0) // across).to(tl.int64) * (PARTS * f)
        tl.store(p_sums + o_f, tl.sum(b_sums, axis=0), mask=o_f < f)
        if PARTS == 2:
            tl.store(p_sums + f + o_f, tl.sum(b_up_sums, axis=0), mask=o_f < f)


@triton.jit
def store_rows(b_x, p_x, p_rows, o_x, m_x, scale, DTYPE: tl.constexpr, E5M2: tl.constexpr,
               EVEN: tl.constexpr):  # fmt: skip
    """Stores an FP32 tile unquantized or as row-major codes, as requested. Returns the codes as int32."""
    b_rounded = round_to(b_x, DTYPE)
    if p_x is not None:
        store_tile(p_x, o_x, cast(b_x, DTYPE), m_x, not EVEN)
    if p_rows is not None:
        store_tile(p_rows, o_x, to_tensor_codes(b_rounded, scale, E5M2), m_x, not EVEN)
    return to_tensor_words(b_rounded, scale, E5M2)


@PreparedKernel
@triton.jit
def activation_columns_kernel(p_codes, p_exponent, p_amax, p_columns, p_scale,
                              rows, f, groups, padded_rows,
                              KIND: tl.constexpr, PARTS: tl.constexpr, E5M2: tl.constexpr,
                              FROM_CODES: tl.constexpr, EVEN: tl.constexpr, M: tl.constexpr,
                              N: tl.constexpr, G: tl.constexpr):  # fmt: skip
    scale = tensor_scale(tl.load(p_amax), E5M2)
    # every program stores the same scale
    tl.store(p_scale, scale)
    o_word = tl.program_id(1) * (M // 4) + tl.arange(0, M // 4)
    column = tl.program_id(0) * N
    b_words = tl.zeros([M // 4, N], dtype=tl.int32)
    for i in tl.static_range(4):
        o_row = o_word.to(tl.int64) * 4 + i
        b_x, b_up = load_parts(p_codes, p_exponent, o_row, column, rows, f, groups, PARTS, N,
                              FROM_CODES, G, EVEN)  # fmt: skip
        b_y, _ = value_and_slope(b_x, KIND)
        if PARTS == 2:
            b_y *= b_up
        # a(0) is 0: rows past the end are 0, too
        b_words |= to_tensor_words(b_y, scale, E5M2) << (8 * i)
    o_f = (column + tl.arange(0, N)).to(tl.int64)
    store_words(p_columns, b_words, o_word, o_f, f, padded_rows, EVEN)


@functools.lru_cache(maxsize=1024)
def _tiles(rows: int, f: int, m: int, n: int) -> tuple[int, int, int]:
    """The number of m x n tiles in [rows, f], of tiles per row of tiles, and of groups per row."""
    across = cdiv(f, n)
    return cdiv(rows, m) * across, across, cdiv(f, GROUP_SIZE)


def activation_forward_triton(x, kind: str, gated: bool, saved_format: str | None):
    """`activation_forward_reference` in one pass over x, with one maximum per tile."""
    rows, f = x.shape[0], x.shape[1] // (1 + gated)
    y = torch.empty(rows, f, dtype=x.dtype, device=x.device)
    q = empty_grouped(rows, f, GROUP_SIZE, saved_format, x.device, 1 + gated) if saved_format else None
    return y, launch_forward(x, q, kind, gated, y=y), q


def launch_forward(
    x,
    q: Grouped | None,
    kind: str,
    gated: bool,
    out: Quantized | None = None,
    scales: Scales = NO_SCALES,
    y: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Writes y or, with `scales`, its row-major codes. The first launch also writes q and returns maxima."""
    rows, f = x.shape[0], x.shape[1] // (1 + gated)
    tiles, _, groups = _tiles(rows, f, FORWARD_ROWS, FORWARD_COLUMNS)
    first = scales.maxima is None
    maxima = torch.empty(tiles, dtype=torch.float32, device=x.device) if first else None
    saves = first and q is not None
    activation_forward_kernel[(scales.programs(tiles),)](
        x,
        y,
        out.rows.view(torch.uint8) if out else None,
        q.codes if saves else None,
        q.exponent if saves else None,
        maxima,
        *scales,
        rows,
        f,
        groups,
        tiles,
        KIND=kind,
        PARTS=1 + gated,
        E5M2=out is not None and out.is_e5m2,
        TO_CODES=q.format.to_codes_tile if saves else None,
        EVEN=rows % FORWARD_ROWS == 0 and f % FORWARD_COLUMNS == 0,
        ROWS=FORWARD_ROWS,
        COLUMNS=FORWARD_COLUMNS,
        G=GROUP_SIZE,
        num_warps=FORWARD_WARPS,
    )
    return maxima


def activation_backward_triton(grad_y, q: Grouped, kind: str, gated: bool):
    """`activation_backward_reference` in one pass, with one maximum per tile."""
    grad_x = torch.empty(q.codes.shape, dtype=grad_y.dtype, device=grad_y.device)
    return grad_x, launch_backward(grad_y, q, kind, gated, grad_x=grad_x)


def launch_backward(
    grad_y,
    q: Grouped,
    kind: str,
    gated: bool,
    out: Quantized | None = None,
    scales: Scales = NO_SCALES,
    grad_x: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Writes grad_x or, with `scales`, its codes. The first launch also writes column sums and returns
    maxima."""
    rows, f = grad_y.shape
    m, n, warps = BACKWARD_ROWS, BACKWARD_COLUMNS, BACKWARD_WARPS
    if out is not None and out.columns is not None:
        m, n, warps = OPERANDS_ROWS, OPERANDS_COLUMNS, OPERANDS_WARPS
    tiles, across, groups = _tiles(rows, f, m, n)
    programs, partial = scales.programs(tiles), None
    first = scales.maxima is None
    maxima = torch.empty(tiles, dtype=torch.float32, device=grad_y.device) if first else None
    by_rows, by_columns, _, sums = out or (None, None, None, None)
    if first and sums is not None:
        partial = sums.new_empty(max(cdiv(rows, SUMMED_ROWS), 1), len(sums))
        programs = len(partial) * across
    activation_backward_kernel[(programs,)](
        grad_y,
        q.codes,
        q.exponent,
        grad_x,
        None if by_rows is None else by_rows.view(torch.uint8),
        None if by_columns is None else by_columns.view(torch.int32),
        partial,
        maxima,
        *scales,
        rows,
        f,
        groups,
        rows + -rows % ALIGNMENT,
        tiles,
        KIND=kind,
        PARTS=1 + gated,
        E5M2=out is not None and out.is_e5m2,
        FROM_CODES=q.format.from_codes_tile,
        EVEN=rows % m == 0 and f % n == 0,
        ROWS=m,
        COLUMNS=n,
        G=GROUP_SIZE,
        num_warps=warps,
    )
    if partial is not None:
        torch.sum(partial, 0, out=sums)
    return maxima


def activation_columns_triton(q: Grouped, amax, kind: str, gated: bool, fmt: Fp8Format) -> Quantized:
    """`activation_columns_reference` in one kernel."""
    rows, parts = q.codes.shape[0], 1 + gated
    f = q.codes.shape[1] // parts
    columns = empty_columns(rows, f, fmt.dtype, amax.device)
    scale = torch.empty(1, dtype=torch.float32, device=amax.device)
    down, across = tiling(columns.shape[1], f, COLUMNS_M, COLUMNS_N)
    activation_columns_kernel[across, down](
        q.codes,
        q.exponent,
        amax,
        columns.view(torch.int32),
        scale,
        rows,
        f,
        cdiv(f, GROUP_SIZE),
        columns.shape[1],
        KIND=kind,
        PARTS=parts,
        E5M2=fmt.is_e5m2,
        FROM_CODES=q.format.from_codes_tile,
        EVEN=rows % COLUMNS_M == 0 and f % COLUMNS_N == 0,
        M=COLUMNS_M,
        N=COLUMNS_N,
        G=GROUP_SIZE,
        num_warps=COLUMNS_WARPS,
    )
    return Quantized(None, columns, scale)
