"""What each flat tensor of ZeRO's holds, with several parameter groups and several flat tensors of one."""

import pytest
import torch

import coat_ds
from coat_ds.zero.partitions import partitions
from tests.util import run_distributed

SIZES = [(37, 131), (13,), (61, 47), (1500,), (5, 1000)]


def rows_of(**zero):
    """What `partitions` gives, whether each part holds the values of its parameter, and the formats of second
    moments, by parameter group."""
    weights = [torch.nn.Parameter(torch.rand(size)) for size in SIZES]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        "coat": {"enabled": True, "activations": False, "report": False},
    }
    groups = [{"params": weights[:3]}, {"params": weights[3:], "exp_avg_sq_format": "bf16"}]
    model = torch.nn.ParameterList(weights)
    values = {p: p.detach().bfloat16().float().flatten() for p in weights}
    engine = coat_ds.initialize(model=model, model_parameters=groups, config=config)[0]
    rows = [(index, flat, list(placed)) for index, flat, placed in partitions(engine.optimizer, len(groups))]
    same = [
        torch.equal(flat.detach().flatten()[start : start + numel], values[p][at : at + numel])
        for _, flat, placed in rows
        for p, start, numel, at in placed
    ]
    kept = engine.basic_optimizer.state
    formats = [
        (index, *sorted({piece.codec.name for piece in kept[flat]["exp_avg_sq"].pieces}))
        for index, flat, _ in rows
    ]
    engine.destroy()
    return rows, same, formats


def work():
    import deepspeed

    deepspeed.init_distributed("gloo")
    found = {}
    for stage in (0, 1, 3):
        # stage 3 makes two flat tensors of the first group
        found[stage] = rows_of(stage=stage, sub_group_size=4000)[1:]
    return found


def round_robin():
    """As `rows_of`, where DeepSpeed deals parameters to the ranks in turn, which changes their order."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    rows, same, _ = rows_of(stage=2, round_robin_gradients=True)
    return [[start for _, start, *_ in placed] for *_, placed in rows], same


@pytest.fixture(scope="module")
def found():
    return run_distributed(work, 1)[0]


# tensors of fewer than 4096 elements keep FP32
FIRST, SECOND = (0, "fp32", "log8"), (1, "bf16", "fp32")


@pytest.mark.parametrize(
    ("stage", "formats"),
    [(0, [FIRST, SECOND]), (1, [FIRST, SECOND]), (3, [(0, "log8"), (0, "fp32"), SECOND])],
)
def test_parts_are_where_they_are_said_to_be(found, stage, formats):
    assert found[stage] == ([True] * len(SIZES), formats)


def test_parameters_that_are_dealt_in_turn_are_found():
    ranks = run_distributed(round_robin, 2)
    for starts, same in ranks:
        assert all(found == sorted(found) for found in starts) and all(same)
    # the border between the ranks cuts one parameter of each group
    assert sum(len(same) for _, same in ranks) == len(SIZES) + 2
