"""CoatAdamW's state dicts: resumed to the bit, exchanged with other optimizers, or refused."""

import copy
import gc
import weakref

import pytest
import torch

from coat_ds import CoatAdamW, state_bytes
from coat_ds.optim.options import MOMENTS
from tests.coat_ds.faithful import assert_ratio_faithful, assert_second_faithful
from tests.coat_ds.optimizers import (
    FP32,
    SHAPES,
    assert_equal,
    codes,
    parameters,
    set_grads,
    through_file,
    train,
    trained,
)
from tests.util import rel_rms

RESUMED = [{"exp_avg_format": name} for name in ("fp8_expanded", "bf16", "fp32")]
RESUMED += [{}, {"checkpoint_layout": "compressed"}]


@pytest.mark.parametrize("options", RESUMED, ids=lambda options: "-".join(options.values()) or "default")
def test_state_dict_resumes_to_the_bit(options):
    params, optimizer = trained(**options)
    saved = through_file(optimizer.state_dict())
    resumed_params = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = CoatAdamW(resumed_params, min_numel=100, **options, lr=7.0)
    resumed.load_state_dict(saved)
    assert resumed.pop_load_summary().endswith("restored to the bit") and not resumed.pop_load_summary()
    assert_equal(codes(resumed), codes(optimizer))
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    train(params, optimizer, first=3)
    train(resumed_params, resumed, first=3)
    assert_equal(resumed_params, params)
    assert_equal(codes(resumed), codes(optimizer))


def test_state_dict_has_torch_adamws_layout():
    params, optimizer = trained()
    set_grads(params, 9)
    stock = torch.optim.AdamW(params)
    stock.step()
    ours, theirs = optimizer.state_dict(), stock.state_dict()
    assert ours.keys() == theirs.keys()
    assert ours["state"].keys() == theirs["state"].keys()
    for index, entry in theirs["state"].items():
        assert ours["state"][index].keys() == entry.keys()
        for name, value in entry.items():
            mine = ours["state"][index][name]
            assert type(mine) is torch.Tensor and mine.device.type == "cpu"
            assert (mine.shape, mine.dtype) == (value.shape, value.dtype)
    for group, own in zip(theirs["param_groups"], ours["param_groups"], strict=True):
        assert group.keys() <= own.keys() and own["params"] == group["params"]


def test_state_dict_is_loaded_by_torch_adamw():
    params, optimizer = trained()
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in params]
    stock = torch.optim.AdamW(theirs, lr=7.0, foreach=False)
    stock.load_state_dict(through_file(optimizer.state_dict()))
    set_grads(params, 3)
    set_grads(theirs, 3)
    optimizer.step()
    stock.step()
    # one step from the same moments is the same step
    assert_equal(theirs, params)


def test_load_state_dict_of_torch_adamw():
    theirs = parameters()
    stock = torch.optim.AdamW(theirs, lr=2e-3, weight_decay=0.3, foreach=True)
    for step in range(3):
        set_grads(theirs, step)
        stock.step()
    ours = [torch.nn.Parameter(p.detach().clone()) for p in theirs]
    optimizer = CoatAdamW(ours, min_numel=100)
    optimizer.load_state_dict(through_file(stock.state_dict()))
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (2e-3, 0.3)
    assert (group["exp_avg_format"], group["min_numel"], group["foreach"]) == (None, 100, None)
    for p, q in zip(ours, theirs, strict=True):
        stored, exact = optimizer.moments(p), [stock.state[q][name] for name in MOMENTS]
        if p.numel() < 100:
            assert_equal(stored, exact)
        else:
            first, second = (x.contiguous() for x in stored)
            assert_ratio_faithful(first, exact[0].contiguous(), second)
            assert_second_faithful(second, exact[1].contiguous())
        assert optimizer.state[p]["step"] == 3
    set_grads(ours, 3)
    optimizer.step()


def test_load_state_dict_drops_remainders_that_another_optimizer_stepped_without():
    """AdamW casts them to the parameters' type: no bits of a master any more."""
    params = parameters(torch.bfloat16)
    ours, stock = CoatAdamW(params), torch.optim.AdamW(params)
    set_grads(params, 0)
    ours.step()
    stock.load_state_dict(ours.state_dict())
    stock.step()
    ours.load_state_dict(stock.state_dict())
    assert not any("remainder" in ours.state[p] for p in params)


# the options of a parameter group that versions of torch, DeepSpeed and NVIDIA's libraries write
FIRST = ("lr", "betas", "eps", "weight_decay", "params")
GROUP_KEYS = {
    "torch 1.0": (*FIRST, "amsgrad"),
    "torch 1.12": (*FIRST, "amsgrad", "maximize", "foreach", "capturable"),
    "torch 2.0": (*FIRST, "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"),
    "DeepSpeedCPUAdam": (*FIRST, "amsgrad", "bias_correction"),
    "FusedAdam": (*FIRST, "bias_correction", "step"),
    "FusedAdam that counts in groups": (*FIRST, "bias_correction", "step"),
}


