"""The fused step against torch.optim.AdamW, and the kernel against the reference."""

import pytest
import torch

from coat_kernels import adamw
from tests.kernels.inputs import wide
from tests.kernels.steps import (
    DEFAULTS,
    OPTIONS,
    PAIRS,
    adamw_,
    adamw_list,
    adamw_reference,
    adamw_triton,
    gradients,
    run_list,
    states,
    values_of,
)
from tests.util import rel_rms


@pytest.mark.parametrize(
    "m_name,v_name,n",
    # every pair of formats with a partial last group, and two pairs with all sizes
    [(m, v, 1000) for m, v in PAIRS if v in ("fp8_expanded", "log8", "fp32")]
    + [(m, v, n) for m, v in DEFAULTS for n in (1, 127, 129, 128 * 5)],
)
def test_adamw_kernel_agrees_with_the_reference(m_name, v_name, n, device):
    """The first step and FP32 moments: approximate root and reciprocal, 2^-21, and the rounding of the
    parameter, 2^-24 of at most 10 updates. Stored moments: a code on a tie may go the other way, which moves
    an update by 2^-3 of a moment's code divided by k; over a thousand elements, seldom."""
    codecs, expected_state = states(m_name, v_name, n, device)
    _, actual_state = states(m_name, v_name, n, device)
    start = 0.02 * torch.randn(n, device=device)
    expected, actual = start.clone(), start.clone()
    for step in range(1, 4):
        grad = wide(n).to(device)
        grad[1::5] = 0
        adamw_reference(expected, grad, *expected_state, step, **codecs, **OPTIONS)
        adamw_triton(actual, grad, *actual_state, step, **codecs, **OPTIONS)
        bound = 2e-6 if m_name == v_name == "fp32" or step == 1 else 5e-3
        assert rel_rms(actual - start, expected - start) < bound


@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_adamw_kernel_takes_other_dtypes(param_dtype, grad_dtype, device):
    codecs, expected_state = states("fp8_expanded", "fp8_expanded", 300, device)
    _, actual_state = states("fp8_expanded", "fp8_expanded", 300, device)
    start = wide(300).to(device, param_dtype)
    expected, actual = start.clone(), start.clone()
    grad = torch.randn(300).to(device, grad_dtype)
    adamw_reference(expected, grad, *expected_state, 1, **codecs, **OPTIONS)
    adamw_triton(actual, grad, *actual_state, 1, **codecs, **OPTIONS)
    # BF16 parameters round to 2^-9 of themselves; only a tie may round differently
    assert rel_rms(actual, expected) < (1e-6 if param_dtype == torch.float32 else 2**-9)


@pytest.mark.parametrize("run", [adamw_reference, adamw_triton])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("m_name,v_name", DEFAULTS)
def test_adamw_bad_gradient_harms_its_own_element_alone(m_name, v_name, run, bad, device):
    codecs, good_state = states(m_name, v_name, 256, device)
    _, bad_state = states(m_name, v_name, 256, device)
    start, grad = wide(256).to(device), wide(256).to(device)
    grad[7] = grad[8]
    good, hurt = start.clone(), start.clone()
    run(good, grad, *good_state, 1, **codecs, **OPTIONS)
    broken = grad.clone()
    broken[7] = bad
    run(hurt, broken, *bad_state, 1, **codecs, **OPTIONS)
    keep = torch.arange(256, device=device) != 7
    assert hurt[7].isnan() and hurt[keep].equal(good[keep])
    for a, b in zip(values_of(codecs, good_state), values_of(codecs, bad_state), strict=True):
        assert b[7].isnan() and b[keep].equal(a[keep])


@pytest.mark.parametrize("run", [adamw_reference, adamw_triton])
@pytest.mark.parametrize("m_name,v_name", DEFAULTS)
def test_adamw_first_step_without_gradient_only_decays(m_name, v_name, run, device):
    """DeepSpeed's stage 0 steps once on zero gradients: zeros must stay zeros."""
    codecs, state = states(m_name, v_name, 300, device)
    start = wide(300).to(device)
    p = start.clone()
    run(p, torch.zeros_like(p), *state, 1, **codecs, **OPTIONS)
    assert rel_rms(p, start * (1 - 1e-3)) < 2**-23
    for x in values_of(codecs, state):
        assert x.equal(torch.zeros_like(p))


