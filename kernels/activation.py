"""Activations, plain and gated (Shazeer, arXiv 2002.05202, section 2), that keep their input in 8 bits, 1 x
G groups.

y = a(x), or a(gate) * up of x = gate | up. Neither a(gate) nor the product is kept: backward makes them
again. The output carries its origin, so that the projection behind it keeps nothing, and its maxima, so that
nobody reads it for its scale; so does the gradient. a is one of

- silu: x s(x), s(x) = 1 / (1 + exp(-x)); gated it is SwiGLU;
- gelu: x (1 + erf(x / sqrt(2))) / 2; gated it is GEGLU;
- gelu_tanh: x (1 + tanh(u)) / 2 = x s(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3), which approximates gelu;
- quick_gelu: x s(1.702 x), the older approximation of gelu;
- relu: max(x, 0);
- squared_relu: max(x, 0)^2 (So et al., arXiv 2109.08668).
"""

import functools

import torch
import triton
import triton.language as tl

from coat_kernels.autograd import once_differentiable
from coat_kernels.codecs.codec import load_tile, store_tile
from coat_kernels.deferred import Attempt, Deferred, PredictedScale, Source, write_reference
from coat_kernels.fast_math import fast_exp2, fast_reciprocal
from coat_kernels.fp8 import (
    Fp8Format,
    cast,
    finite_or_nan,
    fp8_format,
    require_fp8,
    round_to,
    uses_kernels,
    widen,
)
from coat_kernels.group_tiles import (
    load_group_tile,
    store_group_tile,
    stored_max,
    tile_mask,
)
from coat_kernels.groups import (
    DEFAULT_FORMAT,
    GROUP_FORMATS,
    Grouped,
    dequantize_groups_reference,
    quantize_groups_reference,
)
from coat_kernels.launch import PreparedKernel, cdiv, tiling
from coat_kernels.ops import compilable
from coat_kernels.origin import Origin, with_maxima, with_origin
from coat_kernels.tensorwise import (
    ALIGNMENT,
    NO_SCALES,
    Quantized,
    Scales,
    empty_columns,
    quantize_tensor_reference,
    scale_and_tiles,
    store_words,
    tensor_scale,
    to_tensor_codes,
    to_tensor_words,
)

KINDS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu")

# rows and columns of a program's tile, and its warps
FORWARD_ROWS, FORWARD_COLUMNS, FORWARD_WARPS = 8, 256, 4
BACKWARD_ROWS, BACKWARD_COLUMNS, BACKWARD_WARPS = 4, 256, 4
# the same of a program of backward that writes columns too; rows are a multiple of 16
OPERANDS_ROWS, OPERANDS_COLUMNS, OPERANDS_WARPS = 32, 128, 4
# the same of a program that writes columns alone
COLUMNS_M, COLUMNS_N, COLUMNS_WARPS = 32, 256, 4
# rows of which a program of backward adds up its columns, where they are asked for
SUMMED_ROWS = 128

LOG2_E = tl.constexpr(1.4426950408889634)
SQRT_HALF = tl.constexpr(0.7071067811865476)
# the density of a normal distribution at 0
NORMAL = tl.constexpr(0.3989422804014327)
TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
CUBE = tl.constexpr(0.044715)
QUICK = tl.constexpr(1.702)
# beyond it tanh(u) is +-1 in FP32, and the cube would overflow
FLAT = tl.constexpr(16.0)


