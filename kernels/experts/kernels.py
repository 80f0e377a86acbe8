"""The experts' kernels and their launchers.

Kernels that transpose read the rows of `places` (`order.padded`) and write words of four places.
"""

import torch
import triton
import triton.language as tl

from coat_kernels.activation.kernels import load_parts, value_and_slope
from coat_kernels.fp8 import E4M3, cast, widen
from coat_kernels.groups.reference import Grouped
from coat_kernels.prepared import PreparedKernel, cdiv, next_power_of_2
from coat_kernels.tensorwise.quantize import to_tensor_codes, to_tensor_words
from coat_kernels.tensorwise.scale import tensor_scale
from coat_kernels.tensorwise.transpose import COLUMNS_TILE, store_words
from coat_kernels.tiles import finite_abs, load_tile, store_tile, tile_mask

# columns of a row that a program reads at a time
ROW_BLOCK, SUM_BLOCK = 4096, 1024
# places and columns of a tile of the gates' kernels, and their warps
GATE_M, GATE_N, GATE_WARPS = 32, 128, 4


@PreparedKernel
@triton.jit
def quantize_each_row_kernel(p_x, p_codes, p_scale, m, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    p_x += row * m
    p_codes += row * m
    b_most = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, m, BLOCK):
        o_x = start + tl.arange(0, BLOCK)
        b_most = tl.maximum(b_most, finite_abs(widen(tl.load(p_x + o_x, mask=o_x < m, other=0.0))))
    scale = tensor_scale(tl.max(b_most, axis=0), False)
    tl.store(p_scale + row, scale)
    for start in range(0, m, BLOCK):
        o_x = start + tl.arange(0, BLOCK)
        b_x = widen(tl.load(p_x + o_x, mask=o_x < m, other=0.0))
        tl.store(p_codes + o_x, to_tensor_codes(b_x, scale, False), mask=o_x < m)


