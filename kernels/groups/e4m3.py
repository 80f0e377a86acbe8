"""e4m3: x / scale rounded to FP8, as in the paper. A power-of-two scale loses nothing in a floating-point
format."""

import torch
import triton

from coat_kernels.fp8 import E4M3, from_fp8, round_to_fp8, to_fp8
from coat_kernels.groups.format import GroupFormat, scaled, scaled_tile


def to_codes(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y, exponent = scaled(groups, E4M3.max)
    return round_to_fp8(y, E4M3).view(torch.uint8), exponent


def from_codes(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(E4M3.dtype).float()


@triton.jit
def to_codes_tile(b_groups):
    b_y, b_exponent = scaled_tile(b_groups, 8, 0x600000)
    return to_fp8(b_y, False), b_exponent


@triton.jit
def from_codes_tile(b_codes):
    return from_fp8(b_codes, False)


FORMAT = GroupFormat("e4m3", to_codes, from_codes, to_codes_tile, from_codes_tile)
