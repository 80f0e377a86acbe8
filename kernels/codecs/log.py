"""A code for second moments with evenly spaced logarithms in all 256 codes; second moments have no sign.

FP8 spends half of its codes on signs that a second moment does not have, and stretches the rest by a power.
Here a group's magnitudes, from its largest M down to its smallest non-zero m, lie on 254 levels

    x = M * 2^(-step * (254 - code)),    step = log2(M / m) / 253,

so that each value is off by at most half a step of the logarithm. Code 0 is zero. Code 255 is NaN: it stands
for non-finite and for negative values, which no second moment has. The step is rounded up to the next 256th
and stored as a byte, 1 to 251; 255 marks a group of zeros. M is stored as FP32. The group takes the same five
bytes as with dynamic range expansion, and the same rules hold: the largest value is exact, only zero becomes
zero, and magnitudes below 2^-120 count as 2^-120.
"""

import torch
import triton
import triton.language as tl

from coat_kernels.codecs.codec import Codec, Functions, Roots, extremes_tile
from coat_kernels.codecs.expanded import log2, log2_tile
from coat_kernels.fast_math import fast_exp2, fast_reciprocal

# the byte of a group whose logarithms span one octave
STEPS_PER_OCTAVE = tl.constexpr(256 / 253)


def statistics(x):
    amax = torch.where(x.isfinite(), x, 0).amax(1, keepdim=True).clamp_min(0)
    smallest = torch.where(x > 0, x, torch.inf).amin(1, keepdim=True)
    octaves = torch.where(amax > 0, log2(amax) - log2(smallest), torch.inf)
    return amax, (octaves * (256 / 253)).floor().add(1).clamp_max(255).to(torch.uint8)


def to_codes(x, scale, exponent, dither):
    code = (log2(x) - log2(scale)) * (256 / exponent.float()) + 254
    if dither is not None:
        code = code + dither
    code = torch.where(x == 0, 0, code.add(0.5).floor().clamp(1, 254))
    return torch.where(x.isfinite() & (x >= 0), code, 255).to(torch.uint8)


def from_codes(codes, scale, exponent):
    code = codes.float()
    # the square root of the factor; the factor itself may be as small as 2^-250
    root = torch.exp2((code - 254) * (exponent.float() / 512))
    x = torch.where(code == 0, 0, scale * root * root)
    return torch.where(code == 255, torch.nan, x)


def log_roots(codes, scale, exponent):
    """Zero counts as the level below the lowest, NaN as the level above the highest. A group of zeros has
    logarithm 0."""
    half_step = torch.where(scale > 0, exponent.float() / 512, 0)
    return (codes.float() - 254) * half_step + torch.where(scale > 0, log2(scale) / 2, 0)


@triton.jit
def statistics_tile(b_x, SIGNED: tl.constexpr):
    b_max, b_min = extremes_tile(b_x, SIGNED)
    b_octaves = log2_tile(b_max) - log2_tile(b_min)
    b_exponent = (b_octaves * STEPS_PER_OCTAVE).to(tl.int32) + 1
    return b_max, tl.where(b_max > 0.0, b_exponent, 255)


@triton.jit
def to_codes_tile(b_x, b_scale, b_exponent, b_dither, SIGNED: tl.constexpr, DITHER: tl.constexpr):
    b_codes_per_octave = 256.0 * fast_reciprocal(b_exponent.to(tl.float32))
    # the added half rounds, because the conversion below truncates
    b_offset = 254.5 - log2_tile(b_scale) * b_codes_per_octave
    b_code = log2_tile(b_x) * b_codes_per_octave + b_offset
    if DITHER:
        b_code += b_dither
    b_code = tl.minimum(tl.maximum(b_code.to(tl.int32), 1), 254)
    # as unsigned numbers, the bits of negative and of non-finite values are the largest
    b_bits = b_x.to(tl.uint32, bitcast=True)
    b_code = tl.where(b_bits < 0x7F800000, b_code, 255)
    return tl.where(b_x == 0.0, 0, b_code).to(tl.uint8)


@triton.jit
def half_steps_tile(b_scale, b_exponent):
    """log2 of the root of a step, per row; 0 in a group of zeros, whose roots are 1."""
    return tl.where(b_scale > 0.0, b_exponent.to(tl.float32) * (1.0 / 512.0), 0.0)


@triton.jit
def levels_tile(b_codes, b_scale, b_exponent):
    """The square roots of the codes' levels, relative to the largest, which is 1. The levels may be as small
    as 2^-250."""
    return fast_exp2((b_codes.to(tl.float32) - 254.0) * half_steps_tile(b_scale, b_exponent))


@triton.jit
def from_codes_tile(b_codes, b_scale, b_exponent, SIGNED: tl.constexpr):
    b_root = levels_tile(b_codes, b_scale, b_exponent)
    b_x = tl.where(b_codes == 0, 0.0, b_scale * b_root * b_root)
    return tl.where(b_codes == 255, float("nan"), b_x)


@triton.jit
def log_top_tile(b_scale):
    return tl.where(b_scale > 0.0, 0.5 * log2_tile(b_scale), 0.0)


@triton.jit
def log_roots_tile(b_codes, b_scale, b_exponent):
    b_level = b_codes.to(tl.float32) - 254.0
    return b_level * half_steps_tile(b_scale, b_exponent) + log_top_tile(b_scale)


@triton.jit
def roots_tile(b_codes, b_scale, b_exponent):
    # from_codes_tile computes the same levels; the compiler computes them once
    return levels_tile(b_codes, b_scale, b_exponent) * fast_exp2(log_top_tile(b_scale))


CODEC = Codec(
    name="log8",
    dtype=torch.uint8,
    reference=Functions(statistics, to_codes, from_codes),
    tiles=Functions(statistics_tile, to_codes_tile, from_codes_tile),
    fine=True,
    signed=False,
    roots=Roots(log_roots, log_roots_tile, roots_tile),
)
