"""What is said of stored moments, against the same step of FP32 moments and against values put in by hand."""

import pytest
import torch

from coat_ds import CoatAdamW
from coat_ds.optim.moment import Moment
from coat_ds.watch.states import SUMS, StateSampler, figures
from coat_kernels.codecs import get_codec

SHAPE = (16, 128)  # the 16 groups that are looked at


def optimizer(exp_avg_sq_format="log8", **options):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(*SHAPE))
    options = {"exp_avg_sq_format": exp_avg_sq_format, "min_numel": 0, **options}
    return CoatAdamW([("w", p)], **options), p


def watched(made, p, grad, **step):
    sampler = StateSampler(made, ["w"], lambda: {p: [("w", 0, p.numel())]})
    sampler.open()
    p.grad = grad
    made.step(**step)
    (sums,) = sampler.close().tolist()
    return figures(sums)


def put(made, p, exp_avg, exp_avg_sq, step=10):
    """Sets the state; what is stored then is what decodes."""
    made.init_states()
    made.state[p]["exp_avg_sq"].copy_(exp_avg_sq)
    made.state[p]["exp_avg"].copy_(exp_avg)
    made.state[p]["step"] = step


@pytest.mark.parametrize(
    "formats", [("auto", "log8"), ("fp8_expanded", "fp8_expanded"), ("fp8", "fp8"), ("bf16", "bf16")]
)
@pytest.mark.parametrize("options", [{}, {"maximize": True, "betas": (0.8, 0.95)}])
def test_update_error_is_that_of_an_fp32_step(formats, options):
    first, second = formats
    made, p = optimizer(second, exp_avg_format=first, **options)
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    for i in range(3):
        p.grad = torch.randn(*SHAPE, generator=torch.Generator().manual_seed(i))
        made.step()
    m, v = (t.double() for t in made.moments(p))
    grad, scale = torch.randn(*SHAPE, generator=torch.Generator().manual_seed(9)), torch.tensor(0.5)
    g = (-0.5 if options.get("maximize") else 0.5) * grad.double()
    found = watched(made, p, grad.clone(), grad_scale=scale)

    def update(m, v):
        return m / (v.sqrt() / (1 - beta2**4) ** 0.5 + 1e-8)

    exact = update(beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g)
    stored = update(*(t.double() for t in made.moments(p)))
    expected = ((stored - exact).square().sum() / exact.square().sum()).sqrt().item()
    assert expected > 1e-4
    assert found["update_error"] == pytest.approx(expected, rel=2e-3)


def test_an_fp32_moment_has_no_error_to_speak_of():
    made, p = optimizer("fp32", exp_avg_format="fp32")
    put(made, p, torch.randn(*SHAPE), torch.rand(*SHAPE))
    sampler = StateSampler(made, ["w"], lambda: {p: [("w", 0, p.numel())]})
    sampler.open()
    p.grad = torch.randn(*SHAPE)
    made.step()
    assert sampler.close() is None


@pytest.mark.parametrize("rounding, least, most", [("nearest", 0.97, 1.0), ("stochastic", 0.0, 0.1)])
def test_stalled_is_the_decay_that_rounding_undoes(rounding, least, most):
    """Without gradients everything is to shrink by a thousandth, much less than half a code."""
    made, p = optimizer("log8", exp_avg_sq_rounding=rounding)
    spread = torch.exp(6 * torch.rand(*SHAPE))
    # the largest of a group decays exactly, in its scale, and takes the group along: so it grows
    spread[:, 0] = 2e3
    put(made, p, torch.zeros(*SHAPE), spread)
    before = made.moments(p)[1].clone()
    grad = torch.zeros(*SHAPE)
    grad[:, 0] = before[:, 0].sqrt()
    found = watched(made, p, grad)["stalled"]
    assert least <= found <= most
    # what really becomes of them
    steps = 64
    for _ in range(steps - 1):
        p.grad[:, 0] = made.moments(p)[1][:, 0].sqrt()
        made.step()
    decayed = (before / made.moments(p)[1]).log()[:, 1:].mean() / -(torch.tensor(0.999).log() * steps)
    assert found == pytest.approx(1 - min(decayed.item(), 1.0), abs=0.05)


def test_underflowed_are_those_raised_to_the_lowest_code():
    """Plain FP8 spans 2^17.8 within a group: what is far below becomes the lowest code."""
    made, p = optimizer("fp8", exp_avg_format="fp8", betas=(0.9, 0.5))
    v = torch.ones(*SHAPE)
    put(made, p, torch.zeros(*SHAPE), v)
    # fresh second moments: 0.5 * 1 + 0.5 g^2, but where nothing was before
    made.state[p]["exp_avg_sq"].zero_()
    grad = torch.ones(*SHAPE)
    grad[:, :32] = 1e-6
    grad[0, :32] = 0
    found = watched(made, p, grad)
    assert found["underflowed"] == pytest.approx((15 * 32) / (16 * 128 - 32))


def test_only_whole_groups_of_each_tensor_are_taken():
    made, p = optimizer()
    put(made, p, torch.randn(*SHAPE), torch.rand(*SHAPE))
    places = {p: [("a", 0, 128 * 3 + 5), ("b", 128 * 3 + 5, 128 * 12), ("c", 2040, 8)]}
    sampler = StateSampler(made, ["c", "b", "a"], lambda: places)
    sampler.open()
    p.grad = torch.randn(*SHAPE)
    made.step()
    sums = sampler.close()
    assert sums.shape == (3, SUMS)
    # elements with a positive second moment: those of whole groups within each
    assert sums[:, 5].tolist() == [0, 11 * 128, 3 * 128]


def test_a_gradient_scaler_changes_no_figure():
    found = []
    for scale in (1.0, 8.0):
        made, p = optimizer()
        put(made, p, torch.full(SHAPE, 0.5), torch.rand(*SHAPE, generator=torch.Generator().manual_seed(1)))
        sampler = StateSampler(made, ["w"], lambda p=p: {p: [("w", 0, p.numel())]})
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(torch.ones(1))
        p.grad = scale * torch.randn(*SHAPE, generator=torch.Generator().manual_seed(2))
        sampler.open()
        scaler.step(made)
        found.append(sampler.close())
    assert found[0][0, 1] > 0 and torch.equal(*found)


def test_a_step_that_is_skipped_counts_nothing():
    made, p = optimizer()
    put(made, p, torch.randn(*SHAPE), torch.rand(*SHAPE))
    made.found_inf = torch.ones(1)
    assert watched(made, p, torch.randn(*SHAPE)) == {}


def test_nothing_is_left_behind():
    made, p = optimizer()
    put(made, p, torch.randn(*SHAPE), torch.rand(*SHAPE))
    watched(made, p, torch.randn(*SHAPE))
    assert not made._optimizer_step_pre_hooks and not made._optimizer_step_post_hooks
    assert isinstance(made.state[p]["exp_avg"], Moment)
    assert made.state[p]["exp_avg"].codec is get_codec("ratio8")
