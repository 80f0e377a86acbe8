"""The norms' kernels and their launchers."""

import functools

import torch
import triton
import triton.language as tl

from coat_kernels.device import shared_memory
from coat_kernels.fp8 import Fp8Format, cast, round_to, widen
from coat_kernels.groups.kernels import load_group_tile, store_group_tile
from coat_kernels.groups.reference import GROUP_SIZE, Grouped, empty_grouped
from coat_kernels.norm.residual import NO_ADDENDS, Addends, residual_add_tile
from coat_kernels.prepared import PreparedKernel, cdiv, next_power_of_2, tiling
from coat_kernels.tensorwise.quantize import Quantized, to_tensor_codes, to_tensor_words
from coat_kernels.tensorwise.scale import NO_SCALES, Scales, scale_and_tiles, tensor_scale
from coat_kernels.tensorwise.transpose import empty_columns, store_words
from coat_kernels.tiles import finite_abs, load_tile, store_tile, stored_max, tile_mask

# minimum number of elements of a program's tile, and elements per thread, up to MAX_WARPS
FORWARD_TILE, FORWARD_ELEMENTS = 4096, 32
BACKWARD_TILE, BACKWARD_ELEMENTS = 4096, 16
MAX_WARPS = 16
# programs of backward, two for each multiprocessor of an H200; each loops over many tiles
PROGRAMS = 264
# maximum number of tiles whose loads are in flight in backward
BACKWARD_STAGES = 3
# partial sums and columns that a program of the summing kernel processes at a time
SUMS_PROGRAMS, SUMS_N = 64, 32
# tile of a program that writes column-major codes
COLUMNS_M, COLUMNS_N, COLUMNS_WARPS = 64, 128, 4


@triton.jit
def load_gamma(p_weight, o_h, m_h, ZERO_CENTERED: tl.constexpr, EVEN: tl.constexpr):
    b_weight = widen(load_tile(p_weight, o_h, m_h, not EVEN))
    return b_weight + 1.0 if ZERO_CENTERED else b_weight


@PreparedKernel
@triton.jit
def norm_forward_kernel(p_x, p_residual, p_branch, p_branch_bias, p_weight, p_bias, p_y, p_rows, p_codes,
                        p_exponent, p_rstd, p_maxima, p_predicted, p_used, p_found, found, p_amax,
                        p_true, rows, h, groups, eps, tiles,
                        LAYER_NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr, E5M2: tl.constexpr,
                        TO_CODES: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, H: tl.constexpr,
                        G: tl.constexpr):  # fmt: skip
    """Writes y, or its row-major FP8 codes; also x, if it is a sum, and the saved tensors and maxima if
    requested."""
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    scale, todo = scale_and_tiles(p_predicted, p_used, p_found, found, p_amax, p_true, tiles, E5M2)
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
            store_group_tile(b_x, p_codes, p_exponent, o_row, 0, rows, h, h, groups, TO_CODES, G, EVEN)


