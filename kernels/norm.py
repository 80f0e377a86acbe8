"""RMSNorm (Zhang & Sennrich, arXiv 1910.07467, equation 4) that keeps its input in FP8, 1 x G groups.

y = x * rstd * w, rstd = 1 / sqrt(mean(x^2) + eps); with zero-centered gamma the weight is w + 1.
Forward uses x as it comes; backward uses what is kept of it. The output carries its origin, so that a
linear layer behind it keeps nothing, and the maxima of its rows, so that nobody reads it for its scale.
"""

import torch
import triton
import triton.language as tl

from coat_kernels.fp8 import E4M3, cast, require_fp8
from coat_kernels.groups import (
    Grouped,
    dequantize_groups_reference,
    empty_grouped,
    load_groups,
    quantize_groups_reference,
    store_groups,
)
from coat_kernels.origin import Origin, with_origin


def _gamma(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def rms_norm_forward_reference(x, weight, eps: float, zero_centered: bool, group_size: int):
    """x [rows, h] -> (y in x's dtype, the kept x, rstd FP32 [rows], maxima of y's rows FP32 [rows])."""
    value = x.float()
    rstd = torch.rsqrt(value.square().mean(1) + eps)
    y = (value * rstd[:, None] * _gamma(weight, zero_centered)).to(x.dtype)
    maxima = torch.where(y.isfinite(), y.float().abs(), 0).amax(1)
    return y, quantize_groups_reference(x, group_size), rstd, maxima


def rms_norm_rebuild_reference(q: Grouped, rstd, weight, zero_centered: bool, group_size: int, dtype):
    """y again, from the kept input."""
    return (dequantize_groups_reference(q, group_size) * rstd[:, None] * _gamma(weight, zero_centered)).to(
        dtype
    )


def rms_norm_backward_reference(grad_y, q: Grouped, rstd, weight, zero_centered: bool, group_size: int):
    """(grad_x in grad_y's dtype, grad_weight FP32 [h])."""
    normed = dequantize_groups_reference(q, group_size) * rstd[:, None]
    grad = grad_y.float()
    scaled = grad * _gamma(weight, zero_centered)
    grad_x = rstd[:, None] * (scaled - normed * (scaled * normed).mean(1, keepdim=True))
    return grad_x.to(grad_y.dtype), (grad * normed).sum(0)


@triton.jit
def load_gamma(p_weight, o_h, m_h, ZERO_CENTERED: tl.constexpr):
    b_weight = tl.load(p_weight + o_h, mask=m_h, other=0.0).to(tl.float32)
    return b_weight + 1.0 if ZERO_CENTERED else b_weight


@triton.jit
def rms_norm_forward_kernel(p_x, p_weight, p_y, p_codes, p_exponent, p_rstd, p_maxima, h, eps,
                            ZERO_CENTERED: tl.constexpr, H: tl.constexpr, G: tl.constexpr):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o_row = i_row + tl.arange(0, 1)
    o_h = tl.arange(0, H)
    m_x = (o_row[:, None] >= 0) & (o_h[None, :] < h)
    b_x = tl.load(p_x + o_row[:, None] * h + o_h[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / h + eps)
    b_y = b_x * b_rstd[:, None] * load_gamma(p_weight, o_h, o_h < h, ZERO_CENTERED)[None, :]
    b_y = cast(b_y, p_y.dtype.element_ty)
    tl.store(p_y + o_row[:, None] * h + o_h[None, :], b_y, mask=m_x)
    tl.store(p_rstd + o_row, b_rstd)
    b_abs = tl.abs(b_y.to(tl.float32))
    tl.store(p_maxima + o_row, tl.max(tl.where(m_x & (b_abs < float("inf")), b_abs, 0.0), axis=1))
    store_groups(b_x, p_codes, p_exponent, o_row, o_h, m_x, h, False, G)


@triton.jit
def rms_norm_rebuild_kernel(p_codes, p_exponent, p_rstd, p_weight, p_y, h,
                            ZERO_CENTERED: tl.constexpr, H: tl.constexpr, G: tl.constexpr):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o_row = i_row + tl.arange(0, 1)
    o_h = tl.arange(0, H)
    m_x = (o_row[:, None] >= 0) & (o_h[None, :] < h)
    b_x = load_groups(p_codes, p_exponent, o_row, o_h, m_x, h, False, G)
    b_gamma = load_gamma(p_weight, o_h, o_h < h, ZERO_CENTERED)
    b_y = b_x * tl.load(p_rstd + o_row)[:, None] * b_gamma[None, :]
    tl.store(p_y + o_row[:, None] * h + o_h[None, :], cast(b_y, p_y.dtype.element_ty), mask=m_x)


@triton.jit
def rms_norm_backward_kernel(p_grad_y, p_codes, p_exponent, p_rstd, p_weight, p_grad_x, p_partial,
                             rows, h, rows_per_program,
                             ZERO_CENTERED: tl.constexpr, H: tl.constexpr, G: tl.constexpr):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, H)
    b_gamma = load_gamma(p_weight, o_h, o_h < h, ZERO_CENTERED)[None, :]
    b_partial = tl.zeros([1, H], dtype=tl.float32)
    for i_row in range(pid * rows_per_program, tl.minimum((pid + 1) * rows_per_program, rows)):
        o_row = i_row + tl.arange(0, 1)
        m_x = (o_row[:, None] >= 0) & (o_h[None, :] < h)
        b_rstd = tl.load(p_rstd + o_row)[:, None]
        b_normed = load_groups(p_codes, p_exponent, o_row, o_h, m_x, h, False, G) * b_rstd
        b_grad = tl.load(p_grad_y + o_row[:, None] * h + o_h[None, :], mask=m_x, other=0.0).to(tl.float32)
        b_scaled = b_grad * b_gamma
        b_mean = tl.sum(b_scaled * b_normed, axis=1)[:, None] / h
        b_grad_x = cast(b_rstd * (b_scaled - b_normed * b_mean), p_grad_x.dtype.element_ty)
        tl.store(p_grad_x + o_row[:, None] * h + o_h[None, :], b_grad_x, mask=m_x)
        b_partial += b_grad * b_normed
    tl.store(p_partial + pid * h + o_h[None, :], b_partial, mask=o_h[None, :] < h)


def _launch(h: int, group_size: int, zero_centered: bool) -> dict:
    block = max(triton.next_power_of_2(h), group_size)
    return {
        "ZERO_CENTERED": zero_centered,
        "H": block,
        "G": group_size,
        "num_warps": min(max(block // 512, 1), 16),
    }


def rms_norm_forward_triton(x, weight, eps: float, zero_centered: bool, group_size: int):
    """`rms_norm_forward_reference`, one row a program."""
    rows, h = x.shape
    y = torch.empty_like(x)
    q = empty_grouped(rows, h, group_size, E4M3, x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    maxima = torch.empty_like(rstd)
    with torch.cuda.device_of(x):
        rms_norm_forward_kernel[(rows,)](
            x,
            weight,
            y,
            q.codes.view(torch.uint8),
            q.exponent,
            rstd,
            maxima,
            h,
            eps,
            **_launch(h, group_size, zero_centered),
        )
    return y, q, rstd, maxima


def rms_norm_rebuild_triton(q: Grouped, rstd, weight, zero_centered: bool, group_size: int, dtype):
    """`rms_norm_rebuild_reference`, one row a program."""
    rows, h = q.codes.shape
    y = torch.empty(rows, h, dtype=dtype, device=rstd.device)
    with torch.cuda.device_of(y):
        rms_norm_rebuild_kernel[(rows,)](
            q.codes.view(torch.uint8),
            q.exponent,
            rstd,
            weight,
            y,
            h,
            **_launch(h, group_size, zero_centered),
        )
    return y


def rms_norm_backward_triton(grad_y, q: Grouped, rstd, weight, zero_centered: bool, group_size: int):
    """`rms_norm_backward_reference`; each program sums the weight gradient of a run of rows, in order."""
    rows, h = grad_y.shape
    programs = min(rows, 512)
    rows_per_program = triton.cdiv(rows, programs)
    programs = triton.cdiv(rows, rows_per_program)
    grad_x = torch.empty_like(grad_y)
    partial = torch.empty(programs, h, dtype=torch.float32, device=grad_y.device)
    with torch.cuda.device_of(grad_y):
        rms_norm_backward_kernel[(programs,)](
            grad_y,
            q.codes.view(torch.uint8),
            q.exponent,
            rstd,
            weight,
            grad_x,
            partial,
            rows,
            h,
            rows_per_program,
            **_launch(h, group_size, zero_centered),
        )
    return grad_x, partial.sum(0)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, zero_centered, group_size):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        forward = rms_norm_forward_triton if x.is_cuda else rms_norm_forward_reference
        y, q, rstd, maxima = forward(rows, weight, eps, zero_centered, group_size)
        ctx.options, ctx.weight_dtype = (zero_centered, group_size), weight.dtype
        ctx.save_for_backward(weight, *q, rstd)
        ctx.mark_non_differentiable(*q, rstd, maxima)
        return y.view(x.shape), *q, rstd, maxima

    @staticmethod
    def backward(ctx, grad_y, *_):
        weight, codes, exponent, rstd = ctx.saved_tensors
        grads = grad_y.reshape(-1, grad_y.shape[-1]).contiguous()
        backward = rms_norm_backward_triton if grad_y.is_cuda else rms_norm_backward_reference
        grad_x, grad_weight = backward(grads, Grouped(codes, exponent), rstd, weight, *ctx.options)
        return grad_x.view(grad_y.shape), grad_weight.to(ctx.weight_dtype), None, None, None


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
    group_size: int = 16,
) -> torch.Tensor:
    """RMSNorm over the last dimension, keeping x as E4M3 in groups of `group_size` and rstd in FP32.

    x [..., h] in BF16 or FP32, weight [h]; the result has x's shape and dtype and carries its origin.
    """
    require_fp8(x.device)
    y, codes, exponent, rstd, maxima = _RMSNorm.apply(x, weight, eps, zero_centered, group_size)
    rebuild_rows = rms_norm_rebuild_triton if x.is_cuda else rms_norm_rebuild_reference
    dtype = x.dtype

    def rebuild(codes, exponent, rstd, weight):
        return rebuild_rows(Grouped(codes, exponent), rstd, weight, zero_centered, group_size, dtype)

    return with_origin(y, Origin((codes, exponent, rstd, weight.detach()), rebuild, maxima))
