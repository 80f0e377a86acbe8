"""AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2) over stored moments, in one pass.

The update uses the fresh FP32 moments; only what is stored is rounded. On CUDA one kernel reads
gradient, parameter and codes once and writes parameter and codes once: no FP32 moment exists in memory.
The same pass scales the gradient, writes a BF16 copy of the weight, and rounds BF16 parameters exactly
(with the 16 bits that FP32 has more) or stochastically.

With beta2 near 1 a second moment decays by less than half a code in a step, and rounded to nearest it never
would: it is then rounded by a dither that goes through all thresholds in turn ("dither").

A relative code (`codecs/ratio.py`) is decoded and encoded with the root of the second moment that is stored
beside it: of the one that was read, and of the one that is written.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from coat_kernels import adamw_cpu
from coat_kernels.adamw_cpu import PIECE, adamw_compiled, compiled_can, compiled_step
from coat_kernels.codecs.codec import (
    Codec,
    Storage,
    Stored,
    encode_reference,
    load_moment,
    load_tile,
    store_moment,
    store_scale,
    store_tile,
)
from coat_kernels.fast_math import fast_reciprocal, fast_sqrt
from coat_kernels.fp8 import cast, widen

# A program takes one tile of ROWS groups. With two warps for four rows of 128 the kernel runs at the speed of
# a copy on an H200; every loop over tiles was slower (benchmarks/LOG.md, 2026-11-21).
ROWS, WARPS = 4, 2
# Tensors are cut into chunks of so many tiles, powers of two, each size in a launch of its own. The larger
# the chunk, the longer the multiprocessors find its row of the table in their caches.
CHUNKS = (2**14, 2**11, 2**8, 2**5)
# columns of the table: pointers, elements that remain, the tensor's index, the first element
POINTERS, COLUMNS = 9, tl.constexpr(12)
# a row of corrections: see corrections_of
CORRECTIONS = tl.constexpr(3)
STEP_KEY, LANE_KEY = tl.constexpr(adamw_cpu.STEP_KEY), tl.constexpr(adamw_cpu.LANE_KEY)
TENSOR_KEY = tl.constexpr(0x85EBCA6B)
# of an int32, as a number in (-1/2, 1/2)
DITHER_UNIT = tl.constexpr((1 - 2**-23) * 2.0**-32)
TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
}


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An FP32 master as a BF16 weight and the int16 remainder that makes it exact again.

    The weight is the nearest BF16 (halves away from zero); its bits, shifted, plus the signed remainder are
    the master's. Where the weight is infinite, so is the master from now on; NaN stays NaN, of any payload.
    """
    bits = master.contiguous().view(torch.int32)
    # rounding would carry a NaN into its sign, and truncation may leave an infinity
    weight = torch.where(master.isnan(), (bits >> 16) | 0x40, (bits + 0x8000) >> 16)
    remainder = torch.where((weight & 0x7FFF) >= 0x7F80, 0, bits)
    return weight.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


