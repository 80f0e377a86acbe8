"""BF16 parameters: exact masters, stochastic rounding, remainders. Of edited weights: tests/hostile."""

import copy

import pytest
import torch

from coat_ds import CoatAdamW
from coat_kernels.adamw import join_master, split_master
from tests.coat_ds.optimizers import OPTIONS, all_equal, codes, start, train


@pytest.mark.parametrize("min_numel", [0, 4096])
def test_exact_bf16_params_are_the_fp32_run_bit_for_bit(device, min_numel):
    masters = start(device, 300, 5000)
    pairs = [split_master(p.detach()) for p in masters]
    weights = [torch.nn.Parameter(w.clone()) for w, _ in pairs]
    fp32 = CoatAdamW(masters, **OPTIONS, min_numel=min_numel)
    bf16 = CoatAdamW(weights, **OPTIONS, min_numel=min_numel)
    bf16.init_states()
    for w, (_, remainder) in zip(weights, pairs, strict=True):
        bf16.state[w]["remainder"].copy_(remainder)
    train(masters, fp32)
    train(weights, bf16, steps=2)
    # a checkpoint in between keeps the 16 bits
    again = CoatAdamW(weights, **OPTIONS, min_numel=min_numel)
    saved = copy.deepcopy(bf16.state_dict())
    # as a state holds them
    saved["state"][0]["remainder"] = saved["state"][0]["remainder"].view(torch.int16)
    again.load_state_dict(saved)
    train(weights, again, steps=2, first=2)
    for p, w in zip(masters, weights, strict=True):
        assert join_master(w.detach(), again.state[w]["remainder"]).equal(p.detach())
    assert all_equal(codes(fp32), codes(again))


@pytest.mark.parametrize("loaded", [False, True], ids=["in place", "by a state dict"])
def test_bf16_params_may_change_type_or_mode_after_a_step(device, loaded):
    """What is FP32 or rounded has no remainder; moments stay to the bit."""
    for before, after, mode in (
        (torch.bfloat16, torch.float32, "exact"),
        (torch.float32, torch.bfloat16, "exact"),
        (torch.bfloat16, torch.bfloat16, "nearest"),
    ):
        (p,) = [torch.nn.Parameter(p.detach().to(before)) for p in start(device, 5000)]
        optimizer = CoatAdamW([p], **OPTIONS)
        train([p], optimizer)
        moments = codes(optimizer)
        if loaded:
            p = torch.nn.Parameter(p.detach().to(after))
            other = CoatAdamW([p], **OPTIONS, bf16_params=mode)
            other.load_state_dict(optimizer.state_dict())
            optimizer = other
        else:
            p.grad, p.data = None, p.detach().to(after)
            optimizer.param_groups[0]["bf16_params"] = mode
        assert all_equal(codes(optimizer), moments)
        expected = torch.nn.Parameter(p.detach().clone())
        fresh = CoatAdamW([expected], **OPTIONS, bf16_params=mode)
        fresh.load_state_dict({**optimizer.state_dict(), "param_groups": fresh.state_dict()["param_groups"]})
        fresh.state[expected].pop("remainder", None)
        for q, o in ((p, optimizer), (expected, fresh)):
            train([q], o, steps=2, first=4)
        assert p.equal(expected) and all_equal(codes(optimizer), codes(fresh))
        assert ("remainder" in optimizer.state[p]) == (after == torch.bfloat16 and mode == "exact")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda old: old[:50], r"shape \(50, 80\), torch.int16"),
        (lambda old: torch.cat([old, torch.zeros(5, 80, device=old.device)]), r"shape \(75, 80\), .*float32"),
        (torch.Tensor.float, r"shape \(70, 80\), torch.float32"),
        (lambda old: old.t().contiguous().t(), r"strides \(1, 70\)"),
    ],
    ids=["cut", "grown", "float", "transposed"],
)
def test_step_refuses_a_remainder_that_does_not_fit(device, change, found):
    """As after one changed the rows of a parameter. On a GPU the kernel reads past its end."""
    p = torch.nn.Parameter(torch.ones(70, 80, device=device, dtype=torch.bfloat16))
    optimizer = CoatAdamW([p], **OPTIONS)
    train([p], optimizer, 1)
    state, before = optimizer.state[p], p.detach().clone()
    state["remainder"] = change(state["remainder"])
    with pytest.raises(ValueError, match=f"{found}.* expected shape \\(70, 80\\), contiguous, torch.int16"):
        optimizer.step()
    assert p.equal(before) and state["step"] == 1
    for absent in ({}, {"remainder": None}):
        del state["remainder"]
        state.update(absent)
        optimizer.step()
        assert state["remainder"].shape == p.shape


def test_bf16_params_keep_small_updates_unless_rounded_to_nearest(device):
    """A hundred updates of a quarter of half a BF16 step: 12.5 steps in all, or none."""
    moved = {}
    for mode in ("exact", "stochastic", "nearest"):
        p = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16, device=device))
        optimizer = CoatAdamW([p], lr=2.0**-11, betas=(0.9, 0.95), weight_decay=0.0, bf16_params=mode)
        # of different sizes, so that elements differ in the bits that are rounded
        grad = -torch.linspace(0.5, 1.5, 4096, dtype=torch.bfloat16, device=device)
        for _ in range(100):
            p.grad = grad.clone()
            optimizer.step()
        moved[mode] = (p.detach().float() - 1).mean().item() / (100 * 2.0**-11)
    assert moved["nearest"] == 0
    assert moved["exact"] == pytest.approx(1, abs=0.1)
    # 4096 walks of a hundred steps of a sixteenth: their mean deviates by 1 % at most
    assert moved["stochastic"] == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("mode", ["exact", "nearest", "stochastic"])
def test_bf16_params_of_replicas_stay_equal(device, mode):
    """One weight is first in its list, after another tensor, in a second group, cut as a shard is, without
    its neighbour's gradient, and in a list with an empty tensor."""
    torch.manual_seed(0)
    weight, other = torch.randn(2, 128, 64, device=device).bfloat16()

    def of(values):
        return torch.nn.Parameter(values.clone())

    def optimizer(*params):
        return CoatAdamW(params, bf16_params=mode, min_numel=0)

    alone, second, grouped, quiet = (of(weight) for _ in range(4))
    halves = [of(half) for half in weight.chunk(2)]
    others, empty = [of(other) for _ in range(3)], torch.nn.Parameter(weight[:0].clone())
    optimizers = [
        optimizer(alone),
        optimizer(others[0], second),
        optimizer({"params": [others[1]]}, {"params": [grouped]}),
        optimizer(*halves),
        optimizer(others[2], empty, quiet),
    ]
    for step in range(20):
        grad, noise = torch.randn(2, 128, 64, device=device).bfloat16()
        for p in (alone, second, grouped, quiet):
            p.grad = grad.clone()
        for half, part in zip(halves, grad.chunk(2), strict=True):
            half.grad = part.clone()
        others[0].grad, others[1].grad, empty.grad = noise, noise.clone(), torch.zeros_like(empty)
        # the gradient of an expert without tokens
        others[2].grad = None if step % 2 else noise.clone()
        for each in optimizers:
            each.step()
    for found in (second, grouped, torch.cat([half.detach() for half in halves]), quiet):
        assert found.equal(alone)
    assert not alone.equal(weight)
