"""Figures of stored moments, against the same step of FP32 moments and against values put in by hand."""

import pytest
import torch

from coat_ds import CoatAdamW
from coat_ds.optim.layouts import Fragment
from coat_ds.optim.narrow_grad import NarrowGrad
from coat_ds.watch.states import SUMS, StateSampler, figures
from coat_kernels.adamw import storing

SHAPE = (16, 128)  # the 16 groups that are looked at


def optimizer(exp_avg_sq_format="log8", **options):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(*SHAPE))
    options = {"exp_avg_sq_format": exp_avg_sq_format, "min_numel": 0, **options}
    return CoatAdamW([("w", p)], **options), p


def watched(made, p, grad, **step):
    sampler = StateSampler(made, {p: 0}, 1)
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


@pytest.mark.parametrize("formats", [(None, "log8"), ("fp8_expanded", "fp8_expanded"), ("bf16", "bf16")])
@pytest.mark.parametrize("options", [{}, {"maximize": True, "betas": (0.8, 0.95), "eps": 0.1}])
def test_watch_update_error_is_that_of_an_fp32_step(formats, options):
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
        return m / (v.sqrt() / (1 - beta2**4) ** 0.5 + options.get("eps", 1e-8))

    exact = update(beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g)
    stored = update(*(t.double() for t in made.moments(p)))
    expected = ((stored - exact).square().sum() / exact.square().sum()).sqrt().item()
    assert expected > 1e-4
    assert found["update_error"] == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(
    "first, second, least, most",
    [
        ("fp8_expanded", "fp8_expanded", 0.97, 1.0),
        # stochastic for the second moment, whatever the first one is stored as
        (None, "log8", 0.0, 0.1),
        ("fp8_expanded", "log8", 0.0, 0.1),
    ],
)
def test_watch_stalled_is_the_decay_that_rounding_undoes(first, second, least, most):
    """Without gradients everything is to shrink by a thousandth, much less than half a code."""
    made, p = optimizer(second, exp_avg_format=first)
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


def test_watch_underflowed_are_those_stored_at_more_than_twice_their_value():
    """Values below 2^-120 count as 2^-120."""
    made, p = optimizer("log8", betas=(0.9, 0.5))
    v = torch.ones(*SHAPE)
    put(made, p, torch.zeros(*SHAPE), v)
    # fresh second moments: 0.5 * 1 + 0.5 g^2, but where nothing was before
    made.state[p]["exp_avg_sq"].zero_()
    grad = torch.ones(*SHAPE)
    # 0.5 g^2 = 2^-123, which is stored as 8 times its value
    grad[:, :32] = 2.0**-61
    grad[0, :32] = 0
    found = watched(made, p, grad)
    assert found["underflowed"] == pytest.approx((15 * 32) / (16 * 128 - 32))


def test_watch_figures_are_those_without_a_gradient_scaler():
    found = []
    for scale in (1.0, 8.0):
        made, p = optimizer()
        put(made, p, torch.full(SHAPE, 0.5), torch.rand(*SHAPE, generator=torch.Generator().manual_seed(1)))
        sampler = StateSampler(made, {p: 0}, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(torch.ones(1))
        p.grad = scale * torch.randn(*SHAPE, generator=torch.Generator().manual_seed(2))
        sampler.open()
        scaler.step(made)
        found.append(sampler.close())
    assert found[0][0, 1] > 0 and torch.equal(*found)


def test_watch_counts_no_step_that_is_skipped():
    made, p = optimizer()
    put(made, p, torch.randn(*SHAPE), torch.rand(*SHAPE))
    made.found_inf = torch.ones(1)
    assert watched(made, p, torch.randn(*SHAPE)) == {}


# of each tensor: shape, options of its parameter group, steps taken before
TENSORS = [
    ((16, 128), {}, 3),
    ((40, 128), {"betas": (0.8, 0.95)}, 3),
    ((5, 77), {"eps": 1e-2}, 3),
    ((700, 41), {"maximize": True}, 3),
    ((33, 130), {"exp_avg_format": "fp8_expanded", "exp_avg_sq_format": "fp8_expanded"}, 3),
    # measured together with the first one, whose steps the CPU counts
    ((9, 200), {"capturable": True}, 3),
    ((4096,), {}, 3),
    ((20, 128), {"betas": (0.9, 0.95)}, 3),
    ((20, 128), {"exp_avg_format": "bf16", "exp_avg_sq_format": "bf16"}, 3),
    # in the batch of the first one, but in another step
    ((20, 128), {}, 90),
    ((31, 128), {}, 7),
    # of one group, and of none
    ((150,), {}, 3),
    ((3,), {}, 3),
]


def many(device="cpu"):
    torch.manual_seed(0)
    groups = [
        {"params": [torch.nn.Parameter(torch.randn(s).to(device))], **options} for s, options, _ in TENSORS
    ]
    made = CoatAdamW(groups, min_numel=0)
    for group in made.param_groups:
        (p,) = group["params"]
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).to(device)
    made.step()
    for group, (_, options, steps) in zip(made.param_groups, TENSORS, strict=True):
        (p,) = group["params"]
        made.state[p]["step"] = torch.tensor(float(steps)).to(device) if "capturable" in options else steps
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(device)
    # gradients of several types share an operation
    for i, dtype, factor in ((1, torch.bfloat16, 0.5), (9, torch.float16, 3.0), (10, torch.bfloat16, None)):
        (p,) = made.param_groups[i]["params"]
        p.grad = NarrowGrad.of(p.grad.to(dtype))
        if factor is not None:
            p.grad.mul_(factor)
    return made, [group["params"][0] for group in made.param_groups]


