"""What each flat tensor of ZeRO's holds, with several parameter groups and several flat tensors of one."""

import deepspeed
import pytest
import torch

import coat_ds
from coat_ds.zero.partitions import partitions
from tests.coat_ds.engines import STATES, engine_of
from tests.util import run_distributed

SIZES = [(37, 131), (13,), (61, 47), (1500,), (5, 1000)]


def rows_of(sums=None, **zero):
    """What `partitions` gives, whether each part holds the values of its parameter, and the formats of second
    moments, by parameter group.

    sums: in which type gradients are summed; in FP32 stage 1 is DeepSpeed's BF16_Optimizer."""
    weights = [torch.nn.Parameter(torch.rand(size)) for size in SIZES]
    groups = [{"params": weights[:3]}, {"params": weights[3:], "exp_avg_sq_format": "bf16"}]
    model = torch.nn.ParameterList(weights)
    values = {p: p.detach().bfloat16().float().flatten() for p in weights}
    sums = {"data_types": {"grad_accum_dtype": sums}}
    engine = engine_of(model, zero.pop("stage"), STATES, {"model_parameters": groups}, zero=zero, **sums)
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
    deepspeed.init_distributed("gloo")
    found = {}
    for stage in (0, 1, 3):
        # stage 3 makes two flat tensors of the first group
        found[stage] = rows_of(stage=stage, sub_group_size=4000)[1:]
    return found


# the first deals parameters to the ranks in turn, which changes their order
SHARED = {
    "round robin": {"stage": 2, "round_robin_gradients": True},
    "stage 1": {"stage": 1},
    "BF16_Optimizer": {"stage": 1, "sums": "fp32"},
}


def shared():
    """For each way in which ranks share tensors: where parts begin, and whether they hold their values."""
    deepspeed.init_distributed("gloo")
    found = {}
    for name, how in SHARED.items():
        rows, same, _ = rows_of(**how)
        found[name] = [[start for _, start, *_ in placed] for *_, placed in rows], same
    return found


class Sum(torch.nn.Module):
    """Its gradients are whole numbers: exact in BF16, as a sum and as an average over a few ranks."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weights = torch.nn.ParameterList(torch.randn(size, generator=generator) for size in SIZES)

    def forward(self, step):
        generator = torch.Generator().manual_seed(step)
        factors = [torch.randint(-40, 40, size, generator=generator) for size in SIZES]
        return sum((p * c.to(p.dtype)).sum() for p, c in zip(self.weights, factors, strict=True))


ADAMW = {"lr": 2.0**-10, "weight_decay": 0.1, "betas": [0.9, 0.95]}
# no groups that a border between ranks could cut
ROUNDED = {"bf16_params": "stochastic", "exp_avg_format": "fp32", "exp_avg_sq_format": "fp32"}


MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def rounded(stages):
    """The weights after some steps of ZeRO with BF16 masters that are rounded stochastically."""
    deepspeed.init_distributed("gloo")
    out = {}
    for stage in stages:
        model = Sum()
        block = {**STATES, "optimizer": ROUNDED}
        engine = engine_of(model, stage, block, bf16=MASTERS, optimizer={"type": "AdamW", "params": ADAMW})
        for step in range(5):
            engine.backward(engine(step))
            engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            out[stage] = [p.detach().clone() for p in model.parameters()]
        engine.destroy()
    return out


def test_zero_rounds_stochastically_alike_at_any_stage_and_number_of_ranks():
    found = [stages for ranks in (1, 3) for stages in run_distributed(rounded, ranks, (1, 2, 3))]
    first = found[0][1]
    for stages in found:
        for weights in stages.values():
            assert all(map(torch.equal, weights, first))
    # and it is stochastic: nearest rounding gives other weights
    model = Sum().bfloat16()
    optimizer = coat_ds.CoatAdamW(model.parameters(), **ADAMW, **{**ROUNDED, "bf16_params": "nearest"})
    for step in range(5):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
    changed = [(a != b).float().mean() for a, b in zip(model.parameters(), first, strict=True)]
    assert min(changed) > 0.1


@pytest.fixture(scope="module")
def found():
    return run_distributed(work, 1)[0]


# tensors of fewer than 4096 elements keep FP32
FIRST, SECOND = (0, "fp32", "log8"), (1, "bf16", "fp32")


@pytest.mark.parametrize(
    ("stage", "formats"),
    [(0, [FIRST, SECOND]), (1, [FIRST, SECOND]), (3, [(0, "log8"), (0, "fp32"), SECOND])],
)
def test_partitions_are_at_their_recorded_places(found, stage, formats):
    assert found[stage] == ([True] * len(SIZES), formats)


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(shared, 2)


@pytest.mark.parametrize("name", SHARED)
def test_partitions_of_parameters_that_two_ranks_share(ranks, name):
    for starts, same in (rank[name] for rank in ranks):
        assert all(found == sorted(found) for found in starts) and all(same)
    # the border between the ranks cuts one parameter of each group
    assert sum(len(rank[name][1]) for rank in ranks) == len(SIZES) + 2
