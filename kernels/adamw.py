"""AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2) over stored moments, in one pass.

The update uses the fresh FP32 moments; only what is stored is rounded. On CUDA one kernel reads
gradient, parameter and codes once and writes parameter and codes once: no FP32 moment exists in memory.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from coat_kernels.codecs.codec import Codec, Storage, load_moment, store_moment
from coat_kernels.fast_math import fast_reciprocal, fast_sqrt
from coat_kernels.fp8 import cast

# A program takes one tile of ROWS groups. With two warps for four rows of 128 the kernel runs at the speed of
# a copy on an H200; every loop over tiles was slower (benchmarks/LOG.md, 2026-11-21).
ROWS, WARPS = 4, 2
# Tensors are cut into chunks of so many tiles, powers of two, each size in a launch of its own. The larger
# the chunk, the longer the multiprocessors find its row of the table in their caches.
CHUNKS = (2**14, 2**11, 2**8, 2**5)
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
def load_pointer(p_chunk, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(p_chunk + COLUMN).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit(do_not_specialize=["log2_tiles"])
def adamw_kernel(p_table, log2_tiles, decay, lr, rate1, rate2, eps,
                 PARAM: tl.constexpr, GRAD: tl.constexpr, M_CODES: tl.constexpr, V_CODES: tl.constexpr,
                 M_FROM: tl.constexpr, M_STATISTICS: tl.constexpr, M_TO: tl.constexpr,
                 M_SCALE: tl.constexpr, M_EXPONENT: tl.constexpr, M_E5M2: tl.constexpr,
                 V_FROM: tl.constexpr, V_STATISTICS: tl.constexpr, V_TO: tl.constexpr,
                 V_SCALE: tl.constexpr, V_EXPONENT: tl.constexpr, V_E5M2: tl.constexpr,
                 MAXIMIZE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, WHOLE: tl.constexpr,
                 ROWS: tl.constexpr, G: tl.constexpr):  # fmt: skip
    # one row of the table holds all that a program needs: look-ups that wait for one another cost time
    pid = tl.program_id(0)
    i_tile = pid & ((1 << log2_tiles) - 1)
    p_chunk = p_table + (pid >> log2_tiles) * 10
    n = tl.load(p_chunk + 8)
    p_param = load_pointer(p_chunk, 0, PARAM, ALIGNED)
    p_grad = load_pointer(p_chunk, 1, GRAD, ALIGNED)
    p_m = load_pointer(p_chunk, 2, M_CODES, ALIGNED)
    p_m_scale = load_pointer(p_chunk, 3, tl.float32, False)
    p_m_exponent = load_pointer(p_chunk, 4, tl.uint8, False)
    p_v = load_pointer(p_chunk, 5, V_CODES, ALIGNED)
    p_v_scale = load_pointer(p_chunk, 6, tl.float32, False)
    p_v_exponent = load_pointer(p_chunk, 7, tl.uint8, False)
    p_corrections = (p_chunk + 9).to(tl.pointer_type(tl.float32))
    step_size = lr * tl.load(p_corrections)
    inverse_root = tl.load(p_corrections + 1)
    if not WHOLE and i_tile * (ROWS * G) >= n:
        return

    # within a chunk offsets fit 32 bits: its pointers have taken the rest
    o_row = i_tile * ROWS + tl.arange(0, ROWS)
    o_x = o_row[:, None] * G + tl.arange(0, G)[None, :]
    m_x, m_row = o_x < n, o_row * G < n
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
    b_p = cast(b_p * decay - step_size * b_update, PARAM)
    if MASKED:
        tl.store(p_param + o_x, b_p, mask=m_x)
        # what lies past the end must not enter the statistics of the last group
        b_m = tl.where(m_x, b_m, 0.0)
        b_v = tl.where(m_x, b_v, 0.0)
    else:
        tl.store(p_param + o_x, b_p)
    store_moment(b_m, p_m, p_m_scale, p_m_exponent, o_x, m_x, o_row, m_row,
                 M_STATISTICS, M_TO, M_SCALE, M_EXPONENT, M_E5M2, True, MASKED)  # fmt: skip
    store_moment(b_v, p_v, p_v_scale, p_v_exponent, o_x, m_x, o_row, m_row,
                 V_STATISTICS, V_TO, V_SCALE, V_EXPONENT, V_E5M2, False, MASKED)  # fmt: skip


def chunk_table(
    pointers: np.ndarray,
    group_bytes: np.ndarray,
    first: np.ndarray,
    numels: np.ndarray,
    corrections: np.ndarray,
    group_size: int,
    tiles: int,
) -> np.ndarray:
    """Cuts `numels` elements of each tensor, from `first` on, into chunks of `tiles` tiles.

    Returns int64 [chunks, 10]. A row holds the tensor's eight `pointers` (parameter, gradient and both
    storages, [tensors, 8]) moved to the chunk's start by `group_bytes` [8] a group, the elements that remain
    from there, and the tensor's `corrections`, a pair of FP32.
    """
    chunk = tiles * ROWS * group_size
    chunks = -(-numels // chunk)
    tensor = np.repeat(np.arange(len(chunks)), chunks)
    start = (np.arange(len(tensor)) - np.repeat(np.cumsum(chunks) - chunks, chunks)) * chunk
    table = np.empty((len(tensor), 10), dtype=np.int64)
    table[:, :8] = pointers[tensor] + ((first[tensor] + start) // group_size)[:, None] * group_bytes
    table[:, 8] = numels[tensor] - start
    table[:, 9:].view(np.float32)[:] = corrections[tensor]
    return table


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
    """`adamw_reference` for tensors of one device, of one type and with gradients of one.

    At most five launches, however many tensors there are: one for each size of chunks, and one, the only one
    with masks, for the last tile of each tensor.
    """
    device = params[0].device
    tensors = [(p, g, *m, *v) for p, g, m, v in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)]
    pointers = np.array([[t.data_ptr() for t in row] for row in tensors], dtype=np.int64)
    # parameter, gradient and codes have an element for each of the group's, scale and exponent one for all
    elements = np.array([group_size, group_size, *(group_size, 1, 1) * 2], dtype=np.int64)
    group_bytes = elements * [t.element_size() for t in tensors[0]]
    numels = np.array([p.numel() for p in params], dtype=np.int64)
    corrections = np.array(
        [(1 / (1 - beta1**t), 1 / math.sqrt(1 - beta2**t)) for t in steps], dtype=np.float32
    )
    # views into flat buffers may start anywhere
    aligned = not (pointers[:, elements > 1] % 16).any()
    tile = ROWS * group_size
    done = np.zeros_like(numels)
    for tiles in (*CHUNKS, 1):
        masked, whole = tiles == 1, tiles not in (CHUNKS[-1], 1)
        # the smallest chunks take all tiles that are left; some end early
        unit = tile if tiles == CHUNKS[-1] else tiles * tile
        part = numels - done if masked else (numels - done) // unit * unit
        table = chunk_table(pointers, group_bytes, done, part, corrections, group_size, tiles)
        done += part
        if not len(table):
            continue
        host = torch.from_numpy(table)
        with torch.cuda.device_of(params[0]):
            adamw_kernel[(len(table) * tiles,)](
                host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host,
                tiles.bit_length() - 1,
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
                ALIGNED=aligned,
                MASKED=masked,
                WHOLE=whole,
                ROWS=ROWS,
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
