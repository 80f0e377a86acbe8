"""Rotary positions, in one pass forward and one backward."""

import functools

import torch
import triton
import triton.language as tl

from coat_kernels.fp8 import ALIGNMENT, cast, round_to
from coat_kernels.prepared import PreparedKernel, cdiv, next_power_of_2, tiling
from coat_kernels.tensorwise.quantize import Quantized, to_tensor_codes, to_tensor_words
from coat_kernels.tensorwise.scale import Scales, scale_and_tiles
from coat_kernels.tensorwise.transpose import store_words
from coat_kernels.tiles import finite_abs, finite_max

# heads per tile, forward and backward
HEADS, BACKWARD_HEADS = 8, 16
# tokens (a multiple of 16), heads and warps of a program that writes FP8 codes, and its registers per thread:
# with 128, four programs fit on a multiprocessor; without a limit, a program that sums takes up to 189
OPERANDS_TOKENS, OPERANDS_HEADS, OPERANDS_WARPS, OPERANDS_REGISTERS = 64, 8, 4, 128


@triton.jit
def place_of_head(head, heads, M: tl.constexpr, STACKED: tl.constexpr):
    """The place of a head in the projection's order: its index among the queries, its group, whether it is a
    query, and whether it is a key."""
    if STACKED:
        kv_groups = heads // (M + 2)
        query, behind = head, head - kv_groups * M
        # keys, then values
        group, is_q, is_k = behind % kv_groups, behind < 0, (behind >= 0) & (behind < kv_groups)
    else:
        group, member = head // (M + 2), head % (M + 2)
        query, is_q, is_k = group * M + member, member < M, member == M
    return query, group, is_q, is_k


@triton.jit
def head_offsets(pid, heads, M: tl.constexpr, HEADS: tl.constexpr, STACKED: tl.constexpr):
    """The heads of a tile in the projection's order: index, query index, group, and masks of q, k and v."""
    o_head = pid * HEADS + tl.arange(0, HEADS)
    o_query, o_group, m_q, m_k = place_of_head(o_head, heads, M, STACKED)
    m_head = o_head < heads
    return o_head, o_query, o_group, m_q & m_head, m_k & m_head, m_head & ~(m_q | m_k)


@triton.jit
def store_heads(b_x, p_q, p_k, p_v, m_q, m_k, m_v, o_d, m_d):
    """Stores channels `o_d` of each head in its tensor."""
    b_x = cast(b_x, p_q.dtype.element_ty)
    tl.store(p_q + o_d[None, :], b_x, mask=m_q[:, None] & m_d[None, :])
    tl.store(p_k + o_d[None, :], b_x, mask=m_k[:, None] & m_d[None, :])
    tl.store(p_v + o_d[None, :], b_x, mask=m_v[:, None] & m_d[None, :])


