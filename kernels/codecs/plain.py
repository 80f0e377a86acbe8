"""Moments in ordinary floating point: BF16, or FP32 for tensors too small to gain from 8 bits."""

import torch
import triton
import triton.language as tl

from coat_kernels.codecs.codec import Codec, Functions
from coat_kernels.fp8 import widen


def _reference(dtype: torch.dtype) -> Functions:
    def statistics(x):
        return x.new_zeros(len(x), 1), x.new_zeros(len(x), 1, dtype=torch.uint8)

    def to_codes(x, scale, exponent, dither):
        return x.to(dtype)

    def from_codes(codes, scale, exponent):
        return codes.float()

    return Functions(statistics, to_codes, from_codes)


@triton.jit
def statistics_tile(b_x, SIGNED: tl.constexpr):
    b_none = tl.zeros([b_x.shape[0]], tl.int32)
    return b_none, b_none


@triton.jit
def to_codes_tile(b_x, b_scale, b_exponent, b_dither, SIGNED: tl.constexpr, DITHER: tl.constexpr):
    return b_x


@triton.jit
def from_codes_tile(b_codes, b_scale, b_exponent, SIGNED: tl.constexpr):
    return widen(b_codes)


BF16, FP32 = (
    Codec(
        name=name,
        dtype=dtype,
        has_scale=False,
        has_exponent=False,
        reference=_reference(dtype),
        tiles=Functions(statistics_tile, to_codes_tile, from_codes_tile),
    )
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
)
