"""FP32 masters as BF16 weights and 16-bit remainders, and the step on these masters."""

import pytest
import torch

from coat_kernels.adamw import join_master, split_master
from tests.kernels.inputs import wide
from tests.kernels.masters import assert_pairs_are_right, pairs
from tests.kernels.steps import OPTIONS, adamw_, adamw_list, gradients, run_list, states


def from_bits(bits, device="cpu"):
    return torch.as_tensor(bits, device=device).to(torch.int32).view(torch.float32)


def test_master_splits_and_joins_exactly():
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-38, 3.39e38, -3.39e38, torch.inf, -torch.inf])
    master = torch.cat((wide(10_000, sigma=20.0), special))
    weight, remainder = split_master(master)
    assert join_master(weight, remainder).view(torch.int32).equal(master.view(torch.int32))
    finite = master.abs() < 3.3e38
    # the nearest BF16; a tie (the lower 16 bits are 0x8000) may go to the other side
    away = weight[finite] != master[finite].bfloat16()
    assert (master[finite][away].view(torch.int32) & 0xFFFF == 0x8000).all()


# around zero, the smallest normal, one, the largest, infinity and NaN, of either sign
SPECIAL_WEIGHTS = [s + b for s in (0, 0x8000) for b in (0, 0x007F, 0x3F7F, 0x7F7E, 0x7F80, 0x7FBF, 0x7FFE)]


@pytest.mark.parametrize("first", SPECIAL_WEIGHTS, ids=hex)
def test_master_of_special_weights_with_every_remainder(first, device):
    assert_pairs_are_right(*pairs(first, 2, device))


@pytest.mark.gpu
def test_master_of_every_weight_with_every_remainder(device):
    for first in range(0, 2**16, 2**9):
        assert_pairs_are_right(*pairs(first, 2**9, device))


def test_master_that_no_finite_weight_rounds_to(device):
    """Above the largest BF16 a master is infinite as its weight is; a NaN of any payload and sign is NaN."""
    nan = [0x7F800001, 0x7F80FFFF, 0x7FC00000, 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF]
    for sign in (0, 2**31):
        huge = from_bits([sign + 0x7F7F8000, sign + 0x7F7FFFFF, sign + 0x7F800000], device)
        weight, remainder = split_master(huge)
        assert weight.float().equal(from_bits([sign + 0x7F800000] * 3, device)) and not remainder.any()
        weight, remainder = split_master(from_bits([sign + bits for bits in nan], device))
        assert weight.isnan().all() and join_master(weight, remainder).isnan().all()
        assert (weight.signbit() == bool(sign)).all()


@pytest.mark.parametrize("run", [adamw_, adamw_list])
@pytest.mark.parametrize("mode", ["exact", "stochastic"])
def test_adamw_bad_gradient_shows_in_the_bf16_weight(run, mode, device):
    """CUDA's own NaN has all bits set, and so have other NaNs here."""
    bad = [0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000, 0x7F800000, -0x00800000]
    grad = torch.cat((from_bits(bad, device), torch.ones(250, device=device)))
    weight = torch.ones(256, device=device, dtype=torch.bfloat16)
    more = (
        {"stochastic": True}
        if mode == "stochastic"
        else {"remainders": [torch.zeros(256, dtype=torch.int16, device=device)]}
    )
    run_list(run, [weight], [[grad]] * 3, device, **more)
    assert weight[:6].isnan().all() and weight[6:].isfinite().all()


@pytest.mark.parametrize("run", [adamw_, adamw_list])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_infinite_weights_stay_infinite(run, dtype, device):
    """As in torch.optim.AdamW: users build masks from infinities."""
    weight = torch.tensor([torch.inf, -torch.inf] * 128, device=device, dtype=dtype)
    start = weight.clone()
    more = (
        {"remainders": [torch.full((256,), -7, dtype=torch.int16, device=device)]}
        if dtype == torch.bfloat16
        else {}
    )
    run_list(run, [weight], gradients((256,), device), device, **more)
    assert weight.equal(start)


@pytest.mark.parametrize("run", [adamw_, adamw_list])
def test_adamw_weights_edited_between_steps_keep_their_fp32_run(run, device):
    """A mask after each step: weights that it keeps equal the FP32 run to the bit, weights that it sets to
    zero go on changing."""
    mask = torch.arange(300, device=device) % 3 > 0
    master, grads = 0.02 * torch.randn(300, device=device), gradients((300,), device)
    weight, remainder = split_master(master)
    codecs, _ = states("fp32", "fp32", 1, device)
    runs = [[codec.zeros(300, device) for codec in codecs.values()] for _ in range(2)]
    for step, (grad,) in enumerate(grads, 1):
        for p, (m, v), more in ((master, runs[0], {}), (weight, runs[1], {"remainders": [remainder]})):
            run([p], [grad], [m], [v], [step], **codecs, **OPTIONS, **more)
            assert (p != 0).all()
            # by multiplication, as users do: half of the zeros are negative
            p.mul_(mask)
    assert weight.equal(split_master(master)[0]) and (weight == 0).sum() == 100
    assert join_master(weight, remainder)[mask].equal(master[mask])
    edits = {"clamp": lambda p: p.clamp_(-0.01, 0.01), "other": lambda p: p.copy_(torch.randn_like(p))}
    for edit in edits.values():
        edit(weight)
        seen = weight.clone()
        run(
            [weight],
            [torch.zeros_like(grad)],
            *([s] for s in runs[1]),
            [4],
            **codecs,
            **{**OPTIONS, "lr": 0.0},
            remainders=[remainder],
        )
        assert weight.equal(seen)


@pytest.mark.parametrize("run", [adamw_, adamw_list])
def test_adamw_with_remainders_is_the_fp32_run_bit_for_bit(run, device):
    if run is adamw_ and device.type == "cuda":
        pytest.skip("adamw_ is the kernel there, which the other case runs")
    sizes = (300, 128 * 6)
    start = [0.02 * torch.randn(n, device=device) for n in sizes]
    grads = gradients(sizes, device)
    masters = [p.clone() for p in start]
    fp32 = run_list(run, masters, grads, device)
    weights, remainders = [list(t) for t in zip(*(split_master(p) for p in start), strict=True)]
    split = run_list(run, weights, grads, device, remainders=remainders)
    for p, w, r in zip(masters, weights, remainders, strict=True):
        assert join_master(w, r).equal(p)
    assert all(a.equal(b) for a, b in zip(fp32, split, strict=True))