def quantize_each_row_triton(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_each_row_reference` as a kernel, bit for bit. `x` is contiguous."""
    n, m = x.shape
    codes = torch.empty(n, m, dtype=E4M3.dtype, device=x.device)
    scale = torch.empty(n, dtype=torch.float32, device=x.device)
    block = min(next_power_of_2(m), ROW_BLOCK)
    quantize_each_row_kernel[(n,)](x, codes.view(torch.uint8), scale, m, BLOCK=block, num_warps=4)
    return codes, scale


@PreparedKernel
@triton.jit
def gather_columns_kernel(p_codes, p_source, p_columns, n, m, places, M: tl.constexpr, N: tl.constexpr):
    across = tl.cdiv(m, N)
    tile = tl.program_id(0)
    o_word = (tile // across) * (M // 4) + tl.arange(0, M // 4)
    o_m = (tile % across) * N + tl.arange(0, N)
    b_words = tl.zeros([M // 4, N], dtype=tl.int32)
    for i in tl.static_range(4):
        o_place = o_word * 4 + i
        o_row = tl.load(p_source + o_place, mask=o_place < places, other=n).to(tl.int64)
        b_codes = tl.load(
            p_codes + o_row[:, None] * m + o_m[None, :], mask=tile_mask(o_row, o_m, n, m), other=0
        )
        b_words |= b_codes.to(tl.int32) << (8 * i)
    store_words(p_columns, b_words, o_word, o_m, m, places)


def gather_columns_triton(codes: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`gather_columns_reference` as a kernel. The codes are contiguous, and the number of places is a
    multiple of 4."""
    (n, m), places, (tile_m, tile_n) = codes.shape, len(source), COLUMNS_TILE
    columns = torch.empty(m, places, dtype=codes.dtype, device=codes.device)
    gather_columns_kernel[(cdiv(places, tile_m) * cdiv(m, tile_n),)](
        codes.view(torch.uint8), source, columns.view(torch.int32), n, m, places, M=tile_m, N=tile_n
    )
    return columns


@PreparedKernel
@triton.jit
def sum_to_tokens_kernel(p_rows, p_back, p_y, h, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(K):
        row = tl.load(p_back + token * K + k)
        b_sum += widen(tl.load(p_rows + row * h + o_h, mask=o_h < h, other=0.0))
    tl.store(p_y + token * h + o_h, cast(b_sum, p_y.dtype.element_ty), mask=o_h < h)


def sum_to_tokens_triton(rows: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """`sum_to_tokens_reference` as a kernel. Both tensors are contiguous; `back` is int64."""
    (tokens, k), h = back.shape, rows.shape[1]
    y = torch.empty(tokens, h, dtype=rows.dtype, device=rows.device)
    sum_to_tokens_kernel[tokens, cdiv(h, SUM_BLOCK)](rows, back, y, h, K=k, BLOCK=SUM_BLOCK, num_warps=4)
    return y


@triton.jit
def load_gate(p_grad, p_codes, p_exponent, p_weights, p_source, o_place, column, rows, f, groups, places,
              KIND: tl.constexpr, PARTS: tl.constexpr, N: tl.constexpr, FROM_CODES: tl.constexpr,
              G: tl.constexpr):  # fmt: skip
    """The rows of these places, their weights and tiles of the gradient, of the gate's output without the
    weight, and of the two parts of its slope; all zero without a row."""
    o_f = column + tl.arange(0, N)
    o_row = tl.load(p_source + o_place, mask=o_place < places, other=rows).to(tl.int64)
    b_weight = widen(tl.load(p_weights + o_row, mask=o_row < rows, other=0.0))[:, None]
    o_x = o_row[:, None] * f + o_f[None, :]
    b_grad = widen(load_tile(p_grad, o_x, tile_mask(o_row, o_f, rows, f), True))
    b_x, b_up = load_parts(
        p_codes, p_exponent, o_row, column, rows, f, groups, PARTS, N, FROM_CODES, G, False
    )
    b_value, b_slope = value_and_slope(b_x, KIND)
    b_output = b_value
    if PARTS == 2:
        b_output = b_value * b_up
        b_slope *= b_up
    return o_row, b_weight, b_grad, b_output, b_slope, b_value


@PreparedKernel
@triton.jit
def gate_output_kernel(p_grad, p_codes, p_exponent, p_weights, p_source, p_largest, p_columns, p_scale,
                       p_sums, p_maxima, rows, f, groups, places,
                       KIND: tl.constexpr, PARTS: tl.constexpr, FROM_CODES: tl.constexpr, M: tl.constexpr,
                       N: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """The transposed output, and for each tile's columns the row sums and the row maxima, as requested."""
    across = tl.cdiv(f, N)
    tile = tl.program_id(0)
    part = (tile % across).to(tl.int64)
    o_word = (tile // across) * (M // 4) + tl.arange(0, M // 4)
    column = (tile % across) * N
    b_words = tl.zeros([M // 4, N], dtype=tl.int32)
    scale = tensor_scale(tl.load(p_largest), False)
    if p_scale is not None:
        # every program stores the same scale
        tl.store(p_scale, scale)
    for i in tl.static_range(4):
        o_row, b_weight, b_grad, b_output, b_slope, b_value = load_gate(
            p_grad, p_codes, p_exponent, p_weights, p_source, o_word * 4 + i, column, rows, f, groups, places,
            KIND, PARTS, N, FROM_CODES, G)  # fmt: skip
        if p_columns is not None:
            b_words |= to_tensor_words(b_output * b_weight, scale, False) << (8 * i)
        if p_sums is not None:
            tl.store(p_sums + part * rows + o_row, tl.sum(b_grad * b_output, axis=1), mask=o_row < rows)
        if p_maxima is not None:
            b_grad *= b_weight
            # maxima ignore NaN
            b_most = tl.maximum(finite_abs(b_grad * b_slope), 0.0)
            if PARTS == 2:
                b_most = tl.maximum(finite_abs(b_grad * b_value), b_most)
            tl.store(p_maxima + part * rows + o_row, tl.max(b_most, axis=1), mask=o_row < rows)
    if p_columns is not None:
        store_words(p_columns, b_words, o_word, column + tl.arange(0, N), f, places)


@PreparedKernel
@triton.jit
def gate_grad_kernel(p_grad, p_codes, p_exponent, p_weights, p_source, p_maxima, p_largest, p_rows, p_scales,
                     p_columns, p_scale, rows, f, groups, places,
                     KIND: tl.constexpr, PARTS: tl.constexpr, FROM_CODES: tl.constexpr, M: tl.constexpr,
                     N: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """The gradient's rows, each with its own scale, and its columns with one scale, as requested."""
    across = tl.cdiv(f, N)
    tile = tl.program_id(0)
    o_word = (tile // across) * (M // 4) + tl.arange(0, M // 4)
    column = (tile % across) * N
    o_f = column + tl.arange(0, N)
    b_words = tl.zeros([M // 4, N], dtype=tl.int32)
    b_up_words = b_words
    scale = tensor_scale(tl.load(p_largest), False)
    if p_scale is not None:
        tl.store(p_scale, scale)
    for i in tl.static_range(4):
        o_row, b_weight, b_grad, b_output, b_slope, b_value = load_gate(
            p_grad, p_codes, p_exponent, p_weights, p_source, o_word * 4 + i, column, rows, f, groups, places,
            KIND, PARTS, N, FROM_CODES, G)  # fmt: skip
        b_grad *= b_weight
        b_gate, b_up = b_grad * b_slope, b_grad * b_value
        if p_rows is not None:
            b_scales = tensor_scale(tl.load(p_maxima + o_row, mask=o_row < rows, other=0.0), False)
            tl.store(p_scales + o_row, b_scales, mask=o_row < rows)
            o_x = o_row[:, None] * (PARTS * f) + o_f[None, :]
            m_x = tile_mask(o_row, o_f, rows, f)
            store_tile(p_rows, o_x, to_tensor_codes(b_gate, b_scales[:, None], False), m_x, True)
            if PARTS == 2:
                store_tile(p_rows, o_x + f, to_tensor_codes(b_up, b_scales[:, None], False), m_x, True)
        if p_columns is not None:
            b_words |= to_tensor_words(b_gate, scale, False) << (8 * i)
            b_up_words |= to_tensor_words(b_up, scale, False) << (8 * i)
    if p_columns is not None:
        store_words(p_columns, b_words, o_word, o_f, f, places)
        if PARTS == 2:
            store_words(p_columns + f.to(tl.int64) * (places // 4), b_up_words, o_word, o_f, f, places)


def _tiles(q: Grouped, source: torch.Tensor, gated: bool, group_size: int) -> tuple[tuple, int, dict]:
    """The grid, the number of tiles across, and the constants of a launch of the gates' kernels."""
    f, n = q.codes.shape[1] // (1 + gated), max(GATE_N, group_size)
    across = cdiv(f, n)
    constants = {
        "PARTS": 1 + gated,
        "FROM_CODES": q.format.from_codes_tile,
        "M": GATE_M,
        "N": n,
        "G": group_size,
    }
    return (cdiv(len(source), GATE_M) * across,), across, constants | {"num_warps": GATE_WARPS}


def gate_output_triton(
    grad_a, q: Grouped, weights, source, largest, kind: str, gated: bool, group_size: int,
    needs_columns: bool = True, needs_sums: bool = True, needs_maxima: bool = True,
):  # fmt: skip
    """`gate_output_reference` in one pass; None in the place of results that are not needed."""
    (rows, f), device = grad_a.shape, grad_a.device
    grid, across, constants = _tiles(q, source, gated, group_size)
    columns = scale = sums = maxima = None
    if needs_columns:
        columns = torch.empty(f, len(source), dtype=E4M3.dtype, device=device)
        scale = torch.empty(1, dtype=torch.float32, device=device)
    if needs_sums:
        sums = torch.empty(across, rows, dtype=torch.float32, device=device)
    if needs_maxima:
        maxima = torch.empty(across, rows, dtype=torch.float32, device=device)
    gate_output_kernel[grid](
        grad_a,
        q.codes,
        q.exponent,
        weights,
        source,
        largest,
        None if columns is None else columns.view(torch.int32),
        scale,
        sums,
        maxima,
        rows,
        f,
        cdiv(f, group_size),
        len(source),
        KIND=kind,
        **constants,
    )
    return columns, scale, sums.sum(0) if needs_sums else None, maxima.amax(0) if needs_maxima else None


def gate_grad_triton(
    grad_a, q: Grouped, weights, source, maxima, largest, kind: str, gated: bool, group_size: int,
    needs_rows: bool = True, needs_columns: bool = True,
):  # fmt: skip
    """`gate_grad_reference` in one pass; None in the place of results that are not needed."""
    (rows, f), device = grad_a.shape, grad_a.device
    grid, _, constants = _tiles(q, source, gated, group_size)
    codes = scales = columns = scale = None
    if needs_rows:
        codes = torch.empty(q.codes.shape, dtype=E4M3.dtype, device=device)
        scales = torch.empty(rows, dtype=torch.float32, device=device)
    if needs_columns:
        columns = torch.empty(q.codes.shape[1], len(source), dtype=E4M3.dtype, device=device)
        scale = torch.empty(1, dtype=torch.float32, device=device)
    gate_grad_kernel[grid](
        grad_a,
        q.codes,
        q.exponent,
        weights,
        source,
        maxima,
        largest,
        None if codes is None else codes.view(torch.uint8),
        scales,
        None if columns is None else columns.view(torch.int32),
        scale,
        rows,
        f,
        cdiv(f, group_size),
        len(source),
        KIND=kind,
        **constants,
    )
    return codes, scales, columns, scale
