"""A code for first moments that stores their ratio to the root of the second moment.

The ratio of exp_avg to the root of exp_avg_sq is Adam's update without its bias corrections. Over a group it
spans far less than the moments do, and it is bounded, so few levels represent it well. With r the root of the
*stored* second moment, u = exp_avg / r and U the group's largest |u|,

    code = round(127 (|u| / U)^(2/3)),    exp_avg = U r (code / 127)^(3/2),

in int8, with the sign. The rounding of r cancels out, because the same number divides and multiplies. The
exponent 2/3 is within 0.01 % of the best exponent (benchmarks/LOG.md), and its inverse needs only a square
root.

U is stored in FP32, rounded to a mantissa of 12 bits, so decoded values encode to the same codes, regardless
of FP32 rounding in between. -128 is NaN. Zero stays zero. Values below a 4,000th of the largest become zero,
which is safe for a first moment. A value of more than 2^128 roots is NaN, like an infinite one.

A moment without gradients shrinks by a tenth in each step with beta1 0.9. Small codes are so far apart that
rounding to nearest would stop this. Codes below 8 are therefore dithered, all codes of a step by the same
number, which costs the kernel next to nothing. Larger codes are rounded to nearest.
"""

import math

import torch
import triton
import triton.language as tl

from coat_kernels.codecs.codec import Codec, Functions
from coat_kernels.fast_math import fast_exp2, fast_log2, fast_sqrt, saturate, with_sign_of

POWER, LOG2_LEVELS = tl.constexpr(2 / 3), tl.constexpr(math.log2(127))
# smaller scales count as zero: their product with UNIT would be subnormal
SMALLEST, UNIT = tl.constexpr(2.0**-110), tl.constexpr(127**-1.5)
# codes up to 7 get the full dither, codes from 9 on none
UNDITHERED = tl.constexpr(8.5)


def statistics(x):
    amax = torch.where(x.isfinite(), x.abs(), 0).amax(1, keepdim=True)
    # the largest FP32 would round to infinity
    bits = (amax.view(torch.int32) + 0x400).bitwise_and(~0x7FF).clamp_max(0x7F7FF800)
    scale = torch.where(amax < SMALLEST.value, 0, bits.view(torch.float32))
    return scale, torch.zeros_like(scale, dtype=torch.uint8)


def to_codes(x, scale, exponent, dither):
    y = torch.exp2(POWER.value * (x.abs().log2() - scale.log2()) + LOG2_LEVELS.value)
    y = torch.where(scale > 0, y, 0).clamp_max(127)
    if dither is not None:
        y = y + dither * (UNDITHERED.value - y).clamp(0, 1)
    code = torch.where(x.isfinite(), y.round().copysign(x), -128)
    return torch.where(x == 0, 0, code).to(torch.int8)


def from_codes(codes, scale, exponent):
    y = codes.float()
    x = y * y.abs().sqrt() * (scale * UNIT.value)
    return torch.where(codes == -128, torch.nan, x)


@triton.jit
def scale_tile(b_log2):
    """The scale of each row of logarithms; non-finite values have the logarithm -infinity."""
    b_bits = fast_exp2(tl.max(b_log2, axis=1)).to(tl.int32, bitcast=True)
    b_scale = tl.minimum((b_bits + 0x400) & -0x800, 0x7F7FF800).to(tl.float32, bitcast=True)
    return tl.where(b_scale < SMALLEST, 0.0, b_scale)


@triton.jit
def codes_tile(b_log2, b_x, b_scale, b_dither, DITHER: tl.constexpr):
    """Codes of the magnitudes whose logarithms are `b_log2`, with the signs of `b_x`."""
    b_offset = tl.where(b_scale > 0.0, LOG2_LEVELS - fast_log2(b_scale) * POWER, float("-inf"))
    b_y = fast_exp2(b_log2 * POWER + b_offset)
    if DITHER:
        # not `-`, whose result in the interpreter is a constexpr, which triton before 3.9 cannot handle
        b_y += b_dither * saturate(tl.sub(UNDITHERED, b_y))
    # adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the lowest bits
    b_code = (with_sign_of(b_y, b_x) + 12582912.0).to(tl.int32, bitcast=True)
    return tl.where(tl.abs(b_x) < float("inf"), b_code, -128).to(tl.int8)


@triton.jit
def finite_log2_tile(b_x, b_log2_root):
    """log2(|x| / root), or -infinity if x is not finite, so it does not change the scale."""
    b_abs = tl.abs(b_x)
    return tl.where(b_abs < float("inf"), fast_log2(b_abs) - b_log2_root, float("-inf"))


@triton.jit
def ratio_tile(b_x, b_log2_root, b_dither):
    b_log2 = finite_log2_tile(b_x, b_log2_root)
    b_scale = scale_tile(b_log2)
    return codes_tile(b_log2, b_x, b_scale[:, None], b_dither, True), b_scale


@triton.jit
def statistics_tile(b_x, SIGNED: tl.constexpr):
    b_scale = scale_tile(finite_log2_tile(b_x, 0.0))
    return b_scale, b_scale


@triton.jit
def to_codes_tile(b_x, b_scale, b_exponent, b_dither, SIGNED: tl.constexpr, DITHER: tl.constexpr):
    return codes_tile(finite_log2_tile(b_x, 0.0), b_x, b_scale, b_dither, DITHER)


@triton.jit
def from_codes_tile(b_codes, b_scale, b_exponent, SIGNED: tl.constexpr):
    b_y = b_codes.to(tl.float32)
    b_x = b_y * fast_sqrt(tl.abs(b_y)) * (b_scale * UNIT)
    return tl.where(b_codes == -128, float("nan"), b_x)


CODEC = Codec(
    name="ratio8",
    dtype=torch.int8,
    has_exponent=False,
    reference=Functions(statistics, to_codes, from_codes),
    tiles=Functions(statistics_tile, to_codes_tile, from_codes_tile),
    ratio_tile=ratio_tile,
)
