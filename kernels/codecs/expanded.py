"""FP8 with dynamic range expansion (COAT, arXiv 2410.19313, section 4.1, equations 2 to 4).

A group of moments spans far less than an FP8 format can: its magnitudes are raised to a power k that
stretches them over the whole range before rounding, and the root is taken on the way back. With M the
group's largest and m its smallest non-zero magnitude,

    code = max * (|x| / M)^k,    |x| = M * (code / max)^(1/k),    k = log2(max^2 / 2) / log2(M / m).

The square root of M * m in the published code cancels out of these, so two numbers a group suffice:
M, and k rounded down to sixteenths and clamped to [1/16, 255/16], which is one byte. The clamp makes
constant groups, groups of one element and groups of zeros exact rather than infinite. A non-zero value
takes at least the smallest code: a second moment that became zero would let its first moment blow up.
"""

import math

import torch
import triton
import triton.language as tl

from coat_kernels.codecs.codec import Codec
from coat_kernels.fast_math import fast_exp2, fast_log2, fast_reciprocal
from coat_kernels.fp8 import E4M3, E5M2, Fp8Format, from_fp8, round_to_fp8, to_fp8


def _span(fmt: Fp8Format) -> float:
    """log2(max^2 / 2), the powers of two that every group is stretched to, in sixteenths."""
    return 16 * math.log2(fmt.max**2 / 2)


SPAN_E4M3, SPAN_E5M2 = tl.constexpr(_span(E4M3)), tl.constexpr(_span(E5M2))
LOG2_MAX_E4M3, LOG2_MAX_E5M2 = tl.constexpr(math.log2(E4M3.max)), tl.constexpr(math.log2(E5M2.max))


def _reference(fmt: Fp8Format):
    span = _span(fmt)

    def statistics(x):
        magnitude = x.abs()
        finite = magnitude.isfinite()
        largest = torch.where(finite, magnitude, 0).amax(1, keepdim=True)
        smallest = torch.where(finite & (magnitude > 0), magnitude, torch.inf).amin(1, keepdim=True)
        k = (span / (largest.log2() - smallest.log2())).floor()
        k = torch.where(largest > 0, k, 255).clamp(1, 255)
        return largest, k.to(torch.uint8)

    def to_codes(x, scale, exponent):
        k = exponent.float() / 16
        stretched = torch.exp2(k * (x.abs().log2() - scale.log2()) + math.log2(fmt.max))
        stretched = torch.where(x == 0, 0, stretched.clamp(fmt.tiny, fmt.max))
        stretched = torch.where(x.isfinite(), stretched, torch.nan)
        return round_to_fp8(stretched.copysign(x), fmt).view(torch.uint8)

    def from_codes(codes, scale, exponent):
        y = codes.view(fmt.dtype).float()
        root = torch.exp2((y.abs() / fmt.max).log2() * (16 / exponent.float()))
        return torch.where(y == 0, 0, scale * root).copysign(y)

    return statistics, to_codes, from_codes


@triton.jit
def statistics_tile(b_x, E5M2: tl.constexpr):
    SPAN: tl.constexpr = SPAN_E5M2 if E5M2 else SPAN_E4M3
    b_abs = tl.abs(b_x)
    m_finite = b_abs < float("inf")
    b_max = tl.max(tl.where(m_finite, b_abs, 0.0), axis=1)
    b_min = tl.min(tl.where(m_finite & (b_abs > 0.0), b_abs, float("inf")), axis=1)
    b_k = SPAN * fast_reciprocal(fast_log2(b_max) - fast_log2(b_min))
    b_k = tl.where(b_max > 0.0, tl.minimum(tl.maximum(b_k, 1.0), 255.0), 255.0)
    return b_max[:, None], b_k.to(tl.int32)[:, None]


@triton.jit
def to_codes_tile(b_x, b_scale, b_exponent, E5M2: tl.constexpr):
    LOG2_MAX: tl.constexpr = LOG2_MAX_E5M2 if E5M2 else LOG2_MAX_E4M3
    MAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    TINY: tl.constexpr = 2.0**-16 if E5M2 else 2.0**-9
    b_abs = tl.abs(b_x)
    b_k = b_exponent.to(tl.float32) * 0.0625
    b_y = fast_exp2(b_k * (fast_log2(b_abs) - fast_log2(b_scale)) + LOG2_MAX)
    b_y = tl.minimum(tl.maximum(b_y, TINY), MAX)
    b_y = tl.where(b_abs == 0.0, 0.0, b_y)
    b_y = tl.where(b_abs < float("inf"), b_y, float("nan"))
    return to_fp8(tl.where(b_x < 0.0, -b_y, b_y), E5M2)


@triton.jit
def from_codes_tile(b_codes, b_scale, b_exponent, E5M2: tl.constexpr):
    INVERSE_MAX: tl.constexpr = 1.0 / 57344.0 if E5M2 else 1.0 / 448.0
    b_y = from_fp8(b_codes, E5M2)
    b_root = 16.0 * fast_reciprocal(b_exponent.to(tl.float32))
    b_abs = b_scale * fast_exp2(fast_log2(tl.abs(b_y) * INVERSE_MAX) * b_root)
    b_abs = tl.where(b_y == 0.0, 0.0, b_abs)
    return tl.where(b_y < 0.0, -b_abs, b_abs)


def _codec(name: str, fmt: Fp8Format) -> Codec:
    return Codec(
        name,
        torch.uint8,
        True,
        True,
        fmt.is_e5m2,
        *_reference(fmt),
        statistics_tile,
        to_codes_tile,
        from_codes_tile,
    )


CODECS = (_codec("fp8_expanded", E4M3), _codec("fp8_expanded_e5m2", E5M2))
