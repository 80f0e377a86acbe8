"""AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2) over stored moments, in one pass.

The update uses the fresh FP32 moments; only what is stored is rounded. On CUDA one kernel reads
gradient, parameter and codes once and writes parameter and codes once: no FP32 moment exists in memory.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from coat_kernels.codecs.codec import ROWS, Codec, Storage, load_moment, store_moment
from coat_kernels.fast_math import fast_reciprocal, fast_sqrt
from coat_kernels.fp8 import cast


def adamw_reference(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: Storage,
    exp_avg_sq: Storage,
    step: int,
    *,
    exp_avg_codec: Codec,
    exp_avg_sq_codec: Codec,
    group_size: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
) -> None:
    """One step for one tensor in plain PyTorch, operation by operation as `torch.optim.AdamW` does it."""
    g = grad.reshape(-1).float()
    g = -g if maximize else g
    m = exp_avg_codec.decode(exp_avg, group_size)
    v = exp_avg_sq_codec.decode(exp_avg_sq, group_size)
    p = param.reshape(-1).float()

    p = p * (1 - lr * weight_decay)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = (v.sqrt() / math.sqrt(1 - beta2**step)).add_(eps)
    p.addcdiv_(m, denominator, value=-lr / (1 - beta1**step))

    param.copy_(p.view_as(param))
    for codec, storage, moment in ((exp_avg_codec, exp_avg, m), (exp_avg_sq_codec, exp_avg_sq, v)):
        for old, new in zip(storage, codec.encode(moment, group_size), strict=True):
            old.copy_(new)


@triton.jit
def adamw_tile(p_param, p_grad, p_m, p_m_scale, p_m_exponent, p_v, p_v_scale, p_v_exponent,
               o_x, m_x, o_row, m_row, decay, step_size, beta1, beta2, inverse_root, eps,
               M_FROM: tl.constexpr, M_STATISTICS: tl.constexpr, M_TO: tl.constexpr,
               M_SCALE: tl.constexpr, M_EXPONENT: tl.constexpr, M_E5M2: tl.constexpr,
               V_FROM: tl.constexpr, V_STATISTICS: tl.constexpr, V_TO: tl.constexpr,
               V_SCALE: tl.constexpr, V_EXPONENT: tl.constexpr, V_E5M2: tl.constexpr,
               MAXIMIZE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    if MASKED:
        b_g = tl.load(p_grad + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_p = tl.load(p_param + o_x, mask=m_x, other=0.0).to(tl.float32)
    else:
        b_g = tl.load(p_grad + o_x).to(tl.float32)
        b_p = tl.load(p_param + o_x).to(tl.float32)
    if MAXIMIZE:
        b_g = -b_g
    b_m = load_moment(p_m, p_m_scale, p_m_exponent, o_x, m_x, o_row, m_row,
                      M_FROM, M_SCALE, M_EXPONENT, M_E5M2, MASKED)  # fmt: skip
    b_v = load_moment(p_v, p_v_scale, p_v_exponent, o_x, m_x, o_row, m_row,
                      V_FROM, V_SCALE, V_EXPONENT, V_E5M2, MASKED)  # fmt: skip
    b_m = b_m + (1.0 - beta1) * (b_g - b_m)
    b_v = beta2 * b_v + (1.0 - beta2) * b_g * b_g
    b_update = b_m * fast_reciprocal(fast_sqrt(b_v) * inverse_root + eps)
    b_p = b_p * decay - step_size * b_update
    if MASKED:
        tl.store(p_param + o_x, cast(b_p, p_param.dtype.element_ty), mask=m_x)
        # what lies past the end must not enter the statistics of the last group
        b_m = tl.where(m_x, b_m, 0.0)
        b_v = tl.where(m_x, b_v, 0.0)
    else:
        tl.store(p_param + o_x, cast(b_p, p_param.dtype.element_ty))
    store_moment(b_m, p_m, p_m_scale, p_m_exponent, o_x, m_x, o_row, m_row,
                 M_STATISTICS, M_TO, M_SCALE, M_EXPONENT, M_E5M2, MASKED)  # fmt: skip
    store_moment(b_v, p_v, p_v_scale, p_v_exponent, o_x, m_x, o_row, m_row,
                 V_STATISTICS, V_TO, V_SCALE, V_EXPONENT, V_E5M2, MASKED)  # fmt: skip


@triton.jit
def adamw_kernel(p_param, p_grad, p_m, p_m_scale, p_m_exponent, p_v, p_v_scale, p_v_exponent, n,
                 decay, step_size, beta1, beta2, inverse_root, eps,
                 M_FROM: tl.constexpr, M_STATISTICS: tl.constexpr, M_TO: tl.constexpr,
                 M_SCALE: tl.constexpr, M_EXPONENT: tl.constexpr, M_E5M2: tl.constexpr,
                 V_FROM: tl.constexpr, V_STATISTICS: tl.constexpr, V_TO: tl.constexpr,
                 V_SCALE: tl.constexpr, V_EXPONENT: tl.constexpr, V_E5M2: tl.constexpr,
                 MAXIMIZE: tl.constexpr, ROWS: tl.constexpr, G: tl.constexpr):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    o_row = first + tl.arange(0, ROWS)
    o_x = o_row[:, None] * G + tl.arange(0, G)[None, :]
    m_x, m_row = o_x < n, o_row * G < n
    # full tiles, all but the last, do without masks: the kernel is bound by its instructions
    if (first + ROWS) * G <= n:
        adamw_tile(p_param, p_grad, p_m, p_m_scale, p_m_exponent, p_v, p_v_scale, p_v_exponent,
                   o_x, m_x, o_row, m_row, decay, step_size, beta1, beta2, inverse_root, eps,
                   M_FROM, M_STATISTICS, M_TO, M_SCALE, M_EXPONENT, M_E5M2,
                   V_FROM, V_STATISTICS, V_TO, V_SCALE, V_EXPONENT, V_E5M2, MAXIMIZE, False)  # fmt: skip
    else:
        adamw_tile(p_param, p_grad, p_m, p_m_scale, p_m_exponent, p_v, p_v_scale, p_v_exponent,
                   o_x, m_x, o_row, m_row, decay, step_size, beta1, beta2, inverse_root, eps,
                   M_FROM, M_STATISTICS, M_TO, M_SCALE, M_EXPONENT, M_E5M2,
                   V_FROM, V_STATISTICS, V_TO, V_SCALE, V_EXPONENT, V_E5M2, MAXIMIZE, True)  # fmt: skip


def adamw_triton(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: Storage,
    exp_avg_sq: Storage,
    step: int,
    *,
    exp_avg_codec: Codec,
    exp_avg_sq_codec: Codec,
    group_size: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
) -> None:
    """`adamw_reference` as one kernel launch."""
    n = param.numel()
    with torch.cuda.device_of(param):
        adamw_kernel[(triton.cdiv(n, ROWS * group_size),)](
            param,
            grad,
            *exp_avg,
            *exp_avg_sq,
            n,
            decay=1 - lr * weight_decay,
            step_size=lr / (1 - beta1**step),
            beta1=beta1,
            beta2=beta2,
            inverse_root=1 / math.sqrt(1 - beta2**step),
            eps=eps,
            M_FROM=exp_avg_codec.from_codes_tile,
            M_STATISTICS=exp_avg_codec.statistics_tile,
            M_TO=exp_avg_codec.to_codes_tile,
            M_SCALE=exp_avg_codec.has_scale,
            M_EXPONENT=exp_avg_codec.has_exponent,
            M_E5M2=exp_avg_codec.is_e5m2,
            V_FROM=exp_avg_sq_codec.from_codes_tile,
            V_STATISTICS=exp_avg_sq_codec.statistics_tile,
            V_TO=exp_avg_sq_codec.to_codes_tile,
            V_SCALE=exp_avg_sq_codec.has_scale,
            V_EXPONENT=exp_avg_sq_codec.has_exponent,
            V_E5M2=exp_avg_sq_codec.is_e5m2,
            MAXIMIZE=maximize,
            ROWS=ROWS,
            G=group_size,
            num_warps=2,
        )


@torch.no_grad()
def adamw_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[Storage],
    exp_avg_sqs: Sequence[Storage],
    steps: Sequence[int],
    **options,
) -> None:
    """One AdamW step in place for every tensor of the lists; `steps` counts from 1.

    Parameters (FP32 or BF16) and gradients (FP32, BF16 or FP16) are contiguous, of one shape each and of
    one device; `options` are `adamw_reference`'s. CUDA tensors take the kernel, others the reference.
    """
    for param, *rest in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
        if param.numel():
            (adamw_triton if param.is_cuda else adamw_reference)(param, *rest, **options)