def value_and_slope_reference(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """a(x) and a'(x)."""
    if kind == "silu":
        s = x.sigmoid()
        return x * s, s + x * s * (1 - s)
    if kind == "gelu":
        below = 0.5 + 0.5 * torch.erf(x * SQRT_HALF.value)
        return x * below, below + x * NORMAL.value * torch.exp(-0.5 * x * x)
    if kind == "gelu_tanh":
        s = torch.sigmoid(TWO_SQRT_2_OVER_PI.value * (x + CUBE.value * x * x * x))
        near = x.clamp(-FLAT.value, FLAT.value)
        return x * s, s + s * (1 - s) * TWO_SQRT_2_OVER_PI.value * (near + 3 * CUBE.value * near**3)
    if kind == "quick_gelu":
        s = torch.sigmoid(QUICK.value * x)
        return x * s, s + x * s * (1 - s) * QUICK.value
    positive = torch.where(x < 0, 0, x)
    if kind == "relu":
        # NaN stays NaN
        return positive, torch.where(x > 0, 1.0, 0 * positive)
    return positive * positive, 2 * positive


def _parts(x: torch.Tensor, gated: bool) -> tuple[torch.Tensor, ...]:
    return x.chunk(2, dim=1) if gated else (x,)


def _dequantize(q: Grouped, gated: bool, group_size: int) -> list[torch.Tensor]:
    parts = zip(_parts(q.codes, gated), _parts(q.exponent, gated), strict=True)
    return [dequantize_groups_reference(Grouped(*part), group_size) for part in parts]


def row_maxima(y: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitudes of rows, FP32."""
    return torch.where(y.isfinite(), y.float().abs(), 0).amax(1)


def activation_forward_reference(x, kind: str, gated: bool, group_size: int, keep: str | None):
    """x [rows, f or 2 f] -> (y [rows, f] in x's dtype, maxima of y, x kept in the format called `keep`,
    groups of gate before groups of up; None where that is None)."""
    parts = _parts(x, gated)
    y, _ = value_and_slope_reference(parts[0].float(), kind)
    if gated:
        y = y * parts[1].float()
    y = y.to(x.dtype)
    if not keep:
        return y, row_maxima(y), None
    kept = [quantize_groups_reference(part, group_size, keep) for part in parts]
    return y, row_maxima(y), Grouped(*(torch.cat(tensors, dim=1) for tensors in zip(*kept, strict=True)))


def activation_backward_reference(grad_y, q: Grouped, kind: str, gated: bool, group_size: int):
    """grad_y [rows, f] -> (grad of x in grad_y's dtype, its maxima)."""
    parts = _dequantize(q, gated, group_size)
    value, slope = value_and_slope_reference(parts[0], kind)
    grad = grad_y.float()
    if gated:
        grad_x = torch.cat((grad * slope * parts[1], grad * value), dim=1)
    else:
        grad_x = grad * slope
    grad_x = grad_x.to(grad_y.dtype)
    return grad_x, row_maxima(grad_x)


def activation_columns_reference(
    q: Grouped, largest, kind: str, gated: bool, group_size: int, fmt: Fp8Format
) -> Quantized:
    """y again, from the kept input, as FP8 columns with the scale of `largest`."""
    parts = _dequantize(q, gated, group_size)
    y, _ = value_and_slope_reference(parts[0], kind)
    if gated:
        y = y * parts[1]
    return quantize_tensor_reference(y, largest, fmt, rows=False, columns=True)


@triton.jit
def sigmoid(b_x):
    # the exponential may overflow to infinity, of which the reciprocal is zero
    return fast_reciprocal(1.0 + fast_exp2(b_x * -LOG2_E))


@triton.jit
def value_and_slope(b_x, KIND: tl.constexpr):
    """`value_and_slope_reference`; a kernel that uses one of them does not compute the other."""
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
                              p_predicted, p_used, p_found, found, p_largest, p_true,
                              rows, f, groups, tiles,
                              KIND: tl.constexpr, PARTS: tl.constexpr,
                              E5M2: tl.constexpr, ROOTS: tl.constexpr, EVEN: tl.constexpr,
                              ROWS: tl.constexpr, COLUMNS: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """y itself, or its FP8 codes by rows; what is kept and maxima where asked for."""
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    scale, todo = scale_and_tiles(p_predicted, p_used, p_found, found, p_largest, p_true, tiles, E5M2)
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
            # a(0) is 0: what is masked does not count
            tl.store(p_maxima + tile, stored_max(b_y, DTYPE))
        if p_codes is not None:
            store_group_tile(b_x, p_codes, p_exponent, o_row, column, rows, f, PARTS * f, PARTS * groups,
                             ROOTS, G, EVEN)  # fmt: skip
            if PARTS == 2:
                store_group_tile(b_up, p_codes + f, p_exponent + groups, o_row, column, rows, f, PARTS * f,
                                 PARTS * groups, ROOTS, G, EVEN)  # fmt: skip


@triton.jit
def load_parts(p_codes, p_exponent, o_row, column, rows, f, groups, PARTS: tl.constexpr,
               COLUMNS: tl.constexpr, ROOTS: tl.constexpr, G: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """The kept gate and up; twice the same where nothing is gated."""
    b_x = load_group_tile(p_codes, p_exponent, o_row, column, rows, f, PARTS * f, PARTS * groups,
                          COLUMNS, ROOTS, G, EVEN)  # fmt: skip
    if PARTS == 2:
        b_up = load_group_tile(p_codes + f, p_exponent + groups, o_row, column, rows, f, PARTS * f,
                               PARTS * groups, COLUMNS, ROOTS, G, EVEN)  # fmt: skip
    else:
        b_up = b_x
    return b_x, b_up


@triton.jit
def finite_abs(b_x):
    """The magnitudes of an FP32 tile; NaN, which maxima pass over, where not finite."""
    return tl.abs(finite_or_nan(b_x))


@PreparedKernel
@triton.jit
def activation_backward_kernel(p_grad_y, p_codes, p_exponent, p_grad_x, p_rows, p_columns, p_sums,
                               p_maxima, p_predicted, p_used, p_found, found, p_largest, p_true,
                               rows, f, groups, padded_rows, tiles,
                               KIND: tl.constexpr, PARTS: tl.constexpr, E5M2: tl.constexpr,
                               ROOTS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
                               COLUMNS: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """The gradient itself, or its FP8 codes by rows and columns as asked for. For sums of columns, over the
    rows of each program, their number is a multiple of `across`: each then stays in its columns."""
    DTYPE: tl.constexpr = p_grad_y.dtype.element_ty
    # columns are transposed in words of four rows
    TURNS: tl.constexpr = 1 if p_columns is None else 4
    HEIGHT: tl.constexpr = ROWS // TURNS
    scale, todo = scale_and_tiles(p_predicted, p_used, p_found, found, p_largest, p_true, tiles, E5M2)
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
                                   ROOTS, G, EVEN)  # fmt: skip
            b_value, b_slope = value_and_slope(b_x, KIND)
            b_grad_x = b_grad * b_slope
            if PARTS == 2:
                b_grad_x *= b_up
            # the gradients of what is masked are 0
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
    """Stores an FP32 tile as it is or as codes, as far as asked for. Returns the codes as int32."""
    b_rounded = round_to(b_x, DTYPE)
    if p_x is not None:
        store_tile(p_x, o_x, cast(b_x, DTYPE), m_x, not EVEN)
    if p_rows is not None:
        store_tile(p_rows, o_x, to_tensor_codes(b_rounded, scale, E5M2), m_x, not EVEN)
    return to_tensor_words(b_rounded, scale, E5M2)


@PreparedKernel
@triton.jit
def activation_columns_kernel(p_codes, p_exponent, p_largest, p_columns, p_scale,
                              rows, f, groups, padded_rows,
                              KIND: tl.constexpr, PARTS: tl.constexpr, E5M2: tl.constexpr,
                              ROOTS: tl.constexpr, EVEN: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                              G: tl.constexpr):  # fmt: skip
    scale = tensor_scale(tl.load(p_largest), E5M2)
    # every program stores the same scale
    tl.store(p_scale, scale)
    o_word = tl.program_id(1) * (M // 4) + tl.arange(0, M // 4)
    column = tl.program_id(0) * N
    b_words = tl.zeros([M // 4, N], dtype=tl.int32)
    for i in tl.static_range(4):
        o_row = o_word.to(tl.int64) * 4 + i
        b_x, b_up = load_parts(p_codes, p_exponent, o_row, column, rows, f, groups, PARTS, N, ROOTS, G,
                              EVEN)  # fmt: skip
        b_y, _ = value_and_slope(b_x, KIND)
        if PARTS == 2:
            b_y *= b_up
        # a(0) is 0: so are the rows past the end
        b_words |= to_tensor_words(b_y, scale, E5M2) << (8 * i)
    o_f = (column + tl.arange(0, N)).to(tl.int64)
    store_words(p_columns, b_words, o_word, o_f, f, padded_rows, EVEN)


def _empty_kept(rows: int, f: int, gated: bool, group_size: int, fmt: str, device: torch.device) -> Grouped:
    """Uninitialised storage for one or two parts, each of which has groups of its own."""
    parts = 1 + gated
    return Grouped(
        torch.empty(rows, parts * f, dtype=GROUP_FORMATS[fmt].dtype, device=device),
        torch.empty(rows, parts * cdiv(f, group_size), dtype=torch.uint8, device=device),
    )


@functools.lru_cache(maxsize=1024)
def _tiles(rows: int, f: int, m: int, n: int, group_size: int) -> tuple[int, int, int]:
    """Tiles of m x n elements in [rows, f], of those side by side, and groups side by side."""
    across = cdiv(f, n)
    return cdiv(rows, m) * across, across, cdiv(f, group_size)


def activation_forward_triton(x, kind: str, gated: bool, group_size: int, keep: str | None):
    """`activation_forward_reference` in one pass over x; one maximum for each tile."""
    rows, f = x.shape[0], x.shape[1] // (1 + gated)
    y = torch.empty(rows, f, dtype=x.dtype, device=x.device)
    q = _empty_kept(rows, f, gated, group_size, keep, x.device) if keep else None
    return y, _launch_forward(x, q, kind, gated, group_size, y=y), q


def _launch_forward(
    x,
    q: Grouped | None,
    kind: str,
    gated: bool,
    group_size: int,
    y: torch.Tensor | None = None,
    out: Quantized | None = None,
    scales: Scales = NO_SCALES,
) -> torch.Tensor | None:
    """Writes y or, with `scales`, its operands by rows; in the first launch also q, and returns maxima."""
    rows, f = x.shape[0], x.shape[1] // (1 + gated)
    tiles, _, groups = _tiles(rows, f, FORWARD_ROWS, FORWARD_COLUMNS, group_size)
    first = scales.maxima is None
    maxima = torch.empty(tiles, dtype=torch.float32, device=x.device) if first else None
    keep = first and q is not None
    activation_forward_kernel[(scales.programs(tiles),)](
        x,
        y,
        out.rows.view(torch.uint8) if out else None,
        q.codes.view(torch.uint8) if keep else None,
        q.exponent if keep else None,
        maxima,
        *scales,
        rows,
        f,
        groups,
        tiles,
        KIND=kind,
        PARTS=1 + gated,
        E5M2=out is not None and out.is_e5m2,
        ROOTS=keep and q.holds_roots,
        EVEN=rows % FORWARD_ROWS == 0 and f % FORWARD_COLUMNS == 0,
        ROWS=FORWARD_ROWS,
        COLUMNS=FORWARD_COLUMNS,
        G=group_size,
        num_warps=FORWARD_WARPS,
    )
    return maxima


def activation_backward_triton(grad_y, q: Grouped, kind: str, gated: bool, group_size: int):
    """`activation_backward_reference` in one pass; one maximum for each tile."""
    grad_x = torch.empty(q.codes.shape, dtype=grad_y.dtype, device=grad_y.device)
    return grad_x, _launch_backward(grad_y, q, kind, gated, group_size, grad_x=grad_x)


def _launch_backward(
    grad_y,
    q: Grouped,
    kind: str,
    gated: bool,
    group_size: int,
    grad_x: torch.Tensor | None = None,
    out: Quantized | None = None,
    scales: Scales = NO_SCALES,
) -> torch.Tensor | None:
    """Writes grad_x or, with `scales`, its operands; the first launch writes sums and returns maxima."""
    rows, f = grad_y.shape
    m, n, warps = BACKWARD_ROWS, BACKWARD_COLUMNS, BACKWARD_WARPS
    if out is not None and out.columns is not None:
        m, n, warps = OPERANDS_ROWS, OPERANDS_COLUMNS, OPERANDS_WARPS
    n = max(n, group_size)
    tiles, across, groups = _tiles(rows, f, m, n, group_size)
    programs, partial = scales.programs(tiles), None
    first = scales.maxima is None
    maxima = torch.empty(tiles, dtype=torch.float32, device=grad_y.device) if first else None
    by_rows, by_columns, _, sums = out or (None, None, None, None)
    if first and sums is not None:
        partial = sums.new_empty(max(cdiv(rows, SUMMED_ROWS), 1), len(sums))
        programs = len(partial) * across
    activation_backward_kernel[(programs,)](
        grad_y,
        q.codes.view(torch.uint8),
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
        ROOTS=q.holds_roots,
        EVEN=rows % m == 0 and f % n == 0,
        ROWS=m,
        COLUMNS=n,
        G=group_size,
        num_warps=warps,
    )
    if partial is not None:
        torch.sum(partial, 0, out=sums)
    return maxima


def activation_columns_triton(
    q: Grouped, largest, kind: str, gated: bool, group_size: int, fmt: Fp8Format
) -> Quantized:
    """`activation_columns_reference` in one kernel."""
    rows, parts = q.codes.shape[0], 1 + gated
    f = q.codes.shape[1] // parts
    columns = empty_columns(rows, f, fmt, largest.device)
    scale = torch.empty(1, dtype=torch.float32, device=largest.device)
    width = max(COLUMNS_N, group_size)
    down, across = tiling(columns.shape[1], f, COLUMNS_M, width)
    activation_columns_kernel[across, down](
        q.codes.view(torch.uint8),
        q.exponent,
        largest,
        columns.view(torch.int32),
        scale,
        rows,
        f,
        cdiv(f, group_size),
        columns.shape[1],
        KIND=kind,
        PARTS=parts,
        E5M2=fmt.is_e5m2,
        ROOTS=q.holds_roots,
        EVEN=rows % COLUMNS_M == 0 and f % width == 0,
        M=COLUMNS_M,
        N=width,
        G=group_size,
        num_warps=COLUMNS_WARPS,
    )
    return Quantized(None, columns, scale)


def _none(like: torch.Tensor) -> torch.Tensor:
    """What an operator returns, which cannot return None."""
    return torch.empty(0, dtype=torch.float32, device=like.device)


def _maxima_fake(y: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    tiles = cdiv(y.shape[0], rows) * cdiv(y.shape[1], columns)
    return y.new_empty(tiles if uses_kernels(y) else y.shape[0], dtype=torch.float32)


def _forward_fake(x, kind, gated, group_size, keep):
    rows, f = x.shape[0], x.shape[1] // (1 + gated)
    y = x.new_empty(rows, f)
    maxima = _maxima_fake(y, FORWARD_ROWS, FORWARD_COLUMNS)
    if not keep:
        return y, maxima, _none(x), _none(x)
    return y, maxima, *_empty_kept(rows, f, gated, group_size, keep, x.device)


@compilable(_forward_fake)
def activation_forward(
    x: torch.Tensor, kind: str, gated: bool, group_size: int, keep: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, maxima, codes, exponent) of a contiguous x; where `keep` is None, the last two are empty."""
    forward = activation_forward_triton if uses_kernels(x) else activation_forward_reference
    y, maxima, q = forward(x, kind, gated, group_size, keep)
    return (y, maxima, *q) if keep else (y, maxima, _none(x), _none(x))


def _backward_fake(grad_y, codes, exponent, kind, gated, group_size):
    return grad_y.new_empty(codes.shape), _maxima_fake(grad_y, BACKWARD_ROWS, BACKWARD_COLUMNS)


@compilable(_backward_fake)
def activation_backward(
    grad_y: torch.Tensor,
    codes: torch.Tensor,
    exponent: torch.Tensor,
    kind: str,
    gated: bool,
    group_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(grad of x, its maxima) of a contiguous grad_y."""
    backward = activation_backward_triton if uses_kernels(grad_y) else activation_backward_reference
    return backward(grad_y, Grouped(codes, exponent), kind, gated, group_size)


def _columns_fake(codes, exponent, largest, kind, gated, group_size, fmt):
    rows, f = codes.shape[0], codes.shape[1] // (1 + gated)
    return empty_columns(rows, f, fp8_format(fmt), codes.device), largest.new_empty(1)


@compilable(_columns_fake)
def activation_columns(
    codes: torch.Tensor,
    exponent: torch.Tensor,
    largest: torch.Tensor,
    kind: str,
    gated: bool,
    group_size: int,
    fmt: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(columns, scale) of y, made again."""
    make = activation_columns_triton if uses_kernels(codes) else activation_columns_reference
    q = Grouped(codes, exponent)
    made = make(q, largest, kind, gated, group_size, fp8_format(fmt))
    return made.columns, made.scale


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kind, gated, group_size, keep, y_scale, grad_scale):
        rows, options = x.reshape(-1, x.shape[-1]).contiguous(), (kind, gated, group_size)
        shape = *x.shape[:-1], x.shape[-1] // (1 + gated)
        if y_scale is None:
            y, maxima, *kept = activation_forward(rows, *options, keep)
            # an alias, not a view: autograd would let nobody change that in place
            y = y.view(shape).detach()
            ctx.mark_non_differentiable(*kept, maxima)
        else:
            source, kept = _deferred_forward(rows, options, keep, y_scale)
            y, maxima = Deferred(source, shape), None
            ctx.mark_non_differentiable(*kept)
        ctx.options, ctx.shape, ctx.grad_scale = options, x.shape, grad_scale
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        return y, maxima, *kept

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, *_):
        if grad_y is None:
            return (None,) * 7
        grads = grad_y.reshape(-1, grad_y.shape[-1]).contiguous()
        if ctx.grad_scale is None or torch.compiler.is_compiling():
            grad_x, maxima = activation_backward(grads, *ctx.saved_tensors, *ctx.options)
            grad_x = with_maxima(grad_x.view(ctx.shape), maxima)
        else:
            grad_x = Deferred(
                _deferred_backward(grads, ctx.saved_tensors, ctx.options, ctx.grad_scale), ctx.shape
            )
        return grad_x, *(None,) * 6


def _deferred_forward(
    x: torch.Tensor, options: tuple, keep: str, scale: PredictedScale
) -> tuple[Source, Grouped]:
    """y, of which only FP8 rows are written now, and what is kept of x."""
    kind, gated, group_size = options
    shape = x.shape[0], x.shape[1] // (1 + gated)

    def make(x):
        return activation_forward(x, *options, None)[0]

    if uses_kernels(x):
        kept = _empty_kept(*shape, gated, group_size, keep, x.device)
    else:
        *_, kept = activation_forward_reference(x, *options, keep)

    def write(x, out, scales):
        return _launch_forward(x, kept, *options, out=out, scales=scales)

    return Source((x,), make, write, scale, shape, x.dtype, at_once=True), kept


def _deferred_backward(grad_y: torch.Tensor, kept: tuple, options: tuple, scale: PredictedScale) -> Source:
    """The gradient of x, of which nothing is written now."""

    def make(*inputs):
        return activation_backward(*inputs, *options)[0]

    def write(grad_y, codes, exponent, out, scales):
        return _launch_backward(grad_y, Grouped(codes, exponent), *options, out=out, scales=scales)

    return Source((grad_y, *kept), make, write, scale, tuple(kept[0].shape), grad_y.dtype)


def activation_operands(
    x: torch.Tensor, options: tuple[str, bool, int], keep: str, scale: PredictedScale
) -> tuple[Quantized, torch.Tensor, Grouped]:
    """The activation's output as FP8 rows alone, at once: (operands, the largest magnitude, the kept input).

    x [rows, f or 2 f], contiguous. options: kind, gated, group_size.
    """
    rows, f = x.shape[0], x.shape[1] // (1 + options[1])
    if uses_kernels(x):
        kept = _empty_kept(rows, f, *options[1:], keep, x.device)

        def write(out, scales):
            return _launch_forward(x, kept, *options, out=out, scales=scales)
    else:
        y, _, kept = activation_forward_reference(x, *options, keep)
        write = functools.partial(write_reference, y, fmt=scale.fmt)
    return *Attempt(write, scale, rows, f, x.device).finish(None), kept


def activation_backward_operands(
    grad_y: torch.Tensor, q: Grouped, options: tuple[str, bool, int], scale: PredictedScale, sums: bool
) -> Quantized:
    """The gradient of the activation's input as FP8 rows and columns alone, and the `sums` of its columns.

    grad_y [rows, f], contiguous; q: the kept input. options: kind, gated, group_size.
    """
    if uses_kernels(grad_y):

        def write(out, scales):
            return _launch_backward(grad_y, q, *options, out=out, scales=scales)
    else:
        grad_x, _ = activation_backward_reference(grad_y, q, *options)
        write = functools.partial(write_reference, grad_x, fmt=scale.fmt)
    attempt = Attempt(write, scale, *q.codes.shape, grad_y.device, rows=True, columns=True, sums=sums)
    return attempt.finish(None, finds_largest=False)[0]


def activation(
    x: torch.Tensor,
    kind: str,
    *,
    gated: bool,
    group_size: int = 16,
    saved_format: str = DEFAULT_FORMAT,
    y_scale: PredictedScale | None = None,
    grad_scale: PredictedScale | None = None,
) -> torch.Tensor:
    """a(x) of `x` [..., f], or if `gated` a(gate) * up of `x` [..., 2 f], gate before up.

    Args:
        x: BF16 or FP32. Kept for backward in groups of `group_size`.
        kind: a, one of `KINDS`.
        group_size: 16, 32, 64 or 128.
        saved_format: one of `coat_kernels.groups.GROUP_FORMATS`.
        y_scale, grad_scale: defer the output, and the gradient of x, which then go straight into the FP8
            product behind them; the caller's, one each for every call site. It pays where only such a product
            reads them. Not used while nothing is trained or a model is compiled.

    Returns [..., f] in x's dtype, carrying its maxima and, where x has a gradient, its origin. Raises
    ValueError for an unknown kind, and if gate and up are not of equal size.
    """
    require_fp8(x.device)
    if kind not in KINDS:
        raise ValueError(f"activation: expected one of {', '.join(KINDS)}; found {kind!r}")
    if gated and x.shape[-1] % 2:
        raise ValueError(f"activation: expected gate and up side by side, found {x.shape[-1]} columns")
    if not (torch.is_grad_enabled() and x.requires_grad):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, maxima, *_ = activation_forward(rows, kind, gated, group_size, None)
        return with_maxima(y.view(*x.shape[:-1], y.shape[1]), maxima)
    if torch.compiler.is_compiling():
        y_scale = grad_scale = None
    y, maxima, codes, exponent = _Activation.apply(
        x, kind, gated, group_size, saved_format, y_scale, grad_scale
    )

    def columns(codes, exponent, largest, fmt: Fp8Format) -> Quantized:
        made = activation_columns(codes, exponent, largest, kind, gated, group_size, fmt.name)
        return Quantized(None, *made)

    y = with_origin(y, Origin((codes, exponent), columns))
    return y if maxima is None else with_maxima(y, maxima)
