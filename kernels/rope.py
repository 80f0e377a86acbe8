"""Rotary positions (RoFormer, arXiv 2104.09864, equation 34, in halves) between a fused query-key-value
projection and attention, in one pass each way.

Of the projection's output [s, b, groups * (m + 2) * d], each group holds m query heads, a key and a value.
Forward rotates queries and keys and writes the three apart. Backward takes their gradients in whatever layout
attention left them, writes the gradient of the projection's output and finds its maxima on the way.
"""

import torch
import triton
import triton.language as tl

from coat_kernels.fp8 import cast, uses_kernels
from coat_kernels.ops import compilable
from coat_kernels.origin import with_maxima
from coat_kernels.tensorwise import finite_max, maxima_reference

# heads of a program's tile, forward and backward
HEADS, BACKWARD_HEADS = 8, 16


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


def rotate_qkv_reference(mixed, cos, sin, groups: int, d: int):
    """mixed [s, b, groups * (m + 2) * d] -> q [s, b, groups * m, d], k and v [s, b, groups, d]."""
    heads = mixed.unflatten(2, (groups, -1, d))
    q, k, v = (part.flatten(2, 3) for part in heads.split((heads.shape[3] - 2, 1, 1), dim=3))
    return rotate(q, cos, sin), rotate(k, cos, sin), v.clone()


def rotate_qkv_backward_reference(dq, dk, dv, cos, sin):
    """The gradients of `rotate_qkv_reference`'s results -> the gradient of mixed, its maxima."""
    s, b, groups, d = dk.shape
    dq, dk = rotate_back(dq, cos, sin), rotate_back(dk, cos, sin)
    grad = torch.cat((dq.reshape(s, b, groups, -1, d), dk.unsqueeze(3), dv.unsqueeze(3)), 3).flatten(2)
    return grad, maxima_reference(grad)


@triton.jit
def head_offsets(pid, heads, M: tl.constexpr, HEADS: tl.constexpr):
    """Heads of a tile in the projection's order: index, query index, group, and which are q, k and v."""
    o_head = pid * HEADS + tl.arange(0, HEADS)
    group, member = o_head // (M + 2), o_head % (M + 2)
    m_head = o_head < heads
    return (o_head, group * M + member, group, (member < M) & m_head, (member == M) & m_head,
            (member == M + 1) & m_head)  # fmt: skip


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


@triton.jit
def rotate_qkv_kernel(p_mixed, p_cos, p_sin, p_q, p_k, p_v, batch, heads, groups,
                      M: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr,
                      REST: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    o_head, o_query, o_group, m_q, m_k, m_v = head_offsets(tl.program_id(1), heads, M, HEADS)
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
def rotate_qkv_backward_kernel(p_dq, p_dk, p_dv, p_cos, p_sin, p_grad, p_maxima, batch, heads,
                               q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n,
                               M: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr,
                               REST: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    s, b = token // batch, token % batch
    o_head, o_query, o_group, m_q, m_k, m_v = head_offsets(tl.program_id(1), heads, M, HEADS)
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
    b_grad_1 = cast(b_1 * b_cos_1 + b_2 * b_sin_2, p_grad.dtype.element_ty)
    b_grad_2 = cast(b_2 * b_cos_2 - b_1 * b_sin_1, p_grad.dtype.element_ty)
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


def _tile(d: int, r: int, heads: int) -> dict[str, int]:
    rest = triton.next_power_of_2(d - r) if d > r else 0
    half = max(triton.next_power_of_2(r // 2), 1)
    return {"D": d, "R": r, "HALF": half, "REST": rest, "HEADS": heads}


def _empty_qkv(mixed: torch.Tensor, groups: int, d: int):
    s, b, width = mixed.shape
    return tuple(mixed.new_empty(s, b, n, d) for n in (width // d - 2 * groups, groups, groups))


def rotate_qkv_triton(mixed, cos, sin, groups: int, d: int):
    """`rotate_qkv_reference` as a kernel; `mixed` is contiguous."""
    s, b, width = mixed.shape
    heads = width // d
    q, k, v = _empty_qkv(mixed, groups, d)
    with torch.cuda.device_of(mixed):
        rotate_qkv_kernel[s * b, triton.cdiv(heads, HEADS)](
            mixed, cos, sin, q, k, v, b, heads, groups, M=heads // groups - 2, **_tile(d, cos.shape[1], HEADS)
        )
    return q, k, v


def rotate_qkv_backward_triton(dq, dk, dv, cos, sin):
    """`rotate_qkv_backward_reference` as a kernel, with one maximum for each tile."""
    s, b, groups, d = dk.shape
    dq, dk, dv = (t if t.stride(3) == 1 else t.contiguous() for t in (dq, dk, dv))
    m = dq.shape[2] // groups
    heads = groups * (m + 2)
    grad = dq.new_empty(s, b, heads * d)
    grid = s * b, triton.cdiv(heads, BACKWARD_HEADS)
    maxima = torch.empty(grid[0] * grid[1], dtype=torch.float32, device=dq.device)
    strides = (stride for t in (dq, dk, dv) for stride in t.stride()[:3])
    with torch.cuda.device_of(grad):
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


@compilable(lambda mixed, cos, sin, groups, d: _empty_qkv(mixed, groups, d))
def rotate_qkv_forward(
    mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, groups: int, d: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """CUDA tensors take the kernel, others the reference."""
    return (rotate_qkv_triton if uses_kernels(mixed) else rotate_qkv_reference)(mixed, cos, sin, groups, d)


def _backward_fake(dq, dk, dv, cos, sin):
    s, b, groups, d = dk.shape
    programs = s * b * triton.cdiv(dq.shape[2] + 2 * groups, BACKWARD_HEADS) if uses_kernels(dq) else 1
    maxima = dq.new_empty(programs, dtype=torch.float32)
    return dq.new_empty(s, b, (dq.shape[2] + 2 * groups) * d), maxima


@compilable(_backward_fake)
def rotate_qkv_backward(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """CUDA tensors take the kernel, others the reference."""
    backward = rotate_qkv_backward_triton if uses_kernels(dq) else rotate_qkv_backward_reference
    return backward(dq, dk, dv, cos, sin)


class _RotateQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mixed, cos, sin, groups, d):
        ctx.save_for_backward(cos, sin)
        return rotate_qkv_forward(mixed.contiguous(), cos, sin, groups, d)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        grad, maxima = rotate_qkv_backward(dq, dk, dv, *ctx.saved_tensors)
        return with_maxima(grad, maxima), None, None, None, None


def rotate_qkv(
    mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, groups: int, d: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits the output of a fused projection and rotates its queries and keys.

    mixed [s, b, groups * (m + 2) * d] in BF16 or FP32: in each group m queries, a key and a value;
    cos, sin: FP32 [s, r], r even and at most d: channel i turns with channel i + r / 2, others stay; with r 0
    (and any s) it only splits.
    Returns q [s, b, groups * m, d], k and v [s, b, groups, d]. Kept for backward are cos and sin.
    """
    return _RotateQKV.apply(mixed, cos, sin, groups, d)