def test_adamw_list_is_what_its_tensors_are_one_by_one(device, monkeypatch):
    """Sizes that end mid-group, an empty tensor, several chunks of either size; each tensor has its own step
    count."""
    monkeypatch.setattr(adamw.chunks, "CHUNKS", (8, 2))
    sizes, steps = (128 * 19 + 5, 0, 1, 1024, 130), [3, 1, 7, 2, 1]
    runs = []
    for together in (True, False):
        torch.manual_seed(1)
        params, grads = ([wide(n).to(device) for n in sizes] for _ in range(2))
        codecs, _ = states("fp8_expanded", "fp8_expanded", 1, device)
        ms, vs = ([codec.encode(wide(n).to(device).abs()) for n in sizes] for codec in codecs.values())
        lists = (params, grads, ms, vs, steps)
        for part in (
            [lists]
            if together
            else [tuple([x] for x in xs) for xs in zip(*lists, strict=True) if xs[0].numel()]
        ):
            adamw_list(*part, **codecs, **OPTIONS)
        runs.append([*params, *(t for s in (*ms, *vs) for t in s)])
    assert all(a.equal(b) for a, b in zip(*runs, strict=True))


def test_adamw_list_takes_tensors_that_start_anywhere(device):
    """Views into flat buffers are not aligned as vector loads require."""
    codecs, expected_state = states("fp8_expanded", "fp8_expanded", 300, device)
    _, actual_state = states("fp8_expanded", "fp8_expanded", 300, device)
    start, grad = wide(300).to(device), wide(300).to(device)
    view = torch.zeros(301, device=device)[1:]
    view.copy_(start)
    adamw_triton(start, grad, *expected_state, 1, **codecs, **OPTIONS)
    adamw_triton(view, grad, *actual_state, 1, **codecs, **OPTIONS)
    assert view.equal(start) and actual_state[0].codes.equal(expected_state[0].codes)


@pytest.mark.parametrize("run", [adamw_, adamw_list])
def test_adamw_reads_gradient_scale_and_found_inf_on_the_device(run, device):
    sizes = (300, 128 * 6)
    start = [0.02 * torch.randn(n, device=device) for n in sizes]
    grads = gradients(sizes, device)
    doubled = [[2 * g for g in gs] for gs in grads]
    plain, scaled, skipped = ([p.clone() for p in start] for _ in range(3))
    expected = run_list(run, plain, grads, device)
    half = torch.tensor([0.5], device=device)
    assert all(
        a.equal(b)
        for a, b in zip(expected, run_list(run, scaled, doubled, device, grad_scale=half), strict=True)
    )
    assert all(a.equal(b) for a, b in zip(plain, scaled, strict=True))
    flag = torch.tensor([1.0], device=device)
    untouched = run_list(run, skipped, grads, device, found_inf=flag)
    assert all(a.equal(b) for a, b in zip(skipped, start, strict=True))
    assert all((t == 0).all() or (t == 255).all() for t in untouched)


def test_adamw_with_steps_and_rate_on_the_device(device):
    sizes = (300, 128 * 6)
    start = [0.02 * torch.randn(n, device=device) for n in sizes]
    grads = gradients(sizes, device)
    host, on_device = ([p.clone() for p in start] for _ in range(2))
    run_list(adamw_list, host, grads, device)
    codecs, _ = states("fp8_expanded", "fp8_expanded", 1, device)
    ms, vs = ([codec.zeros(n, device) for n in sizes] for codec in codecs.values())
    for step in range(1, 4):
        steps = torch.full((2,), float(step), device=device)
        rate = {"lr": torch.tensor(OPTIONS["lr"], device=device)}
        adamw_list(on_device, grads[step - 1], ms, vs, steps, **codecs, **(OPTIONS | rate))
    assert all(a.equal(b) for a, b in zip(host, on_device, strict=True))


def test_adamw_of_pieces_is_that_of_the_whole():
    """A tensor stepped in several pieces has the noise and the groups of the whole tensor."""
    numel, more = adamw.step.PIECE + 1000, {"dither": True, "seed": 5}
    outcomes = []
    for step_one in (adamw_reference, lambda *given, **options: adamw_(*([x] for x in given), **options)):
        torch.manual_seed(0)
        p, g = torch.randn(2, numel)
        codecs, storage = states("fp8_expanded", "log8", numel, "cpu")
        step_one(p, g, *storage, 1, **codecs, **OPTIONS, **more)
        outcomes.append((p, *storage[0], *storage[1]))
    assert all(map(torch.equal, *outcomes))
