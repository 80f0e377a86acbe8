"""Storage formats of moments: error bounds, exact cases, and kernels against their references."""

import math

import pytest
import torch

from coat_kernels.codecs import CODECS, get_codec
from coat_kernels.codecs.codec import (
    decode_kernel_launch,
    decode_reference,
    encode_kernel_launch,
    encode_reference,
)
from tests.kernels.agreement import GROUP, comparable, log2_error_bound
from tests.kernels.inputs import SIZES, hard, wide


def by_reference(codec, x):
    return encode_reference(codec, x), lambda s: decode_reference(codec, s)


def by_kernel(codec, x):
    return encode_kernel_launch(codec, x), lambda s: decode_kernel_launch(codec, s)


@pytest.mark.parametrize("run", [by_reference, by_kernel])
@pytest.mark.parametrize("name", ["fp8_expanded", "log8"])
def test_codec_keeps_the_largest_of_each_group_exactly(name, run, device):
    """Constant groups, groups of one element and the maxima of all groups are restored bit for bit."""
    codec = get_codec(name)
    x = wide(GROUP * 3 + 1).to(device)
    x[:GROUP] = -0.7
    x = x if codec.signed else x.abs()
    storage, decode = run(codec, x)
    decoded = decode(storage)
    assert decoded[:GROUP].equal(x[:GROUP]) and decoded[-1] == x[-1]
    for group in (1, 2):
        part = slice(group * GROUP, (group + 1) * GROUP)
        i = x[part].abs().argmax()
        assert decoded[part][i] == x[part][i]


@pytest.mark.parametrize("run", [by_reference, by_kernel])
def test_expanded_codec_ignores_zeros_in_its_range(run, device):
    """The public kernel's minimum starts with the first lane even if it is zero; k then falls to about
    0.19."""
    codec = get_codec("fp8_expanded")
    x = wide(GROUP, sigma=1.0).to(device)
    with_zero = torch.cat((torch.zeros(1, device=device), x[1:]))
    k = [run(codec, v)[0].exponent.item() for v in (x, with_zero)]
    assert k[1] >= k[0] > 16


@pytest.mark.parametrize("name", list(CODECS))
@pytest.mark.parametrize("n", SIZES)
def test_codec_kernel_agrees_with_the_reference(name, n, device):
    """Approximate logarithms may move k by one sixteenth and, rarely, a code by one step."""
    codec = get_codec(name)
    for case, x in hard(n, codec.signed).items():
        x = x.to(device)
        expected, actual = encode_reference(codec, x), encode_kernel_launch(codec, x)
        tipped = actual.scale != expected.scale
        if codec.relative:
            # computed from logarithms that are off by 2^-18, and rounded to 12 bits
            torch.testing.assert_close(actual.scale, expected.scale, rtol=2**-11, atol=0, msg=case)
            assert tipped.sum().item() <= 1, case
        else:
            assert not tipped.any(), case
        moved = actual.exponent.int() - expected.exponent.int()
        assert moved.abs().max().item() <= 1 if moved.numel() else True, case
        alike = ~tipped if tipped.numel() else torch.ones_like(x, dtype=bool)
        alike = alike & (moved == 0) if moved.numel() else alike
        same = alike.repeat_interleave(GROUP)[:n] if tipped.numel() else alike
        a, e = (comparable(codec, s.codes).float() for s in (actual, expected))
        differ = (a[same] != e[same]) & ~(a[same].isnan() & e[same].isnan())
        assert differ.sum().item() <= max(0.005 * n, 1), case
        decoded = decode_kernel_launch(codec, expected)
        reference = decode_reference(codec, expected)
        # one approximate logarithm and one approximate power: 2^-21 each, times |log2| of up to 150
        torch.testing.assert_close(decoded, reference, rtol=2**-13, atol=1e-44, equal_nan=True, msg=case)


def test_codec_takes_at_most_the_promised_bytes():
    for name in ("fp8_expanded", "log8"):
        storage = get_codec(name).zeros(2**20)
        assert 2 * storage.nbytes / 2**20 <= 2.08


def test_codec_zeros_are_encoded_zeros():
    for codec in CODECS.values():
        zeros, encoded = codec.zeros(200), codec.encode(torch.zeros(200))
        assert decode_reference(codec, zeros).equal(torch.zeros(200))
        assert zeros.exponent.equal(encoded.exponent) and zeros.codes.equal(encoded.codes)


def test_expanded_codec_bound_is_a_sixteenth_over_k():
    """In the middle of the range the derived bound is a sixteenth, divided by k."""
    codec = get_codec("fp8_expanded")
    x = torch.logspace(0, 2, GROUP)
    storage = encode_reference(codec, x)
    k = storage.exponent.item() / 16
    assert k == pytest.approx(math.log2(448**2 / 2) / math.log2(100), abs=1 / 16)
    assert log2_error_bound(storage, x)[-1] < 0.1 / k
