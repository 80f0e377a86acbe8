"""The kernels of `head_norm` and their launchers. A row is one head of one token."""

import torch
import triton
import triton.language as tl

from coat_kernels.fp8 import cast, widen
from coat_kernels.groups.kernels import load_group_tile, store_group_tile
from coat_kernels.groups.reference import Grouped
from coat_kernels.norm.kernels import PROGRAMS, empty_saved, load_gamma, row_tiles, sum_parts
from coat_kernels.prepared import PreparedKernel
from coat_kernels.tiles import load_tile, store_tile, tile_mask

# minimum number of elements of a program's tile, and elements per thread. For 8192 tokens of 32 heads of 128
# channels an H200 takes 75 us forward and 96 us backward; a copy of the same number of bytes takes 44 us.
# With the tiles of `norm`, and loads of three tiles in flight, they took 112 us and 158 us.
FORWARD_TILE, FORWARD_ELEMENTS = 1024, 32
BACKWARD_TILE, BACKWARD_ELEMENTS = 4096, 16


@triton.jit
def partner_of(o_d, d):
    """The channel that rotates together with each channel."""
    return tl.where(o_d < d // 2, o_d + d // 2, o_d - d // 2)


@PreparedKernel
@triton.jit
def head_norm_forward_kernel(p_x, p_weight, p_cos, p_sin, p_y, p_codes, p_exponent, p_rstd,
                             rows, rows_of_position, d, groups, eps,
                             ZERO_CENTERED: tl.constexpr, TURNS: tl.constexpr, TO_CODES: tl.constexpr,
                             EVEN: tl.constexpr, ROWS: tl.constexpr, H: tl.constexpr,
                             G: tl.constexpr):  # fmt: skip
    """Writes y and the tensors saved for backward."""
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_d = tl.arange(0, H)
    m_d = o_d < d
    m_x = tile_mask(o_row, o_d, rows, d)
    o_x = o_row[:, None] * d + o_d[None, :]
    b_x = widen(load_tile(p_x, o_x, m_x, not EVEN))
    b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / d + eps)
    b_y = b_x * b_rstd[:, None] * load_gamma(p_weight, o_d, m_d, ZERO_CENTERED, EVEN)[None, :]
    if TURNS:
        o_partner = partner_of(o_d, d)
        # a second read, from the cache, is cheaper than an exchange between threads
        b_partner = widen(load_tile(p_x, o_row[:, None] * d + o_partner[None, :], m_x, not EVEN))
        b_gamma = load_gamma(p_weight, o_partner, m_d, ZERO_CENTERED, EVEN)
        b_partner = b_partner * b_rstd[:, None] * tl.where(o_d < d // 2, -b_gamma, b_gamma)[None, :]
        o_table = (o_row // rows_of_position)[:, None] * d + o_d[None, :]
        b_cos, b_sin = load_tile(p_cos, o_table, m_x, not EVEN), load_tile(p_sin, o_table, m_x, not EVEN)
        b_y = b_y * b_cos + b_partner * b_sin
    store_tile(p_y, o_x, cast(b_y, p_y.dtype.element_ty), m_x, not EVEN)
    tl.store(p_rstd + o_row, b_rstd, mask=o_row < rows)
    store_group_tile(b_x, p_codes, p_exponent, o_row, 0, rows, d, d, groups, TO_CODES, G, EVEN)


@PreparedKernel
@triton.jit
def head_norm_backward_kernel(p_grad_y, p_codes, p_exponent, p_rstd, p_weight, p_cos, p_sin,
                              p_grad_x, p_grad_weight, rows, batch, heads, d, groups,
                              stride_s, stride_b, stride_n,
                              ZERO_CENTERED: tl.constexpr, TURNS: tl.constexpr, FROM_CODES: tl.constexpr,
                              EVEN: tl.constexpr, ROWS: tl.constexpr, H: tl.constexpr,
                              G: tl.constexpr):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, H)
    m_d = o_d < d
    o_partner = partner_of(o_d, d)
    b_gamma = load_gamma(p_weight, o_d, m_d, ZERO_CENTERED, EVEN)[None, :]
    b_grad_weight = tl.zeros([ROWS, H], dtype=tl.float32)
    for tile in tl.range(pid, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=1):
        o_row = tile * ROWS + tl.arange(0, ROWS)
        m_x = tile_mask(o_row, o_d, rows, d)
        o_token = o_row // heads
        o_s = o_token // batch
        o_grad = (o_s * stride_s + (o_token % batch) * stride_b + (o_row % heads) * stride_n)[:, None]
        b_grad = widen(load_tile(p_grad_y, o_grad + o_d[None, :], m_x, not EVEN))
        if TURNS:
            b_partner = widen(load_tile(p_grad_y, o_grad + o_partner[None, :], m_x, not EVEN))
            o_table = o_s[:, None] * d
            b_cos = load_tile(p_cos, o_table + o_d[None, :], m_x, not EVEN)
            b_sin = load_tile(p_sin, o_table + o_partner[None, :], m_x, not EVEN)
            b_partner *= b_sin
            b_grad = b_grad * b_cos + tl.where((o_d < d // 2)[None, :], b_partner, -b_partner)
        b_rstd = tl.load(p_rstd + o_row, mask=o_row < rows, other=0.0)[:, None]
        b_x = load_group_tile(p_codes, p_exponent, o_row, 0, rows, d, d, groups, H, FROM_CODES, G, EVEN)
        b_normed = b_x * b_rstd
        b_scaled = b_grad * b_gamma
        b_grad_x = b_rstd * (b_scaled - b_normed * (tl.sum(b_scaled * b_normed, axis=1) / d)[:, None])
        o_x = o_row[:, None] * d + o_d[None, :]
        store_tile(p_grad_x, o_x, cast(b_grad_x, p_grad_x.dtype.element_ty), m_x, not EVEN)
        b_grad_weight += b_grad * b_normed
    store_tile(p_grad_weight, pid * d + o_d, tl.sum(b_grad_weight, axis=0), m_d, not EVEN)


def head_norm_forward_triton(x, weight, cos, sin, eps: float, zero_centered: bool, saved_format: str):
    """`head_norm_forward_reference` as a kernel; `x` is contiguous."""
    s, b, heads, d = x.shape
    rows = x.view(-1, d)
    tile, tiles, groups, even = row_tiles(*rows.shape, FORWARD_TILE, FORWARD_ELEMENTS)
    q, rstd = empty_saved(rows, saved_format)
    y = torch.empty_like(x)
    head_norm_forward_kernel[(tiles,)](
        x,
        weight,
        cos,
        sin,
        y,
        q.codes,
        q.exponent,
        rstd,
        rows.shape[0],
        b * heads,
        d,
        groups,
        eps,
        ZERO_CENTERED=zero_centered,
        TURNS=cos.shape[1] > 0,
        TO_CODES=q.format.to_codes_tile,
        EVEN=even,
        **tile,
    )
    return y, q, rstd


def head_norm_backward_triton(grad_y, q: Grouped, rstd, weight, cos, sin, zero_centered: bool):
    """`head_norm_backward_reference`. Each program sums the weight's gradient over many rows. A second kernel
    sums over programs, in an order that depends on the shape alone."""
    s, b, heads, d = grad_y.shape
    if grad_y.stride(3) != 1:
        grad_y = grad_y.contiguous()
    rows = s * b * heads
    tile, tiles, groups, even = row_tiles(rows, d, BACKWARD_TILE, BACKWARD_ELEMENTS)
    # without rows, one program that stores zeros
    programs = min(tiles, PROGRAMS) or 1
    grad_x = torch.empty(grad_y.shape, dtype=grad_y.dtype, device=grad_y.device)
    parts = torch.empty(1, programs, d, dtype=torch.float32, device=grad_y.device)
    head_norm_backward_kernel[(programs,)](
        grad_y,
        q.codes,
        q.exponent,
        rstd,
        weight,
        cos,
        sin,
        grad_x,
        parts,
        rows,
        b,
        heads,
        d,
        groups,
        *grad_y.stride()[:3],
        ZERO_CENTERED=zero_centered,
        TURNS=cos.shape[1] > 0,
        FROM_CODES=q.format.from_codes_tile,
        EVEN=even,
        **tile,
    )
    (grad_weight,) = sum_parts(parts, torch.float32)
    return grad_x, grad_weight
