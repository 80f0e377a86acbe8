"""FP8 with dynamic range expansion (COAT, arXiv 2410.19313, section 4.1, equations 2 to 4).

A group of moments spans far less than the range of an FP8 format. Before rounding, magnitudes are raised to a
power k that stretches them over the whole range; decoding takes the root. With M the group's largest and m
its smallest non-zero magnitude,

    code = max * (|x| / M)^k,    |x| = M * (code / max)^(1/k),    k = log2(max^2 / 2) / log2(M / m).

The square root of M * m in the published code cancels out of these formulas, so two numbers per group
suffice: M, and k rounded down to sixteenths and clamped to [1/16, 255/16], which is one byte. The clamp makes
constant groups, groups of one element and groups of zeros exact rather than infinite.

Only zero becomes zero: a second moment rounded to zero would let its first moment blow up. Magnitudes below
2^-120 therefore count as 2^-120, whose root is about 1e-18. Larger ones are stretched to at least max /
(max^2 / 2), which is more than the smallest code.
"""

import math

import torch
import triton
import triton.language as tl

from coat_kernels.codecs.codec import Codec, Functions, extremes_tile
from coat_kernels.fast_math import fast_exp2, fast_log2, fast_reciprocal, with_sign_of
from coat_kernels.fp8 import E4M3, from_fp8, round_to_fp8, to_fp8

# log2(max^2 / 2) in sixteenths: the binades that every group is stretched to
SPAN = tl.constexpr(16 * math.log2(E4M3.max**2 / 2))
MAX, LOG2_MAX = tl.constexpr(E4M3.max), tl.constexpr(math.log2(E4M3.max))


def log2(x: torch.Tensor) -> torch.Tensor:
    """The logarithm, in which magnitudes below 2^-120 count as 2^-120."""
    return x.log2().clamp_min(-120)


def statistics(x):
    magnitude = x.abs()
    finite = magnitude.isfinite()
    amax = torch.where(finite, magnitude, 0).amax(1, keepdim=True)
    smallest = torch.where(finite & (magnitude > 0), magnitude, torch.inf).amin(1, keepdim=True)
    k = (SPAN.value / (log2(amax) - log2(smallest))).floor()
    k = torch.where(amax > 0, k, 255).clamp(1, 255)
    return amax, k.to(torch.uint8)


def to_codes(x, scale, exponent, dither):
    k = exponent.float() / 16
    stretched = torch.exp2(k * (log2(x.abs()) - log2(scale)) + LOG2_MAX.value)
    if dither is not None:
        stretched = dithered(stretched, dither, bend=1 - 1 / k)
    stretched = torch.where(x == 0, 0, stretched.clamp(E4M3.tiny, E4M3.max))
    stretched = torch.where(x.isfinite(), stretched, torch.nan)
    return round_to_fp8(stretched.copysign(x), E4M3).view(torch.uint8)


def from_codes(codes, scale, exponent):
    y = codes.view(E4M3.dtype).float()
    # the square root of the factor; the factor itself may be as small as 2^-250
    root = torch.exp2((y.abs() / E4M3.max).log2() * (8 / exponent.float()))
    return (scale * root * root).copysign(y)


def dithered(y: torch.Tensor, u: torch.Tensor, bend: torch.Tensor | float = 0.0) -> torch.Tensor:
    """`y` (FP32) moved by `u` of its steps in E4M3, |u| < 1/2, so that its rounded value is right on average.

    If the power y^(1/k), not y, must be right on average, `bend` is 1 - 1/k. Roundings of variance step^2 / 6
    then bias the power like a change of y by -bend * step^2 / (12 y), so the opposite change is added here
    (second term of the power's Taylor series).
    """
    _, power = torch.frexp(y)
    # y has 3 bits after its first
    step = torch.ldexp(torch.ones_like(y), power - 4).clamp_min(E4M3.tiny)
    return torch.where(y == 0, y, y + step * (u + bend / 12 * step / y))


@triton.jit
def dithered_tile(b_y, b_u, b_bend):
    """`dithered` for nonzero values; the step comes from the exponent's bits."""
    SMALLEST: tl.constexpr = (127 - 6) << 23
    b_power = tl.maximum(b_y.to(tl.int32, bitcast=True) & 0x7F800000, SMALLEST).to(tl.float32, bitcast=True)
    b_step = b_power * 0.125
    return b_y + b_step * (b_u + b_bend * 0.08333333 * b_step / b_y)


@triton.jit
def log2_tile(b_abs):
    return tl.maximum(fast_log2(b_abs), -120.0)


@triton.jit
def statistics_tile(b_x, SIGNED: tl.constexpr):
    b_max, b_min = extremes_tile(b_x, SIGNED)
    b_k = SPAN * fast_reciprocal(log2_tile(b_max) - log2_tile(b_min))
    b_k = tl.where(b_max > 0.0, tl.minimum(tl.maximum(b_k, 1.0), 255.0), 255.0)
    return b_max, b_k.to(tl.int32)


@triton.jit
def to_codes_tile(b_x, b_scale, b_exponent, b_dither, SIGNED: tl.constexpr, DITHER: tl.constexpr):
    b_k = b_exponent.to(tl.float32) * 0.0625
    b_offset = LOG2_MAX - b_k * log2_tile(b_scale)
    b_y = fast_exp2(b_k * log2_tile(tl.abs(b_x)) + b_offset)
    if DITHER:
        b_y = dithered_tile(b_y, b_dither, 1.0 - fast_reciprocal(b_k))
    # adds NaN to non-finite values (infinity times zero is NaN), and nothing to the others
    b_y = tl.where(b_x == 0.0, 0.0, b_y) + b_x * 0.0
    if SIGNED:
        b_y = with_sign_of(b_y, b_x)
    return to_fp8(b_y, False)


@triton.jit
def from_codes_tile(b_codes, b_scale, b_exponent, SIGNED: tl.constexpr):
    b_y = from_fp8(b_codes, False)
    # The square root of the factor; the factor itself may be as small as 2^-250. The logarithm of zero is
    # -infinity, and the power is zero again; the logarithm of the largest code is exactly zero.
    b_power = 8.0 * fast_reciprocal(b_exponent.to(tl.float32))
    b_root = fast_exp2(fast_log2(tl.abs(b_y) * (1.0 / MAX)) * b_power)
    b_abs = b_scale * b_root * b_root
    if SIGNED:
        return with_sign_of(b_abs, b_y)
    return b_abs


CODEC = Codec(
    name="fp8_expanded",
    dtype=torch.uint8,
    reference=Functions(statistics, to_codes, from_codes),
    tiles=Functions(statistics_tile, to_codes_tile, from_codes_tile),
)
