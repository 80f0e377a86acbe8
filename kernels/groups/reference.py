"""Eight bits per element in groups of 1 x G along the last dimension, each with a power-of-two scale.

Activations are saved in this format for the backward of non-linear layers (COAT, section 5.1: mixed
granularity). The stored exponent e, scale = 2^(e - 127), takes 1/G of a byte per element. It is the smallest
exponent that keeps the group's amax within the format, and at least 1. With y = x / scale an element x is
stored as one of

- e4m3: y rounded to FP8, as in the paper. A power-of-two scale loses nothing in a floating-point format.
- sqrt8: c = sign(y) round(sqrt(|y|)), an integer; c |c| decodes to y. Its steps grow with the root of a
  value, FP8's with the value itself. A Gaussian has an error of 0.7 % (relative RMS) instead of 2.7 %. In a
  group with an outlier of 1000, an element of 1 has an error of at most 14 %; plain integers would lose it.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton.language as tl

from coat_kernels.fp8 import E4M3, round_to_fp8
from coat_kernels.prepared import cdiv


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """A storage format. `max` is the largest magnitude, divided by the scale, that does not saturate."""

    name: str
    dtype: torch.dtype
    max: float


GROUP_FORMATS = {
    # the root of more than 127.5^2 would round to 128
    "sqrt8": GroupFormat("sqrt8", torch.int8, 16256.0),
    "e4m3": GroupFormat("e4m3", E4M3.dtype, E4M3.max),
}
DEFAULT_FORMAT = "sqrt8"
# the sqrt8 code of NaN and infinities
NAN_CODE = tl.constexpr(-128)
# rounds roots half way between two integers up, whatever the last bits of a fast square root
TIES_UP = tl.constexpr(1 + 2.0**-20)


class Grouped(NamedTuple):
    """`codes` [rows, columns], int8 for sqrt8 or FP8; `exponent` uint8 [rows, ceil(columns / G)], scale =
    2^(exponent - 127)."""

    codes: torch.Tensor
    exponent: torch.Tensor

    @property
    def holds_roots(self) -> bool:
        """Whether the codes are sqrt8; the kernels select the format by this flag."""
        return self.codes.dtype == torch.int8


def _split(x: torch.Tensor, group_size: int) -> torch.Tensor:
    padding = -x.shape[1] % group_size
    return torch.nn.functional.pad(x, (0, padding)).unflatten(1, (-1, group_size))


def quantize_groups_reference(x: torch.Tensor, group_size: int, fmt: str = DEFAULT_FORMAT) -> Grouped:
    """`x` [rows, columns] in groups of `group_size` along its columns, in the format called `fmt`."""
    groups, form = _split(x.float(), group_size), GROUP_FORMATS[fmt]
    largest = torch.where(groups.isfinite(), groups.abs(), 0).amax(2)
    mantissa, power = torch.frexp(largest)
    # `power - m` suffices up to the mantissa of fmt.max; a larger mantissa needs one more
    limit, m = math.frexp(form.max)
    exponent = power - m + (mantissa > limit) + 127
    exponent = torch.where(largest > 0, exponent, 1).clamp(1, 254)
    y = torch.ldexp(groups, 127 - exponent[..., None])
    codes = _roots(y) if form.dtype == torch.int8 else round_to_fp8(y, E4M3)
    return Grouped(codes.flatten(1)[:, : x.shape[1]].contiguous(), exponent.to(torch.uint8))


def _roots(y: torch.Tensor) -> torch.Tensor:
    codes = y.sign() * (y.abs().sqrt() * TIES_UP.value).round()
    return torch.where(y.isfinite(), codes, NAN_CODE.value).to(torch.int8)


def dequantize_groups_reference(q: Grouped, group_size: int) -> torch.Tensor:
    """FP32 [rows, columns]."""
    y = q.codes.float()
    if q.holds_roots:
        y = torch.where(y == NAN_CODE.value, torch.nan, y * y.abs())
    scale = torch.exp2(q.exponent.float() - 127)
    return (_split(y, group_size) * scale[..., None]).flatten(1)[:, : q.codes.shape[1]]


def empty_grouped(rows: int, columns: int, group_size: int, fmt: str, device: torch.device) -> Grouped:
    """Uninitialised storage for [rows, columns]."""
    return Grouped(
        torch.empty(rows, columns, dtype=GROUP_FORMATS[fmt].dtype, device=device),
        torch.empty(rows, cdiv(columns, group_size), dtype=torch.uint8, device=device),
    )
