"""Plain FP8: each group is scaled so that its amax becomes the format's largest magnitude. For comparison.

A value below the format's range relative to its group becomes zero. If a second moment becomes zero, the
update can blow up. Dynamic range expansion avoids this.
"""

import torch
import triton
import triton.language as tl

from coat_kernels.codecs.codec import Codec
from coat_kernels.fp8 import E4M3, E5M2, Fp8Format, dither_fp8, dither_tile, from_fp8, round_to_fp8, to_fp8

# smallest scale whose inverse is finite
SMALLEST_SCALE = 2.0**-126


def _reference(fmt: Fp8Format):
    def statistics(x):
        largest = torch.where(x.isfinite(), x.abs(), 0).amax(1, keepdim=True)
        scale = (largest * (1 / fmt.max)).clamp_min(SMALLEST_SCALE)
        return scale, torch.zeros_like(scale, dtype=torch.uint8)

    def to_codes(x, scale, exponent, dither):
        y = x * (1 / scale)
        y = y if dither is None else dither_fp8(y, dither, fmt)
        return round_to_fp8(y, fmt).view(torch.uint8)

    def from_codes(codes, scale, exponent):
        return codes.view(fmt.dtype).float() * scale

    return statistics, to_codes, from_codes


@triton.jit
def statistics_tile(b_x, E5M2: tl.constexpr, SIGNED: tl.constexpr):
    INVERSE_MAX: tl.constexpr = 1.0 / 57344.0 if E5M2 else 1.0 / 448.0
    b_abs = tl.abs(b_x)
    b_max = tl.max(tl.where(b_abs < float("inf"), b_abs, 0.0), axis=1)
    b_scale = tl.maximum(b_max * INVERSE_MAX, 2.0**-126)
    return b_scale, b_scale


@triton.jit
def to_codes_tile(b_x, b_scale, b_exponent, b_dither,
                  E5M2: tl.constexpr, SIGNED: tl.constexpr, DITHER: tl.constexpr):  # fmt: skip
    MAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    b_y = b_x * (1.0 / b_scale)
    if DITHER:
        b_y = tl.where(b_x == 0.0, 0.0, dither_tile(b_y, b_dither, 0.0, E5M2))
    b_y = tl.minimum(tl.maximum(b_y, -MAX), MAX)
    return to_fp8(tl.where(tl.abs(b_x) < float("inf"), b_y, float("nan")), E5M2)


@triton.jit
def from_codes_tile(b_codes, b_scale, b_exponent, E5M2: tl.constexpr, SIGNED: tl.constexpr):
    return from_fp8(b_codes, E5M2) * b_scale


TILES = statistics_tile, to_codes_tile, from_codes_tile
CODECS = tuple(
    Codec(name, torch.uint8, True, False, fmt.is_e5m2, *_reference(fmt), *TILES)
    for name, fmt in (("fp8", E4M3), ("fp8_e5m2", E5M2))
)
