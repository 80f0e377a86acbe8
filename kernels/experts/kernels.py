"""The kernels around the experts' GEMMs that order, quantize and sum rows, and their launchers. `rows` is an
`order.Rows`. Kernels that transpose read the rows of `order.PaddedRows`, and write words of four places.
"""

import torch
import triton
import triton.language as tl

from coat_kernels.experts.reference import max_padded_rows
from coat_kernels.fp8 import ALIGNMENT, E4M3, cast, widen
from coat_kernels.prepared import PreparedKernel, cdiv, next_power_of_2
from coat_kernels.tensorwise.quantize import to_tensor_codes, to_tensor_words
from coat_kernels.tensorwise.scale import amax_triton, tensor_scale
from coat_kernels.tensorwise.transpose import COLUMNS_TILE, store_words
from coat_kernels.tiles import finite_abs, tile_mask

# columns of a row that a program reads at a time
ROW_BLOCK, SUM_BLOCK = 4096, 1024
# elements of a tile of choices and experts, and programs that order choices
ORDER_TILE, ORDER_PROGRAMS = 4096, 256
# words of a program that gathers rows
GATHER_BLOCK = 1024


@triton.jit
def experts_of(p_offs, o_row, count, E: tl.constexpr):
    """The expert of each row: the number of experts whose rows end before it."""
    o_e = tl.arange(0, E)
    b_offs = tl.load(p_offs + o_e, mask=o_e < count, other=2147483647)
    return tl.sum((b_offs[None, :] <= o_row[:, None]).to(tl.int32), axis=1)


@triton.jit
def expert_of(p_offs, row, count, E: tl.constexpr):
    """`experts_of` for one row."""
    o_e = tl.arange(0, E)
    b_offs = tl.load(p_offs + o_e, mask=o_e < count, other=2147483647)
    return tl.sum((b_offs <= row).to(tl.int32), axis=0)


@triton.jit
def load_choices(p_chosen, o_choice, n, E: tl.constexpr):
    """Which expert each choice is, [choices, E]."""
    b_chosen = tl.load(p_chosen + o_choice, mask=o_choice < n, other=-1).to(tl.int32)
    return (b_chosen[:, None] == tl.arange(0, E)[None, :]).to(tl.int32)


@PreparedKernel
@triton.jit
def count_choices_kernel(p_chosen, p_counts, n, count, chunks, C: tl.constexpr, E: tl.constexpr):
    """How often each program's choices name each expert."""
    program = tl.program_id(0)
    o_e = tl.arange(0, E)
    b_count = tl.zeros([E], dtype=tl.int32)
    for i in range(chunks):
        o_choice = (program * chunks + i) * C + tl.arange(0, C)
        b_count += tl.sum(load_choices(p_chosen, o_choice, n, E), axis=0)
    tl.store(p_counts + program * count + o_e, b_count, mask=o_e < count)


@PreparedKernel
@triton.jit
def order_kernel(p_chosen, p_counts, p_offs, p_order, p_inverse, n, count, chunks, C: tl.constexpr,
                 E: tl.constexpr):  # fmt: skip
    """The row of each choice: after the rows of earlier experts, and of earlier choices of its expert."""
    program = tl.program_id(0)
    o_e = tl.arange(0, E)
    b_all = tl.zeros([E], dtype=tl.int32)
    b_next = b_all
    for start in range(0, tl.num_programs(0), C):
        o_program = start + tl.arange(0, C)
        m_counts = tile_mask(o_program, o_e, tl.num_programs(0), count)
        b_counts = tl.load(p_counts + o_program[:, None] * count + o_e[None, :], mask=m_counts, other=0)
        b_all += tl.sum(b_counts, axis=0)
        b_next += tl.sum(tl.where(o_program[:, None] < program, b_counts, 0), axis=0)
    b_offs = tl.cumsum(b_all, axis=0)
    # every program stores the same offsets
    tl.store(p_offs + o_e, b_offs, mask=o_e < count)
    b_next += b_offs - b_all
    for i in range(chunks):
        o_choice = (program * chunks + i) * C + tl.arange(0, C)
        b_is = load_choices(p_chosen, o_choice, n, E)
        b_row = tl.sum(b_is * (b_next[None, :] + tl.cumsum(b_is, axis=0) - 1), axis=1)
        tl.store(p_inverse + o_choice, b_row, mask=o_choice < n)
        tl.store(p_order + b_row, o_choice, mask=o_choice < n)
        b_next += tl.sum(b_is, axis=0)


