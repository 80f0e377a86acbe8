"""What CoatAdamW stores of its moments is faithful."""

import math

import pytest
import torch

from coat_ds import CoatAdamW
from coat_kernels.adamw import step as adamw_step
from tests.coat_ds.faithful import assert_faithful, assert_ratio_faithful, assert_second_faithful


def _exponents(low, high, count=128):
    return torch.logspace(low, high, count) * torch.tensor([1.0, -1.0]).repeat(count // 2)


def _hidden_minimum():
    # in COAT's published code the zero in lane 1 hides lane 17 from the minimum
    x = torch.linspace(0.5, 1.0, 128)
    x[1], x[17] = 0.0, 0.01
    return x


# most of these defeat the formula of COAT's published code
GRADIENTS = {
    "zero-first": torch.cat([torch.zeros(1), torch.linspace(0.1, 1.0, 127)]),
    "zero-hides-the-minimum": _hidden_minimum(),
    "constant-negative": torch.cat([torch.full((128,), -c) for c in torch.linspace(0.1, 1.0, 16).tolist()]),
    "one-negative-element-left": torch.cat([torch.linspace(0.1, 1.0, 128), torch.tensor([-0.7])]),
    "all-zero": torch.zeros(200),
    "zero-group-among-others": torch.cat([torch.linspace(0.1, 1.0, 128), torch.zeros(128)]),
    "tiny": _exponents(-16.5, -15.5),
    "huge-span": _exponents(-17, 17),
    "infinity": torch.cat([torch.linspace(0.1, 1.0, 100), torch.tensor([torch.inf]), torch.ones(27)]),
    "negative-infinity": torch.cat([torch.tensor([-torch.inf]), -torch.linspace(0.1, 1.0, 140)]),
    "nan": torch.cat([torch.linspace(0.1, 1.0, 100), torch.tensor([torch.nan]), torch.ones(27)]),
    "normal": torch.randn(1000, generator=torch.Generator().manual_seed(0)),
    "wide": _exponents(-4, 2),
    **{f"{n}-left": torch.linspace(0.1, 1.0, 128 + n) for n in (1, 2, 127)},
}


def _fresh_moments(grad):
    """Exact FP32 moments after one step from zero."""
    v = torch.zeros_like(grad)
    return torch.zeros_like(grad).lerp_(grad, 1 - 0.9), v.addcmul_(grad, grad, value=1 - 0.95)


@pytest.mark.parametrize("grad", GRADIENTS.values(), ids=GRADIENTS)
def test_coat_adamw_stores_moments_faithfully(grad):
    p = torch.nn.Parameter(torch.zeros_like(grad))
    options = {"min_numel": 0, "betas": (0.9, 0.95)}
    optimizer = CoatAdamW([p], **options, exp_avg_sq_format="fp8_expanded")
    p.grad = grad.clone()
    optimizer.step()
    exact = _fresh_moments(grad)
    for stored, expected in zip(optimizer.moments(p), exact, strict=True):
        assert_faithful(stored, expected)
    optimizer = CoatAdamW([p], **options)
    optimizer.step()
    first, second = optimizer.moments(p)
    assert_second_faithful(second, exact[1])
    # small codes are dithered, by less than half a step more: less than the largest one's
    assert_ratio_faithful(first, exact[0], second)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_coat_adamw_keeps_a_bad_gradient_in_its_element(bad):
    """Element 5 is within its group's range, so that without it the group has the same scales."""
    grad = torch.linspace(-1.0, 1.0, 300)
    params = {x: torch.nn.Parameter(torch.ones(300)) for x in (grad[5].item(), bad)}
    for value, p in params.items():
        optimizer = CoatAdamW([p], min_numel=0, betas=(0.9, 0.95))
        for _ in range(3):
            p.grad = grad.clone()
            p.grad[5] = value
            optimizer.step()
            p.grad = None
    clean, dirty = params.values()
    others = torch.arange(300) != 5
    assert torch.equal(dirty[others], clean[others])
    assert dirty[5].isnan()
    for moment in optimizer.moments(dirty):
        assert moment[5].isnan() and moment[others].isfinite().all()


OVERFLOWING = {"betas": (0.9, 0.95), "weight_decay": 0.0, "min_numel": 0}


@pytest.mark.parametrize("kernels", [False, True])
def test_coat_adamw_with_gradients_whose_square_overflows(kernels, device, monkeypatch):
    """The kernel squares first, the reference multiplies by 1 - beta2 first, as torch.optim.AdamW does."""
    monkeypatch.setattr(adamw_step, "uses_kernels", lambda *_, **__: kernels)
    limit = torch.finfo(torch.float32).max ** 0.5 / (1 if kernels else (1 - 0.95) ** 0.5)
    for factor in (0.99, 1.01):
        coded, plain = (torch.nn.Parameter(torch.ones(300, device=device)) for _ in range(2))
        optimizer = CoatAdamW([{"params": [coded]}, {"params": [plain], "min_numel": 4096}], **OVERFLOWING)
        stock = torch.nn.Parameter(torch.ones(300, device=device))
        adamw = torch.optim.AdamW([stock], betas=(0.9, 0.95), weight_decay=0.0)
        for grad in (factor * limit, 1.0):
            for p in (coded, plain, stock):
                p.grad = torch.ones_like(p)
                p.grad[5] = grad
            optimizer.step()
            adamw.step()
        assert coded[5].isnan() == (factor > 1) and not coded[6].isnan()
        if kernels:
            assert plain[5].isnan() == (factor > 1)
        else:
            assert (plain[5] == 1) == (stock[5] == 1) == (factor > 1)


def test_coat_adamw_second_moments_never_reach_zero():
    """What a flushed second moment does: the first moment over eps."""
    p = torch.nn.Parameter(torch.zeros(128))
    optimizer = CoatAdamW([p], lr=1.0, weight_decay=0.0, min_numel=0)
    p.grad = torch.logspace(-12, 2, 128)
    optimizer.step()
    assert (optimizer.moments(p)[1] > 0).all()
    p.grad = torch.zeros(128)
    before = p.detach().clone()
    optimizer.step()
    # exact: 0.9 * 0.1 / 0.19 / sqrt(0.999 * 0.001 / 0.001999) = 0.67; stored with k = 0.1875 a moment is
    # off by at most (1 + 0.22)^(1 / 0.1875) = 2.9 either way, its root by 1.7; eps only shrinks it
    assert ((p - before).abs() < 0.67 * 2.9 * 1.7 * 1.7).all()
