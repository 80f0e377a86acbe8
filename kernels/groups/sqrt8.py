"""sqrt8: signed integers whose squares are the values.

With y = x / scale the code is c = sign(y) round(sqrt(|y|)); c |c| decodes to y. Its steps grow with the root
of a value, FP8's with the value itself. A Gaussian has an error of 0.7 % (relative RMS) instead of 2.7 %. In
a group with an outlier of 1000, an element of 1 has an error of at most 14 %; plain integers would lose it.
"""

import torch
import triton
import triton.language as tl

from coat_kernels.fast_math import fast_sqrt, with_sign_of
from coat_kernels.groups.format import GroupFormat, scaled, scaled_tile

# the code of NaN and infinities
NAN_CODE = tl.constexpr(-128)
# rounds roots half way between two integers up, whatever the last bits of a fast square root
TIES_UP = tl.constexpr(1 + 2.0**-20)


def to_codes(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # the root of more than 127.5^2 would round to 128
    y, exponent = scaled(groups, 16256.0)
    codes = y.sign() * (y.abs().sqrt() * TIES_UP.value).round()
    codes = torch.where(y.isfinite(), codes, NAN_CODE.value).to(torch.int8)
    return codes.view(torch.uint8), exponent


def from_codes(codes: torch.Tensor) -> torch.Tensor:
    root = codes.view(torch.int8).float()
    return torch.where(root == NAN_CODE.value, torch.nan, root * root.abs())


@triton.jit
def to_codes_tile(b_groups):
    b_y, b_exponent = scaled_tile(b_groups, 13, 0x7E0000)
    b_root = with_sign_of(fast_sqrt(tl.abs(b_y)), b_y)
    # adding 1.5 * 2^23 rounds to nearest and leaves the integer in the lowest bits
    b_bits = (b_root * TIES_UP + 12582912.0).to(tl.int32, bitcast=True)
    return tl.where(b_y == b_y, b_bits, NAN_CODE).to(tl.uint8), b_exponent


@triton.jit
def from_codes_tile(b_codes):
    b_root = b_codes.to(tl.int8, bitcast=True).to(tl.float32)
    return tl.where(b_root == NAN_CODE, float("nan"), b_root * tl.abs(b_root))


FORMAT = GroupFormat("sqrt8", to_codes, from_codes, to_codes_tile, from_codes_tile)