def join_master(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The FP32 master of a BF16 weight and its remainder.

    Exact for every pair that `split_master` makes. Somebody may have edited the weight since: of the other
    pairs, which are zeros with a negative remainder and what is not finite, the weight alone counts. So for
    all 2^32 pairs the master rounds to the weight that can be seen. An edited weight that might have had its
    remainder cannot be told from one that has it: it keeps it, at most half a BF16 step.
    """
    upper, lower = weight.view(torch.int16).int(), remainder.int()
    magnitude = upper & 0x7FFF
    is_alone = (magnitude >= 0x7F80) | ((magnitude == 0) & (lower < 0))
    return ((upper << 16) + torch.where(is_alone, 0, lower)).view(torch.float32)


def noise_reference(
    seed: int, step: int, tensor: int, numel: int, device: torch.device | str
) -> torch.Tensor:
    """Noise of each element, int32 in [0, 2^16): half of a 32-bit integer hash.

    The hash (Wellons, lowbias32) is of the element's index, moved by seed, step and the tensor's index times
    odd constants: the same on every rank and in every run, and new on every step.
    """
    key = seed + step * STEP_KEY.value + tensor * TENSOR_KEY.value
    x = (torch.arange(numel, dtype=torch.int64, device=device) + key) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return ((x ^ (x >> 16)) >> 16).int()


def dither_reference(step: int, numel: int, group_size: int, device: torch.device | str) -> torch.Tensor:
    """What is added, in steps of codes, to each element before it is rounded: FP32 [numel] in (-1/2, 1/2).

    It is of the step and of the element's place in its group, so that codes are the same wherever tensors are
    cut. From step to step it goes on by the golden ratio, which fills the interval more evenly than chance
    would: rounding so, an element is right over few steps.
    """
    lane = torch.arange(numel, dtype=torch.int64, device=device) % group_size
    return (step * STEP_KEY.value + lane * LANE_KEY.value).int().float() * DITHER_UNIT.value


def round_stochastically(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """FP32 as BF16, up with the probability of what truncation would drop; NaN stays NaN."""
    bits = (x.view(torch.int32) + noise) >> 16
    return torch.where(x.isnan(), torch.nan, bits.to(torch.int16).view(torch.bfloat16))


def adamw_reference(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: Storage,
    exp_avg_sq: Storage,
    step: float,
    remainder: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
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
    grad_scale: torch.Tensor | None = None,
    stochastic: bool = False,
    dither: bool = False,
    seed: int = 0,
    tensor: int = 0,
) -> None:
    """One step for one tensor in plain PyTorch, operation by operation as `torch.optim.AdamW` does it.

    `stochastic` is of BF16 parameters, `dither` of exp_avg_sq; `tensor` is the index in `adamw_`'s lists.
    """
    g = grad.reshape(-1).float()
    g = g if grad_scale is None else g * grad_scale
    g = -g if maximize else g
    m = exp_avg_codec.decode(exp_avg, group_size, Stored(exp_avg_sq_codec, exp_avg_sq))
    v = exp_avg_sq_codec.decode(exp_avg_sq, group_size)
    p = (param if remainder is None else join_master(param, remainder)).reshape(-1).float()

    p = p * (1 - lr * weight_decay)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = (v.sqrt() / math.sqrt(1 - beta2**step)).add_(eps)
    p.addcdiv_(m, denominator, value=-lr / (1 - beta1**step))

    if remainder is not None:
        for old, new in zip((param, remainder), split_master(p), strict=True):
            old.copy_(new.view_as(old))
    elif stochastic:
        noise = noise_reference(seed, int(step), tensor, p.numel(), p.device)
        param.copy_(round_stochastically(p, noise).view_as(param))
    else:
        param.copy_(p.view_as(param))
    if weight is not None:
        weight.copy_(p.view_as(weight))
    shift = dither_reference(int(step), p.numel(), group_size, p.device) if dither else None
    _overwrite(exp_avg_sq, encode_reference(exp_avg_sq_codec, v, group_size, dither=shift))
    turn = None
    if exp_avg_codec.relative:
        m = m / Stored(exp_avg_sq_codec, exp_avg_sq).roots(group_size)
        # one number for the whole step costs the kernel nothing
        turn = dither_reference(int(step), 1, 1, m.device).expand_as(m)
    _overwrite(exp_avg, encode_reference(exp_avg_codec, m, group_size, dither=turn))


def _overwrite(storage: Storage, made: Storage) -> None:
    for old, new in zip(storage, made, strict=True):
        old.copy_(new)


@triton.jit
def load_pointer(p_chunk, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(p_chunk + COLUMN).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def bf16_of_bits(b_bits):
    """The upper halves of FP32 bit patterns, shifted down, as BF16."""
    return b_bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def join_tile(b_weight, b_remainder):
    """`join_master` of a BF16 and an int16 tile."""
    b_upper, b_lower = b_weight.to(tl.int16, bitcast=True).to(tl.int32), b_remainder.to(tl.int32)
    b_magnitude = b_upper & 0x7FFF
    b_is_alone = (b_magnitude >= 0x7F80) | ((b_magnitude == 0) & (b_lower < 0))
    return ((b_upper << 16) + tl.where(b_is_alone, 0, b_lower)).to(tl.float32, bitcast=True)


@triton.jit
def split_tile(b_master):
    """`split_master` of an FP32 tile."""
    b_bits = b_master.to(tl.int32, bitcast=True)
    b_weight = tl.where(b_master == b_master, (b_bits + 0x8000) >> 16, (b_bits >> 16) | 0x40)
    b_remainder = tl.where((b_weight & 0x7FFF) >= 0x7F80, 0, b_bits)
    return bf16_of_bits(b_weight), b_remainder.to(tl.int16)


@triton.jit
def hash_tile(b_x):
    b_x = (b_x ^ (b_x >> 16)) * 0x7FEB352D
    b_x = (b_x ^ (b_x >> 15)) * 0x846CA68B
    return b_x ^ (b_x >> 16)


@triton.jit(do_not_specialize=["log2_tiles", "seed"])
def adamw_kernel(p_table, p_corrections, p_lr, p_grad_scale, p_found_inf, log2_tiles, seed,
                 lr, weight_decay, rate1, rate2, eps,
                 PARAM: tl.constexpr, GRAD: tl.constexpr, M_CODES: tl.constexpr, V_CODES: tl.constexpr,
                 M_FROM: tl.constexpr, M_STATISTICS: tl.constexpr, M_TO: tl.constexpr,
                 M_SCALE: tl.constexpr, M_EXPONENT: tl.constexpr, M_E5M2: tl.constexpr,
                 V_FROM: tl.constexpr, V_STATISTICS: tl.constexpr, V_TO: tl.constexpr,
                 V_SCALE: tl.constexpr, V_EXPONENT: tl.constexpr, V_E5M2: tl.constexpr,
                 V_ROOTS: tl.constexpr, V_LOG_ROOTS: tl.constexpr, M_RATIO: tl.constexpr,
                 RELATIVE: tl.constexpr,
                 EXTRA: tl.constexpr, STOCHASTIC: tl.constexpr, DITHER: tl.constexpr, MAXIMIZE: tl.constexpr,
                 ALIGNED: tl.constexpr, MASKED: tl.constexpr, WHOLE: tl.constexpr,
                 ROWS: tl.constexpr, G: tl.constexpr):  # fmt: skip
    # one row of the table holds all that a program needs: look-ups that wait for one another cost time
    pid = tl.program_id(0)
    i_tile = pid & ((1 << log2_tiles) - 1)
    p_chunk = p_table + (pid >> log2_tiles) * COLUMNS
    n = tl.load(p_chunk + 9)
    p_param = load_pointer(p_chunk, 0, PARAM, ALIGNED)
    p_grad = load_pointer(p_chunk, 1, GRAD, ALIGNED)
    p_m = load_pointer(p_chunk, 2, M_CODES, ALIGNED)
    p_m_scale = load_pointer(p_chunk, 3, tl.float32, False)
    p_m_exponent = load_pointer(p_chunk, 4, tl.uint8, False)
    p_v = load_pointer(p_chunk, 5, V_CODES, ALIGNED)
    p_v_scale = load_pointer(p_chunk, 6, tl.float32, False)
    p_v_exponent = load_pointer(p_chunk, 7, tl.uint8, False)
    i_tensor = tl.load(p_chunk + 10)
    if not WHOLE and i_tile * (ROWS * G) >= n:
        return
    # nested: without a pointer the load must not be compiled
    if p_found_inf is not None:  # noqa: SIM102
        if tl.load(p_found_inf) != 0.0:
            return

    # within a chunk offsets fit 32 bits: its pointers have taken the rest
    o_row = i_tile * ROWS + tl.arange(0, ROWS)
    o_x = o_row[:, None] * G + tl.arange(0, G)[None, :]
    m_x, m_row = o_x < n, o_row * G < n
    b_g = widen(load_tile(p_grad, o_x, m_x, MASKED))
    b_param = load_tile(p_param, o_x, m_x, MASKED)
    b_p = widen(b_param)
    if EXTRA == "remainder":
        p_remainder = load_pointer(p_chunk, 8, tl.int16, ALIGNED)
        b_p = join_tile(b_param, load_tile(p_remainder, o_x, m_x, MASKED))
    b_m_codes, b_m_scale, b_m_exponent = load_moment(p_m, p_m_scale, p_m_exponent, o_x, m_x, o_row, m_row,
                                                     M_SCALE, M_EXPONENT, MASKED)  # fmt: skip
    b_v_codes, b_v_scale, b_v_exponent = load_moment(p_v, p_v_scale, p_v_exponent, o_x, m_x, o_row, m_row,
                                                     V_SCALE, V_EXPONENT, MASKED)  # fmt: skip
    # nothing is shared: the barrier keeps the assembler from moving loads down into the arithmetic, where
    # they are waited for (2.23 ms without it, 2.08 with, 2^29 parameters on an H200)
    tl.debug_barrier()
    if p_lr is not None:
        lr = tl.load(p_lr).to(tl.float32)
    step_size = lr * tl.load(p_corrections + CORRECTIONS * i_tensor)
    inverse_root = tl.load(p_corrections + CORRECTIONS * i_tensor + 1)
    b_dither, turn = 0.0, 0.0
    if STOCHASTIC or DITHER or RELATIVE:
        turns = tl.load(p_corrections + CORRECTIONS * i_tensor + 2).to(tl.int64) * STEP_KEY
        turn = turns.to(tl.int32).to(tl.float32) * DITHER_UNIT
    if DITHER:
        b_lane = tl.arange(0, G).to(tl.uint32) * LANE_KEY + turns.to(tl.uint32)
        b_dither = (b_lane.to(tl.int32, bitcast=True).to(tl.float32) * DITHER_UNIT)[None, :]
    if STOCHASTIC:
        key = seed + turns + i_tensor * TENSOR_KEY + tl.load(p_chunk + 11)
        b_noise = (hash_tile(o_x.to(tl.uint32) + key.to(tl.uint32)) >> 16).to(tl.int32)
    if p_grad_scale is not None:
        b_g *= tl.load(p_grad_scale)
    if MAXIMIZE:
        b_g = -b_g
    b_m = M_FROM(b_m_codes, b_m_scale, b_m_exponent, M_E5M2, True)
    if RELATIVE:
        b_m *= V_ROOTS(b_v_codes, b_v_scale, b_v_exponent)
    b_v = V_FROM(b_v_codes, b_v_scale, b_v_exponent, V_E5M2, False)
    b_m += rate1 * (b_g - b_m)
    b_v += rate2 * (b_g * b_g - b_v)
    b_update = b_m * fast_reciprocal(fast_sqrt(b_v) * inverse_root + eps)
    # in this order FP32 keeps a decay that 1 - lr * weight_decay would round away; infinity less infinity
    # would be NaN
    b_p -= tl.where(tl.abs(b_p) < float("inf"), (lr * weight_decay) * b_p, 0.0)
    b_p -= step_size * b_update
    if EXTRA == "remainder":
        b_weight, b_remainder = split_tile(b_p)
        store_tile(p_param, o_x, b_weight, m_x, MASKED)
        store_tile(p_remainder, o_x, b_remainder, m_x, MASKED)
    elif STOCHASTIC:
        b_rounded = bf16_of_bits((b_p.to(tl.int32, bitcast=True) + b_noise) >> 16)
        store_tile(p_param, o_x, tl.where(b_p == b_p, b_rounded, cast(b_p, PARAM)), m_x, MASKED)
    else:
        store_tile(p_param, o_x, cast(b_p, PARAM), m_x, MASKED)
    if EXTRA == "weight":
        p_weight = load_pointer(p_chunk, 8, tl.bfloat16, ALIGNED)
        store_tile(p_weight, o_x, cast(b_p, tl.bfloat16), m_x, MASKED)
    if MASKED:
        # what lies past the end must not enter the statistics of the last group
        b_m = tl.where(m_x, b_m, 0.0)
        b_v = tl.where(m_x, b_v, 0.0)
    b_v_codes, b_v_scale, b_v_exponent = store_moment(
        b_v, b_dither, p_v, p_v_scale, p_v_exponent, o_x, m_x, o_row, m_row,
        V_STATISTICS, V_TO, V_SCALE, V_EXPONENT, V_E5M2, False, DITHER, MASKED)  # fmt: skip
    if RELATIVE:
        b_log_root = V_LOG_ROOTS(b_v_codes, b_v_scale, b_v_exponent)
        b_m_codes, b_m_scale = M_RATIO(b_m, b_log_root, turn)
        store_tile(p_m, o_x, b_m_codes, m_x, MASKED)
        store_scale(p_m_scale + o_row, b_m_scale, m_row, MASKED)
    else:
        store_moment(b_m, 0.0, p_m, p_m_scale, p_m_exponent, o_x, m_x, o_row, m_row,
                     M_STATISTICS, M_TO, M_SCALE, M_EXPONENT, M_E5M2, True, False, MASKED)  # fmt: skip


def chunk_table(
    pointers: np.ndarray,
    group_bytes: np.ndarray,
    first: np.ndarray,
    numels: np.ndarray,
    group_size: int,
    tiles: int,
) -> np.ndarray:
    """Cuts `numels` elements of each tensor, from `first` on, into chunks of `tiles` tiles.

    Returns int64 [chunks, COLUMNS]. A row holds the tensor's `pointers` (parameter, gradient, both storages
    and the extra tensor, [tensors, POINTERS]) moved to the chunk's start by `group_bytes` [POINTERS] a group,
    the elements that remain from there, the tensor's index and the chunk's first element.
    """
    chunk = tiles * ROWS * group_size
    chunks = -(-numels // chunk)
    tensor = np.repeat(np.arange(len(chunks)), chunks)
    within = (np.arange(len(tensor)) - np.repeat(np.cumsum(chunks) - chunks, chunks)) * chunk
    start = first[tensor] + within
    table = np.empty((len(tensor), COLUMNS.value), dtype=np.int64)
    table[:, :POINTERS] = pointers[tensor] + (start // group_size)[:, None] * group_bytes
    table[:, POINTERS:] = np.stack((numels[tensor] - within, tensor, start), axis=1)
    return table


def _upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


@functools.lru_cache(maxsize=8)
def launches(
    pointers: bytes,
    element_bytes: tuple[int, ...],
    numels: tuple[int, ...],
    group_size: int,
    device: torch.device,
) -> tuple[list[tuple[torch.Tensor, int]], torch.cuda.Event | None]:
    """The tables, on the device, of all chunks of each size, largest first, with the tiles in a chunk; and
    the event of their arrival.

    Remembered for tensors that stay where they are: their steps upload nothing, and CUDA graphs hold them.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "CoatAdamW: a step captured in a CUDA graph must have run before on the same tensors. Warm up "
            "with gradients that stay in place: zero_grad(set_to_none=False)."
        )
    table = np.frombuffer(pointers, dtype=np.int64).reshape(-1, POINTERS)
    # all but scales and exponents have an element for each of the group's
    elements = np.where(np.isin(np.arange(POINTERS), (3, 4, 6, 7)), 1, group_size)
    group_bytes = elements * np.array(element_bytes, dtype=np.int64)
    remaining = np.array(numels, dtype=np.int64)
    done = np.zeros_like(remaining)
    tile = ROWS * group_size
    out = []
    for tiles in (*CHUNKS, 1):
        # the smallest chunks take all full tiles that are left, then single tiles the ends of the tensors
        unit = {CHUNKS[-1]: tile, 1: 1}.get(tiles, tiles * tile)
        part = remaining // unit * unit
        chunks = chunk_table(table, group_bytes, done, part, group_size, tiles)
        if len(chunks):
            out.append((_upload(chunks, device), tiles))
        done, remaining = done + part, remaining - part
    return out, torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def corrections_of(
    steps: Sequence[float] | torch.Tensor, beta1: float, beta2: float, device: torch.device
) -> torch.Tensor:
    """1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t) and t of each tensor, FP32 [tensors, CORRECTIONS]."""
    if isinstance(steps, torch.Tensor):
        t = steps.double()
        return torch.stack((1 / (1 - beta1**t), (1 - beta2**t).rsqrt(), t), dim=1).float()
    rows = [(1 / (1 - beta1**t), 1 / math.sqrt(1 - beta2**t), t) for t in steps]
    return _upload(np.array(rows, dtype=np.float32), device)


