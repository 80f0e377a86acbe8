"""RMSNorm (Zhang & Sennrich, arXiv 1910.07467, equation 4) and LayerNorm (Ba et al., arXiv 1607.06450,
equation 3) that keep their input in 8 bits, 1 x G groups.

y = c * rstd * w + b, rstd = 1 / sqrt(mean(c^2) + eps); c is x for RMSNorm and x - mean(x) for LayerNorm; with
zero-centered gamma the weight is w + 1. Forward uses c as it comes; backward uses what is kept of it, which a
large mean costs no precision. The output carries its origin, so that a linear layer behind it keeps nothing,
and its maxima, so that nobody reads it for its scale; so does the gradient. An input that is a deferred sum
(residual.py) is made on the way.
"""

import functools

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from coat_kernels.autograd import once_differentiable
from coat_kernels.codecs.codec import load_tile, store_tile
from coat_kernels.deferred import Attempt, Deferred, PredictedScale, Source, write_reference
from coat_kernels.fp8 import Fp8Format, cast, fp8_format, require_fp8, round_to, uses_kernels, widen
from coat_kernels.group_tiles import (
    load_group_tile,
    store_group_tile,
    stored_max,
    tile_mask,
)
from coat_kernels.groups import (
    DEFAULT_FORMAT,
    Grouped,
    dequantize_groups_reference,
    empty_grouped,
    quantize_groups_reference,
)
from coat_kernels.launch import PreparedKernel, cdiv, next_power_of_2, tiling
from coat_kernels.ops import compilable
from coat_kernels.origin import Origin, with_maxima, with_origin
from coat_kernels.residual import (
    NO_ADDENDS,
    Addends,
    is_deferred_sum,
    residual_add_reference,
    residual_add_tile,
)
from coat_kernels.tensorwise import (
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

# least elements of a program's tile, and elements of a thread, as far as warps go
FORWARD_TILE, FORWARD_ELEMENTS = 4096, 32
BACKWARD_TILE, BACKWARD_ELEMENTS = 4096, 16
MAX_WARPS = 16
# backward programs, each of which goes through many tiles: two for each multiprocessor of an H200
PROGRAMS = 264
# tiles of which backward has loads in flight
BACKWARD_STAGES = 3
# programs of backward and columns that a program of the sums behind it takes at a time
SUMS_PROGRAMS, SUMS_N = 64, 32
# rows and columns of a program that writes columns
COLUMNS_M, COLUMNS_N, COLUMNS_WARPS = 64, 128, 4


def _gamma(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def _affine(normed: torch.Tensor, weight, bias, zero_centered: bool) -> torch.Tensor:
    y = normed * _gamma(weight, zero_centered)
    return y if bias is None else y + bias.float()


def row_maxima(y: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitudes of rows, FP32."""
    return torch.where(y.isfinite(), y.float().abs(), 0).amax(1)


def norm_forward_reference(
    x, weight, bias, eps: float, layer_norm: bool, zero_centered: bool, group_size: int, keep: str | None
):
    """x [rows, h] -> (y in x's dtype, maxima of y, the input kept in the format
    called `keep`, rstd FP32 [rows]); where that is None, the last two are."""
    value = x.float()
    if layer_norm:
        value = value - value.mean(1, keepdim=True)
    rstd = torch.rsqrt(value.square().mean(1) + eps)
    y = _affine(value * rstd[:, None], weight, bias, zero_centered).to(x.dtype)
    if not keep:
        return y, row_maxima(y), None, None
    return y, row_maxima(y), quantize_groups_reference(value, group_size, keep), rstd


def norm_backward_reference(
    grad_y,
    grad_residual,
    q: Grouped,
    rstd,
    weight,
    layer_norm: bool,
    zero_centered: bool,
    group_size: int,
):
    """(grad_x in grad_y's dtype, its maxima, grad_weight, grad_bias, both FP32 [h]).

    grad_residual, [rows, h] or None, is added to grad_x before that is rounded.
    """
    normed = dequantize_groups_reference(q, group_size) * rstd[:, None]
    grad = grad_y.float()
    scaled = grad * _gamma(weight, zero_centered)
    centered = scaled - normed * (scaled * normed).mean(1, keepdim=True)
    if layer_norm:
        centered = centered - scaled.mean(1, keepdim=True)
    grad_x = rstd[:, None] * centered
    if grad_residual is not None:
        grad_x = grad_x + grad_residual.float()
    grad_x = grad_x.to(grad_y.dtype)
    return grad_x, row_maxima(grad_x), (grad * normed).sum(0), grad.sum(0)


def norm_columns_reference(
    q: Grouped, rstd, weight, bias, largest, zero_centered: bool, group_size: int, fmt: Fp8Format
) -> Quantized:
    """y again, from the kept input, as FP8 columns with the scale of `largest`."""
    normed = dequantize_groups_reference(q, group_size) * rstd[:, None]
    y = _affine(normed, weight, bias, zero_centered)
    return quantize_tensor_reference(y, largest, fmt, rows=False, columns=True)


@triton.jit
def load_gamma(p_weight, o_h, m_h, ZERO_CENTERED: tl.constexpr, EVEN: tl.constexpr):
    b_weight = widen(load_tile(p_weight, o_h, m_h, not EVEN))
    return b_weight + 1.0 if ZERO_CENTERED else b_weight


@PreparedKernel
@triton.jit
def norm_forward_kernel(p_x, p_residual, p_branch, p_branch_bias, p_weight, p_bias, p_y, p_rows, p_codes,
                        p_exponent, p_rstd, p_maxima, p_predicted, p_used, p_found, found, p_largest,
                        p_true, rows, h, groups, eps, tiles,
                        LAYER_NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr, E5M2: tl.constexpr,
                        ROOTS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, H: tl.constexpr,
                        G: tl.constexpr):  # fmt: skip
    """y itself, or its FP8 codes by rows; x, if it is a sum, what is kept and maxima where asked for."""
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    scale, todo = scale_and_tiles(p_predicted, p_used, p_found, found, p_largest, p_true, tiles, E5M2)
    o_h = tl.arange(0, H)
    for tile in range(tl.program_id(0), todo, tl.num_programs(0)):
        o_row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        m_x = tile_mask(o_row, o_h, rows, h)
        o_x = o_row[:, None] * h + o_h[None, :]
        if p_branch is None:
            b_x = widen(load_tile(p_x, o_x, m_x, not EVEN))
        else:
            b_x = residual_add_tile(p_residual, p_branch, p_branch_bias, o_x, m_x, o_h, o_h < h, EVEN)
            store_tile(p_x, o_x, cast(b_x, DTYPE), m_x, not EVEN)
        b_gamma = load_gamma(p_weight, o_h, o_h < h, ZERO_CENTERED, EVEN)
        if LAYER_NORM:
            b_x -= (tl.sum(b_x, axis=1) / h)[:, None]
            if not EVEN:
                b_x = tl.where(m_x, b_x, 0.0)
        b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / h + eps)
        b_y = b_x * b_rstd[:, None] * b_gamma[None, :]
        if p_bias is not None:
            b_y += widen(load_tile(p_bias, o_h, o_h < h, not EVEN))[None, :]
        if p_y is not None:
            store_tile(p_y, o_x, cast(b_y, DTYPE), m_x, not EVEN)
        else:
            store_tile(p_rows, o_x, to_tensor_codes(round_to(b_y, DTYPE), scale, E5M2), m_x, not EVEN)
        if p_maxima is not None:
            tl.store(p_maxima + tile, stored_max(b_y if EVEN else tl.where(m_x, b_y, 0.0), DTYPE))
        if p_codes is not None:
            tl.store(p_rstd + o_row, b_rstd, mask=o_row < rows)
            store_group_tile(b_x, p_codes, p_exponent, o_row, 0, rows, h, h, groups, ROOTS, G, EVEN)


@PreparedKernel
@triton.jit
def norm_backward_kernel(p_grad_y, p_grad_residual, p_codes, p_exponent, p_rstd, p_weight,
                         p_grad_x, p_maxima, p_grad_weight, p_grad_bias, rows, h, groups,
                         LAYER_NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr, ROOTS: tl.constexpr,
                         EVEN: tl.constexpr, ROWS: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
                         STAGES: tl.constexpr):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, H)
    b_gamma = load_gamma(p_weight, o_h, o_h < h, ZERO_CENTERED, EVEN)[None, :]
    b_grad_weight = tl.zeros([ROWS, H], dtype=tl.float32)
    b_grad_bias = tl.zeros([ROWS, H], dtype=tl.float32)
    # maxima of eight, which one thread holds; over the warps they are reduced once, at the end
    b_largest = tl.zeros([ROWS, H // 8], dtype=tl.float32)
    for tile in tl.range(pid, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        o_row = tile * ROWS + tl.arange(0, ROWS)
        m_x = tile_mask(o_row, o_h, rows, h)
        o_x = o_row[:, None] * h + o_h[None, :]
        b_rstd = tl.load(p_rstd + o_row, mask=o_row < rows, other=0.0)[:, None]
        b_x = load_group_tile(p_codes, p_exponent, o_row, 0, rows, h, h, groups, H, ROOTS, G, EVEN)
        b_grad = widen(load_tile(p_grad_y, o_x, m_x, not EVEN))
        b_normed = b_x * b_rstd
        if p_grad_x is not None:
            b_scaled = b_grad * b_gamma
            b_grad_x = b_scaled - b_normed * (tl.sum(b_scaled * b_normed, axis=1) / h)[:, None]
            if LAYER_NORM:
                b_grad_x -= (tl.sum(b_scaled, axis=1) / h)[:, None]
            b_grad_x *= b_rstd
            if p_grad_residual is not None:
                b_grad_x += widen(load_tile(p_grad_residual, o_x, m_x, not EVEN))
            store_tile(p_grad_x, o_x, cast(b_grad_x, p_grad_x.dtype.element_ty), m_x, not EVEN)
            # NaN, which maxima pass over, where not finite
            b_abs = tl.abs(b_grad_x + b_grad_x * 0.0)
            if not EVEN:
                b_abs = tl.where(m_x, b_abs, 0.0)
            b_largest = tl.maximum(b_largest, tl.max(tl.reshape(b_abs, [ROWS, H // 8, 8]), axis=2))
        if p_grad_weight is not None:
            b_grad_weight += b_grad * b_normed
        if p_grad_bias is not None:
            b_grad_bias += b_grad
    o_partial = pid * h + o_h
    if p_grad_x is not None:
        tl.store(p_maxima + pid, stored_max(b_largest, p_grad_x.dtype.element_ty))
    if p_grad_weight is not None:
        store_tile(p_grad_weight, o_partial, tl.sum(b_grad_weight, axis=0), o_h < h, not EVEN)
    if p_grad_bias is not None:
        store_tile(p_grad_bias, o_partial, tl.sum(b_grad_bias, axis=0), o_h < h, not EVEN)


@PreparedKernel
@triton.jit
def norm_sums_kernel(p_parts, p_first, p_second, programs, h, PROGRAMS: tl.constexpr, N: tl.constexpr):
    """Sums [h] of the `programs` rows of one part, or of two."""
    o_h = tl.program_id(0) * N + tl.arange(0, N)
    p_part = p_parts + tl.program_id(1).to(tl.int64) * programs * h
    b_sum = tl.zeros([PROGRAMS, N], dtype=tl.float32)
    for start in range(0, programs, PROGRAMS):
        o_program = start + tl.arange(0, PROGRAMS)
        m_part = (o_program[:, None] < programs) & (o_h[None, :] < h)
        b_sum += tl.load(p_part + o_program[:, None] * h + o_h[None, :], mask=m_part, other=0.0)
    b_sum = cast(tl.sum(b_sum, axis=0), p_first.dtype.element_ty)
    p_sums = p_first
    if p_second is not None:
        p_sums = tl.where(tl.program_id(1) == 0, p_first, p_second)
    tl.store(p_sums + o_h, b_sum, mask=o_h < h)


@PreparedKernel
@triton.jit
def norm_columns_kernel(p_codes, p_exponent, p_rstd, p_weight, p_bias, p_largest, p_columns, p_scale,
                        rows, h, groups, padded_rows,
                        ZERO_CENTERED: tl.constexpr, E5M2: tl.constexpr, ROOTS: tl.constexpr,
                        EVEN: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                        G: tl.constexpr):  # fmt: skip
    scale = tensor_scale(tl.load(p_largest), E5M2)
    # every program stores the same scale
    tl.store(p_scale, scale)
    o_word = tl.program_id(1) * (M // 4) + tl.arange(0, M // 4)
    column = tl.program_id(0) * N
    o_h = column + tl.arange(0, N)
    b_gamma = load_gamma(p_weight, o_h, o_h < h, ZERO_CENTERED, EVEN)[None, :]
    if p_bias is not None:
        b_bias = widen(load_tile(p_bias, o_h, o_h < h, not EVEN))[None, :]
    b_words = tl.zeros([M // 4, N], dtype=tl.int32)
    for i in tl.static_range(4):
        o_row = o_word.to(tl.int64) * 4 + i
        b_x = load_group_tile(p_codes, p_exponent, o_row, column, rows, h, h, groups, N, ROOTS, G, EVEN)
        b_y = b_x * load_tile(p_rstd, o_row, o_row < rows, not EVEN)[:, None] * b_gamma
        if p_bias is not None:
            b_y += b_bias
            if not EVEN:
                b_y = tl.where(o_row[:, None] < rows, b_y, 0.0)
        b_words |= to_tensor_words(b_y, scale, E5M2) << (8 * i)
    store_words(p_columns, b_words, o_word, o_h.to(tl.int64), h, padded_rows, EVEN)


@functools.cache
def _tile(h: int, group_size: int, least: int, elements: int) -> dict:
    """What a launch over tiles of whole rows needs: `least` elements in one, `elements` a thread."""
    width = max(next_power_of_2(h), group_size)
    height = max(least // width, 1)
    warps = height * width // (32 * elements)
    return {"ROWS": height, "H": width, "G": group_size, "num_warps": min(max(warps, 1), MAX_WARPS)}


@functools.lru_cache(maxsize=1024)
def _tiles(rows: int, h: int, group_size: int, least: int, elements: int) -> tuple[dict, int, int, bool]:
    """`_tile`, how many there are, groups of a row, and whether all tiles lie inside."""
    tile = _tile(h, group_size, least, elements)
    return tile, cdiv(rows, tile["ROWS"]), cdiv(h, group_size), tile["H"] == h and rows % tile["ROWS"] == 0


def norm_forward_triton(
    x, weight, bias, eps: float, layer_norm: bool, zero_centered: bool, group_size: int, keep: str | None
):
    """`norm_forward_reference` in one pass over x; one maximum for each program."""
    y = torch.empty_like(x)
    q, rstd = _empty_kept(x, group_size, keep) if keep else (None, None)
    options = eps, layer_norm, zero_centered, group_size
    return y, _launch_forward(x, weight, bias, q, rstd, *options, y=y), q, rstd


def _empty_kept(x: torch.Tensor, group_size: int, fmt: str) -> tuple[Grouped, torch.Tensor]:
    """Uninitialised storage for the kept input and rstd."""
    rstd = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    return empty_grouped(*x.shape, group_size, fmt, x.device), rstd


def _launch_forward(
    x,
    weight,
    bias,
    q: Grouped | None,
    rstd,
    eps: float,
    layer_norm: bool,
    zero_centered: bool,
    group_size: int,
    y: torch.Tensor | None = None,
    out: Quantized | None = None,
    scales: Scales = NO_SCALES,
    addends: Addends = NO_ADDENDS,
) -> torch.Tensor | None:
    """Writes y or, with `scales`, its operand by rows; in the first launch also q and rstd, and returns
    maxima. Where x is the sum of `addends` it is written, too."""
    rows, h = x.shape
    tile, tiles, groups, even = _tiles(rows, h, group_size, FORWARD_TILE, FORWARD_ELEMENTS)
    first = scales.maxima is None
    maxima = torch.empty(tiles, dtype=torch.float32, device=x.device) if first else None
    keep = first and q is not None
    norm_forward_kernel[(scales.programs(tiles),)](
        x,
        *addends,
        weight,
        bias,
        y,
        out.rows.view(torch.uint8) if out else None,
        q.codes.view(torch.uint8) if keep else None,
        q.exponent if keep else None,
        rstd if keep else None,
        maxima,
        *scales,
        rows,
        h,
        groups,
        eps,
        tiles,
        LAYER_NORM=layer_norm,
        ZERO_CENTERED=zero_centered,
        E5M2=out is not None and out.is_e5m2,
        ROOTS=keep and q.holds_roots,
        EVEN=even,
        **tile,
    )
    return maxima


def norm_backward_triton(
    grad_y,
    grad_residual,
    q: Grouped,
    rstd,
    weight,
    layer_norm: bool,
    zero_centered: bool,
    group_size: int,
    needs_x: bool = True,
    needs_weight: bool = True,
    needs_bias: bool = True,
    in_weights_dtype: bool = False,
):
    """`norm_backward_reference`, None for what is not needed; each program goes through many rows and sums
    their parameter gradients, and a second kernel the sums of the programs, in an order that depends on the
    shape alone."""
    rows, h = grad_y.shape
    tile, tiles, groups, even = _tiles(rows, h, group_size, BACKWARD_TILE, BACKWARD_ELEMENTS)
    # without rows, one that stores zeros
    programs = min(tiles, PROGRAMS) or 1
    fp32 = {"dtype": torch.float32, "device": grad_y.device}
    grad_x = torch.empty_like(grad_y) if needs_x else None
    maxima = torch.empty(programs, **fp32) if needs_x else None
    count = needs_weight + needs_bias
    parts = torch.empty(count, programs, h, **fp32) if count else None
    norm_backward_kernel[(programs,)](
        grad_y,
        grad_residual,
        q.codes.view(torch.uint8),
        q.exponent,
        rstd,
        weight,
        grad_x,
        maxima,
        parts[0] if needs_weight else None,
        parts[-1] if needs_bias else None,
        rows,
        h,
        groups,
        LAYER_NORM=layer_norm,
        ZERO_CENTERED=zero_centered,
        STAGES=BACKWARD_STAGES,
        ROOTS=q.holds_roots,
        EVEN=even,
        **tile,
    )
    if not count:
        return grad_x, maxima, None, None
    dtype = weight.dtype if in_weights_dtype else torch.float32
    sums = [torch.empty(h, dtype=dtype, device=grad_y.device) for _ in range(count)]
    norm_sums_kernel[cdiv(h, SUMS_N), count](
        parts,
        sums[0],
        sums[1] if count == 2 else None,
        programs,
        h,
        PROGRAMS=SUMS_PROGRAMS,
        N=SUMS_N,
        num_warps=4,
    )
    return grad_x, maxima, sums[0] if needs_weight else None, sums[-1] if needs_bias else None


def norm_columns_triton(
    q: Grouped, rstd, weight, bias, largest, zero_centered: bool, group_size: int, fmt: Fp8Format
) -> Quantized:
    """`norm_columns_reference` in one kernel."""
    rows, h = q.codes.shape
    columns = empty_columns(rows, h, fmt, rstd.device)
    scale = torch.empty(1, dtype=torch.float32, device=rstd.device)
    width = max(COLUMNS_N, group_size)
    down, across = tiling(columns.shape[1], h, COLUMNS_M, width)
    norm_columns_kernel[across, down](
        q.codes.view(torch.uint8),
        q.exponent,
        rstd,
        weight,
        bias,
        largest,
        columns.view(torch.int32),
        scale,
        rows,
        h,
        cdiv(h, group_size),
        columns.shape[1],
        ZERO_CENTERED=zero_centered,
        E5M2=fmt.is_e5m2,
        ROOTS=q.holds_roots,
        EVEN=h % width == 0 and rows % COLUMNS_M == 0,
        M=COLUMNS_M,
        N=width,
        G=group_size,
        num_warps=COLUMNS_WARPS,
    )
    return Quantized(None, columns, scale)


def _none(like: torch.Tensor) -> torch.Tensor:
    """What an operator returns, which cannot return None."""
    return torch.empty(0, dtype=torch.float32, device=like.device)


def _forward_fake(x, weight, bias, eps, layer_norm, zero_centered, group_size, keep):
    rows, h = x.shape
    programs = cdiv(rows, _tile(int(h), group_size, FORWARD_TILE, FORWARD_ELEMENTS)["ROWS"])
    maxima = x.new_empty(programs if uses_kernels(x) else rows, dtype=torch.float32)
    if not keep:
        return torch.empty_like(x), maxima, _none(x), _none(x), _none(x)
    q = empty_grouped(rows, h, group_size, keep, x.device)
    return torch.empty_like(x), maxima, *q, x.new_empty(rows, dtype=torch.float32)


@compilable(_forward_fake)
def norm_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    layer_norm: bool,
    zero_centered: bool,
    group_size: int,
    keep: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, maxima, codes, exponent, rstd); where `keep` is None, the last three are empty. x is contiguous."""
    forward = norm_forward_triton if uses_kernels(x) else norm_forward_reference
    y, maxima, q, rstd = forward(x, weight, bias, eps, layer_norm, zero_centered, group_size, keep)
    return (y, maxima, *q, rstd) if keep else (y, maxima, _none(x), _none(x), _none(x))


def _backward_fake(
    grad_y,
    grad_residual,
    codes,
    exponent,
    rstd,
    weight,
    layer_norm,
    zero_centered,
    group_size,
    needs_x,
    needs_weight,
    needs_bias,
):
    rows, h = grad_y.shape
    tile = _tile(int(h), group_size, BACKWARD_TILE, BACKWARD_ELEMENTS)
    programs = max(min(cdiv(rows, tile["ROWS"]), PROGRAMS), 1) if uses_kernels(grad_y) else rows
    return (
        torch.empty_like(grad_y) if needs_x else _none(grad_y),
        rstd.new_empty(programs) if needs_x else _none(grad_y),
        rstd.new_empty(h) if needs_weight else _none(grad_y),
        rstd.new_empty(h) if needs_bias else _none(grad_y),
    )


@compilable(_backward_fake)
def norm_backward(
    grad_y: torch.Tensor,
    grad_residual: torch.Tensor | None,
    codes: torch.Tensor,
    exponent: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    layer_norm: bool,
    zero_centered: bool,
    group_size: int,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(grad_x, maxima, grad_weight, grad_bias), empty where not needed; gradients are contiguous."""
    kept = grad_y, grad_residual, Grouped(codes, exponent), rstd, weight
    options = layer_norm, zero_centered, group_size
    needs = needs_x, needs_x, needs_weight, needs_bias
    if uses_kernels(grad_y):
        found = norm_backward_triton(*kept, *options, *needs[1:])
    else:
        found = norm_backward_reference(*kept, *options)
    return tuple(f if need else _none(grad_y) for f, need in zip(found, needs, strict=True))


def norm_gradients(
    grad_y, grad_residual, q: Grouped, rstd, weight, bias, options: tuple[bool, bool, int], needs_x: bool
):
    """As `norm_backward_reference`, with the gradients of weight and bias in the dtypes of those; None for
    the bias if that is None, and for x if it is not needed. options: layer_norm, zero_centered, group_size.
    """
    kept = grad_y, grad_residual, q, rstd, weight
    if uses_kernels(grad_y):
        same = bias is None or bias.dtype == weight.dtype
        found = norm_backward_triton(*kept, *options, needs_x, True, bias is not None, same)
    else:
        found = norm_backward_reference(*kept, *options)
    grad_x, maxima, grad_weight, grad_bias = found
    grad_bias = None if bias is None else grad_bias.to(bias.dtype)
    return grad_x if needs_x else None, maxima, grad_weight.to(weight.dtype), grad_bias


def _columns_fake(codes, exponent, rstd, weight, bias, largest, zero_centered, group_size, fmt):
    return empty_columns(*codes.shape, fp8_format(fmt), codes.device), largest.new_empty(1)


@compilable(_columns_fake)
def norm_columns(
    codes: torch.Tensor,
    exponent: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    largest: torch.Tensor,
    zero_centered: bool,
    group_size: int,
    fmt: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(columns, scale) of y, made again."""
    make = norm_columns_triton if uses_kernels(codes) else norm_columns_reference
    q = Grouped(codes, exponent)
    made = make(q, rstd, weight, bias, largest, zero_centered, group_size, fp8_format(fmt))
    return made.columns, made.scale


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, layer_norm, zero_centered, group_size, keep, residual, y_scale):
        options = eps, layer_norm, zero_centered, group_size
        if y_scale is not None and is_deferred_sum(x) and uses_kernels(x):
            # this memory is where the kernel makes it
            addends, value = x.source.addends, torch.empty(x.shape, dtype=x.dtype, device=x.device)
        else:
            addends, value = NO_ADDENDS, _plain(x)
        rows = value.reshape(-1, x.shape[-1]).contiguous()
        if y_scale is None:
            y, maxima, *kept = norm_forward(rows, weight, bias, *options, keep)
            # an alias, not a view: autograd would let nobody change that in place
            y = y.view(x.shape).detach()
            ctx.mark_non_differentiable(*kept, maxima)
        else:
            source, q, rstd = _deferred_forward(rows, weight.detach(), bias, options, keep, y_scale, addends)
            y, maxima, kept = Deferred(source, x.shape), None, (*q, rstd)
            ctx.mark_non_differentiable(*kept)
        if addends is not NO_ADDENDS:
            x.source.fill(rows)
        ctx.options = layer_norm, zero_centered, group_size
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(weight, *kept)
        ctx.set_materialize_grads(False)
        # an alias, not a view: autograd would refuse what is added to it in place. Last, since torch 2.11's
        # compiler counts outputs that are not differentiable without those that are None before them
        return y, maxima, *kept, value.detach() if residual else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, *rest):
        grad_residual = rest[-1]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        nothing = (None,) * 7
        if grad_y is None:
            return grad_residual if needs_x else None, None, None, *nothing
        weight, *kept = ctx.saved_tensors
        h = grad_y.shape[-1]
        grad_x, maxima, grad_weight, grad_bias = norm_backward(
            grad_y.reshape(-1, h).contiguous(),
            None if grad_residual is None else grad_residual.reshape(-1, h).contiguous(),
            *kept,
            weight,
            *ctx.options,
            needs_x,
            needs_weight,
            needs_bias,
        )
        return (
            with_maxima(grad_x.view(grad_y.shape), maxima) if needs_x else None,
            grad_weight.to(weight.dtype) if needs_weight else None,
            grad_bias.to(ctx.bias_dtype) if needs_bias else None,
            *nothing,
        )


def _deferred_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: tuple,
    keep: str,
    scale: PredictedScale,
    addends: Addends,
) -> tuple[Source, Grouped, torch.Tensor]:
    """y, of which only FP8 rows are written now, and what is kept of x, the sum of `addends` if there are."""
    parameters = (weight,) if bias is None else (weight, bias.detach())

    def make(x, weight, bias=None):
        return norm_forward(x, weight, bias, *options, None)[0]

    def write(x, *rest):
        nonlocal addends
        *parameters, out, scales = rest
        weight, bias = parameters if len(parameters) == 2 else (*parameters, None)
        maxima = _launch_forward(x, weight, bias, q, rstd, *options, out=out, scales=scales, addends=addends)
        # x exists from now on, and they need not
        addends = NO_ADDENDS
        return maxima

    if uses_kernels(x):
        q, rstd = _empty_kept(x, options[-1], keep)
    else:
        *_, q, rstd = norm_forward_reference(x, weight, bias, *options, keep)
    return Source((x, *parameters), make, write, scale, tuple(x.shape), x.dtype, at_once=True), q, rstd


def norm_operands(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: tuple[float, bool, bool, int],
    keep: str,
    scale: PredictedScale,
    group: dist.ProcessGroup | None = None,
    addends: Addends = NO_ADDENDS,
) -> tuple[Quantized, torch.Tensor, Grouped, torch.Tensor]:
    """The norm's output as FP8 rows alone, at once: (operands, the largest magnitude over the ranks of
    `group`, the kept input, rstd).

    x [rows, h], contiguous; where it is the sum of `addends` it is memory that the sum is written to.
    options: eps, layer_norm, zero_centered, group_size.
    """
    if uses_kernels(x):
        q, rstd = _empty_kept(x, options[-1], keep)

        def write(out, scales):
            # the first launch makes the sum, the second reads it
            summed = addends if scales.maxima is None else NO_ADDENDS
            return _launch_forward(x, weight, bias, q, rstd, *options, out=out, scales=scales, addends=summed)
    else:
        if addends is not NO_ADDENDS:
            x.copy_(residual_add_reference(*addends))
        y, _, q, rstd = norm_forward_reference(x, weight, bias, *options, keep)
        write = functools.partial(write_reference, y, fmt=scale.fmt)
    operands, largest = Attempt(write, scale, *x.shape, x.device).finish(group)
    return operands, largest, q, rstd


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.plain() if isinstance(x, Deferred) else x


def _norm(x, weight, bias, eps, layer_norm, zero_centered, group_size, keep, residual, y_scale):
    require_fp8(x.device)
    width = x.shape[-1:]
    if weight.shape != width or (bias is not None and bias.shape != width):
        found = "" if bias is None else f", the bias {list(bias.shape)}"
        raise ValueError(
            f"norm: x has shape {list(x.shape)} and the weight {list(weight.shape)}{found}; expected one "
            "element of weight and bias for each column of x"
        )
    options = eps, layer_norm, zero_centered, group_size
    inputs = (x, weight) if bias is None else (x, weight, bias)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in inputs)):
        rows = _plain(x).reshape(-1, x.shape[-1]).contiguous()
        y, maxima, *_ = norm_forward(rows, weight, bias, *options, None)
        y = with_maxima(y.view(x.shape), maxima)
        return (y, x) if residual else y
    if torch.compiler.is_compiling():
        y_scale = None
    y, maxima, codes, exponent, rstd, handed_on = _Norm.apply(
        x, weight, bias, *options, keep, residual, y_scale
    )
    parameters = weight.detach(), None if bias is None else bias.detach()
    watched = ((parameters[0], weight._version),)
    if bias is not None:
        watched = *watched, (parameters[1], bias._version)

    def columns(codes, exponent, rstd, largest, fmt: Fp8Format) -> Quantized:
        for t, version in watched:
            if t._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    "operation: a weight or bias of a norm, of which a linear layer makes its input again, "
                    f"{t.dtype} {list(t.shape)}, is at version {t._version}; expected version {version}."
                )
        kept = codes, exponent, rstd, *parameters
        return Quantized(None, *norm_columns(*kept, largest, zero_centered, group_size, fmt.name))

    y = with_origin(y, Origin((codes, exponent, rstd), columns, watched))
    if maxima is not None:
        y = with_maxima(y, maxima)
    return (y, handed_on) if residual else y


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
    group_size: int = 16,
    saved_format: str = DEFAULT_FORMAT,
    residual: bool = False,
    y_scale: PredictedScale | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over the last dimension, keeping x in groups of `group_size` and rstd in FP32.

    Args:
        x: [..., h], BF16 or FP32; where y is deferred, a deferred sum is made in the same pass.
        weight: [h], BF16 or FP32.
        zero_centered: the weight is w + 1.
        group_size: 16, 32, 64 or 128.
        saved_format: one of `coat_kernels.groups.GROUP_FORMATS`.
        residual: also return x, handed through this node in the same memory: what reads it instead of x has
            its gradient added inside this norm's backward, which saves a pass.
        y_scale: defer y, which then goes straight into the FP8 products behind it; the caller's, one for
            every call site. It pays where only such products read y. Not used while nothing is trained or a
            model is compiled.

    Returns y, in x's shape and dtype, carrying its maxima and, where something is trained, its origin; with
    `residual` (y, x). Raises ValueError for a weight of another width than x.
    """
    return _norm(x, weight, None, eps, False, zero_centered, group_size, saved_format, residual, y_scale)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    group_size: int = 16,
    saved_format: str = DEFAULT_FORMAT,
    residual: bool = False,
    y_scale: PredictedScale | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm over the last dimension, keeping x - mean(x); otherwise as `rms_norm`. bias: [h] or None."""
    return _norm(x, weight, bias, eps, True, zero_centered, group_size, saved_format, residual, y_scale)
