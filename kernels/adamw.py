"""AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2) over stored moments, in one pass.

The update uses the fresh FP32 moments; only what is stored is rounded. On CUDA one kernel reads
gradient, parameter and codes once and writes parameter and codes once: no FP32 moment exists in memory.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from coat_kernels.codecs.codec import Codec, Storage, load_moment, store_moment
from coat_kernels.fast_math import fast_reciprocal, fast_sqrt
from coat_kernels.fp8 import cast

# a program takes ROWS groups; CHUNK programs share one entry of the map from programs to tensors
ROWS, WARPS, CHUNK = 4, 2, 64
# columns of the table of tensors: the pointers of adamw_tile in its order, then the number of elements
COLUMNS = tl.constexpr(9)
TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
}


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
               o_x, m_x, o_row, m_row, decay, step_size, rate1, rate2, inverse_root, eps,
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
                      M_FROM, M_SCALE, M_EXPONENT, M_E5M2, True, MASKED)  # fmt: skip
    b_v = load_moment(p_v, p_v_scale, p_v_exponent, o_x, m_x, o_row, m_row,
                      V_FROM, V_SCALE, V_EXPONENT, V_E5M2, False, MASKED)  # fmt: skip
    b_m += rate1 * (b_g - b_m)
    b_v += rate2 * (b_g * b_g - b_v)
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
                 M_STATISTICS, M_TO, M_SCALE, M_EXPONENT, M_E5M2, True, MASKED)  # fmt: skip
    store_moment(b_v, p_v, p_v_scale, p_v_exponent, o_x, m_x, o_row, m_row,
                 V_STATISTICS, V_TO, V_SCALE, V_EXPONENT, V_E5M2, False, MASKED)  # fmt: skip


@triton.jit
def load_pointer(p_row, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(p_row + COLUMN).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def adamw_kernel(p_table, p_corrections, p_chunks, decay, lr, rate1, rate2, eps,
                 PARAM: tl.constexpr, GRAD: tl.constexpr, M_CODES: tl.constexpr, V_CODES: tl.constexpr,
                 M_FROM: tl.constexpr, M_STATISTICS: tl.constexpr, M_TO: tl.constexpr,
                 M_SCALE: tl.constexpr, M_EXPONENT: tl.constexpr, M_E5M2: tl.constexpr,
                 V_FROM: tl.constexpr, V_STATISTICS: tl.constexpr, V_TO: tl.constexpr,
                 V_SCALE: tl.constexpr, V_EXPONENT: tl.constexpr, V_E5M2: tl.constexpr,
                 MAXIMIZE: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
                 G: tl.constexpr):  # fmt: skip
    pid = tl.program_id(0)
    i_tensor = tl.load(p_chunks + 2 * (pid // CHUNK))
    i_chunk = tl.load(p_chunks + 2 * (pid // CHUNK) + 1).to(tl.int64)
    p_row = p_table + i_tensor * COLUMNS
    n = tl.load(p_row + 8)
    first = (i_chunk * CHUNK + pid % CHUNK) * ROWS
    if first * G >= n:
        return
    p_param = load_pointer(p_row, 0, PARAM, ALIGNED)
    p_grad = load_pointer(p_row, 1, GRAD, ALIGNED)
    p_m = load_pointer(p_row, 2, M_CODES, ALIGNED)
    p_m_scale = load_pointer(p_row, 3, tl.float32, ALIGNED)
    p_m_exponent = load_pointer(p_row, 4, tl.uint8, ALIGNED)
    p_v = load_pointer(p_row, 5, V_CODES, ALIGNED)
    p_v_scale = load_pointer(p_row, 6, tl.float32, ALIGNED)
    p_v_exponent = load_pointer(p_row, 7, tl.uint8, ALIGNED)
    step_size = lr * tl.load(p_corrections + 2 * i_tensor)
    inverse_root = tl.load(p_corrections + 2 * i_tensor + 1)
    o_row = first + tl.arange(0, ROWS)
    # four elements a thread: more of the codes at once would part their layout from that of FP32
    o_x = tl.max_contiguous(o_row[:, None] * G + tl.arange(0, G)[None, :], [1, 4])
    m_x, m_row = o_x < n, o_row * G < n
    # full tiles, all but a tensor's last, do without masks: the kernel is bound by its instructions
    if (first + ROWS) * G <= n:
        adamw_tile(p_param, p_grad, p_m, p_m_scale, p_m_exponent, p_v, p_v_scale, p_v_exponent,
                   o_x, m_x, o_row, m_row, decay, step_size, rate1, rate2, inverse_root, eps,
                   M_FROM, M_STATISTICS, M_TO, M_SCALE, M_EXPONENT, M_E5M2,
                   V_FROM, V_STATISTICS, V_TO, V_SCALE, V_EXPONENT, V_E5M2, MAXIMIZE, False)  # fmt: skip
    else:
        adamw_tile(p_param, p_grad, p_m, p_m_scale, p_m_exponent, p_v, p_v_scale, p_v_exponent,
                   o_x, m_x, o_row, m_row, decay, step_size, rate1, rate2, inverse_root, eps,
                   M_FROM, M_STATISTICS, M_TO, M_SCALE, M_EXPONENT, M_E5M2,
                   V_FROM, V_STATISTICS, V_TO, V_SCALE, V_EXPONENT, V_E5M2, MAXIMIZE, True)  # fmt: skip


@functools.lru_cache(maxsize=32)
def chunk_map(numels: tuple[int, ...], elements: int, device: torch.device) -> torch.Tensor:
    """For each run of `elements`: its tensor's index, and its own index in that tensor; int32 [chunks, 2]."""
    chunks = [triton.cdiv(n, elements) for n in numels]
    of_tensor = np.repeat(np.arange(len(numels)), chunks)
    within = np.arange(len(of_tensor)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    return torch.from_numpy(np.stack((of_tensor, within), axis=1).astype(np.int32)).to(device)


def _to_device(values: list, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def adamw_triton(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[Storage],
    exp_avg_sqs: Sequence[Storage],
    steps: Sequence[int],
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
    """`adamw_reference` for tensors of one device, of one type and with gradients of one: a single launch."""
    device = params[0].device
    table = [
        [t.data_ptr() for t in (p, g, *m, *v)] + [p.numel()]
        for p, g, m, v in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)
    ]
    corrections = [(1 / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)) for step in steps]
    chunks = chunk_map(tuple(row[-1] for row in table), CHUNK * ROWS * group_size, device)
    with torch.cuda.device_of(params[0]):
        adamw_kernel[(len(chunks) * CHUNK,)](
            _to_device(table, torch.int64, device),
            _to_device(corrections, torch.float32, device),
            chunks,
            decay=1 - lr * weight_decay,
            lr=lr,
            rate1=1 - beta1,
            rate2=1 - beta2,
            # subnormal roots count as zero, and zero moments must not divide by zero
            eps=max(eps, 2.0**-120),
            PARAM=TRITON_DTYPES[params[0].dtype],
            GRAD=TRITON_DTYPES[grads[0].dtype],
            M_CODES=TRITON_DTYPES[exp_avg_codec.dtype],
            V_CODES=TRITON_DTYPES[exp_avg_sq_codec.dtype],
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
            # views into flat buffers may start anywhere
            ALIGNED=all(pointer % 16 == 0 for row in table for pointer in row[:-1]),
            ROWS=ROWS,
            CHUNK=CHUNK,
            G=group_size,
            num_warps=WARPS,
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

    Parameters (FP32 or BF16) and gradients (FP32, BF16 or FP16) are contiguous, of one type each and of
    one device; `options` are `adamw_reference`'s. CUDA tensors take the kernel, others the reference.
    """
    if params and params[0].is_cuda:
        adamw_triton(params, grads, exp_avgs, exp_avg_sqs, steps, **options)
        return
    for tensors in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
        adamw_reference(*tensors, **options)
