"""The kernels of gates, and their launchers. `rows` is an `order.Rows`, `gate` a `gates.KernelGate`."""

import torch
import triton
import triton.language as tl

from coat_kernels.activation.kernels import load_parts, value_and_slope
from coat_kernels.experts.kernels import experts_of
from coat_kernels.fp8 import E4M3, cast, round_to, widen
from coat_kernels.groups.kernels import store_group_tile
from coat_kernels.groups.reference import GROUP_SIZE, Grouped
from coat_kernels.prepared import PreparedKernel, cdiv, next_power_of_2
from coat_kernels.tensorwise.quantize import Quantized, to_tensor_codes, to_tensor_words
from coat_kernels.tensorwise.scale import Scales, scale_and_tiles, tensor_scale
from coat_kernels.tensorwise.transpose import store_words
from coat_kernels.tiles import finite_abs, load_tile, store_tile, stored_max, tile_mask

# rows, columns and warps of a forward program's tile
FORWARD_ROWS, FORWARD_COLUMNS, FORWARD_WARPS = 8, 256, 4
# places and columns of a tile of the backward kernels, and their warps
GATE_M, GATE_N, GATE_WARPS = 32, 128, 4
# rows of a program that adds the tiles' results
FINISH_ROWS = 128


@triton.jit
def gate_tile(b_x, b_up, KIND: tl.constexpr, PARTS: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """`gate_reference` for FP32 tiles; NaN stays NaN."""
    b_near = b_x
    if LIMIT is not None:
        b_near = tl.where(b_x > LIMIT, LIMIT, b_x)
    b_value, b_slope = value_and_slope(b_near, KIND)
    if LIMIT is not None:
        b_slope = tl.where(b_x > LIMIT, 0.0, b_slope)
    b_output, b_of_up = b_value, b_value
    if PARTS == 2:
        b_factor = b_up
        if LIMIT is not None:
            b_factor = tl.where(b_up > LIMIT, LIMIT, tl.where(b_up < -LIMIT, -LIMIT, b_up))
            b_of_up = tl.where(tl.abs(b_up) > LIMIT, 0.0, b_value)
        b_factor += OFFSET
        b_output = b_value * b_factor
        b_slope *= b_factor
    return b_output, b_slope, b_of_up


@triton.jit
def load_weights(p_weights, p_order, o_row, rows):
    """The weight of each row, [rows, 1]; zero past the last row."""
    o_choice = o_row
    if p_order is not None:
        o_choice = tl.load(p_order + o_row, mask=o_row < rows, other=0).to(tl.int64)
    return widen(tl.load(p_weights + o_choice, mask=o_row < rows, other=0.0))[:, None]


@triton.jit
def load_both(p_x, p_bias, o_row, o_expert, column, rows, width, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """A tile of the gate's input, FP32, with its bias."""
    o_x = column + tl.arange(0, COLUMNS)
    m_x = tile_mask(o_row, o_x, rows, width)
    b_x = widen(load_tile(p_x, o_row[:, None] * width + o_x[None, :], m_x, not EVEN))
    if p_bias is not None:
        b_x += widen(load_tile(p_bias, o_expert[:, None] * width + o_x[None, :], m_x, not EVEN))
    return b_x


@PreparedKernel
@triton.jit
def gate_forward_kernel(p_x, p_bias, p_weights, p_order, p_offs, p_rows, p_codes, p_exponent, p_maxima,
                        p_predicted, p_used, p_found, found, p_amax, p_true,
                        rows, f, groups, tiles, count,
                        KIND: tl.constexpr, PARTS: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
                        INTERLEAVED: tl.constexpr, TO_CODES: tl.constexpr, EVEN: tl.constexpr,
                        ROWS: tl.constexpr, COLUMNS: tl.constexpr, G: tl.constexpr,
                        E: tl.constexpr):  # fmt: skip
    """Writes the output's codes; the first launch also writes the maxima and, if requested, the saved
    input."""
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    scale, todo = scale_and_tiles(p_predicted, p_used, p_found, found, p_amax, p_true, tiles, False)
    across = tl.cdiv(f, COLUMNS)
    for tile in range(tl.program_id(0), todo, tl.num_programs(0)):
        o_row = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = (tile % across) * COLUMNS
        o_f = column + tl.arange(0, COLUMNS)
        o_expert = o_row
        if p_bias is not None:
            o_expert = experts_of(p_offs, o_row, count, E).to(tl.int64)
        if INTERLEAVED:
            b_both = load_both(p_x, p_bias, o_row, o_expert, 2 * column, rows, 2 * f, 2 * COLUMNS, EVEN)
            b_x, b_up = tl.split(tl.reshape(b_both, [ROWS, COLUMNS, 2]))
        else:
            # gate's columns past f would be up's
            m_f = o_f[None, :] < f
            b_x = load_both(p_x, p_bias, o_row, o_expert, column, rows, PARTS * f, COLUMNS, EVEN)
            b_up = b_x
            if PARTS == 2:
                b_up = load_both(p_x, p_bias, o_row, o_expert, f + column, rows, PARTS * f, COLUMNS, EVEN)
            if not EVEN:
                b_x, b_up = tl.where(m_f, b_x, 0.0), tl.where(m_f, b_up, 0.0)
        b_y, _, _ = gate_tile(b_x, b_up, KIND, PARTS, LIMIT, OFFSET)
        b_y *= load_weights(p_weights, p_order, o_row, rows)
        m_y = tile_mask(o_row, o_f, rows, f)
        b_codes = to_tensor_codes(round_to(b_y, DTYPE), scale, False)
        store_tile(p_rows, o_row[:, None] * f + o_f[None, :], b_codes, m_y, not EVEN)
        if p_maxima is not None:
            # a(0) is 0: masked elements do not change the maximum
            tl.store(p_maxima + tile, stored_max(b_y, DTYPE))
        if p_codes is not None:
            store_group_tile(b_x, p_codes, p_exponent, o_row, column, rows, f, PARTS * f, PARTS * groups,
                             TO_CODES, G, EVEN)  # fmt: skip
            if PARTS == 2:
                store_group_tile(b_up, p_codes + f, p_exponent + groups, o_row, column, rows, f, PARTS * f,
                                 PARTS * groups, TO_CODES, G, EVEN)  # fmt: skip


def launch_gate_forward(
    both: torch.Tensor, weights, bias, rows, gate, q: Grouped | None, out: Quantized, scales: Scales
) -> torch.Tensor | None:
    """Writes the codes of a gate's output, `gate_forward_reference` quantized. The first launch also writes
    q, if given, and returns maxima. All tensors are contiguous."""
    n, f = both.shape[0], both.shape[1] // (1 + gate.gated)
    tiles, count = cdiv(n, FORWARD_ROWS) * cdiv(f, FORWARD_COLUMNS), len(rows.offs)
    first = scales.maxima is None
    maxima = torch.empty(tiles, dtype=torch.float32, device=both.device) if first else None
    saves = first and q is not None
    gate_forward_kernel[(scales.programs(tiles),)](
        both,
        bias,
        weights,
        rows.order,
        rows.offs,
        out.rows.view(torch.uint8),
        q.codes if saves else None,
        q.exponent if saves else None,
        maxima,
        *scales,
        n,
        f,
        cdiv(f, GROUP_SIZE),
        tiles,
        count,
        KIND=gate.kind,
        PARTS=1 + gate.gated,
        LIMIT=gate.limit,
        OFFSET=gate.offset,
        INTERLEAVED=gate.interleaved,
        TO_CODES=q.format.to_codes_tile if saves else None,
        EVEN=n % FORWARD_ROWS == 0 and f % FORWARD_COLUMNS == 0,
        ROWS=FORWARD_ROWS,
        COLUMNS=FORWARD_COLUMNS,
        G=GROUP_SIZE,
        E=next_power_of_2(count),
        num_warps=FORWARD_WARPS,
    )
    return maxima


@triton.jit
def load_gate(p_grad, p_codes, p_exponent, p_weights, p_order, p_source, o_place, column, rows, f, groups,
              padded, KIND: tl.constexpr, PARTS: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
              N: tl.constexpr, FROM_CODES: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """The rows of these places, their weights and tiles of the gradient, of the gate's output without the
    weight, and of its derivatives by both parts; the gradient and the output are zero without a row."""
    o_f = column + tl.arange(0, N)
    o_row = tl.load(p_source + o_place, mask=o_place < padded, other=rows).to(tl.int64)
    b_weight = load_weights(p_weights, p_order, o_row, rows)
    o_x = o_row[:, None] * f + o_f[None, :]
    b_grad = widen(load_tile(p_grad, o_x, tile_mask(o_row, o_f, rows, f), True))
    b_x, b_up = load_parts(
        p_codes, p_exponent, o_row, column, rows, f, groups, PARTS, N, FROM_CODES, G, False
    )
    b_output, b_by_gate, b_by_up = gate_tile(b_x, b_up, KIND, PARTS, LIMIT, OFFSET)
    return o_row, b_weight, b_grad, b_output, b_by_gate, b_by_up


@PreparedKernel
@triton.jit
def gate_output_kernel(p_grad, p_codes, p_exponent, p_weights, p_order, p_source, p_amax, p_columns,
                       p_scale, p_sums, p_maxima, rows, f, groups, padded,
                       KIND: tl.constexpr, PARTS: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
                       FROM_CODES: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                       G: tl.constexpr):  # fmt: skip
    """The transposed output, and for each tile's columns the row sums and the row maxima, as
    requested."""
    across = tl.cdiv(f, N)
    tile = tl.program_id(0)
    part = (tile % across).to(tl.int64)
    o_word = (tile // across) * (M // 4) + tl.arange(0, M // 4)
    column = (tile % across) * N
    b_words = tl.zeros([M // 4, N], dtype=tl.int32)
    scale = tensor_scale(tl.load(p_amax), False)
    if p_scale is not None:
        # every program stores the same scale
        tl.store(p_scale, scale)
    for i in tl.static_range(4):
        o_row, b_weight, b_grad, b_output, b_by_gate, b_by_up = load_gate(
            p_grad, p_codes, p_exponent, p_weights, p_order, p_source, o_word * 4 + i, column, rows, f,
            groups, padded, KIND, PARTS, LIMIT, OFFSET, N, FROM_CODES, G)  # fmt: skip
        if p_columns is not None:
            b_words |= to_tensor_words(b_output * b_weight, scale, False) << (8 * i)
        if p_sums is not None:
            tl.store(p_sums + part * rows + o_row, tl.sum(b_grad * b_output, axis=1), mask=o_row < rows)
            b_grad *= b_weight
            # maxima ignore NaN
            b_most = tl.maximum(finite_abs(b_grad * b_by_gate), 0.0)
            if PARTS == 2:
                b_most = tl.maximum(finite_abs(b_grad * b_by_up), b_most)
            tl.store(p_maxima + part * rows + o_row, tl.max(b_most, axis=1), mask=o_row < rows)
    if p_columns is not None:
        store_words(p_columns, b_words, o_word, column + tl.arange(0, N), f, padded)


@PreparedKernel
@triton.jit
def gate_finish_kernel(p_sums, p_parts, p_dots, p_order, p_grad, p_maxima, p_amax, rows, across,
                       BLOCK: tl.constexpr):  # fmt: skip
    """The gradient of the weights from the sums of all tiles, and the largest of their maxima, for each row
    and for all rows. `p_amax` begins as zero."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_row = o_row < rows
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    b_most = tl.zeros([BLOCK], dtype=tl.float32)
    for part in range(across):
        o_part = tl.cast(part, tl.int64) * rows + o_row
        b_sum += tl.load(p_sums + o_part, mask=m_row, other=0.0)
        b_most = tl.maximum(b_most, tl.load(p_parts + o_part, mask=m_row, other=0.0))
    o_choice = o_row
    if p_order is not None:
        o_choice = tl.load(p_order + o_row, mask=m_row, other=0).to(tl.int64)
    if p_dots is not None:
        b_sum += tl.load(p_dots + o_choice, mask=m_row, other=0.0)
    tl.store(p_grad + o_choice, cast(b_sum, p_grad.dtype.element_ty), mask=m_row)
    tl.store(p_maxima + o_row, b_most, mask=m_row)
    # the bits of positive numbers have their order
    tl.atomic_max(p_amax, tl.max(b_most, axis=0).to(tl.int32, bitcast=True))


@PreparedKernel
@triton.jit
def gate_grad_kernel(p_grad, p_codes, p_exponent, p_weights, p_order, p_source, p_maxima, p_amax, p_rows,
                     p_scales, p_columns, p_scale, rows, f, groups, padded,
                     KIND: tl.constexpr, PARTS: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
                     FROM_CODES: tl.constexpr, M: tl.constexpr, N: tl.constexpr, G: tl.constexpr,
                     INTERLEAVED: tl.constexpr):  # fmt: skip
    """The gradient's rows, each with its own scale, and its columns with one scale, as requested."""
    across = tl.cdiv(f, N)
    tile = tl.program_id(0)
    o_word = (tile // across) * (M // 4) + tl.arange(0, M // 4)
    column = (tile % across) * N
    o_f = column + tl.arange(0, N)
    b_words = tl.zeros([M // 4, N], dtype=tl.int32)
    b_up_words = b_words
    scale = tensor_scale(tl.load(p_amax), False)
    if p_scale is not None:
        tl.store(p_scale, scale)
    for i in tl.static_range(4):
        o_row, b_weight, b_grad, b_output, b_by_gate, b_by_up = load_gate(
            p_grad, p_codes, p_exponent, p_weights, p_order, p_source, o_word * 4 + i, column, rows, f,
            groups, padded, KIND, PARTS, LIMIT, OFFSET, N, FROM_CODES, G)  # fmt: skip
        b_grad *= b_weight
        b_gate, b_up = b_grad * b_by_gate, b_grad * b_by_up
        if p_rows is not None:
            b_scales = tensor_scale(tl.load(p_maxima + o_row, mask=o_row < rows, other=0.0), False)
            tl.store(p_scales + o_row, b_scales, mask=o_row < rows)
            b_codes = to_tensor_codes(b_gate, b_scales[:, None], False)
            if INTERLEAVED:
                b_up_codes = to_tensor_codes(b_up, b_scales[:, None], False)
                b_codes = tl.reshape(tl.join(b_codes, b_up_codes), [M // 4, 2 * N])
                o_both = 2 * column + tl.arange(0, 2 * N)
                o_x = o_row[:, None] * (2 * f) + o_both[None, :]
                store_tile(p_rows, o_x, b_codes, tile_mask(o_row, o_both, rows, 2 * f), True)
            else:
                o_x = o_row[:, None] * (PARTS * f) + o_f[None, :]
                m_x = tile_mask(o_row, o_f, rows, f)
                store_tile(p_rows, o_x, b_codes, m_x, True)
                if PARTS == 2:
                    store_tile(p_rows, o_x + f, to_tensor_codes(b_up, b_scales[:, None], False), m_x, True)
        if p_columns is not None:
            b_words |= to_tensor_words(b_gate, scale, False) << (8 * i)
            b_up_words |= to_tensor_words(b_up, scale, False) << (8 * i)
    if p_columns is not None:
        if INTERLEAVED:
            store_words(p_columns, b_words, o_word, 2 * o_f, 2 * f, padded)
            store_words(p_columns, b_up_words, o_word, 2 * o_f + 1, 2 * f, padded)
        else:
            store_words(p_columns, b_words, o_word, o_f, f, padded)
            if PARTS == 2:
                store_words(p_columns + f.to(tl.int64) * (padded // 4), b_up_words, o_word, o_f, f, padded)


def _tiles(q: Grouped, source: torch.Tensor, gate) -> tuple[tuple, int, dict]:
    """The grid, the number of tiles across, and the constants of a launch of the backward kernels."""
    parts = 1 + gate.gated
    across = cdiv(q.codes.shape[1] // parts, GATE_N)
    constants = {
        "KIND": gate.kind,
        "PARTS": parts,
        "LIMIT": gate.limit,
        "OFFSET": gate.offset,
        "FROM_CODES": q.format.from_codes_tile,
        "M": GATE_M,
        "N": GATE_N,
        "G": GROUP_SIZE,
        "num_warps": GATE_WARPS,
    }
    return (cdiv(len(source), GATE_M) * across,), across, constants


def gate_output_triton(
    grad_a, q: Grouped, weights, rows, source, amax, dots, gate,
    needs_columns: bool = True, needs_rest: bool = True,
):  # fmt: skip
    """`gate_output_reference` in two launches; None in the place of results that are not needed.
    needs_rest: of the three results after the columns."""
    (n, f), new = grad_a.shape, {"dtype": torch.float32, "device": grad_a.device}
    grid, across, constants = _tiles(q, source, gate)
    columns = scale = sums = parts = grad_weights = maxima = most = None
    if needs_columns:
        columns = torch.empty(f, len(source), dtype=E4M3.dtype, device=grad_a.device)
        scale = torch.empty(1, **new)
    if needs_rest:
        sums, parts = torch.empty(2, across, n, **new).unbind(0)
        grad_weights, maxima, most = torch.empty_like(weights), torch.empty(n, **new), torch.zeros(1, **new)
    gate_output_kernel[grid](
        grad_a,
        q.codes,
        q.exponent,
        weights,
        rows.order,
        source,
        amax,
        None if columns is None else columns.view(torch.int32),
        scale,
        sums,
        parts,
        n,
        f,
        cdiv(f, GROUP_SIZE),
        len(source),
        **constants,
    )
    if needs_rest:
        gate_finish_kernel[(cdiv(n, FINISH_ROWS),)](
            sums,
            parts,
            dots,
            rows.order,
            grad_weights,
            maxima,
            most.view(torch.int32),
            n,
            across,
            BLOCK=FINISH_ROWS,
        )
    return columns, scale, grad_weights, maxima, most


def gate_grad_triton(
    grad_a, q: Grouped, weights, rows, source, maxima, amax, gate,
    needs_rows: bool = True, needs_columns: bool = True,
):  # fmt: skip
    """`gate_grad_reference` in one pass; None in the place of results that are not needed."""
    (n, f), device = grad_a.shape, grad_a.device
    grid, _, constants = _tiles(q, source, gate)
    codes = scales = columns = scale = None
    if needs_rows:
        codes = torch.empty(q.codes.shape, dtype=E4M3.dtype, device=device)
        scales = torch.empty(n, dtype=torch.float32, device=device)
    if needs_columns:
        columns = torch.empty(q.codes.shape[1], len(source), dtype=E4M3.dtype, device=device)
        scale = torch.empty(1, dtype=torch.float32, device=device)
    gate_grad_kernel[grid](
        grad_a,
        q.codes,
        q.exponent,
        weights,
        rows.order,
        source,
        maxima,
        amax,
        None if codes is None else codes.view(torch.uint8),
        scales,
        None if columns is None else columns.view(torch.int32),
        scale,
        n,
        f,
        cdiv(f, GROUP_SIZE),
        len(source),
        **constants,
        INTERLEAVED=gate.interleaved,
    )
    return codes, scales, columns, scale
