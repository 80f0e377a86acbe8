"""Stochastic rounding of weights and dithered codes of moments."""

import math

import pytest
import torch

from coat_kernels.adamw import dither_reference, join_master
from coat_kernels.adamw.reference import round_stochastically
from coat_kernels.codecs import get_codec
from coat_kernels.codecs.codec import encode_reference
from coat_kernels.fp8 import E4M3
from tests.kernels.inputs import wide
from tests.kernels.steps import (
    DEFAULTS,
    OPTIONS,
    adamw_list,
    adamw_reference,
    adamw_triton,
    gradients,
    run_list,
    states,
    values_of,
)


def test_stochastic_rounding_is_unbiased_and_keyed_by_its_seed(device):
    # every normal BF16 value, plus a quarter of the step to the next one
    below = torch.arange(0x80, 0x7F7F, device=device, dtype=torch.int32) << 16
    x, below = (below + 0x4000).view(torch.float32), below.view(torch.float32)
    zero = torch.zeros_like(x)
    up = torch.stack(
        [round_stochastically(x, zero, 3, step).float() > below for step in range(1, 257)]
    ).float()
    # the share of values rounded up has mean 1/4 and deviation sqrt(3/16 / n): within six deviations, for
    # each element over the steps and for each step over the elements
    for dim in (0, 1):
        assert ((up.mean(dim) - 0.25).abs() < 6 * (3 / 16 / up.shape[dim]) ** 0.5).all()
    # neighbouring elements and consecutive steps are not correlated
    for a, b in ((up[:, 1:], up[:, :-1]), (up[1:], up[:-1])):
        assert abs(((a - 0.25) * (b - 0.25)).mean().item()) < 6 * (3 / 16) / a.numel() ** 0.5
    # equal weights get different noise through their gradients
    same, grad = torch.full((100_000,), 1 + 2**-9, device=device), torch.randn(100_000, device=device)
    up = (round_stochastically(same, grad, 3, 1).float() > 1).float()
    assert (up.mean() - 0.25).abs() < 6 * (3 / 16 / len(up)) ** 0.5
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1.0, -(2.0**-126)], device=device)
    torch.testing.assert_close(round_stochastically(special, special, 3, 1).float(), special, equal_nan=True)

    sizes, runs = (300, 128 * 6), []
    for seed in (5, 5, 6):
        torch.manual_seed(0)
        params = [(0.02 * torch.randn(n)).to(device, torch.bfloat16) for n in sizes]
        run_list(adamw_list, params, gradients(sizes, device), device, stochastic=True, seed=seed)
        runs.append(params)
    assert all(a.equal(b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not runs[0][1].equal(runs[2][1])


@pytest.mark.parametrize("name", ["fp8_expanded", "log8"])
def test_dither_codes_are_right_on_average(name):
    """The mean of n roundings deviates from the value by at most 1/2 / sqrt(n) steps: five of that. Just over
    a power of two, where steps double, the lower half reaches into finer ones: an eighth of a step."""
    codec, n = get_codec(name), 400
    x = torch.logspace(-3, 0, 128)
    storage = encode_reference(codec, x)
    shifts = torch.stack([*(dither_reference(step, 128) for step in range(n)), torch.zeros(128)])
    codes = torch.stack([encode_reference(codec, x, dither=u).codes for u in shifts])
    if name == "log8":
        values, step = codes.float(), torch.ones(128)
        exact = 254 + x.log2() * 256 / storage.exponent.float()
    else:
        values = codes.view(E4M3.dtype).float()
        exact = E4M3.max * (x / x.max()) ** (storage.exponent.float() / 16)
        step = torch.exp2(exact.log2().floor() - 3).clamp_min(E4M3.tiny)
    # the largest is exact with rounding to nearest, and cannot be rounded up
    error = ((values[:n].mean(0) - exact) / step).abs()[:-1]
    assert error.max() < 5 * 0.5 / n**0.5 + 1 / 8 and error.mean() < 0.5 / n**0.5 + 1 / 64
    # with rounding to nearest the error is a quarter of a step on average
    assert ((values[n] - exact) / step).abs()[:-1].mean() > 0.2


def test_dither_fills_the_interval_evenly_in_steps_and_in_groups():
    """Each of n dither values lies within log2(n) / n of its place in an even spread, where random numbers
    would be within 1 / sqrt(n). Where a tensor is cut into shards, each group keeps its values."""
    over_steps = torch.stack([dither_reference(step, 300) for step in range(1000, 1100)])
    for x in (*over_steps.T[:128], *over_steps[:, :128]):
        n = len(x)
        places = (torch.arange(n) + 0.5) / n - 0.5
        assert x.abs().max() < 0.5 and (x.sort().values - places).abs().max() < math.log2(n) / n
    assert over_steps[:, 128:256].equal(over_steps[:, :128])
    assert dither_reference(2**24, 128).unique().numel() == 128


@pytest.mark.parametrize("name", ["fp8_expanded", "log8"])
def test_dither_lets_second_moments_decay_that_rounding_to_nearest_holds(name, device):
    """One element of each group keeps the group's maximum up; the other elements, without gradients, decay to
    beta2^t."""
    options = {**OPTIONS, "beta2": 0.999, "lr": 0.0}
    left = {}
    for dither in (False, True):
        codecs, (m, v) = states("fp8_expanded", name, 1280, device)
        codec = codecs["exp_avg_sq_codec"]
        start = wide(1280, sigma=0.5).abs().to(device)
        grad = torch.zeros(1280, device=device)
        grad[::128] = 10.0
        start[::128] = 100.0
        for old, new in zip(v, codec.encode(start), strict=True):
            old.copy_(new)
        run = adamw_triton if device.type == "cuda" else adamw_reference
        for step in range(1, 301):
            run(torch.zeros_like(start), grad, m, v, step, **codecs, **options, dither=dither)
        kept = torch.arange(1280, device=device) % 128 != 0
        left[dither] = (codec.decode(v) / start)[kept].mean().item()
    assert left[False] > 0.95
    # 300 steps of 0.1 % in codes a quarter apart at most: 1270 walks of variance 0.3 / 4, five deviations
    assert left[True] == pytest.approx(0.999**300, rel=5 * (0.3 / 4 / 1270) ** 0.5)


def test_adamw_first_moments_without_gradient_vanish(device):
    """The group has one element that keeps its scale up. With rounding to nearest, codes below 8 would not
    change: these moments would stay at a hundredth of the largest or more, and the weight would go on
    moving."""
    options = {**OPTIONS, "beta2": 0.999, "lr": 0.0}
    codecs, (m, v) = states("ratio8", "log8", 128, device)
    run = adamw_triton if device.type == "cuda" else adamw_reference
    kept = torch.arange(128, device=device) > 0
    for step in range(1, 121):
        # of one sign, sometimes larger
        grad = torch.where(kept, torch.tensor(float(step <= 40), device=device), 1.0 + (step % 7 == 0))
        run(torch.zeros(128, device=device), grad, m, v, step, **codecs, **options, dither=True)
        first, second = values_of(codecs, (m, v))
        if step == 40:
            assert (first / second.sqrt() > 1).all()
    # after 80 steps 0.9^80 = 0.0002 of it is left
    assert (first[kept].abs() <= 0.001 * second[kept].sqrt()).all() and first[0] > second[0].sqrt()


@pytest.mark.parametrize("m_name,v_name", [*DEFAULTS, ("fp8_expanded", "bf16")])
def test_adamw_kernel_rounds_its_own_result_stochastically_as_the_reference(m_name, v_name, device):
    """The exact mode shows the FP32 result, as weight and remainder."""
    sizes = (300, 128 * 6)
    start = [(0.02 * torch.randn(n)).to(device, torch.bfloat16) for n in sizes]
    grads = gradients(sizes, device, steps=1)[0]
    codecs, _ = states(m_name, v_name, 1, device)
    found = {}
    for stochastic in (False, True):
        params = [p.clone() for p in start]
        ms, vs = ([codec.zeros(n, device) for n in sizes] for codec in codecs.values())
        remainders = None if stochastic else [torch.zeros_like(p, dtype=torch.int16) for p in params]
        options = {"stochastic": stochastic, "dither": True, "seed": 11}
        adamw_list(params, grads, ms, vs, [1, 2], remainders=remainders, **codecs, **OPTIONS, **options)
        found[stochastic] = params, remainders
    rounded, masters = found[True][0], [join_master(*pair) for pair in zip(*found[False], strict=True)]
    for actual, master, grad, step in zip(rounded, masters, grads, (1, 2), strict=True):
        assert actual.equal(round_stochastically(master, grad, 11, step))
    assert any(actual.ne(weight).any() for actual, weight in zip(rounded, found[False][0], strict=True))