def order_triton(chosen: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`order_reference` in two launches."""
    chosen, n, e = chosen.contiguous(), chosen.numel(), next_power_of_2(count)
    c = max(ORDER_TILE // e, 16)
    chunks = cdiv(n, ORDER_PROGRAMS * c) or 1
    programs = cdiv(n, chunks * c) or 1
    new = {"dtype": torch.int32, "device": chosen.device}
    counts, offs = torch.empty(programs, count, **new), torch.empty(count, **new)
    order, inverse = torch.empty(n, **new), torch.empty(chosen.shape, **new)
    count_choices_kernel[(programs,)](chosen, counts, n, count, chunks, C=c, E=e)
    order_kernel[(programs,)](chosen, counts, offs, order, inverse, n, count, chunks, C=c, E=e)
    return offs, order, inverse


@PreparedKernel
@triton.jit
def padded_kernel(p_offs, p_order, p_row, p_token, p_padded_offs, n, k, count, padded,
                  ALIGNMENT: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    o_e = tl.arange(0, E)
    b_offs = tl.load(p_offs + o_e, mask=o_e < count, other=0)
    b_starts = tl.load(p_offs + o_e - 1, mask=(o_e < count) & (o_e > 0), other=0)
    b_places = tl.cdiv(tl.maximum(b_offs - b_starts, 1), ALIGNMENT) * ALIGNMENT
    b_places = tl.where(o_e < count, b_places, 0)
    b_padded_offs = tl.cumsum(b_places, axis=0)
    # every program stores the same offsets
    tl.store(p_padded_offs + o_e, b_padded_offs, mask=o_e < count)
    o_place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # the row of each place, if it is the expert's
    b_rows = o_place[:, None] + (b_starts + b_places - b_padded_offs)[None, :]
    b_is = (b_rows >= b_starts[None, :]) & (b_rows < b_offs[None, :])
    b_is &= o_place[:, None] < b_padded_offs[None, :]
    b_row = n + tl.sum(tl.where(b_is, b_rows - n, 0), axis=1)
    tl.store(p_row + o_place, b_row, mask=o_place < padded)
    if p_order is not None:
        b_token = tl.load(p_order + b_row, mask=b_row < n, other=n) // k
        tl.store(p_token + o_place, b_token, mask=o_place < padded)


def padded_triton(rows, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`padded_reference` in one launch."""
    count, new = len(rows.offs), {"dtype": torch.int32, "device": rows.offs.device}
    padded, e = max_padded_rows(n, count), next_power_of_2(count)
    row, offs = torch.empty(padded, **new), torch.empty(count, **new)
    token = row if rows.order is None else torch.empty(padded, **new)
    block = max(ORDER_TILE // e, 16)
    padded_kernel[(cdiv(padded, block),)](
        rows.offs,
        rows.order,
        row,
        token,
        offs,
        n,
        rows.k,
        count,
        padded,
        ALIGNMENT=ALIGNMENT,
        E=e,
        BLOCK=block,
    )
    return row, token, offs


@PreparedKernel
@triton.jit
def gather_rows_kernel(p_codes, p_order, p_rows, words, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = (tl.load(p_order + row) // k).to(tl.int64)
    o_word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_words = tl.load(p_codes + token * words + o_word, mask=o_word < words)
    tl.store(p_rows + row * words + o_word, b_words, mask=o_word < words)


def gather_rows_triton(codes: torch.Tensor, rows) -> torch.Tensor:
    """`gather_rows_reference` as a kernel; m is a multiple of 4."""
    n, m = len(rows.order), codes.shape[1]
    found, words = torch.empty(n, m, dtype=codes.dtype, device=codes.device), m // 4
    block = min(next_power_of_2(words), GATHER_BLOCK)
    gather_rows_kernel[n, cdiv(words, block)](
        codes.view(torch.int32), rows.order, found.view(torch.int32), words, rows.k, BLOCK=block
    )
    return found


@PreparedKernel
@triton.jit
def quantize_each_row_kernel(p_x, p_inverse, p_offs, p_bias, p_codes, p_scale, p_maxima, p_dots, m, count,
                             K: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    p_x += token * m
    b_most = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, m, BLOCK):
        o_x = start + tl.arange(0, BLOCK)
        b_most = tl.maximum(b_most, finite_abs(widen(tl.load(p_x + o_x, mask=o_x < m, other=0.0))))
    amax = tl.max(b_most, axis=0)
    scale = tensor_scale(amax, False)
    tl.store(p_maxima + token, amax)
    for start in range(0, m, BLOCK):
        o_x = start + tl.arange(0, BLOCK)
        b_x = widen(tl.load(p_x + o_x, mask=o_x < m, other=0.0))
        b_codes = to_tensor_codes(b_x, scale, False)
        for i in tl.static_range(K):
            row = token if p_inverse is None else tl.load(p_inverse + token * K + i).to(tl.int64)
            tl.store(p_codes + row * m + o_x, b_codes, mask=o_x < m)
    for i in tl.static_range(K):
        row = token if p_inverse is None else tl.load(p_inverse + token * K + i).to(tl.int64)
        tl.store(p_scale + row, scale)
        if p_bias is not None:
            p_own = p_bias + expert_of(p_offs, row, count, E).to(tl.int64) * m
            b_sum = tl.zeros([BLOCK], dtype=tl.float32)
            for start in range(0, m, BLOCK):
                o_x = start + tl.arange(0, BLOCK)
                b_x = widen(tl.load(p_x + o_x, mask=o_x < m, other=0.0))
                b_sum += b_x * widen(tl.load(p_own + o_x, mask=o_x < m, other=0.0))
            tl.store(p_dots + token * K + i, tl.sum(b_sum, axis=0))


def quantize_each_row_triton(
    x: torch.Tensor, rows, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`quantize_each_row_reference` as a kernel, the codes and scales bit for bit. `x` is contiguous."""
    (t, m), k, count = x.shape, rows.k, len(rows.offs)
    new = {"dtype": torch.float32, "device": x.device}
    codes = torch.empty(t * k, m, dtype=E4M3.dtype, device=x.device)
    scale, maxima = torch.empty(t * k, **new), torch.empty(t, **new)
    dots = None if bias is None else torch.empty(t, k, **new)
    quantize_each_row_kernel[(t,)](
        x,
        rows.inverse,
        rows.offs,
        bias,
        codes.view(torch.uint8),
        scale,
        maxima,
        dots,
        m,
        count,
        K=k,
        E=next_power_of_2(count),
        BLOCK=min(next_power_of_2(m), ROW_BLOCK),
        num_warps=4,
    )
    return codes, scale, amax_triton(maxima), dots


@PreparedKernel
@triton.jit
def gather_columns_kernel(p_x, p_source, p_amax, p_columns, p_scale, n, m, padded, M: tl.constexpr,
                          N: tl.constexpr):  # fmt: skip
    """Gathers rows and transposes them: codes, or, with an amax, values that it quantizes."""
    across = tl.cdiv(m, N)
    tile = tl.program_id(0)
    o_word = (tile // across) * (M // 4) + tl.arange(0, M // 4)
    o_m = (tile % across) * N + tl.arange(0, N)
    b_words = tl.zeros([M // 4, N], dtype=tl.int32)
    if p_amax is not None:
        scale = tensor_scale(tl.load(p_amax), False)
        # every program stores the same scale
        tl.store(p_scale, scale)
    for i in tl.static_range(4):
        o_place = o_word * 4 + i
        o_row = tl.load(p_source + o_place, mask=o_place < padded, other=n).to(tl.int64)
        b_x = tl.load(p_x + o_row[:, None] * m + o_m[None, :], mask=tile_mask(o_row, o_m, n, m), other=0)
        if p_amax is not None:
            b_words |= to_tensor_words(widen(b_x), scale, False) << (8 * i)
        else:
            b_words |= b_x.to(tl.int32) << (8 * i)
    store_words(p_columns, b_words, o_word, o_m, m, padded)


def gather_columns_triton(
    x: torch.Tensor, source: torch.Tensor, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`gather_columns_reference` as a kernel. `x` is contiguous, and the number of places is a multiple of
    4."""
    (n, m), padded, (tile_m, tile_n) = x.shape, len(source), COLUMNS_TILE
    columns = torch.empty(m, padded, dtype=E4M3.dtype, device=x.device)
    scale = None if amax is None else torch.empty(1, dtype=torch.float32, device=x.device)
    gather_columns_kernel[(cdiv(padded, tile_m) * cdiv(m, tile_n),)](
        x.view(torch.uint8) if amax is None else x,
        source,
        amax,
        columns.view(torch.int32),
        scale,
        n,
        m,
        padded,
        M=tile_m,
        N=tile_n,
    )
    return columns, scale


@PreparedKernel
@triton.jit
def sum_to_tokens_kernel(p_rows, p_inverse, p_offs, p_weights, p_bias, p_y, h, count, K: tl.constexpr,
                         E: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for i in tl.static_range(K):
        row = token if p_inverse is None else tl.load(p_inverse + token * K + i).to(tl.int64)
        b_sum += widen(tl.load(p_rows + row * h + o_h, mask=o_h < h, other=0.0))
        if p_bias is not None:
            p_own = p_bias + expert_of(p_offs, row, count, E).to(tl.int64) * h
            weight = widen(tl.load(p_weights + token * K + i))
            b_sum += weight * widen(tl.load(p_own + o_h, mask=o_h < h, other=0.0))
    tl.store(p_y + token * h + o_h, cast(b_sum, p_y.dtype.element_ty), mask=o_h < h)


def sum_to_tokens_triton(rows_of: torch.Tensor, rows, weights, bias) -> torch.Tensor:
    """`sum_to_tokens_reference` as a kernel. All tensors are contiguous."""
    (n, h), k, count = rows_of.shape, rows.k, len(rows.offs)
    y = torch.empty(n // k, h, dtype=rows_of.dtype, device=rows_of.device)
    sum_to_tokens_kernel[n // k, cdiv(h, SUM_BLOCK)](
        rows_of,
        rows.inverse,
        rows.offs,
        weights,
        bias,
        y,
        h,
        count,
        K=k,
        E=next_power_of_2(count),
        BLOCK=SUM_BLOCK,
        num_warps=4,
    )
    return y


@PreparedKernel
@triton.jit
def repeat_scales_kernel(p_a, p_b, p_out, n_a, n_b, start, BLOCK: tl.constexpr):
    """Two numbers, each repeated: `p_a` from the start, `p_b` from `start` on."""
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_out + o_x, tl.zeros([BLOCK], dtype=tl.float32) + tl.load(p_a), mask=o_x < n_a)
    tl.store(p_out + start + o_x, tl.zeros([BLOCK], dtype=tl.float32) + tl.load(p_b), mask=o_x < n_b)


def repeat_scales(a: torch.Tensor, n_a: int, b: torch.Tensor, n_b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two scales [1] on a GPU as vectors [n_a] and [n_b], in one launch."""
    # both begin at multiples of 128 bytes
    start, block = n_a + -n_a % 32, 1024
    out = torch.empty(start + n_b, dtype=torch.float32, device=a.device)
    repeat_scales_kernel[(cdiv(max(n_a, n_b), block),)](a, b, out, n_a, n_b, start, BLOCK=block)
    return out[:n_a], out[start:]
