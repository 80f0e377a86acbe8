"""Definition of a format of saved activations, and what all formats share: the exponent of a group.

Activations are saved for the backward of non-linear layers in 8 bits per element (COAT, section 5.1: mixed
granularity), in groups of 1 x G along the last dimension. Each group has an exponent e, 1/G of a byte per
element; its scale is 2^(e - 127). e is the smallest exponent, at least 1, with which the group's amax does
not exceed the format's largest magnitude.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True, eq=False)
class GroupFormat:
    """A storage format of groups: reference functions, and tile functions that compute the same inside a
    kernel. Codes and exponents are bytes (uint8)."""

    name: str
    to_codes: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """FP32 groups [rows, groups, G] -> (codes, exponent [rows, groups])."""
    from_codes: Callable[[torch.Tensor], torch.Tensor]
    """Codes of any shape -> FP32 values divided by their scales."""
    to_codes_tile: Callable
    from_codes_tile: Callable


def scaled(groups: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 groups [rows, groups, G] divided by their scales, and their exponents [rows, groups]. `largest` is
    the largest magnitude that the format stores without saturation."""
    amax = torch.where(groups.isfinite(), groups.abs(), 0).amax(2)
    mantissa, power = torch.frexp(amax)
    # `power - m` suffices up to the mantissa of `largest`; a larger mantissa needs one more
    limit, m = math.frexp(largest)
    exponent = power - m + (mantissa > limit) + 127
    exponent = torch.where(amax > 0, exponent, 1).clamp(1, 254)
    return torch.ldexp(groups, 127 - exponent[..., None]), exponent.to(torch.uint8)


@triton.jit
def scaled_tile(b_groups, POWER: tl.constexpr, LIMIT: tl.constexpr):
    """`scaled`. POWER and LIMIT: exponent and mantissa bits of the format's largest magnitude."""
    # NaN for non-finite values, in one instruction; maxima ignore NaN, and the codes store it
    b_groups += b_groups * 0.0
    b_max = tl.maximum(tl.max(tl.abs(b_groups), axis=2), 0.0)
    # the exponent of the amax, from its bits
    b_bits = b_max.to(tl.int32, bitcast=True)
    b_exponent = (b_bits >> 23) - POWER + ((b_bits & 0x7FFFFF) > LIMIT).to(tl.int32)
    b_exponent = tl.maximum(b_exponent, 1)
    b_inverse = ((254 - b_exponent) << 23).to(tl.float32, bitcast=True)
    return b_groups * b_inverse[:, :, None], b_exponent
