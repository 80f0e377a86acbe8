"""Options of CoatAdamW that it refuses."""

import math

import pytest
import torch

from coat_ds import CoatAdamW
from tests.coat_ds.optimizers import parameters


def test_misspelled_options_of_a_group_are_errors():
    p = torch.nn.Parameter(torch.ones(3))
    for name, meant in (("weight_decy", "weight_decay"), ("Betas", "betas"), ("groupsize", "group_size")):
        with pytest.raises(ValueError, match=f"{name!r}, which is no option. Did you mean {meant!r}"):
            CoatAdamW([{"params": [p], name: 0.1}])
    with pytest.raises(ValueError, match="Did you mean 'params'"):
        CoatAdamW([{"param": [p]}])
    # what schedulers, DeepSpeed, Megatron and users note there
    notes = dict.fromkeys(
        ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "name", "moe"), 1
    )
    notes |= dict.fromkeys(("lr_mult", "wd_mult", "is_decoupled_lr", "lr_scale", "use_muon", "start_wd"), 1)
    assert CoatAdamW([{"params": [p], **notes}]).param_groups[0].items() >= notes.items()


@pytest.mark.parametrize(
    "options",
    [
        {"lr": "auto"},
        {"lr": None},
        {"weight_decay": torch.zeros(2)},
        {"betas": 0.9},
        {"betas": ("0.9", 0.95)},
    ],
)
def test_options_of_a_wrong_kind_are_errors_that_name_them(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"CoatAdamW: {name} must be"):
        CoatAdamW(parameters(), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fused": True}, ["fused=True"]),
        ({"foreach": True}, ["foreach=True"]),
        ({"exp_avg_sq_rounding": "up"}, ["exp_avg_sq_rounding", "'up'", "'stochastic'"]),
        ({"bf16_params": "rounded"}, ["bf16_params", "'rounded'", "'stochastic'"]),
        ({"differentiable": True}, ["differentiable=True"]),
        ({"lr": -1.0}, ["lr", "-1.0"]),
        ({"lr": math.nan}, ["lr", "nan"]),
        ({"lr": torch.ones(2)}, ["tensor lr", "(2,)"]),
        ({"eps": -1e-8}, ["eps"]),
        ({"weight_decay": -0.1}, ["weight_decay"]),
        ({"betas": (0.9, 1.0)}, ["betas", "(0.9, 1.0)"]),
        ({"betas": (0.9,)}, ["betas"]),
        ({"exp_avg_format": "fp9"}, ["exp_avg_format", "'fp9'", "fp8_expanded"]),
        ({"min_numel": -1}, ["min_numel", "-1"]),
        ({"min_numel": True}, ["min_numel", "True"]),
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, dict) else "",
)
def test_bad_options(options, words):
    p = torch.nn.Parameter(torch.zeros(3))
    for build in (
        lambda: CoatAdamW([p], **options),
        lambda: CoatAdamW([{"params": [p], **options}]),
    ):
        with pytest.raises(ValueError) as error:
            build()
        for word in words:
            assert word in str(error.value)
