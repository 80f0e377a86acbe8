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

from coat_kernels.codecs.codec import Codec, extremes_tile
from coat_kernels.fast_math import fast_exp2, fast_log2, fast_reciprocal, with_sign_of
from coat_kernels.fp8 import E4M3, E5M2, Fp8Format, dither_fp8, dither_tile, from_fp8, round_to_fp8, to_fp8


def _span(fmt: Fp8Format) -> float:
    """log2(max^2 / 2) in sixteenths: the binades that every group is stretched to."""
    return 16 * math.log2(fmt.max**2 / 2)


SPAN_E4M3, SPAN_E5M2 = tl.constexpr(_span(E4M3)), tl.constexpr(_span(E5M2))
LOG2_MAX_E4M3, LOG2_MAX_E5M2 = tl.constexpr(math.log2(E4M3.max)), tl.constexpr(math.log2(E5M2.max))


def _log2(x: torch.Tensor) -> torch.Tensor:
    return x.log2().clamp_min(-120)


def _reference(fmt: Fp8Format):
    span = _span(fmt)

    def statistics(x):
        magnitude = x.abs()
        finite = magnitude.isfinite()
        largest = torch.where(finite, magnitude, 0).amax(1, keepdim=True)
        smallest = torch.where(finite & (magnitude > 0), magnitude, torch.inf).amin(1, keepdim=True)
        k = (span / (_log2(largest) - _log2(smallest))).floor()
        k = torch.where(largest > 0, k, 255).clamp(1, 255)
        return largest, k.to(torch.uint8)

    def to_codes(x, scale, exponent, dither):
        k = exponent.float() / 16
        stretched = torch.exp2(k * (_log2(x.abs()) - _log2(scale)) + math.log2(fmt.max))
        if dither is not None:
            stretched = dither_fp8(stretched, dither, fmt, bend=1 - 1 / k)
        stretched = torch.where(x == 0, 0, stretched.clamp(fmt.tiny, fmt.max))
        stretched = torch.where(x.isfinite(), stretched, torch.nan)
        return round_to_fp8(stretched.copysign(x), fmt).view(torch.uint8)

    def from_codes(codes, scale, exponent):
        y = codes.view(fmt.dtype).float()
        # the square root of the factor; the factor itself may be as small as 2^-250
        root = torch.exp2((y.abs() / fmt.max).log2() * (8 / exponent.float()))
        return (scale * root * root).copysign(y)

    return statistics, to_codes, from_codes


@triton.jit
def log2_tile(b_abs):
    return tl.maximum(fast_log2(b_abs), -120.0)


@triton.jit
def statistics_tile(b_x, E5M2: tl.constexpr, SIGNED: tl.constexpr):
    SPAN: tl.constexpr = SPAN_E5M2 if E5M2 else SPAN_E4M3
    b_max, b_min = extremes_tile(b_x, SIGNED)
    b_k = SPAN * fast_reciprocal(log2_tile(b_max) - log2_tile(b_min))
    b_k = tl.where(b_max > 0.0, tl.minimum(tl.maximum(b_k, 1.0), 255.0), 255.0)
    return b_max, b_k.to(tl.int32)


@triton.jit
def to_codes_tile(b_x, b_scale, b_exponent, b_dither,
                  E5M2: tl.constexpr, SIGNED: tl.constexpr, DITHER: tl.constexpr):  # fmt: skip
    LOG2_MAX: tl.constexpr = LOG2_MAX_E5M2 if E5M2 else LOG2_MAX_E4M3
    b_k = b_exponent.to(tl.float32) * 0.0625
    b_offset = LOG2_MAX - b_k * log2_tile(b_scale)
    b_y = fast_exp2(b_k * log2_tile(tl.abs(b_x)) + b_offset)
    if DITHER:
        b_y = dither_tile(b_y, b_dither, 1.0 - fast_reciprocal(b_k), E5M2)
    # adds NaN to non-finite values (infinity times zero is NaN), and nothing to the others
    b_y = tl.where(b_x == 0.0, 0.0, b_y) + b_x * 0.0
    if SIGNED:
        b_y = with_sign_of(b_y, b_x)
    return to_fp8(b_y, E5M2)


@triton.jit
def from_codes_tile(b_codes, b_scale, b_exponent, E5M2: tl.constexpr, SIGNED: tl.constexpr):
    INVERSE_MAX: tl.constexpr = 1.0 / 57344.0 if E5M2 else 1.0 / 448.0
    b_y = from_fp8(b_codes, E5M2)
    # The square root of the factor; the factor itself may be as small as 2^-250. The logarithm of zero is
    # -infinity, and the power is zero again; the logarithm of the largest code is exactly zero.
    b_power = 8.0 * fast_reciprocal(b_exponent.to(tl.float32))
    b_root = fast_exp2(fast_log2(tl.abs(b_y) * INVERSE_MAX) * b_power)
    b_abs = b_scale * b_root * b_root
    if SIGNED:
        return with_sign_of(b_abs, b_y)
    return b_abs


TILES = statistics_tile, to_codes_tile, from_codes_tile
CODECS = tuple(
    Codec(name, torch.uint8, True, True, fmt.is_e5m2, *_reference(fmt), *TILES)
    for name, fmt in (("fp8_expanded", E4M3), ("fp8_expanded_e5m2", E5M2))
)