@pytest.mark.parametrize("kind", GROUP_KEYS)
def test_load_state_dict_keeps_options_that_others_lack(kind):
    theirs = parameters()
    stock = torch.optim.AdamW(theirs, lr=2e-3, weight_decay=0.3)
    for step in range(3):
        set_grads(theirs, step)
        stock.step()
    saved = copy.deepcopy(stock.state_dict())
    (group,) = saved["param_groups"]
    counts = "counts" in kind
    group |= {"bias_correction": True, "step": 3 if counts else 0}
    for key in group.keys() - set(GROUP_KEYS[kind]):
        del group[key]
    for index, entry in saved["state"].items():
        entry["step"] = int(entry["step"])
        if counts:
            del entry["step"]
        elif kind == "FusedAdam":
            # DeepSpeed's counts in the state of the last parameter alone
            entry["step"] = 3 if index == max(saved["state"]) else 0
    ours, expected = ([torch.nn.Parameter(p.detach().clone()) for p in theirs] for _ in range(2))
    optimizer, other = (
        CoatAdamW(params, **FP32, maximize=True, capturable=True) for params in (ours, expected)
    )
    optimizer.load_state_dict(through_file(saved))
    other.load_state_dict(stock.state_dict())
    (own,), (full,) = optimizer.param_groups, other.param_groups
    assert own.keys() == full.keys() == {*optimizer.defaults, "params"}
    assert (own["lr"], own["weight_decay"], own["bias_correction"]) == (2e-3, 0.3, True)
    for name in ("maximize", "capturable"):
        assert own[name] == (name not in GROUP_KEYS[kind])
    assert [int(optimizer.state[p]["step"]) for p in ours] == [3] * len(ours)
    own["maximize"] = False
    set_grads(ours, 3)
    set_grads(expected, 3)
    optimizer.step()
    other.step()
    assert_equal(ours, expected)
    assert optimizer.state_dict()["param_groups"][0]["bias_correction"] is True


def test_state_dict_drops_empty_states():
    """A read of the state of a parameter before the first step makes one."""
    params = parameters()
    optimizer, again = CoatAdamW(params), CoatAdamW(parameters())
    assert not optimizer.state[params[0]]
    again.load_state_dict(through_file(optimizer.state_dict()))
    assert not again.state


def test_state_dict_keeps_other_keys_of_the_state():
    """Under other keys than parameters, of any kind, as torch.optim.AdamW passes them on."""
    notes = {"seen": 7, "history": [1.0, 2.0], "norms": {"last": torch.ones(2)}}
    params, optimizer = trained()
    optimizer.state.update(notes)
    step_again(params, optimizer)
    saved = through_file(optimizer.state_dict())
    assert state_bytes(optimizer)["parameters"] == sum(p.numel() for p in params)
    again = CoatAdamW(parameters(), min_numel=100)
    again.load_state_dict(saved)
    assert again.state["seen"] == 7 and again.state["history"] == [1.0, 2.0]
    assert again.state["norms"]["last"].equal(torch.ones(2))
    assert_equal(codes(optimizer), codes(again))
    again.state_dict()


def step_again(params, optimizer):
    set_grads(params, 9)
    optimizer.step()


@pytest.mark.parametrize("options", [{}, {"exp_avg_format": "fp8_expanded"}])
def test_load_state_dict_restores_codes_from_values_alone(options):
    params, optimizer = trained()
    saved = optimizer.state_dict()
    resumed = CoatAdamW(parameters(), min_numel=100, **options)
    resumed.load_state_dict({"state": saved["state"], "param_groups": saved["param_groups"]})
    if not options:
        assert_equal(codes(resumed), codes(optimizer))
    for p, q in zip(params, resumed.param_groups[0]["params"], strict=True):
        for a, b in zip(optimizer.moments(p), resumed.moments(q), strict=True):
            # one more encoding; E4M3, the coarsest here, rounds by 2^-4 at most, over k >= 1
            assert p.numel() == 0 or rel_rms(b, a) < 2**-4


@pytest.mark.parametrize("make", [float, torch.tensor])
@pytest.mark.parametrize("name", ["lr", "weight_decay", "eps"])
def test_load_state_dict_takes_negative_options(name, make):
    """As by torch.optim.AdamW: a scheduler may have gone below 0."""
    params, optimizer = trained(1)
    optimizer.param_groups[0][name] = make(-1e-6)
    set_grads(params, 1)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    stock = torch.optim.AdamW(parameters())
    for resumed in (trained(1)[1], stock):
        resumed.load_state_dict(optimizer.state_dict())
        assert resumed.param_groups[0][name] == optimizer.param_groups[0][name]
    optimizer.step()