def adamw_triton(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[Storage],
    exp_avg_sqs: Sequence[Storage],
    steps: Sequence[float] | torch.Tensor,
    remainders: Sequence[torch.Tensor] | None = None,
    weights: Sequence[torch.Tensor] | None = None,
    *,
    exp_avg_codec: Codec,
    exp_avg_sq_codec: Codec,
    group_size: int,
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    stochastic: bool = False,
    dither: bool = False,
    seed: int = 0,
) -> None:
    """`adamw_` on CUDA, or in the interpreter.

    At most five launches, however many tensors there are: one for each size of chunks, and one, the only one
    with masks, for the last tile of each tensor.
    """
    device = params[0].device
    extra = remainders or weights or params
    tensors = [
        (p, g, *m, *v, e) for p, g, m, v, e in zip(params, grads, exp_avgs, exp_avg_sqs, extra, strict=True)
    ]
    pointers = np.array([[t.data_ptr() for t in row] for row in tensors], dtype=np.int64)
    element_bytes = tuple(t.element_size() for t in tensors[0])
    numels = tuple(p.numel() for p in params)
    corrections = corrections_of(steps, beta1, beta2, device)
    tables, uploaded = launches(pointers.tobytes(), element_bytes, numels, group_size, device)
    if uploaded is not None and not torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(device)
        # another stream may have asked for them first, and may give them up first
        stream.wait_event(uploaded)
        for table, _ in tables:
            table.record_stream(stream)
    for table, tiles in tables:
        with torch.cuda.device_of(params[0]):
            adamw_kernel[(len(table) * tiles,)](
                table,
                corrections,
                lr if isinstance(lr, torch.Tensor) else None,
                grad_scale,
                found_inf,
                tiles.bit_length() - 1,
                seed,
                lr=0.0 if isinstance(lr, torch.Tensor) else lr,
                weight_decay=weight_decay,
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
                V_ROOTS=exp_avg_sq_codec.roots_tile,
                V_LOG_ROOTS=exp_avg_sq_codec.log_roots_tile,
                M_RATIO=exp_avg_codec.ratio_tile,
                RELATIVE=exp_avg_codec.relative,
                EXTRA="remainder" if remainders else "weight" if weights else "none",
                STOCHASTIC=stochastic,
                DITHER=dither,
                MAXIMIZE=maximize,
                # views into flat buffers may start anywhere
                ALIGNED=not (pointers[:, (0, 1, 2, 5, 8)] % 16).any(),
                MASKED=tiles == 1,
                WHOLE=tiles not in (CHUNKS[-1], 1),
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
    steps: Sequence[float] | torch.Tensor,
    remainders: Sequence[torch.Tensor] | None = None,
    weights: Sequence[torch.Tensor] | None = None,
    *,
    found_inf: torch.Tensor | None = None,
    compiled: bool = False,
    **options,
) -> None:
    """One AdamW step in place for every tensor of the lists.

    Args:
        params: FP32 or BF16, contiguous, of one type and one device.
        grads: FP32, BF16 or FP16, contiguous, of one type.
        steps: counts from 1, of each tensor, as numbers or as one FP32 tensor on the device.
        remainders: int16, for BF16 parameters: the 16 bits that make each of them an exact FP32 master.
        weights: BF16, for FP32 parameters: copies to be written too.
        lr: a number, or an FP32 tensor of one element on the device.
        grad_scale: FP32 tensor of one element on the device, by which gradients are multiplied.
        found_inf: the same; unless it holds zero, nothing is changed.
        stochastic: rounds BF16 parameters without remainders stochastically.
        dither: rounds exp_avg_sq up or down in turn, `dither_reference`.
        seed: of stochastic rounding, 31 bits; every step, tensor and element has its own noise.
        compiled: on the CPU, step in C++ where it can (`adamw_cpu`), equal but for FP32 rounding.
        options: codecs, group size and hyper-parameters, as `adamw_reference` has them.

    CUDA tensors take the kernel and never wait for the device, others the reference, in pieces.
    """
    if params and params[0].is_cuda:
        adamw_triton(
            params, grads, exp_avgs, exp_avg_sqs, steps, remainders, weights, found_inf=found_inf, **options
        )
        return
    if found_inf is not None and found_inf.item():
        return
    options["lr"] = float(options["lr"])
    nothing = [None] * len(params)
    lists = (params, grads, exp_avgs, exp_avg_sqs, steps, remainders or nothing, weights or nothing)
    function = compiled_step() if compiled else None
    for i, (param, grad, m, v, step, remainder, weight) in enumerate(zip(*lists, strict=True)):
        plain = remainder is None and weight is None
        if function is not None and plain and compiled_can(param, grad, **options):
            adamw_compiled(function, param, grad, m, v, float(step), **options)
        else:
            _in_pieces(param, grad, m, v, float(step), remainder, weight, tensor=i, **options)


def _in_pieces(param, grad, m, v, step, remainder, weight, *, group_size, seed=0, **options) -> None:
    """`adamw_reference` on one piece of the tensor after another: its temporaries stay in the cache."""

    def cut(x, a, b):
        return None if x is None else x.view(-1)[a:b]

    for a in range(0, param.numel(), PIECE):
        b = a + PIECE
        adamw_reference(
            cut(param, a, b),
            cut(grad, a, b),
            *(s.groups(a // group_size, -(-b // group_size), group_size) for s in (m, v)),
            step,
            cut(remainder, a, b),
            cut(weight, a, b),
            group_size=group_size,
            # the noise of an element is of its place in the tensor
            seed=seed + a,
            **options,
        )
