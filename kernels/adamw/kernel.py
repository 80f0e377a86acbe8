"""AdamW in one pass: the kernel reads gradient, parameter and codes once and writes parameter and codes once.
FP32 moments never exist in memory."""

import triton
import triton.language as tl

from coat_kernels.adamw.reference import DITHER_UNIT, GRAD_KEY, LANE_KEY, STEP_KEY
from coat_kernels.codecs.codec import load_metadata, store_moment, store_scale
from coat_kernels.fast_math import fast_reciprocal, fast_sqrt
from coat_kernels.fp8 import cast, widen
from coat_kernels.tiles import load_tile, store_tile

# A program processes one tile of ROWS groups. With two warps for four rows of 128 elements, the kernel runs
# at the speed of a copy on an H200. Every variant that looped over tiles was slower (benchmarks/LOG.md).
ROWS, WARPS = 4, 2
# columns of the table: pointers, number of remaining elements, the tensor's index, and a zero
POINTERS, COLUMNS = 9, tl.constexpr(12)
# columns of a row of corrections (`corrections_of`)
CORRECTIONS = tl.constexpr(3)


@triton.jit
def load_pointer(p_chunk, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(p_chunk + COLUMN).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def bf16_of_bits(b_bits):
    """The upper 16 bits of FP32 bit patterns, already shifted down, as BF16."""
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
    """A 32-bit hash; only its upper half is correct."""
    b_x = (b_x ^ (b_x >> 16)) * 0x7FEB352D
    # the hash's last step would change only the lower half, which is unused
    return (b_x ^ (b_x >> 15)) * 0x846CA68B


@triton.jit(do_not_specialize=["log2_tiles", "seed"])
def adamw_kernel(
    # addresses of the tensors, and values that differ between tensors: see `chunks.py`
    p_table, p_corrections,
    # FP32 [1] on the device; each may be None
    p_lr, p_grad_scale, p_found_inf,
    # tiles per chunk, and the seed of stochastic rounding
    log2_tiles, seed,
    # hyper-parameters; rate1 and rate2 are 1 - beta
    lr, weight_decay, rate1, rate2, eps,
    # types of the parameter, the gradient and the codes of both moments
    PARAM: tl.constexpr, GRAD: tl.constexpr, M_CODES: tl.constexpr, V_CODES: tl.constexpr,
    # codec of exp_avg: its tile functions, and whether it stores a scale and an exponent per group
    M_FROM: tl.constexpr, M_STATISTICS: tl.constexpr, M_TO: tl.constexpr,
    M_SCALE: tl.constexpr, M_EXPONENT: tl.constexpr,
    # the same for exp_avg_sq
    V_FROM: tl.constexpr, V_STATISTICS: tl.constexpr, V_TO: tl.constexpr,
    V_SCALE: tl.constexpr, V_EXPONENT: tl.constexpr,
    # for an exp_avg that is stored relative to the root of exp_avg_sq
    V_ROOTS: tl.constexpr, V_LOG_ROOTS: tl.constexpr, M_RATIO: tl.constexpr, RELATIVE: tl.constexpr,
    # EXACT: the table's last pointer is of remainders
    EXACT: tl.constexpr, STOCHASTIC: tl.constexpr, DITHER: tl.constexpr, MAXIMIZE: tl.constexpr,
    # ALIGNED: tensors begin at multiples of 16 bytes; MASKED: the last tile of a tensor; WHOLE: full chunks
    ALIGNED: tl.constexpr, MASKED: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    # one row of the table holds everything that a program needs, because dependent look-ups cost time
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
    # nested: if the pointer is None, the load must not be compiled
    if p_found_inf is not None:  # noqa: SIM102
        if tl.load(p_found_inf) != 0.0:
            return

    # offsets within a chunk fit into 32 bits; the table's pointers hold the rest of the address
    o_row = i_tile * ROWS + tl.arange(0, ROWS)
    o_x = o_row[:, None] * G + tl.arange(0, G)[None, :]
    m_x, m_row = o_x < n, o_row * G < n
    b_g = widen(load_tile(p_grad, o_x, m_x, MASKED))
    b_param = load_tile(p_param, o_x, m_x, MASKED)
    b_p = widen(b_param)
    if EXACT:
        p_remainder = load_pointer(p_chunk, 8, tl.int16, ALIGNED)
        b_p = join_tile(b_param, load_tile(p_remainder, o_x, m_x, MASKED))
    b_m_codes = load_tile(p_m, o_x, m_x, MASKED)
    b_v_codes = load_tile(p_v, o_x, m_x, MASKED)
    correction = tl.load(p_corrections + CORRECTIONS * i_tensor)
    inverse_root = tl.load(p_corrections + CORRECTIONS * i_tensor + 1)
    # The barrier protects nothing. Without it the assembler moves the wide loads down to their first use,
    # where the program would stall for them. Scales are loaded after the barrier. Decoding needs the scales,
    # so the assembler cannot move arithmetic, which stalls for the codes, ahead of the other loads either.
    tl.debug_barrier()
    b_m_scale, b_m_exponent = load_metadata(
        p_m_scale, p_m_exponent, o_row, m_row, M_SCALE, M_EXPONENT, MASKED
    )
    b_v_scale, b_v_exponent = load_metadata(
        p_v_scale, p_v_exponent, o_row, m_row, V_SCALE, V_EXPONENT, MASKED
    )
    if p_lr is not None:
        lr = tl.load(p_lr).to(tl.float32)
    step_size = lr * correction
    b_dither, turn = 0.0, 0.0
    if STOCHASTIC or DITHER or RELATIVE:
        turns = tl.load(p_corrections + CORRECTIONS * i_tensor + 2).to(tl.int64) * STEP_KEY
        turn = turns.to(tl.int32).to(tl.float32) * DITHER_UNIT
    if DITHER:
        b_lane = tl.arange(0, G).to(tl.uint32) * LANE_KEY + turns.to(tl.uint32)
        b_dither = (b_lane.to(tl.int32, bitcast=True).to(tl.float32) * DITHER_UNIT)[None, :]
    if p_grad_scale is not None:
        # Rounded here by an explicit fma. The compiler would fuse a plain multiplication into one of the sums
        # below, and only in some tiles, so the bits of an element would depend on its position.
        b_g = tl.fma(b_g, tl.load(p_grad_scale), 0.0)
    if MAXIMIZE:
        b_g = -b_g
    b_m = M_FROM(b_m_codes, b_m_scale, b_m_exponent, True)
    if RELATIVE:
        b_m *= V_ROOTS(b_v_codes, b_v_scale, b_v_exponent)
    b_v = V_FROM(b_v_codes, b_v_scale, b_v_exponent, False)
    b_m += rate1 * (b_g - b_m)
    b_v += rate2 * (b_g * b_g - b_v)
    b_update = b_m * fast_reciprocal(fast_sqrt(b_v) * inverse_root + eps)
    # decay first: FP32 keeps a decay that 1 - lr * weight_decay would round away. Infinity is skipped,
    # because infinity minus infinity would be NaN.
    b_p -= tl.where(tl.abs(b_p) < float("inf"), (lr * weight_decay) * b_p, 0.0)
    b_p -= step_size * b_update
    if EXACT:
        b_weight, b_remainder = split_tile(b_p)
        store_tile(p_param, o_x, b_weight, m_x, MASKED)
        store_tile(p_remainder, o_x, b_remainder, m_x, MASKED)
    elif STOCHASTIC:
        # `noise_reference`
        b_hash = b_p.to(tl.uint32, bitcast=True) + b_g.to(tl.uint32, bitcast=True) * GRAD_KEY
        b_hash = hash_tile(b_hash + (seed + turns).to(tl.uint32))
        b_rounded = bf16_of_bits((b_p.to(tl.int32, bitcast=True) + (b_hash >> 16).to(tl.int32)) >> 16)
        store_tile(p_param, o_x, tl.where(b_p == b_p, b_rounded, cast(b_p, PARAM)), m_x, MASKED)
    else:
        store_tile(p_param, o_x, cast(b_p, PARAM), m_x, MASKED)
    if MASKED:
        # elements past the end must not enter the statistics of the last group
        b_m = tl.where(m_x, b_m, 0.0)
        b_v = tl.where(m_x, b_v, 0.0)
    b_v_codes, b_v_scale, b_v_exponent = store_moment(
        b_v, b_dither, p_v, p_v_scale, p_v_exponent, o_x, m_x, o_row, m_row,
        V_STATISTICS, V_TO, V_SCALE, V_EXPONENT, False, DITHER, MASKED)  # fmt: skip
    if RELATIVE:
        b_log_root = V_LOG_ROOTS(b_v_codes, b_v_scale, b_v_exponent)
        b_m_codes, b_m_scale = M_RATIO(b_m, b_log_root, turn)
        store_tile(p_m, o_x, b_m_codes, m_x, MASKED)
        store_scale(p_m_scale + o_row, b_m_scale, m_row, MASKED)
    else:
        store_moment(b_m, 0.0, p_m, p_m_scale, p_m_exponent, o_x, m_x, o_row, m_row,
                     M_STATISTICS, M_TO, M_SCALE, M_EXPONENT, True, False, MASKED)  # fmt: skip