def sums_of(made, tensors):
    """By the numbers of `tensors`: parameters of the model by their rows."""
    sampler = StateSampler(made, {p: i for i, p in tensors.items()}, len(TENSORS))
    sampler.open()
    made.step()
    return sampler.close()


def test_watch_of_tensors_together_is_that_of_each_alone(monkeypatch):
    alone = torch.zeros(len(TENSORS), SUMS, dtype=torch.float64)
    for i in range(len(TENSORS)):
        made, tensors = many()
        found = sums_of(made, {i: tensors[i]})
        alone += 0 if found is None else found
    # batches end within a tensor
    monkeypatch.setattr(storing, "AT_ONCE", 5 * 128)
    made, tensors = many()
    together = sums_of(made, dict(enumerate(tensors)))
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=0)
    expected = [min(p.numel() // 128, 16) * 128 for p in tensors]
    assert together[:, 5].tolist() == expected


@pytest.mark.gpu
def test_watch_on_a_gpu_is_the_reference(device):
    """Its steps round a few elements of a hundred otherwise, by a code, which moves a logarithm by 0.05."""
    found = []
    for where in ("cpu", device):
        made, tensors = many(where)
        found.append(sums_of(made, dict(enumerate(tensors))).cpu())
    for sums, rtol, atol in (((0, 1), 0.1, 0.0), ((2,), 0.02, 1e-3), ((3,), 0.05, 0.5), ((4,), 0.0, 2.0)):
        expected, there = (one[:, sums] for one in found)
        torch.testing.assert_close(there, expected, rtol=rtol, atol=atol)
    assert torch.equal(found[1][:, 5], found[0][:, 5])


def test_watch_of_parts_of_a_flat_partition_is_that_of_tensors():
    """ZeRO's partitions: groups start with each parameter, and some parameters keep FP32 moments."""
    sizes, kept = [1000, 300, 128 * 40, 640, 77], [True, False, False, False, False]
    grads = [torch.randn(n, generator=torch.Generator().manual_seed(n)) * 10.0 ** -(n % 4) for n in sizes]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    tensors = [torch.nn.Parameter(torch.ones(n)) for n in sizes]

    def flat_sums():
        p = torch.nn.Parameter(torch.ones(sum(sizes)))
        made = CoatAdamW([p], min_numel=0)
        parts = zip(starts, sizes, kept, tensors, strict=True)
        made.set_fragments([(p, [Fragment(start, n, 0, k, of) for start, n, k, of in parts], 0)])
        p.grad = torch.cat(grads)
        made.step()
        return sums_of(made, dict(enumerate(tensors)))

    made = CoatAdamW(tensors, min_numel=0, keep_fp32=lambda name, p: p.numel() == 1000)
    for p, g in zip(tensors, grads, strict=True):
        p.grad = g
    made.step()
    own = sums_of(made, dict(enumerate(tensors)))
    torch.testing.assert_close(flat_sums(), own, rtol=1e-6, atol=0)
    assert own[:5, 5].tolist() == [0, 256, 2048, 640, 0]