@PreparedKernel
@triton.jit
def norm_backward_kernel(p_grad_y, p_grad_residual, p_codes, p_exponent, p_rstd, p_weight,
                         p_grad_x, p_maxima, p_grad_weight, p_grad_bias, rows, h, groups,
                         LAYER_NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr, FROM_CODES: tl.constexpr,
                         EVEN: tl.constexpr, ROWS: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
                         STAGES: tl.constexpr):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, H)
    b_gamma = load_gamma(p_weight, o_h, o_h < h, ZERO_CENTERED, EVEN)[None, :]
    b_grad_weight = tl.zeros([ROWS, H], dtype=tl.float32)
    b_grad_bias = tl.zeros([ROWS, H], dtype=tl.float32)
    # one maximum per eight elements, which one thread holds; reduced over the warps once, at the end
    b_amax = tl.zeros([ROWS, H // 8], dtype=tl.float32)
    for tile in tl.range(pid, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        o_row = tile * ROWS + tl.arange(0, ROWS)
        m_x = tile_mask(o_row, o_h, rows, h)
        o_x = o_row[:, None] * h + o_h[None, :]
        b_rstd = tl.load(p_rstd + o_row, mask=o_row < rows, other=0.0)[:, None]
        b_x = load_group_tile(p_codes, p_exponent, o_row, 0, rows, h, h, groups, H, FROM_CODES, G, EVEN)
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
            b_abs = finite_abs(b_grad_x)
            if not EVEN:
                b_abs = tl.where(m_x, b_abs, 0.0)
            b_amax = tl.maximum(b_amax, tl.max(tl.reshape(b_abs, [ROWS, H // 8, 8]), axis=2))
        if p_grad_weight is not None:
            b_grad_weight += b_grad * b_normed
        if p_grad_bias is not None:
            b_grad_bias += b_grad
    o_partial = pid * h + o_h
    if p_grad_x is not None:
        tl.store(p_maxima + pid, stored_max(b_amax, p_grad_x.dtype.element_ty))
    if p_grad_weight is not None:
        store_tile(p_grad_weight, o_partial, tl.sum(b_grad_weight, axis=0), o_h < h, not EVEN)
    if p_grad_bias is not None:
        store_tile(p_grad_bias, o_partial, tl.sum(b_grad_bias, axis=0), o_h < h, not EVEN)


@PreparedKernel
@triton.jit
def norm_sums_kernel(p_parts, p_first, p_second, programs, h, PROGRAMS: tl.constexpr, N: tl.constexpr):
    """Sums [h] over the `programs` rows of one part, or of two."""
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
def norm_columns_kernel(p_codes, p_exponent, p_rstd, p_weight, p_bias, p_amax, p_columns, p_scale,
                        rows, h, groups, padded_rows,
                        ZERO_CENTERED: tl.constexpr, E5M2: tl.constexpr, FROM_CODES: tl.constexpr,
                        EVEN: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                        G: tl.constexpr):  # fmt: skip
    scale = tensor_scale(tl.load(p_amax), E5M2)
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
        b_x = load_group_tile(p_codes, p_exponent, o_row, column, rows, h, h, groups, N, FROM_CODES, G, EVEN)
        b_y = b_x * load_tile(p_rstd, o_row, o_row < rows, not EVEN)[:, None] * b_gamma
        if p_bias is not None:
            b_y += b_bias
            if not EVEN:
                b_y = tl.where(o_row[:, None] < rows, b_y, 0.0)
        b_words |= to_tensor_words(b_y, scale, E5M2) << (8 * i)
    store_words(p_columns, b_words, o_word, o_h.to(tl.int64), h, padded_rows, EVEN)


@functools.cache
def _tile(h: int, least: int, elements: int) -> dict:
    """The tile of a launch over whole rows: at least `least` elements, and `elements` per thread."""
    width = max(next_power_of_2(h), GROUP_SIZE)
    height = max(least // width, 1)
    warps = height * width // (32 * elements)
    return {"ROWS": height, "H": width, "G": GROUP_SIZE, "num_warps": min(max(warps, 1), MAX_WARPS)}


@functools.lru_cache(maxsize=1024)
def row_tiles(rows: int, h: int, least: int, elements: int) -> tuple[dict, int, int, bool]:
    """`_tile`, the number of tiles, groups per row, and whether all tiles lie inside the tensor."""
    tile = _tile(h, least, elements)
    return tile, cdiv(rows, tile["ROWS"]), cdiv(h, GROUP_SIZE), tile["H"] == h and rows % tile["ROWS"] == 0


def norm_forward_triton(
    x, weight, bias, eps: float, layer_norm: bool, zero_centered: bool, saved_format: str
):
    """`norm_forward_reference` in one pass over x, with one maximum per program."""
    y = torch.empty_like(x)
    q, rstd = empty_saved(x, saved_format)
    options = eps, layer_norm, zero_centered
    return y, launch_forward(x, weight, bias, q, rstd, *options, y=y), q, rstd


def empty_saved(x: torch.Tensor, fmt: str) -> tuple[Grouped, torch.Tensor]:
    """Uninitialised storage for the saved input and rstd."""
    rstd = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    return empty_grouped(*x.shape, GROUP_SIZE, fmt, x.device), rstd


def launch_forward(
    x,
    weight,
    bias,
    q: Grouped,
    rstd,
    eps: float,
    layer_norm: bool,
    zero_centered: bool,
    addends: Addends = NO_ADDENDS,
    out: Quantized | None = None,
    scales: Scales = NO_SCALES,
    y: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Writes y or, with `scales`, its row-major codes. The first launch also writes q and rstd and returns
    maxima. If x is the sum of `addends`, the first launch writes it, and the second reads it."""
    rows, h = x.shape
    tile, tiles, groups, even = row_tiles(rows, h, FORWARD_TILE, FORWARD_ELEMENTS)
    first = scales.maxima is None
    maxima = torch.empty(tiles, dtype=torch.float32, device=x.device) if first else None
    norm_forward_kernel[(scales.programs(tiles),)](
        x,
        *(addends if first else NO_ADDENDS),
        weight,
        bias,
        y,
        out.rows.view(torch.uint8) if out else None,
        q.codes if first else None,
        q.exponent if first else None,
        rstd if first else None,
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
        TO_CODES=q.format.to_codes_tile,
        EVEN=even,
        **tile,
    )
    return maxima


@functools.lru_cache(maxsize=256)
def backward_stages(loaded: int, device: torch.device) -> int:
    """How many tiles of `loaded` bytes fit into shared memory, 1 to `BACKWARD_STAGES`."""
    return max(1, min(BACKWARD_STAGES, shared_memory(device) // loaded))


def norm_backward_triton(
    grad_y,
    grad_residual,
    q: Grouped,
    rstd,
    weight,
    layer_norm: bool,
    zero_centered: bool,
    needs_x: bool = True,
    needs_weight: bool = True,
    needs_bias: bool = True,
    dtype: torch.dtype = torch.float32,
):
    """`norm_backward_reference`, with None for results that are not needed. Each program loops over many rows
    and sums their parameter gradients. A second kernel sums over programs, in an order that depends on the
    shape alone."""
    rows, h = grad_y.shape
    tile, tiles, groups, even = row_tiles(rows, h, BACKWARD_TILE, BACKWARD_ELEMENTS)
    # without rows, one program that stores zeros
    programs = min(tiles, PROGRAMS) or 1
    # bytes of a tile's loads: codes, gradient and the gradient of the residual
    residual_bytes = 0 if grad_residual is None else grad_residual.dtype.itemsize
    loaded = tile["ROWS"] * tile["H"] * (1 + grad_y.dtype.itemsize + residual_bytes)
    fp32 = {"dtype": torch.float32, "device": grad_y.device}
    grad_x = torch.empty_like(grad_y) if needs_x else None
    maxima = torch.empty(programs, **fp32) if needs_x else None
    count = needs_weight + needs_bias
    parts = torch.empty(count, programs, h, **fp32) if count else None
    norm_backward_kernel[(programs,)](
        grad_y,
        grad_residual,
        q.codes,
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
        STAGES=backward_stages(loaded, grad_y.device),
        FROM_CODES=q.format.from_codes_tile,
        EVEN=even,
        **tile,
    )
    if not count:
        return grad_x, maxima, None, None
    sums = sum_parts(parts, dtype)
    return grad_x, maxima, sums[0] if needs_weight else None, sums[-1] if needs_bias else None


def sum_parts(parts: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """The sums [h] over the programs of one part or two, FP32 [1 or 2, programs, h], in `dtype`."""
    count, programs, h = parts.shape
    first, second = torch.empty(h, dtype=dtype, device=parts.device), None
    if count == 2:
        second = torch.empty(h, dtype=dtype, device=parts.device)
    norm_sums_kernel[cdiv(h, SUMS_N), count](
        parts,
        first,
        second,
        programs,
        h,
        PROGRAMS=SUMS_PROGRAMS,
        N=SUMS_N,
        num_warps=4,
    )
    return [first] if second is None else [first, second]


def norm_columns_triton(
    q: Grouped, rstd, weight, bias, amax, zero_centered: bool, fmt: Fp8Format
) -> Quantized:
    """`norm_columns_reference` in one kernel."""
    rows, h = q.codes.shape
    columns = empty_columns(rows, h, fmt.dtype, rstd.device)
    scale = torch.empty(1, dtype=torch.float32, device=rstd.device)
    down, across = tiling(columns.shape[1], h, COLUMNS_M, COLUMNS_N)
    norm_columns_kernel[across, down](
        q.codes,
        q.exponent,
        rstd,
        weight,
        bias,
        amax,
        columns.view(torch.int32),
        scale,
        rows,
        h,
        cdiv(h, GROUP_SIZE),
        columns.shape[1],
        ZERO_CENTERED=zero_centered,
        E5M2=fmt.is_e5m2,
        FROM_CODES=q.format.from_codes_tile,
        EVEN=h % COLUMNS_N == 0 and rows % COLUMNS_M == 0,
        M=COLUMNS_M,
        N=COLUMNS_N,
        G=GROUP_SIZE,
        num_warps=COLUMNS_WARPS,
    )
    return Quantized(None, columns, scale)
