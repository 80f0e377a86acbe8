"""A code for first moments that stores what they are to the root of the second moment.

The ratio of exp_avg to the root of exp_avg_sq is Adam's update, but for its bias corrections. Over a group it
spans far less than the moments do, and it is bounded: few levels hold it well. With r the root of the second
moment *as that is stored*, u = exp_avg / r and U the group's largest |u|,

    code = round(127 (|u| / U)^(2/3)),    exp_avg = U r (code / 127)^(3/2),

in int8, with the sign. What rounding does to r cancels out: the same number divides and multiplies. 2/3 is as
good as the best exponent to 0.01 % (benchmarks/LOG.md, 2026-11-22), and its inverse takes a square root only.

U is kept in FP32, rounded to a mantissa of 12 bits: decoded values then give the very same codes again,
whatever FP32 rounding came in between. -128 is NaN. Zero stays zero; what is below a 4,000th of the largest
becomes zero, which a first moment may. One of more than 2^128 roots is NaN, as an infinite one is.

A moment that gets no gradient shrinks by a tenth in a step. Small codes are so far apart that, to nearest, it
never would: codes below 8 are dithered, all those of a step by the same number, which costs the kernel next
to nothing. Larger codes are to nearest.
"""

import math

import torch
import triton
import triton.language as tl

from coat_kernels.codecs.codec import Codec, extremes_tile, unclamped_tile
from coat_kernels.fast_math import fast_exp2, fast_log2, fast_sqrt, with_sign_of

POWER, LOG2_LEVELS = tl.constexpr(2 / 3), tl.constexpr(math.log2(127))
SMALLEST, DITHERED_BELOW = tl.constexpr(2.0**-126), tl.constexpr(8.0)


def statistics(x):
    largest = torch.where(x.isfinite(), x.abs(), 0).amax(1, keepdim=True)
    # the largest FP32 would round to infinity
    bits = (largest.view(torch.int32) + 0x400).bitwise_and(~0x7FF).clamp_max(0x7F7FF800)
    scale = torch.where(largest < SMALLEST.value, 0, bits.view(torch.float32))
    return scale, torch.zeros_like(scale, dtype=torch.uint8)


def to_codes(x, scale, exponent, dither):
    magnitude = torch.where(x.abs() < SMALLEST.value, 0, x.abs())
    y = torch.exp2(
        POWER.value * (magnitude.log2() - scale.clamp_min(SMALLEST.value).log2()) + LOG2_LEVELS.value
    )
    y = y.clamp_max(127)
    if dither is not None:
        y = torch.where((y > 0) & (y < DITHERED_BELOW.value), y + dither, y)
    code = torch.where(x.isfinite(), y.round().copysign(x), -128)
    return code.to(torch.int8)


def from_codes(codes, scale, exponent):
    y = codes.float() * (1 / 127)
    x = y * y.abs().sqrt() * scale
    return torch.where(codes == -128, torch.nan, x)


@triton.jit
def statistics_tile(b_x, E5M2: tl.constexpr, SIGNED: tl.constexpr):
    b_max, _ = extremes_tile(b_x, SIGNED)
    b_bits = tl.minimum((b_max.to(tl.int32, bitcast=True) + 0x400) & -0x800, 0x7F7FF800)
    b_scale = tl.where(b_max < SMALLEST, 0.0, b_bits.to(tl.float32, bitcast=True))
    return b_scale, b_scale


@triton.jit
def to_codes_tile(b_x, b_scale, b_exponent, b_dither,
                  E5M2: tl.constexpr, SIGNED: tl.constexpr, DITHER: tl.constexpr):  # fmt: skip
    b_offset = fast_log2(tl.maximum(b_scale, SMALLEST)) * POWER - LOG2_LEVELS
    b_abs = tl.abs(b_x)
    b_y = tl.minimum(fast_exp2(fast_log2(b_abs) * POWER - b_offset), 127.0)
    if DITHER:
        b_y += tl.where(b_y < DITHERED_BELOW, b_dither, 0.0)
    # adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the lowest bits
    b_code = (with_sign_of(b_y, b_x) + 12582912.0).to(tl.int32, bitcast=True)
    return tl.where(b_abs < float("inf"), b_code, -128).to(tl.int8)


@triton.jit
def from_codes_tile(b_codes, b_scale, b_exponent, E5M2: tl.constexpr, SIGNED: tl.constexpr):
    b_y = b_codes.to(tl.float32) * (1.0 / 127.0)
    b_x = b_y * fast_sqrt(tl.abs(b_y)) * b_scale
    return tl.where(b_codes == -128, float("nan"), b_x)


CODECS = (
    Codec(
        "ratio8",
        torch.int8,
        True,
        False,
        False,
        statistics,
        to_codes,
        from_codes,
        statistics_tile,
        to_codes_tile,
        from_codes_tile,
        unclamped_tile,
        relative=True,
    ),
)
