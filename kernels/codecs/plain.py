"""Moments in ordinary floating point: BF16, or FP32 for tensors too small to gain from 8 bits."""

from functools import partial

import torch
import triton
import triton.language as tl

from coat_kernels.codecs.codec import Codec
from coat_kernels.fp8 import widen


def _no_statistics(x):
    return x.new_zeros(len(x), 1), x.new_zeros(len(x), 1, dtype=torch.uint8)


def _to_codes(dtype, x, scale, exponent, dither):
    return x.to(dtype)


def _from_codes(codes, scale, exponent):
    return codes.float()


@triton.jit
def statistics_tile(b_x, E5M2: tl.constexpr, SIGNED: tl.constexpr):
    b_none = tl.zeros([b_x.shape[0]], tl.int32)
    return b_none, b_none


@triton.jit
def to_codes_tile(b_x, b_scale, b_exponent, b_dither,
                  E5M2: tl.constexpr, SIGNED: tl.constexpr, DITHER: tl.constexpr):  # fmt: skip
    return b_x


@triton.jit
def from_codes_tile(b_codes, b_scale, b_exponent, E5M2: tl.constexpr, SIGNED: tl.constexpr):
    return widen(b_codes)


TILES = statistics_tile, to_codes_tile, from_codes_tile
CODECS = tuple(
    Codec(name, dtype, False, False, False, _no_statistics, partial(_to_codes, dtype), _from_codes, *TILES)
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
)
