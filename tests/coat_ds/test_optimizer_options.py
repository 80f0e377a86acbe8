"""Options of CoatAdamW that it refuses."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from coat_ds import CoatAdamW
from tests.coat_ds.optimizers import assert_equal, codes, parameters, set_grads, trained
from tests.util import run_distributed


def test_group_options_that_are_misspelled_are_errors():
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="Did you mean 'params'"):
        CoatAdamW([{"param": [p]}])
    # what schedulers, DeepSpeed, Megatron and users note there
    notes = dict.fromkeys(
        ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "name", "moe"), 1
    )
    notes |= dict.fromkeys(("lr_mult", "wd_mult", "is_decoupled_lr", "lr_scale", "use_muon", "start_wd"), 1)
    assert CoatAdamW([{"params": [p], **notes}]).param_groups[0].items() >= notes.items()


def is_narrow(name, p):
    return p.shape == (130,)


OF_ALL = {"keep_fp32": is_narrow, "checkpoint_layout": "compressed", "seed": 3}


def spread_over_ranks():
    dist.init_process_group("gloo")
    params = parameters()
    optimizer = ZeroRedundancyOptimizer(params, CoatAdamW, min_numel=100, **OF_ALL)
    for step in range(3):
        set_grads(params, step)
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_parameters_listed_twice_are_errors():
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = CoatAdamW([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="lists a tensor twice"):
        optimizer.add_param_group({"params": [p, p]})
    assert len(optimizer.param_groups) == 1
    (held,) = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"].append(held)
    set_grads([held], 0)
    with pytest.raises(ValueError, match="lists a tensor twice"):
        optimizer.step()
    assert not held.any()


def test_group_options_may_be_those_of_the_whole_optimizer():
    """torch's ZeroRedundancyOptimizer passes them so, with the constructor's."""
    alone, _ = trained(**OF_ALL)
    for params in run_distributed(spread_over_ranks, 2):
        assert_equal(params, alone)
    patterns = ["*norm*"]
    CoatAdamW([{"params": parameters(), "keep_fp32": patterns}], keep_fp32=patterns)
    with pytest.raises(ValueError, match="has seed=4, which is one for the whole optimizer"):
        CoatAdamW([{"params": parameters(), "seed": 4}], seed=3)


# of the string "*embed*" the first letter would match every name; seeds of `torch.seed()` have 64 bits
OF_THE_WHOLE = [({"keep_fp32": found}, "keep_fp32") for found in ("*embed*", None, [5])]
OF_THE_WHOLE += [({"seed": found}, "seed") for found in ("a", 1.5, 2**63, -(2**63))]
OF_THE_WHOLE += [({"checkpoint_layout": "compress"}, "checkpoint_layout")]
OF_A_GROUP = [({"lr": found}, "lr") for found in ("auto", None, -1.0, math.nan, torch.ones(2))]
OF_A_GROUP += [({"weight_decay": found}, "weight_decay") for found in (torch.zeros(2), -0.1)]
OF_A_GROUP += [({"betas": found}, "betas") for found in (0.9, ("0.9", 0.95), (0.9, 0.0), (0.9, 1.0), (0.9,))]
OF_A_GROUP += [({"min_numel": found}, "min_numel") for found in (-1, True)]
OF_A_GROUP += [({"eps": -1e-8}, "eps"), ({"differentiable": True}, "differentiable=True")]
OF_A_GROUP += [({"bf16_params": "rounded"}, "bf16_params"), ({"exp_avg_format": "fp9"}, "exp_avg_format")]
OF_A_GROUP += [({"exp_avg_format": "ratio8", "exp_avg_sq_format": "fp8_expanded"}, "exp_avg_format")]
OF_A_GROUP += [({"exp_avg_sq_format": "ratio8"}, "exp_avg_sq_format")]


@pytest.mark.parametrize("options, key", OF_A_GROUP, ids=str)
def test_coat_adamw_names_bad_options(options, key):
    """Their messages: tests/mistakes/others.py."""
    params = parameters()
    for build in (lambda: CoatAdamW(params, **options), lambda: CoatAdamW([{"params": params, **options}])):
        with pytest.raises(ValueError, match=key):
            build()


@pytest.mark.parametrize("options, key", OF_THE_WHOLE, ids=str)
def test_coat_adamw_names_bad_options_of_the_whole_optimizer(options, key):
    with pytest.raises(ValueError, match=key):
        CoatAdamW(torch.nn.Linear(8, 8).named_parameters(), **options)


def test_coat_adamw_refuses_fp16_parameters():
    half, quantized = (torch.nn.Parameter(torch.zeros(9, dtype=t), False) for t in (torch.half, torch.uint8))
    optimizer = CoatAdamW([half, quantized, *parameters()])
    half.requires_grad_()
    other = torch.nn.Parameter(half.detach().clone())
    for build in (lambda: CoatAdamW([half]), lambda: optimizer.add_param_group({"params": other})):
        with pytest.raises(TypeError, match=r"shape \(9,\) on cpu is torch.float16; expected FP32 or BF16"):
            build()


@pytest.mark.parametrize(
    ("name", "value"),
    [("exp_avg_format", "fp8_expanded"), ("exp_avg_sq_format", "fp32"), ("min_numel", 0)],
)
def test_group_options_of_states_may_not_change(name, value):
    params, optimizer = trained()
    before = params[0].detach().clone()
    group = optimizer.param_groups[0]
    group[name] = value
    with pytest.raises(ValueError, match=rf"group 0 .*{name} {value!r}.* now"):
        optimizer.step()
    assert torch.equal(params[0], before) and optimizer.state[params[0]]["step"] == 3
    # the way out: what `layout` says is what is stored
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    moments = [optimizer.state[p][f"exp_avg{sq}"] for p in params for sq in ("", "_sq")]
    made = [optimizer.layouts.layout_of(p, group, f"exp_avg{sq}") for p in params for sq in ("", "_sq")]
    assert [moment.piece_layout for moment in moments] == made


def step_all(optimizer):
    for group in optimizer.param_groups:
        set_grads(group["params"], 3)
    optimizer.step()


def test_group_options_move_with_groups_that_come_go_and_change_places():
    _, optimizer = trained()
    optimizer.add_param_group({"params": parameters(), "exp_avg_format": "bf16"})
    step_all(optimizer)
    groups = optimizer.param_groups
    groups.reverse()
    step_all(optimizer)
    groups[0] = {**groups[0], "params": parameters(), "exp_avg_format": "fp8_expanded"}
    step_all(optimizer)
    del groups[0]
    optimizer.add_param_group({"params": parameters(), "exp_avg_format": "bf16"})
    step_all(optimizer)
    found = [optimizer.state[group["params"][0]]["exp_avg"].pieces[0].codec.name for group in groups]
    assert found == ["ratio8", "bf16"]


def loaded(optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def grown(optimizer):
    optimizer.add_param_group({"params": parameters()})


@pytest.mark.parametrize("steps, do", [(1, loaded), (1, grown), (0, CoatAdamW.init_states)])
def test_group_options_of_states_may_not_change_before_the_next_step(steps, do):
    params, optimizer = trained(steps)
    do(optimizer)
    optimizer.param_groups[0]["exp_avg_format"] = "bf16"
    set_grads(params, 3)
    with pytest.raises(ValueError, match="group 0 is stored as ratio8, .*'bf16'.* ask for bf16 now"):
        optimizer.step()


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("amsgrad", True, "amsgrad=True is not supported. Leave it at False"),
        ("differentiable", True, "differentiable=True is not supported. Leave it at False"),
        ("bias_correction", False, "bias_correction=False"),
        ("decoupled_weight_decay", False, "decoupled_weight_decay=False"),
        ("seed", 4, "seed=4, which is one for the whole optimizer"),
        ("checkpoint_layout", "compressed", "checkpoint_layout='compressed', which is one for the whole"),
        ("weight_decy", 0.1, "'weight_decy', which is no option. Did you mean 'weight_decay'"),
    ],
)
def test_group_options_are_refused_later_as_by_the_constructor(steps, name, value, said):
    params, optimizer = trained(steps)
    set_grads(params, 0)
    before = params[0].detach().clone()
    (group,) = optimizer.param_groups
    kept = dict(group)
    group[name] = value
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            optimizer.step()
    assert torch.equal(params[0], before)
    with pytest.raises(ValueError, match=said):
        optimizer.add_param_group({"params": parameters(), name: value})
    states = codes(optimizer) if steps else []
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(optimizer.state_dict())
    assert_equal(codes(optimizer) if steps else [], states)
    group.clear()
    group |= kept
    optimizer.step()
    assert not torch.equal(params[0], before)


def test_group_options_that_steps_read_may_change():
    params, optimizer = trained(1)
    (group,) = optimizer.param_groups
    group |= {"initial_lr": 1e-3, "note": torch.ones(2), "foreach": False, "maximize": True, "lr": 1e-4}
    before = params[0].detach().clone()
    optimizer.step()
    assert not torch.equal(params[0], before)
    group["note"] = torch.zeros(3)
    optimizer.step()