def of_group(**values):
    return lambda saved: saved["param_groups"][0].update(values)


def of_another(kind):
    """The state dict of another optimizer that has made a step."""

    def change(saved):
        params = parameters()
        other = kind(params, lr=5.0)
        set_grads(params, 0)
        other.step()
        saved.update(through_file(other.state_dict()))

    return change


LOAD_ERRORS = [
    (lambda d: d["param_groups"].append(d["param_groups"][0]), "different number of parameter groups"),
    (lambda d: d["param_groups"][0]["params"].pop(), "doesn't match the size of optimizer's group"),
    (lambda d: d["state"][1].pop("exp_avg_sq"), "no exp_avg_sq, but step, exp_avg"),
    (lambda d: d["state"][1].pop("step"), "no step, but exp_avg"),
    (lambda d: d["state"].update({"0": d["state"].pop(0)}), r"a state of '0', .* params are 0, 1, 2"),
    (lambda d: d["state"][0].update(step=2**70), "step of parameter 0 is .* from 0 to 2147483647"),
    (lambda d: d["state"][0].update(step=2.5), "step of parameter 0 is a float: 2.5. .* whole number"),
    (lambda d: d["state"][0].update(step=-1), "step of parameter 0 is a int: -1"),
    (lambda d: d["param_groups"][0].update(betas=(0.9, 1.5)), "group 0: CoatAdamW: betas: expected two"),
    (lambda d: d["param_groups"][0].update(lr="1e-3"), "group 0: CoatAdamW: lr: expected a number, found"),
    (lambda d: d["param_groups"][0].update(lr=torch.ones(2)), r"lr: expected a number, found tensor"),
    (of_group(eps=torch.nan), "group 0: CoatAdamW: eps: expected a number, found nan"),
    (lambda d: d["param_groups"][0].update(step=2.5), "step of parameter group 0 is a float: 2.5"),
    (lambda d: d["state"][0].update(remainder=torch.zeros(5).half()), r"remainder of .* 0 is \(5,\)"),
    (
        lambda d: d["state"][0].update(exp_avg=torch.zeros(33, 70, dtype=torch.complex64)),
        "exp_avg of parameter 0 is torch.complex64, .* Expected a dense tensor",
    ),
    (
        lambda d: d["state"][0].update(exp_avg=torch.zeros(33, 70).to_sparse()),
        "exp_avg of parameter 0 is torch.float32, torch.sparse_coo. Expected a dense tensor",
    ),
    # steps that would be others
    (of_group(bias_correction=False), "parameter group 0 has bias_correction=False"),
    (of_group(adam_w_mode=0), "parameter group 0 has adam_w_mode=0"),
    (of_group(correct_bias=False), "parameter group 0 has correct_bias=False"),
    (of_group(decoupled_weight_decay=False), "parameter group 0 has decoupled_weight_decay=False"),
    (
        lambda d: d["state"][0].update(max_exp_avg_sq=torch.zeros(33, 70)),
        "the state of parameter 0 has max_exp_avg_sq",
    ),
    (
        of_another(torch.optim.Adamax),
        "the state of parameter 0 has no exp_avg_sq, but step, exp_avg, exp_inf",
    ),
]


@pytest.mark.parametrize("change, message", LOAD_ERRORS, ids=lambda x: x if isinstance(x, str) else "")
def test_load_state_dict_checks_before_it_changes_anything(change, message):
    _, optimizer = trained()
    before, saved = codes(optimizer), copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 7.0
    change(saved)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert_equal(codes(optimizer), before)
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_load_state_dict_does_not_keep_the_state_dict():
    """In FP32 it takes four times the memory of the states."""
    _, optimizer = trained()
    saved = optimizer.state_dict()
    held = [weakref.ref(saved["state"][0][name]) for name in MOMENTS]
    optimizer.load_state_dict(saved)
    del saved
    gc.collect()
    assert [ref() for ref in held] == [None, None]


@pytest.mark.parametrize("layout", ["stock", "compressed"])
def test_load_state_dict_copies_the_states(layout):
    both = [parameters(torch.bfloat16) for _ in range(2)]
    saved, loaded = (CoatAdamW(params, min_numel=100, checkpoint_layout=layout) for params in both)

    def stepped(optimizer, params):
        set_grads(params, 0)
        optimizer.step()
        return codes(optimizer) + [optimizer.state[p]["remainder"].clone() for p in params]

    before = stepped(saved, both[0])
    loaded.load_state_dict(saved.state_dict())
    stepped(loaded, both[1])
    assert_equal(codes(saved) + [saved.state[p]["remainder"] for p in both[0]], before)


def test_load_state_dict_hooks_see_the_whole_state():
    _, optimizer = trained()
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda o, d: seen.append(len(d["state"])))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [len(SHAPES) + 1] * 2
