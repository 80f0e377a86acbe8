"""Guarantees of every 8-bit codec for any finite input, and the effects of NaN and infinity."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from coat_kernels.codecs import CODECS, get_codec
from coat_kernels.codecs.codec import (
    decode_kernel_launch,
    decode_reference,
    encode_kernel_launch,
    encode_reference,
)
from tests.hosts import TEST_ALL
from tests.kernels.agreement import GROUP, comparable, log2_error_bound

EIGHT_BIT = [name for name, codec in CODECS.items() if codec.dtype == torch.uint8]
FLOOR = 2.0**-120
RUNS = {
    "reference": (encode_reference, decode_reference),
    "kernel": (encode_kernel_launch, decode_kernel_launch),
}

SIZES = st.one_of(st.sampled_from([1, GROUP - 1, GROUP, GROUP + 1]), st.integers(1, 2 * GROUP + 40))
# every finite bit pattern, with the edge values more often than by chance
FINITE = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 2.0**-149, -(2.0**-126), FLOOR, -FLOOR, 1.0, 448.0, 3.4028234663852886e38]),
)


@st.composite
def vectors(draw) -> torch.Tensor:
    """FP32 vectors of finite values: some with a few values repeated many times, some distributed like
    moments."""
    n = draw(SIZES)
    if draw(st.booleans()):
        return torch.from_numpy(draw(hnp.arrays(np.float32, n, elements=FINITE)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    sigma, shift = draw(st.floats(0, 20)), draw(st.floats(-30, 30))
    x = torch.randn(n, generator=generator) * torch.exp(sigma * torch.randn(n, generator=generator) + shift)
    x[torch.rand(n, generator=generator) < draw(st.sampled_from([0.0, 0.1, 0.9]))] = 0
    return x.clamp(-3e38, 3e38)


def for_any_input(check):
    """Runs `check(codec, x, encode, decode)` on many inputs by the reference and on a few by the kernels;
    `make test-all` runs more inputs of both."""

    @pytest.mark.parametrize("run", list(RUNS))
    def test(name, run, device):
        codec, (encode, decode) = get_codec(name), RUNS[run]

        number = (200 if run == "reference" else 20) if TEST_ALL else (100 if run == "reference" else 8)

        @settings(max_examples=number, derandomize=True, deadline=None)
        @given(vectors(), st.data())
        def examples(x, data):
            x = (x if codec.signed else x.abs()).to(device)
            check(
                codec,
                x,
                data,
                lambda x: encode(codec, x),
                lambda storage: decode(codec, storage),
            )

        examples()

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return test


def bound(codec, storage, expected):
    """Largest |log2(decoded / expected)|. For the logarithmic code: half a step, plus FP32 arithmetic (two
    logarithms of up to 128, each to 2^-22 of itself on a GPU, and a reciprocal to 2^-23, which scales their
    difference of up to 248), together less than 2^-13."""
    if codec.signed:
        return log2_error_bound(storage, expected)
    step = storage.exponent.float().repeat_interleave(GROUP)[: len(expected)] / 256
    return step / 2 + 2**-13


@pytest.mark.parametrize("name", EIGHT_BIT)
@for_any_input
def test_codec_error_is_within_the_derived_bound(codec, x, data, encode, decode):
    """Zeros and signs are kept, no other value becomes zero, and every magnitude is off by at most half a
    step of its code; magnitudes below 2^-120 count as 2^-120, or as the group's largest if that is
    smaller."""
    storage = encode(x)
    decoded = decode(storage)
    assert decoded.sign().equal(x.sign())
    amax = storage.scale.repeat_interleave(GROUP)[: len(x)]
    expected = x.abs().clamp_min(FLOOR).minimum(amax)
    live = x != 0
    error = (decoded.abs().log2() - expected.log2()).abs()
    assert (error <= bound(codec, storage, expected))[live].all()
    assert decoded.abs()[x.abs() == amax].equal(amax[x.abs() == amax])


@pytest.mark.parametrize("name", EIGHT_BIT)
@for_any_input
def test_codec_keeps_the_order_within_a_group(codec, x, data, encode, decode):
    decoded = decode(encode(x))
    for values, results in zip(x.split(GROUP), decoded.split(GROUP), strict=True):
        assert (results[values.argsort()].diff() >= 0).all()


@pytest.mark.parametrize("name", EIGHT_BIT)
@for_any_input
def test_codec_gives_the_same_codes_for_stored_metadata(codec, x, data, encode, decode):
    """Decoding and encoding with the same scale and exponent changes nothing: resuming is exact."""
    storage = encode(x)
    again = encode_reference(codec, decode(storage), storage)
    assert comparable(codec, again.codes).float().equal(comparable(codec, storage.codes).float())


@pytest.mark.parametrize("name", EIGHT_BIT)
@for_any_input
def test_codec_shows_bad_values_and_harms_no_neighbour(codec, x, data, encode, decode):
    """Values that are not finite decode to NaN; the other values decode as if these were zeros."""
    bad = data.draw(st.lists(st.integers(0, len(x) - 1), min_size=1, max_size=5, unique=True))
    without, broken = x.clone(), x.clone()
    for i in bad:
        without[i] = 0
        broken[i] = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    expected, decoded = decode(encode(without)), decode(encode(broken))
    is_bad = ~broken.isfinite()
    assert decoded[is_bad].isnan().all()
    assert decoded[~is_bad].equal(expected[~is_bad])


def test_codec_bound_of_the_logarithmic_code_is_not_vacuous():
    """Second moments over six decades, about twenty octaves: each is off by 3 percent at most."""
    codec = get_codec("log8")
    x = torch.logspace(-9, -3, GROUP)
    storage = encode_reference(codec, x)
    assert bound(codec, storage, x)[0] < np.log2(1.03)
    assert (
        bound(codec, storage, x)[0]
        < log2_error_bound(encode_reference(get_codec("fp8_expanded"), x), x).median()
    )
