"""Rotary positions (RoFormer, arXiv 2104.09864, equation 34, in halves) between a fused query-key-value
projection and attention, in one pass each way.

Of the projection's output [s, b, groups * (m + 2) * d], each group holds m query heads, a key and a value;
or, if they lie `apart`, all queries come first, then all keys, then all values. Forward rotates queries and
keys and writes the three to tensors of their own. Backward takes their gradients in whatever layout attention
left them, writes the gradient of the projection's output and finds its maxima on the way; or, where only an
FP8 product reads that gradient, its operands.
"""

import functools

import torch
import triton
import triton.language as tl

from coat_kernels.autograd import once_differentiable
from coat_kernels.deferred import Attempt, Deferred, PredictedScale, Source, write_reference
from coat_kernels.fp8 import cast, finite_or_nan, round_to, uses_kernels
from coat_kernels.launch import PreparedKernel, cdiv, next_power_of_2, tiling
from coat_kernels.ops import compilable
from coat_kernels.origin import with_maxima
from coat_kernels.tensorwise import (
    ALIGNMENT,
    Quantized,
    Scales,
    finite_max,
    maxima_reference,
    scale_and_tiles,
    store_words,
    to_tensor_codes,
    to_tensor_words,
)

# heads of a program's tile, forward and backward
HEADS, BACKWARD_HEADS = 8, 16
# tokens, a multiple of 16, and heads of a program that writes FP8 operands, its warps, and its registers a
# thread: with these, four programs fit on a multiprocessor; left alone, one that sums takes up to 189
OPERANDS_TOKENS, OPERANDS_HEADS, OPERANDS_WARPS, OPERANDS_REGISTERS = 64, 8, 4, 128


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first r channels of x [s, b, heads, d] by the angles of cos, sin [s, r], FP32."""
    if cos.shape[1] == 0:
        return x.clone()
    first, second = x[..., : cos.shape[1]].float().chunk(2, dim=-1)
    cos, sin = cos[:, None, None], sin[:, None, None]
    turned = torch.cat((first, second), -1) * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned.to(x.dtype), x[..., cos.shape[-1] :]), -1)


def rotate_back(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The gradient of `rotate`'s input from that of its output."""
    r = cos.shape[1]
    if r == 0:
        return grad
    value, crossed = (grad[..., :r].float() * t[:, None, None] for t in (cos, sin))
    first, second = crossed.chunk(2, dim=-1)
    return torch.cat(((value + torch.cat((second, -first), -1)).to(grad.dtype), grad[..., r:]), -1)


