"""The codes of moments are found again from their FP32 values."""

import pytest
import torch

from coat_ds.state import Moment
from coat_kernels.codecs import CODECS
from coat_kernels.codecs.codec import encode_reference
from megatron_ext.recover import recovered

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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [64, 128, 256])
@pytest.mark.parametrize("name", CODECS)
def test_recovered_to_the_bit(name, group_size, kind, device):
    torch.manual_seed(42)
    codec = CODECS[name]
    x = KINDS[kind](torch.randn(N))
    values = Moment.encoded((x if codec.signed else x.abs()).to(device), codec, group_size).decode()
    moment, exact = recovered(values, codec, group_size)
    torch.testing.assert_close(moment.decode(), values, rtol=0, atol=0, equal_nan=True)
    assert exact


@pytest.mark.parametrize("name", ["fp8_expanded", "log8"])
def test_recovered_after_stochastic_rounding(name):
    torch.manual_seed(42)
    codec, x = CODECS[name], torch.randn(N).square() * torch.exp(2 * torch.randn(N))
    stored = encode_reference(codec, x, 128, dither=torch.rand(N) - 0.5)
    values = codec.decode(stored, 128)
    moment, exact = recovered(values, codec, 128)
    assert exact and torch.equal(moment.decode(), values)


def test_plain_encoding_would_not_do():
    torch.manual_seed(42)
    codec = CODECS["fp8_expanded"]
    values = Moment.encoded(torch.randn(N), codec, 128).decode()
    assert not torch.equal(Moment.encoded(values, codec, 128).decode(), values)


def test_values_of_another_device_get_the_same_codes():
    torch.manual_seed(42)
    codec = CODECS["fp8_expanded"]
    stored = Moment.encoded(torch.randn(N), codec, 128)
    # a few FP32 roundings on
    moment, exact = recovered(stored.decode() * (1 + 1e-6 * torch.randn(N)), codec, 128)
    assert not exact and torch.equal(moment.storage.codes, stored.storage.codes)


def test_other_values_are_encoded():
    torch.manual_seed(42)
    codec, x = CODECS["fp8_expanded"], torch.randn(N)
    moment, exact = recovered(x, codec, 128)
    assert not exact and torch.equal(moment.decode(), Moment.encoded(x, codec, 128).decode())
