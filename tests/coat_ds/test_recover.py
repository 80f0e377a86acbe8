"""The codes of moments are found again from their FP32 values."""

from unittest import mock

import pytest
import torch

from coat_ds.optim import recover
from coat_ds.optim.moment import Moment
from coat_ds.optim.recover import recover_
from coat_kernels.codecs import CODECS, Encoded
from coat_kernels.codecs import codec as codecs
from coat_kernels.codecs.codec import encode_reference
from tests.coat_ds.optimizers import encoded

N = 128 * 40 + 77
KINDS = {
    "normal": lambda x: x,
    "wide": lambda x: x * torch.exp(8 * torch.randn(N)),
    "wider than the range of codes": lambda x: x * torch.exp(30 * torch.randn(N)).clamp(1e-37, 1e37),
    "narrow": lambda x: 1 + 1e-3 * x,
    "one value": lambda x: torch.full_like(x, 3.7e-9),
    "sparse": lambda x: torch.where(torch.rand(N) < 0.9, 0, 1e-20 * x),
    "zeros": torch.zeros_like,
    "one NaN": lambda x: torch.where(torch.arange(N) == 5, torch.nan, x),
}


def recovered(codec, values):
    """What is stored of `values`, and whether it decodes to all of them."""
    into = Encoded(codec, codec.zeros(values.numel(), device=values.device))
    return into.storage, recover_(into, values)


def recovered_moment(x, layout):
    moment = Moment.zeros(x.shape, layout, x.device)
    return moment, moment.recover_(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CODECS)
def test_recover_codes_to_the_bit(name, kind, device):
    torch.manual_seed(42)
    codec = CODECS[name]
    x = KINDS[kind](torch.randn(N))
    stored = codec.encode((x if codec.signed else x.abs()).to(device))
    values = codec.decode(stored)
    found, exact = recovered(codec, values)
    torch.testing.assert_close(codec.decode(found), values, rtol=0, atol=0, equal_nan=True)
    assert exact
    # elsewhere other codes may stand for the same values, of one magnitude or with several NaN
    if kind in ("normal", "wide"):
        assert all(torch.equal(a, b) for a, b in zip(found, stored, strict=True))


@pytest.mark.parametrize("name", ["fp8_expanded", "log8"])
def test_recover_codes_after_stochastic_rounding(name):
    torch.manual_seed(42)
    codec, x = CODECS[name], torch.randn(N).square() * torch.exp(2 * torch.randn(N))
    stored = encode_reference(codec, x, dither=torch.rand(N) - 0.5)
    values = codec.decode(stored)
    found, exact = recovered(codec, values)
    assert exact and torch.equal(codec.decode(found), values)


def test_recover_codes_that_plain_encoding_would_not():
    torch.manual_seed(42)
    codec = CODECS["fp8_expanded"]
    values = encoded(torch.randn(N), codec).decode()
    assert not torch.equal(encoded(values, codec).decode(), values)


@pytest.mark.parametrize("width", [1e-3, 1.0])
def test_recover_same_codes_of_values_of_another_device(width):
    torch.manual_seed(42)
    codec = CODECS["fp8_expanded"]
    stored = codec.encode((width * torch.randn(N)).exp())
    # a few FP32 roundings on
    found, exact = recovered(codec, codec.decode(stored) * (1 + 1e-7 * torch.randn(N)))
    assert exact and torch.equal(found.codes, stored.codes)
    assert torch.equal(found.exponent, stored.exponent)


def test_recover_encodes_other_values():
    torch.manual_seed(42)
    codec, x = CODECS["fp8_expanded"], torch.randn(N)
    found, exact = recovered(codec, x)
    assert not exact and all(torch.equal(a, b) for a, b in zip(found, codec.encode(x), strict=True))


@pytest.mark.parametrize("name", ["fp8_expanded", "log8"])
def test_recover_finds_groups_one_by_one(name):
    """Next to groups that cannot be, and in any number of parts."""
    torch.manual_seed(42)
    codec = CODECS[name]
    stored = codec.encode(torch.randn(N).abs())
    values = codec.decode(stored)
    values[300:400] = torch.rand(100)
    with mock.patch.object(codecs, "AT_ONCE", 1024):
        found, exact = recovered(codec, values)
    back = codec.decode(found)
    same = back == values
    assert not exact and same[:256].all() and same[512:].all()
    assert torch.equal(back[256:512], encoded(values[256:512], codec).decode())


def test_recover_is_exact_if_all_pieces_are():
    torch.manual_seed(42)
    layout = ((0, CODECS["fp8_expanded"]), (1000, CODECS["fp32"]), (1100, CODECS["log8"]))
    values = encoded(torch.rand(2000), layout).decode()
    moment, exact = recovered_moment(values.view(4, 500), layout)
    assert exact and moment.piece_layout == layout and torch.equal(moment.decode(), values.view(4, 500))
    values[100] = 0.123
    moment, exact = recovered_moment(values, layout)
    assert not exact and torch.equal(moment.decode()[128:], values[128:])


def test_recover_does_not_search_what_plain_encoding_gives():
    x = 2.0 ** torch.arange(N).remainder(8)
    codec = CODECS["bf16"]
    with mock.patch.object(recover, "_moved") as moved:
        found, exact = recovered(codec, codec.decode(codec.encode(x)))
    assert exact and not moved.called