def rotate_qkv_reference(mixed, cos, sin, groups: int, d: int, apart: bool = False):
    """mixed [s, b, groups * (m + 2) * d] -> q [s, b, groups * m, d], k and v [s, b, groups, d]."""
    if apart:
        heads = mixed.unflatten(2, (-1, d))
        q, k, v = heads.split((heads.shape[2] - 2 * groups, groups, groups), dim=2)
    else:
        heads = mixed.unflatten(2, (groups, mixed.shape[2] // (groups * d), d))
        q, k, v = (part.flatten(2, 3) for part in heads.split((heads.shape[3] - 2, 1, 1), dim=3))
    return rotate(q, cos, sin), rotate(k, cos, sin), v.clone()


def rotate_qkv_backward_reference(dq, dk, dv, cos, sin, apart: bool = False):
    """The gradients of `rotate_qkv_reference`'s results -> the gradient of mixed, its maxima."""
    s, b, groups, d = dk.shape
    dq, dk = rotate_back(dq, cos, sin), rotate_back(dk, cos, sin)
    if apart:
        grad = torch.cat((dq, dk, dv), 2).flatten(2)
    else:
        dq = dq.reshape(s, b, groups, dq.shape[2] // groups, d)
        grad = torch.cat((dq, dk.unsqueeze(3), dv.unsqueeze(3)), 3).flatten(2)
    return grad, maxima_reference(grad)


@triton.jit
def place_of_head(head, heads, M: tl.constexpr, APART: tl.constexpr):
    """Of a head in the projection's order: its index among the queries, its group, and whether it is a query
    and whether a key."""
    if APART:
        groups = heads // (M + 2)
        query, behind = head, head - groups * M
        # keys, then values
        group, is_q, is_k = behind % groups, behind < 0, (behind >= 0) & (behind < groups)
    else:
        group, member = head // (M + 2), head % (M + 2)
        query, is_q, is_k = group * M + member, member < M, member == M
    return query, group, is_q, is_k


@triton.jit
def head_offsets(pid, heads, M: tl.constexpr, HEADS: tl.constexpr, APART: tl.constexpr):
    """Heads of a tile in the projection's order: index, query index, group, and which are q, k and v."""
    o_head = pid * HEADS + tl.arange(0, HEADS)
    o_query, o_group, m_q, m_k = place_of_head(o_head, heads, M, APART)
    m_head = o_head < heads
    return o_head, o_query, o_group, m_q & m_head, m_k & m_head, m_head & ~(m_q | m_k)


@triton.jit
def store_heads(b_x, p_q, p_k, p_v, m_q, m_k, m_v, o_d, m_d):
    """Stores channels `o_d` of each head where it belongs."""
    b_x = cast(b_x, p_q.dtype.element_ty)
    tl.store(p_q + o_d[None, :], b_x, mask=m_q[:, None] & m_d[None, :])
    tl.store(p_k + o_d[None, :], b_x, mask=m_k[:, None] & m_d[None, :])
    tl.store(p_v + o_d[None, :], b_x, mask=m_v[:, None] & m_d[None, :])


@triton.jit
def load_heads(p_q, p_k, p_v, m_q, m_k, m_v, o_d, m_d):
    """Channels `o_d` of each head, FP32; of a head's three masks at most one is true."""
    b_x = tl.load(p_q + o_d[None, :], mask=m_q[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    b_x += tl.load(p_k + o_d[None, :], mask=m_k[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    b_x += tl.load(p_v + o_d[None, :], mask=m_v[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    return b_x


@PreparedKernel
@triton.jit
def rotate_qkv_kernel(p_mixed, p_cos, p_sin, p_q, p_k, p_v, batch, heads, groups,
                      M: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr,
                      REST: tl.constexpr, HEADS: tl.constexpr, APART: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    o_head, o_query, o_group, m_q, m_k, m_v = head_offsets(tl.program_id(1), heads, M, HEADS, APART)
    p_x = p_mixed + (token * heads + o_head[:, None]) * D
    p_q += (token * groups * M + o_query[:, None]) * D
    p_k += (token * groups + o_group[:, None]) * D
    p_v += (token * groups + o_group[:, None]) * D
    m_head = (o_head < heads)[:, None]
    o_half = tl.arange(0, HALF)
    m_half = o_half < R // 2
    m_turns = (m_q | m_k)[:, None] & m_half[None, :]
    p_table = (token // batch) * R + o_half[None, :]
    b_1 = tl.load(p_x + o_half[None, :], mask=m_head & m_half[None, :], other=0.0).to(tl.float32)
    b_2 = tl.load(p_x + o_half[None, :] + R // 2, mask=m_head & m_half[None, :], other=0.0).to(tl.float32)
    b_cos_1 = tl.load(p_cos + p_table, mask=m_turns, other=1.0)
    b_sin_1 = tl.load(p_sin + p_table, mask=m_turns, other=0.0)
    b_cos_2 = tl.load(p_cos + p_table + R // 2, mask=m_turns, other=1.0)
    b_sin_2 = tl.load(p_sin + p_table + R // 2, mask=m_turns, other=0.0)
    store_heads(b_1 * b_cos_1 - b_2 * b_sin_1, p_q, p_k, p_v, m_q, m_k, m_v, o_half, m_half)
    store_heads(b_2 * b_cos_2 + b_1 * b_sin_2, p_q, p_k, p_v, m_q, m_k, m_v, o_half + R // 2, m_half)
    if REST > 0:
        o_rest = R + tl.arange(0, REST)
        b_rest = tl.load(p_x + o_rest[None, :], mask=m_head & (o_rest < D)[None, :], other=0.0)
        store_heads(b_rest.to(tl.float32), p_q, p_k, p_v, m_q, m_k, m_v, o_rest, o_rest < D)


@triton.jit
def turn_back(b_1, b_2, b_cos_1, b_sin_1, b_cos_2, b_sin_2):
    return b_1 * b_cos_1 + b_2 * b_sin_2, b_2 * b_cos_2 - b_1 * b_sin_1


@PreparedKernel
@triton.jit
def rotate_qkv_backward_kernel(p_dq, p_dk, p_dv, p_cos, p_sin, p_grad, p_maxima, batch, heads,
                               q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n,
                               M: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr,
                               REST: tl.constexpr, HEADS: tl.constexpr, APART: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    s, b = token // batch, token % batch
    o_head, o_query, o_group, m_q, m_k, m_v = head_offsets(tl.program_id(1), heads, M, HEADS, APART)
    p_q = p_dq + s * q_s + b * q_b + o_query[:, None] * q_n
    p_k = p_dk + s * k_s + b * k_b + o_group[:, None] * k_n
    p_v = p_dv + s * v_s + b * v_b + o_group[:, None] * v_n
    p_out = p_grad + (token * heads + o_head[:, None]) * D
    m_head = (o_head < heads)[:, None]
    o_half = tl.arange(0, HALF)
    m_half = o_half < R // 2
    m_turns = (m_q | m_k)[:, None] & m_half[None, :]
    p_table = s * R + o_half[None, :]
    b_1 = load_heads(p_q, p_k, p_v, m_q, m_k, m_v, o_half, m_half)
    b_2 = load_heads(p_q, p_k, p_v, m_q, m_k, m_v, o_half + R // 2, m_half)
    b_cos_1 = tl.load(p_cos + p_table, mask=m_turns, other=1.0)
    b_sin_1 = tl.load(p_sin + p_table, mask=m_turns, other=0.0)
    b_cos_2 = tl.load(p_cos + p_table + R // 2, mask=m_turns, other=1.0)
    b_sin_2 = tl.load(p_sin + p_table + R // 2, mask=m_turns, other=0.0)
    b_grad_1, b_grad_2 = turn_back(b_1, b_2, b_cos_1, b_sin_1, b_cos_2, b_sin_2)
    b_grad_1 = cast(b_grad_1, p_grad.dtype.element_ty)
    b_grad_2 = cast(b_grad_2, p_grad.dtype.element_ty)
    tl.store(p_out + o_half[None, :], b_grad_1, mask=m_head & m_half[None, :])
    tl.store(p_out + o_half[None, :] + R // 2, b_grad_2, mask=m_head & m_half[None, :])
    largest = tl.maximum(finite_max(b_grad_1), finite_max(b_grad_2))
    if REST > 0:
        o_rest = R + tl.arange(0, REST)
        b_rest = load_heads(p_q, p_k, p_v, m_q, m_k, m_v, o_rest, o_rest < D)
        b_rest = cast(b_rest, p_grad.dtype.element_ty)
        tl.store(p_out + o_rest[None, :], b_rest, mask=m_head & (o_rest < D)[None, :])
        largest = tl.maximum(largest, finite_max(b_rest))
    tl.store(p_maxima + token * tl.num_programs(1) + tl.program_id(1), largest)


@triton.jit
def store_codes(b_grad, b_words, p_rows, o_row, o_channel, m_x, scale, i, DTYPE: tl.constexpr,
                E5M2: tl.constexpr):  # fmt: skip
    """Stores a tile of FP8 codes by rows if asked for, and adds it to words of four rows."""
    b_rounded = round_to(b_grad, DTYPE)
    if p_rows is not None:
        b_codes = to_tensor_codes(b_rounded, scale, E5M2)
        tl.store(p_rows + o_row[:, None] + o_channel[None, :], b_codes, mask=m_x)
    return b_words | (to_tensor_words(b_rounded, scale, E5M2) << (8 * i))


@triton.jit
def finite_abs(b_grad, DTYPE: tl.constexpr):
    """Magnitudes of what would be stored; NaN, which maxima pass over, where not finite."""
    return tl.abs(finite_or_nan(round_to(b_grad, DTYPE)))


@PreparedKernel
@triton.jit
def rotate_qkv_operands_kernel(p_dq, p_dk, p_dv, p_cos, p_sin, p_rows, p_columns, p_sums, p_maxima,
                               p_predicted, p_used, p_found, found, p_largest, p_true,
                               tokens, batch, heads, padded, tiles,
                               q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n,
                               M: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr,
                               REST: tl.constexpr, HEADS: tl.constexpr, APART: tl.constexpr,
                               TOKENS: tl.constexpr, E5M2: tl.constexpr):  # fmt: skip
    """FP8 codes of the gradient by rows [tokens, heads * D] and columns, and sums of columns over the tokens
    of each tile, as asked for."""
    DTYPE: tl.constexpr = p_dq.dtype.element_ty
    scale, todo = scale_and_tiles(p_predicted, p_used, p_found, found, p_largest, p_true, tiles, E5M2)
    across = tl.cdiv(heads, HEADS)
    o_half = tl.arange(0, HALF)
    m_half = o_half < R // 2
    # a dimension of zero elements cannot be
    WIDTH: tl.constexpr = REST if REST > 0 else 1
    o_rest = R + tl.arange(0, WIDTH)
    for tile in range(tl.program_id(0), todo, tl.num_programs(0)):
        o_word = (tile // across) * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
        first = tile % across * HEADS
        b_most = tl.zeros([TOKENS // 4], dtype=tl.float32)
        # the heads of a program read the same angles, which stay in the cache
        for head in range(first, tl.minimum(first + HEADS, heads)):
            query, group, is_q, is_k = place_of_head(head, heads, M, APART)
            p_x = tl.where(is_q, p_dq, tl.where(is_k, p_dk, p_dv))
            x_s = tl.where(is_q, q_s, tl.where(is_k, k_s, v_s)).to(tl.int64)
            x_b = tl.where(is_q, q_b, tl.where(is_k, k_b, v_b)).to(tl.int64)
            x_n = tl.where(is_q, q_n, tl.where(is_k, k_n, v_n)).to(tl.int64)
            p_x += tl.where(is_q, query, group) * x_n
            b_words_1 = tl.zeros([TOKENS // 4, HALF], dtype=tl.int32)
            b_words_2 = tl.zeros([TOKENS // 4, HALF], dtype=tl.int32)
            b_words_3 = tl.zeros([TOKENS // 4, WIDTH], dtype=tl.int32)
            b_sums_1 = tl.zeros([TOKENS // 4, HALF], dtype=tl.float32)
            b_sums_2 = tl.zeros([TOKENS // 4, HALF], dtype=tl.float32)
            b_sums_3 = tl.zeros([TOKENS // 4, WIDTH], dtype=tl.float32)
            for i in tl.static_range(4):
                o_token = o_word * 4 + i
                m_token = o_token < tokens
                o_s = o_token // batch
                o_x = o_s * x_s + (o_token % batch) * x_b
                m_x = m_token[:, None] & m_half[None, :]
                m_turns = m_x & (is_q | is_k)
                b_1 = tl.load(p_x + o_x[:, None] + o_half[None, :], mask=m_x, other=0.0).to(tl.float32)
                b_2 = tl.load(p_x + o_x[:, None] + (R // 2 + o_half)[None, :], mask=m_x, other=0.0)
                b_2 = b_2.to(tl.float32)
                p_table = o_s[:, None] * R + o_half[None, :]
                b_cos_1 = tl.load(p_cos + p_table, mask=m_turns, other=1.0)
                b_sin_1 = tl.load(p_sin + p_table, mask=m_turns, other=0.0)
                b_cos_2 = tl.load(p_cos + p_table + R // 2, mask=m_turns, other=1.0)
                b_sin_2 = tl.load(p_sin + p_table + R // 2, mask=m_turns, other=0.0)
                b_1, b_2 = turn_back(b_1, b_2, b_cos_1, b_sin_1, b_cos_2, b_sin_2)
                b_abs = tl.maximum(finite_abs(b_1, DTYPE), finite_abs(b_2, DTYPE))
                b_most = tl.maximum(b_most, tl.max(b_abs, axis=1))
                if p_sums is not None:
                    b_sums_1 += round_to(b_1, DTYPE)
                    b_sums_2 += round_to(b_2, DTYPE)
                o_row = (o_token.to(tl.int64) * heads + head) * D
                b_words_1 = store_codes(b_1, b_words_1, p_rows, o_row, o_half, m_x, scale, i, DTYPE, E5M2)
                b_words_2 = store_codes(b_2, b_words_2, p_rows, o_row, R // 2 + o_half, m_x, scale, i, DTYPE,
                                        E5M2)  # fmt: skip
                if REST > 0:
                    m_x = m_token[:, None] & (o_rest < D)[None, :]
                    b_3 = tl.load(p_x + o_x[:, None] + o_rest[None, :], mask=m_x, other=0.0).to(tl.float32)
                    b_most = tl.maximum(b_most, tl.max(finite_abs(b_3, DTYPE), axis=1))
                    if p_sums is not None:
                        b_sums_3 += b_3
                    b_words_3 = store_codes(b_3, b_words_3, p_rows, o_row, o_rest, m_x, scale, i, DTYPE, E5M2)
            if p_columns is not None:
                p_head = p_columns + tl.cast(head * D, tl.int64) * (padded // 4)
                o_channel = o_half.to(tl.int64)
                store_words(p_head, b_words_1, o_word, o_channel, R // 2, padded, False)
                p_second = p_head + (R // 2) * (padded // 4)
                store_words(p_second, b_words_2, o_word, o_channel, R // 2, padded, False)
                if REST > 0:
                    store_words(p_head, b_words_3, o_word, o_rest.to(tl.int64), D, padded, False)
            if p_sums is not None:
                p_head_sums = p_sums + ((tile // across).to(tl.int64) * heads + head) * D
                tl.store(p_head_sums + o_half, tl.sum(b_sums_1, axis=0), mask=m_half)
                tl.store(p_head_sums + R // 2 + o_half, tl.sum(b_sums_2, axis=0), mask=m_half)
                if REST > 0:
                    tl.store(p_head_sums + o_rest, tl.sum(b_sums_3, axis=0), mask=o_rest < D)
        if p_maxima is not None:
            tl.store(p_maxima + tile, tl.max(b_most, axis=0))


@functools.cache
def _tile(d: int, r: int, heads: int, apart: bool) -> dict[str, int]:
    rest = next_power_of_2(d - r) if d > r else 0
    half = next_power_of_2(r // 2)
    return {"D": d, "R": r, "HALF": half, "REST": rest, "HEADS": heads, "APART": apart}


def _empty_qkv(mixed: torch.Tensor, groups: int, d: int):
    s, b, width = mixed.shape
    q = mixed.new_empty(s, b, width // d - 2 * groups, d)
    return q, mixed.new_empty(s, b, groups, d), mixed.new_empty(s, b, groups, d)


def rotate_qkv_triton(mixed, cos, sin, groups: int, d: int, apart: bool = False):
    """`rotate_qkv_reference` as a kernel; `mixed` is contiguous."""
    s, b, width = mixed.shape
    heads = width // d
    q, k, v = _empty_qkv(mixed, groups, d)
    rotate_qkv_kernel[s * b, cdiv(heads, HEADS)](
        mixed,
        cos,
        sin,
        q,
        k,
        v,
        b,
        heads,
        groups,
        M=heads // groups - 2,
        **_tile(d, cos.shape[1], HEADS, apart),
    )
    return q, k, v


def rotate_qkv_backward_triton(dq, dk, dv, cos, sin, apart: bool = False):
    """`rotate_qkv_backward_reference` as a kernel, with one maximum for each tile."""
    s, b, groups, d = dk.shape
    dq, dk, dv = [t if t.stride(3) == 1 else t.contiguous() for t in (dq, dk, dv)]
    m = dq.shape[2] // groups
    heads = groups * (m + 2)
    grad = dq.new_empty(s, b, heads * d)
    grid = s * b, cdiv(heads, BACKWARD_HEADS)
    maxima = torch.empty(grid[0] * grid[1], dtype=torch.float32, device=dq.device)
    strides = (stride for t in (dq, dk, dv) for stride in t.stride()[:3])
    rotate_qkv_backward_kernel[grid](
        dq,
        dk,
        dv,
        cos,
        sin,
        grad,
        maxima,
        b,
        heads,
        *strides,
        M=m,
        **_tile(d, cos.shape[1], BACKWARD_HEADS, apart),
    )
    return grad, maxima


def _launch_operands(
    dq, dk, dv, cos, sin, out: Quantized, scales: Scales, apart: bool = False
) -> torch.Tensor | None:
    """Writes the operands of the gradient; the first launch writes sums and returns maxima."""
    s, b, groups, d = dk.shape
    m = dq.shape[2] // groups
    heads, tokens = groups * (m + 2), s * b
    down, across = tiling(tokens, heads, OPERANDS_TOKENS, OPERANDS_HEADS)
    tiles = down * across
    first = scales.maxima is None
    maxima = torch.empty(tiles, dtype=torch.float32, device=dq.device) if first else None
    sums = first and out.sums is not None
    partial = out.sums.new_empty(down, heads * d) if sums else None
    rotate_qkv_operands_kernel[(scales.programs(tiles),)](
        dq,
        dk,
        dv,
        cos,
        sin,
        None if out.rows is None else out.rows.view(torch.uint8),
        None if out.columns is None else out.columns.view(torch.int32),
        partial,
        maxima,
        *scales,
        tokens,
        b,
        heads,
        tokens + -tokens % ALIGNMENT,
        tiles,
        *dq.stride()[:3],
        *dk.stride()[:3],
        *dv.stride()[:3],
        M=m,
        **_tile(d, cos.shape[1], OPERANDS_HEADS, apart),
        TOKENS=OPERANDS_TOKENS,
        E5M2=out.is_e5m2,
        num_warps=OPERANDS_WARPS,
        maxnreg=OPERANDS_REGISTERS,
    )
    if partial is not None:
        torch.sum(partial, 0, out=out.sums)
    return maxima


def _deferred_backward(dq, dk, dv, cos, sin, scale: PredictedScale) -> Deferred:
    """The gradient of the projection's output, of which nothing is written now."""
    dq, dk, dv = [t if t.stride(3) == 1 else t.contiguous() for t in (dq, dk, dv)]
    s, b, groups, d = dk.shape
    width = (dq.shape[2] + 2 * groups) * d

    def make(*inputs):
        return rotate_qkv_backward(*inputs)[0].view(s * b, width)

    source = Source((dq, dk, dv, cos, sin), make, _launch_operands, scale, (s * b, width), dq.dtype)
    return Deferred(source, (s, b, width))


def rotate_qkv_backward_operands(
    dq, dk, dv, cos, sin, scale: PredictedScale, sums: bool, apart: bool = False
) -> Quantized:
    """The gradient of the projection's output [s * b, width] as FP8 rows and columns alone, and the `sums` of
    its columns."""
    dq, dk, dv = [t if t.stride(3) == 1 else t.contiguous() for t in (dq, dk, dv)]
    s, b, groups, d = dk.shape
    width = (dq.shape[2] + 2 * groups) * d
    if uses_kernels(dq):
        write = functools.partial(_launch_operands, dq, dk, dv, cos, sin, apart=apart)
    else:
        grad, _ = rotate_qkv_backward_reference(dq, dk, dv, cos, sin, apart)
        write = functools.partial(write_reference, grad.view(s * b, width), fmt=scale.fmt)
    attempt = Attempt(write, scale, s * b, width, dq.device, rows=True, columns=True, sums=sums)
    return attempt.finish(None, finds_largest=False)[0]


@compilable(lambda mixed, cos, sin, groups, d, apart=False: _empty_qkv(mixed, groups, d))
def rotate_qkv_forward(
    mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, groups: int, d: int, apart: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """CUDA tensors take the kernel, others the reference."""
    run = rotate_qkv_triton if uses_kernels(mixed) else rotate_qkv_reference
    return run(mixed, cos, sin, groups, d, apart)


def _backward_fake(dq, dk, dv, cos, sin, apart=False):
    s, b, groups, d = dk.shape
    programs = s * b * cdiv(dq.shape[2] + 2 * groups, BACKWARD_HEADS) if uses_kernels(dq) else 1
    maxima = dq.new_empty(programs, dtype=torch.float32)
    return dq.new_empty(s, b, (dq.shape[2] + 2 * groups) * d), maxima


@compilable(_backward_fake)
def rotate_qkv_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    apart: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """CUDA tensors take the kernel, others the reference."""
    backward = rotate_qkv_backward_triton if uses_kernels(dq) else rotate_qkv_backward_reference
    return backward(dq, dk, dv, cos, sin, apart)


class _RotateQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mixed, cos, sin, groups, d, grad_scale):
        ctx.save_for_backward(cos, sin)
        ctx.grad_scale = grad_scale
        return rotate_qkv_forward(mixed.contiguous(), cos, sin, groups, d)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        nothing = (None,) * 5
        if ctx.grad_scale is not None and not torch.compiler.is_compiling():
            return _deferred_backward(dq, dk, dv, *ctx.saved_tensors, ctx.grad_scale), *nothing
        grad, maxima = rotate_qkv_backward(dq, dk, dv, *ctx.saved_tensors)
        return with_maxima(grad, maxima), *nothing


def rotate_qkv(
    mixed: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    groups: int,
    d: int,
    *,
    grad_scale: PredictedScale | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits the output of a fused projection and rotates its queries and keys.

    mixed [s, b, groups * (m + 2) * d] in BF16 or FP32: in each group m queries, a key and a value;
    cos, sin: FP32 [s, r], r even and at most d: channel i turns with channel i + r / 2, others stay; with r 0
    (and any s) it only splits;
    grad_scale: defer the gradient of mixed, which then goes straight into the FP8 products of the projection;
    the caller's, one for every call site. Not used while a model is compiled.
    Returns q [s, b, groups * m, d], k and v [s, b, groups, d]. Kept for backward are cos and sin.
    Raises ValueError for shapes that do not belong together.
    """
    s, b, width = mixed.shape
    r = cos.shape[-1]
    if cos.shape != sin.shape or cos.ndim != 2 or (r and cos.shape[0] != s) or r % 2 or r > d:
        raise ValueError(
            f"rotate_qkv: expected cosines and sines of shape [{s}, r], r even and at most {d}; found "
            f"{list(cos.shape)} and {list(sin.shape)}"
        )
    if width % (groups * d) or width < 3 * groups * d:
        raise ValueError(
            f"rotate_qkv: expected a multiple of {groups} groups x {d} channels, at least three times that; "
            f"found {width} columns"
        )
    if torch.compiler.is_compiling():
        grad_scale = None
    return _RotateQKV.apply(mixed, cos, sin, groups, d, grad_scale)