@triton.jit
def load_heads(p_q, p_k, p_v, m_q, m_k, m_v, o_d, m_d):
    """Channels `o_d` of each head, FP32; at most one of a head's three masks is true."""
    b_x = tl.load(p_q + o_d[None, :], mask=m_q[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    b_x += tl.load(p_k + o_d[None, :], mask=m_k[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    b_x += tl.load(p_v + o_d[None, :], mask=m_v[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    return b_x


@triton.jit
def load_tables(p_cos, p_sin, o_table, m_turns, D: tl.constexpr):
    """Cosines and sines of the first half of the channels and of their partners; masked channels have an
    angle of 0."""
    b_cos_1 = tl.load(p_cos + o_table, mask=m_turns, other=1.0)
    b_sin_1 = tl.load(p_sin + o_table, mask=m_turns, other=0.0)
    b_cos_2 = tl.load(p_cos + o_table + D // 2, mask=m_turns, other=1.0)
    b_sin_2 = tl.load(p_sin + o_table + D // 2, mask=m_turns, other=0.0)
    return b_cos_1, b_sin_1, b_cos_2, b_sin_2


@PreparedKernel
@triton.jit
def rotate_qkv_kernel(p_mixed, p_cos, p_sin, p_q, p_k, p_v, batch, heads, kv_groups,
                      M: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, TURNS: tl.constexpr,
                      HEADS: tl.constexpr, STACKED: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    o_head, o_query, o_group, m_q, m_k, m_v = head_offsets(tl.program_id(1), heads, M, HEADS, STACKED)
    p_x = p_mixed + (token * heads + o_head[:, None]) * D
    p_q += (token * kv_groups * M + o_query[:, None]) * D
    p_k += (token * kv_groups + o_group[:, None]) * D
    p_v += (token * kv_groups + o_group[:, None]) * D
    m_head = (o_head < heads)[:, None]
    o_half = tl.arange(0, HALF)
    m_half = o_half < D // 2
    b_1 = tl.load(p_x + o_half[None, :], mask=m_head & m_half[None, :], other=0.0).to(tl.float32)
    b_2 = tl.load(p_x + o_half[None, :] + D // 2, mask=m_head & m_half[None, :], other=0.0).to(tl.float32)
    if TURNS:
        o_table = (token // batch) * D + o_half[None, :]
        m_turns = (m_q | m_k)[:, None] & m_half[None, :]
        b_cos_1, b_sin_1, b_cos_2, b_sin_2 = load_tables(p_cos, p_sin, o_table, m_turns, D)
        b_1, b_2 = b_1 * b_cos_1 - b_2 * b_sin_1, b_2 * b_cos_2 + b_1 * b_sin_2
    store_heads(b_1, p_q, p_k, p_v, m_q, m_k, m_v, o_half, m_half)
    store_heads(b_2, p_q, p_k, p_v, m_q, m_k, m_v, o_half + D // 2, m_half)


@triton.jit
def turn_back(b_1, b_2, b_cos_1, b_sin_1, b_cos_2, b_sin_2):
    return b_1 * b_cos_1 + b_2 * b_sin_2, b_2 * b_cos_2 - b_1 * b_sin_1


@PreparedKernel
@triton.jit
def rotate_qkv_backward_kernel(p_dq, p_dk, p_dv, p_cos, p_sin, p_grad, p_maxima, batch, heads,
                               q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n,
                               M: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, TURNS: tl.constexpr,
                               HEADS: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    s, b = token // batch, token % batch
    o_head, o_query, o_group, m_q, m_k, m_v = head_offsets(tl.program_id(1), heads, M, HEADS, False)
    p_q = p_dq + s * q_s + b * q_b + o_query[:, None] * q_n
    p_k = p_dk + s * k_s + b * k_b + o_group[:, None] * k_n
    p_v = p_dv + s * v_s + b * v_b + o_group[:, None] * v_n
    p_out = p_grad + (token * heads + o_head[:, None]) * D
    m_head = (o_head < heads)[:, None]
    o_half = tl.arange(0, HALF)
    m_half = o_half < D // 2
    b_1 = load_heads(p_q, p_k, p_v, m_q, m_k, m_v, o_half, m_half)
    b_2 = load_heads(p_q, p_k, p_v, m_q, m_k, m_v, o_half + D // 2, m_half)
    if TURNS:
        m_turns = (m_q | m_k)[:, None] & m_half[None, :]
        b_cos_1, b_sin_1, b_cos_2, b_sin_2 = load_tables(p_cos, p_sin, s * D + o_half[None, :], m_turns, D)
        b_1, b_2 = turn_back(b_1, b_2, b_cos_1, b_sin_1, b_cos_2, b_sin_2)
    b_1 = cast(b_1, p_grad.dtype.element_ty)
    b_2 = cast(b_2, p_grad.dtype.element_ty)
    tl.store(p_out + o_half[None, :], b_1, mask=m_head & m_half[None, :])
    tl.store(p_out + o_half[None, :] + D // 2, b_2, mask=m_head & m_half[None, :])
    amax = tl.maximum(finite_max(b_1), finite_max(b_2))
    tl.store(p_maxima + token * tl.num_programs(1) + tl.program_id(1), amax)


@triton.jit
def store_codes(b_grad, b_words, p_rows, o_row, o_channel, m_x, scale, i, DTYPE: tl.constexpr,
                E5M2: tl.constexpr):  # fmt: skip
    """Stores a tile of row-major FP8 codes, if requested, and adds it to words of four rows."""
    b_rounded = round_to(b_grad, DTYPE)
    if p_rows is not None:
        b_codes = to_tensor_codes(b_rounded, scale, E5M2)
        tl.store(p_rows + o_row[:, None] + o_channel[None, :], b_codes, mask=m_x)
    return b_words | (to_tensor_words(b_rounded, scale, E5M2) << (8 * i))


@PreparedKernel
@triton.jit
def rotate_qkv_operands_kernel(p_dq, p_dk, p_dv, p_cos, p_sin, p_rows, p_columns, p_sums, p_maxima,
                               p_predicted, p_used, p_found, found, p_amax, p_true,
                               tokens, batch, heads, padded, tiles,
                               q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n,
                               M: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
                               TURNS: tl.constexpr, HEADS: tl.constexpr, STACKED: tl.constexpr,
                               TOKENS: tl.constexpr, E5M2: tl.constexpr):  # fmt: skip
    """Writes row-major [tokens, heads * D] and column-major FP8 codes of the gradient, and its column sums
    over the tokens of each tile, as requested."""
    DTYPE: tl.constexpr = p_dq.dtype.element_ty
    scale, todo = scale_and_tiles(p_predicted, p_used, p_found, found, p_amax, p_true, tiles, E5M2)
    across = tl.cdiv(heads, HEADS)
    o_half = tl.arange(0, HALF)
    m_half = o_half < D // 2
    for tile in range(tl.program_id(0), todo, tl.num_programs(0)):
        o_word = (tile // across) * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
        first = tile % across * HEADS
        b_most = tl.zeros([TOKENS // 4], dtype=tl.float32)
        # all heads of a program read the same angles, which stay in the cache
        for head in range(first, tl.minimum(first + HEADS, heads)):
            query, group, is_q, is_k = place_of_head(head, heads, M, STACKED)
            p_x = tl.where(is_q, p_dq, tl.where(is_k, p_dk, p_dv))
            x_s = tl.where(is_q, q_s, tl.where(is_k, k_s, v_s)).to(tl.int64)
            x_b = tl.where(is_q, q_b, tl.where(is_k, k_b, v_b)).to(tl.int64)
            x_n = tl.where(is_q, q_n, tl.where(is_k, k_n, v_n)).to(tl.int64)
            p_x += tl.where(is_q, query, group) * x_n
            b_words_1 = tl.zeros([TOKENS // 4, HALF], dtype=tl.int32)
            b_words_2 = tl.zeros([TOKENS // 4, HALF], dtype=tl.int32)
            b_sums_1 = tl.zeros([TOKENS // 4, HALF], dtype=tl.float32)
            b_sums_2 = tl.zeros([TOKENS // 4, HALF], dtype=tl.float32)
            for i in tl.static_range(4):
                o_token = o_word * 4 + i
                m_token = o_token < tokens
                o_s = o_token // batch
                o_x = o_s * x_s + (o_token % batch) * x_b
                m_x = m_token[:, None] & m_half[None, :]
                b_1 = tl.load(p_x + o_x[:, None] + o_half[None, :], mask=m_x, other=0.0).to(tl.float32)
                b_2 = tl.load(p_x + o_x[:, None] + (D // 2 + o_half)[None, :], mask=m_x, other=0.0)
                b_2 = b_2.to(tl.float32)
                if TURNS:
                    o_table = o_s[:, None] * D + o_half[None, :]
                    m_turns = m_x & (is_q | is_k)
                    b_cos_1, b_sin_1, b_cos_2, b_sin_2 = load_tables(p_cos, p_sin, o_table, m_turns, D)
                    b_1, b_2 = turn_back(b_1, b_2, b_cos_1, b_sin_1, b_cos_2, b_sin_2)
                b_abs = tl.maximum(finite_abs(round_to(b_1, DTYPE)), finite_abs(round_to(b_2, DTYPE)))
                b_most = tl.maximum(b_most, tl.max(b_abs, axis=1))
                if p_sums is not None:
                    b_sums_1 += round_to(b_1, DTYPE)
                    b_sums_2 += round_to(b_2, DTYPE)
                o_row = (o_token.to(tl.int64) * heads + head) * D
                b_words_1 = store_codes(b_1, b_words_1, p_rows, o_row, o_half, m_x, scale, i, DTYPE, E5M2)
                b_words_2 = store_codes(b_2, b_words_2, p_rows, o_row, D // 2 + o_half, m_x, scale, i, DTYPE,
                                        E5M2)  # fmt: skip
            if p_columns is not None:
                p_head = p_columns + tl.cast(head * D, tl.int64) * (padded // 4)
                o_channel = o_half.to(tl.int64)
                store_words(p_head, b_words_1, o_word, o_channel, D // 2, padded, False)
                p_second = p_head + (D // 2) * (padded // 4)
                store_words(p_second, b_words_2, o_word, o_channel, D // 2, padded, False)
            if p_sums is not None:
                p_head_sums = p_sums + ((tile // across).to(tl.int64) * heads + head) * D
                tl.store(p_head_sums + o_half, tl.sum(b_sums_1, axis=0), mask=m_half)
                tl.store(p_head_sums + D // 2 + o_half, tl.sum(b_sums_2, axis=0), mask=m_half)
        if p_maxima is not None:
            tl.store(p_maxima + tile, tl.max(b_most, axis=0))


@functools.cache
def _tile(d: int, r: int, heads: int) -> dict[str, int]:
    """Constants for heads of `d` channels; the number `r` of rotating channels is d or 0."""
    return {"D": d, "HALF": next_power_of_2(d // 2), "TURNS": r > 0, "HEADS": heads}


def empty_qkv(mixed: torch.Tensor, kv_groups: int, d: int):
    s, b, width = mixed.shape
    q = mixed.new_empty(s, b, width // d - 2 * kv_groups, d)
    return q, mixed.new_empty(s, b, kv_groups, d), mixed.new_empty(s, b, kv_groups, d)


def rotate_qkv_triton(mixed, cos, sin, kv_groups: int, d: int, stacked: bool = False):
    """`rotate_qkv_reference` as a kernel; `mixed` is contiguous."""
    s, b, width = mixed.shape
    heads = width // d
    q, k, v = empty_qkv(mixed, kv_groups, d)
    rotate_qkv_kernel[s * b, cdiv(heads, HEADS)](
        mixed,
        cos,
        sin,
        q,
        k,
        v,
        b,
        heads,
        kv_groups,
        M=heads // kv_groups - 2,
        **_tile(d, cos.shape[1], HEADS),
        STACKED=stacked,
    )
    return q, k, v


def rotate_qkv_backward_triton(dq, dk, dv, cos, sin):
    """`rotate_qkv_backward_reference` as a kernel, with one maximum per tile."""
    s, b, kv_groups, d = dk.shape
    dq, dk, dv = [t if t.stride(3) == 1 else t.contiguous() for t in (dq, dk, dv)]
    m = dq.shape[2] // kv_groups
    heads = kv_groups * (m + 2)
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
        **_tile(d, cos.shape[1], BACKWARD_HEADS),
    )
    return grad, maxima


def launch_operands(
    dq, dk, dv, cos, sin, out: Quantized, scales: Scales, stacked: bool = False
) -> torch.Tensor | None:
    """Writes the FP8 codes of the gradient. The first launch also writes column sums and returns maxima."""
    s, b, kv_groups, d = dk.shape
    m = dq.shape[2] // kv_groups
    heads, tokens = kv_groups * (m + 2), s * b
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
        **_tile(d, cos.shape[1], OPERANDS_HEADS),
        STACKED=stacked,
        TOKENS=OPERANDS_TOKENS,
        E5M2=out.is_e5m2,
        num_warps=OPERANDS_WARPS,
        maxnreg=OPERANDS_REGISTERS,
    )
    if partial is not None:
        torch.sum(partial, 0, out=out.sums)
    return maxima
