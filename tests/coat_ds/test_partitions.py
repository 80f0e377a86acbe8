"""What each flat tensor of ZeRO's holds, with several parameter groups and several flat tensors of one."""

import pytest
import torch

import coat_ds
from coat_ds.zero.partitions import partitions
from tests.util import run_distributed

SIZES = [(37, 131), (13,), (61, 47), (1500,), (5, 1000)]


def work():
    import deepspeed

    deepspeed.init_distributed("gloo")
    found = {}
    for stage in (0, 1, 3):
        weights = [torch.nn.Parameter(torch.rand(size)) for size in SIZES]
        # stage 3 makes two flat tensors of the first group
        zero = {"stage": stage, "sub_group_size": 4000}
        config = {
            "train_batch_size": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": zero,
            "coat": {"enabled": True, "activations": False, "report": False},
        }
        groups = [{"params": weights[:3]}, {"params": weights[3:], "lr": 1e-4}]
        values = {p: p.detach().bfloat16().float().flatten() for p in weights}
        model = torch.nn.ParameterList(weights)
        engine = coat_ds.initialize(model=model, model_parameters=groups, config=config)[0]
        rows = list(partitions(engine.optimizer, len(groups)))
        same = [
            torch.equal(flat.detach().flatten()[start : start + numel], values[p][at : at + numel])
            for _, flat, placed in rows
            for p, start, numel, at in placed
        ]
        found[stage] = [index for index, *_ in rows], same
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def found():
    return run_distributed(work, 1)[0]


@pytest.mark.parametrize(("stage", "groups"), [(0, [0, 1]), (1, [0, 1]), (3, [0, 0, 1])])
def test_parts_are_where_they_are_said_to_be(found, stage, groups):
    assert found[stage] == (groups, [True] * len(SIZES))
