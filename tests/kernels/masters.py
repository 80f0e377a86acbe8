"""Pairs of BF16 weights and remainders, and what holds of each."""

import torch
import triton
import triton.language as tl

from coat_kernels.adamw import join_master, split_master
from coat_kernels.adamw.kernel import join_tile, split_tile


@triton.jit
def join_and_split_kernel(p_weight, p_remainder, p_master, p_weight_out, p_remainder_out, N: tl.constexpr):
    o_x = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    b_master = join_tile(tl.load(p_weight + o_x), tl.load(p_remainder + o_x))
    b_weight, b_remainder = split_tile(b_master)
    tl.store(p_master + o_x, b_master)
    tl.store(p_weight_out + o_x, b_weight)
    tl.store(p_remainder_out + o_x, b_remainder)


def join_and_split(weight, remainder):
    """Uses the kernel's own functions; the number of elements is a power of two."""
    master = torch.empty_like(weight, dtype=torch.float32)
    out = torch.empty_like(weight), torch.empty_like(remainder)
    n = min(weight.numel(), 2**14)
    join_and_split_kernel[(weight.numel() // n,)](weight, remainder, master, *out, N=n)
    return master, *out


def assert_pairs_are_right(weight, remainder, by_kernel=True):
    """A round trip keeps the weight of every pair, and keeps every pair that a split makes exactly; tested
    with the reference and with the kernel's functions."""
    master = join_master(weight, remainder)
    again = split_master(master)
    if by_kernel:
        for got, expected in zip(join_and_split(weight, remainder), (master, *again), strict=True):
            assert got.view(torch.uint8).equal(expected.view(torch.uint8))
    nan = weight.isnan()
    # compared by bits: -0 is not 0; of a NaN only the quiet bit may change
    assert (
        again[0].view(torch.int16)
        == torch.where(nan, weight.view(torch.int16) | 0x40, weight.view(torch.int16))
    ).all()
    assert master.isnan().equal(nan) and master.isinf().equal(weight.isinf())
    alone = ~weight.isfinite() | ((weight == 0) & (remainder < 0))
    assert again[1].equal(torch.where(alone, 0, remainder))
    # no jump: at most half a step, 2^-9 of a normal value and 2^-134 for subnormals
    off = (master.double() - weight.double()).abs().nan_to_num(0.0, 0.0, 0.0)
    assert (off <= (weight.double().abs().nan_to_num(0.0, 0.0, 0.0) * 2.0**-8).clamp_min(2.0**-134)).all()


def pairs(first, weights, device):
    """Every remainder for each of `weights` weights, beginning with the bits `first`."""
    bits = torch.arange(first, first + weights, dtype=torch.int32, device=device).to(torch.int16)
    remainders = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device)
    weight = bits.view(torch.bfloat16).repeat_interleave(2**16)
    return weight, remainders.repeat(weights)
