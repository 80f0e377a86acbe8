"""Errors that storing causes in moments: the kernel against the reference, for every format."""

import pytest
import torch

from coat_kernels.adamw import AdamWOptions, storing
from coat_kernels.adamw.storing import SUMS, Moments, storing_sums_reference, storing_sums_triton
from coat_kernels.codecs import GROUP_SIZE, get_codec
from coat_kernels.codecs.codec import Encoded, encode_reference
from tests.kernels.agreement import STORING
from tests.kernels.steps import PAIRS
from tests.util import default_dtype


def options_of(m_name, v_name, **more):
    given = {"lr": 0.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
    return AdamWOptions(get_codec(m_name), get_codec(v_name), **(given | more))


def stored(options, m, v):
    """Moments [groups, GROUP_SIZE] after they were stored and decoded."""
    first = options.exp_avg_codec
    exp_avg_sq = encode_reference(options.exp_avg_sq_codec, v.reshape(-1))
    roots = Encoded(options.exp_avg_sq_codec, exp_avg_sq).roots().view_as(m) if first.relative else 1
    return Moments(encode_reference(first, (m / roots).reshape(-1)), exp_avg_sq)


def example(options, groups, device, seed=0):
    """Before and after a step that shrinks about half of the second moments, gradients and step counts."""
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(groups, GROUP_SIZE, generator=generator)

    m, v, grad = 1e-3 * normal(), 1e-6 * (3 * normal()).exp(), 1e-3 * normal()
    g = -grad if options.maximize else grad
    fresh = torch.lerp(m, g, 1 - options.beta1), v * options.beta2 + g * g * (1 - options.beta2)
    before, after = stored(options, m, v), stored(options, *fresh)
    moved = [Moments(*(type(s)(*(t.to(device) for t in s)) for s in one)) for one in (before, after)]
    step = torch.arange(1, groups + 1, dtype=torch.float64, device=device)
    return *moved, grad.to(device), step


def close(found, expected):
    for column, (rtol, atol) in enumerate(STORING):
        torch.testing.assert_close(
            found[:, column], expected[:, column], rtol=rtol, atol=atol, equal_nan=column == 0
        )


def compare(options, arguments):
    expected = storing_sums_reference(*arguments, options)
    found = storing_sums_triton(*arguments, options)
    assert found.shape == expected.shape == (len(arguments[2]), SUMS)
    close(found, expected)
    return expected


# each format once for either moment; moments stored in 32 bits have no error to measure
CASES = [(m, v, False) for m, v in PAIRS if m == "bf16" or v == "log8"]
CASES += [(m, "log8", True) for m in ("ratio8", "fp8_expanded")]


@pytest.mark.parametrize("m_name, v_name, dither", CASES)
def test_store_kernel_is_the_reference(m_name, v_name, dither, device):
    options = options_of(m_name, v_name, dither=dither)
    expected = compare(options, example(options, 6, device))
    assert (expected[:, (0, 1, 2, 5)] > 0).all()


@pytest.mark.parametrize("groups", [0, 1, 4, 9])
def test_store_takes_any_number_of_groups(groups, device):
    options = options_of("ratio8", "log8", dither=True, maximize=True, eps=0.1)
    arguments = example(options, groups, device)
    if groups:
        compare(options, arguments)
    assert storing_sums_triton(*arguments, options).shape == (groups, SUMS)


@pytest.mark.parametrize("m_name, v_name", [("ratio8", "log8"), ("fp8_expanded", "fp8_expanded")])
def test_store_of_zeros_and_what_is_not_finite(m_name, v_name, device):
    options = options_of(m_name, v_name, eps=0.0)
    before, after, grad, step = example(options, 6, device)
    zeros = stored(options, torch.zeros(6, 128), torch.zeros(6, 128))
    grad[0, 3], grad[1, 5], grad[2] = float("inf"), float("nan"), 0
    for moments in (before, after):
        for storage, empty in zip(moments, zeros, strict=True):
            # a group of zeros without a gradient, as padding has
            storage.codes.view(6, 128)[2] = empty.codes.view(6, 128)[2].to(device)
            for t, e in zip(storage[1:], empty[1:], strict=True):
                t[2:3] = e[2:3].to(device)
    # an infinite update, from a second moment of zero; and a moment that should shrink, and is stored as zero
    before.exp_avg_sq.codes.view(6, 128)[3, 7] = 0
    after.exp_avg_sq.codes.view(6, 128)[4, 9] = 0
    grad[3, 7] = grad[4, 9] = 0
    expected = storing_sums_reference(before, after, grad, step, options)
    found = storing_sums_triton(before, after, grad, step, options)
    assert expected[3, 5] == found[3, 5] == 127 and expected[4, 4] == found[4, 4] >= 1
    assert expected[3].isfinite().all() and expected[4, 0].isinf() and expected[4, 1:].isfinite().all()
    assert expected[2].tolist() == found[2].tolist() == [0] * SUMS
    # an infinite second moment counts as positive, NaN does not; neither has a finite update
    assert found[:2, 5].tolist() == expected[:2, 5].tolist() == [128, 127]
    assert torch.equal(found.isfinite(), expected.isfinite())
    rows = [0, 1, 3, 4, 5]
    close(found[rows], expected[rows])


def test_store_reference_in_batches_is_that_at_once(monkeypatch):
    options = options_of("ratio8", "log8", dither=True)
    arguments = example(options, 7, torch.device("cpu"))
    expected = storing_sums_reference(*arguments, options)
    monkeypatch.setattr(storing, "AT_ONCE", 3 * 128)
    assert torch.equal(storing.storing_sums(*arguments, options), expected)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_store_thresholds_are_the_same_whatever_the_default_dtype(default):
    options = options_of("ratio8", "log8", dither=True)
    arguments = example(options, 4, torch.device("cpu"))
    expected = storing_sums_reference(*arguments, options)
    storing._thresholds.cache_clear()
    try:
        with default_dtype(default):
            assert torch.equal(storing_sums_reference(*arguments, options), expected)
    finally:
        storing._thresholds.cache_clear()
