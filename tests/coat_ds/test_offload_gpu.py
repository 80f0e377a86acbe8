"""A model on a GPU with states on the CPU: `offload_optimizer`, `offload_states()` and `reload_states()`."""

import gc
import itertools
import warnings

import pytest
import torch

import coat_ds
from tests.coat_ds.cells import STEPS, TOLERANCE, Wide, cell, start, train_step
from tests.util import run_distributed

STAGES = (1, 2, 3)
# gradients go to pageable memory at once, or are summed in pinned memory over two micro-batches
CELLS = {
    f"{kind}-{stage}": cell(
        stage,
        accumulation=accumulation,
        zero={"offload_optimizer": {"device": "cpu", "pin_memory": kind == "pinned"}},
    )
    for kind, accumulation in (("pageable", 1), ("pinned", 2))
    for stage in STAGES
}
# pin_memory, non_blocking, whether weights and gradients go too
MOVES = list(itertools.product((False, True), repeat=3))
# norm and clip factor, and from them the moments of the first step: a dozen roundings of 2^-24 at most
FP32_ROUNDING = 2**-20

pytestmark = pytest.mark.gpu


def masters(engine):
    wrapper = engine.optimizer
    is_stage3 = hasattr(wrapper, "fp32_partitioned_groups_flat")
    return wrapper.fp32_partitioned_groups_flat if is_stage3 else wrapper.single_partition_of_fp32_groups


def full(engine):
    """FP32 master, both moments and weight of each parameter."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    return [
        (
            safe_get_full_fp32_param(p).cpu(),
            *(safe_get_full_optimizer_state(p, name).cpu() for name in ("exp_avg", "exp_avg_sq")),
            getattr(p, "ds_tensor", p).detach().view(getattr(p, "ds_shape", p.shape)),
        )
        for p in engine.module.parameters()
        if p.requires_grad
    ]


def tensors(engine):
    states = engine.basic_optimizer.state.values()
    pieces = (piece for state in states for name in ("exp_avg", "exp_avg_sq") for piece in state[name].pieces)
    # torch calls an empty tensor, such as the scale of log8, not pinned wherever it is
    return [t for piece in pieces for t in piece.storage if t.numel()]


def train(run):
    engine = start(run)
    out = {"losses": [train_step(engine)], "norm": float(engine.get_global_grad_norm())}
    out["first"] = full(engine)
    out["losses"] += [train_step(engine) for _ in range(STEPS - 1)]
    out["last"] = full(engine)
    out["devices"] = {t.device.type for t in (*masters(engine), *tensors(engine))}
    out["bytes"] = coat_ds.state_bytes(engine)["bytes_per_parameter"]
    return out


def move(stage, pin_memory, non_blocking, everything):
    """Where states are, what they hold and what the GPU does, before, while and after they are moved."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind

    engine = start(cell(stage, model=Wide))
    losses = [train_step(engine) for _ in range(2)]
    include = None if everything else [Kind.optim_states]
    seen = []
    for change in (
        lambda: None,
        lambda: engine.offload_states(include=include, pin_memory=pin_memory, non_blocking=non_blocking),
        lambda: engine.reload_states(non_blocking=non_blocking),
    ):
        change()
        gc.collect()
        torch.cuda.synchronize()
        there = {(t.device.type, t.is_pinned()) for t in tensors(engine)}
        seen.append((there, torch.cuda.memory_allocated(), [t.cpu() for t in tensors(engine)]))
    losses += [train_step(engine) for _ in range(STEPS - 2)]
    return {"losses": losses, "seen": seen, "bytes": coat_ds.state_bytes(engine)["bytes"]}


def work(backend):
    warnings.simplefilter("ignore")
    import deepspeed

    deepspeed.init_distributed(backend)
    out = {name: (train({**run, "zero": {}}), train(run)) for name, run in CELLS.items()}
    for stage in STAGES:
        engine = start(cell(stage, model=Wide))
        out["stays", stage] = [train_step(engine) for _ in range(STEPS)]
        out["moves", stage] = [move(stage, *how) for how in MOVES]
    return out


@pytest.fixture(scope="module")
def runs():
    (out,) = run_distributed(work, 1, "nccl", gpus=True)
    return out


every_cell = pytest.mark.parametrize("name", CELLS)
every_stage = pytest.mark.parametrize("stage", STAGES)


@every_cell
def test_offloaded_engine_trains_as_on_the_gpu(runs, name):
    stays, offloaded = runs[name]
    assert offloaded["losses"][0] == stays["losses"][0]
    assert offloaded["losses"] == pytest.approx(stays["losses"], rel=TOLERANCE["bf16"])
    assert stays["losses"][-1] < 0.95 * stays["losses"][0]


@every_cell
def test_offloaded_engine_gradients_arrive_on_the_host(runs, name):
    """The first step's: their norm, and the moments that are stored in FP32, which they alone make."""
    stays, offloaded = runs[name]
    assert offloaded["norm"] == pytest.approx(stays["norm"], rel=FP32_ROUNDING)
    small = [
        pair
        for (_, *moments, _), (_, *others, _) in zip(stays["first"], offloaded["first"], strict=True)
        for pair in zip(moments, others, strict=True)
        if pair[0].numel() < 1000
    ]
    assert small and all(a.abs().max() > 0 for a, _ in small)
    for a, b in small:
        torch.testing.assert_close(b, a, rtol=FP32_ROUNDING, atol=0)


@every_cell
def test_offloaded_engine_weights_are_the_rounded_masters(runs, name):
    for run in runs[name]:
        for master, _, _, weight in run["last"]:
            assert weight.device.type == "cuda"
            assert torch.equal(master.bfloat16(), weight.cpu())


@every_cell
def test_offloaded_engine_has_masters_and_states_on_the_host(runs, name):
    stays, offloaded = runs[name]
    assert (stays["devices"], offloaded["devices"]) == ({"cuda"}, {"cpu"})
    # as on the GPU, which test_zero.py bounds
    assert offloaded["bytes"] == stays["bytes"] < 2.1 + 0.25


@every_stage
@pytest.mark.parametrize("how", range(len(MOVES)), ids=map(str, MOVES))
def test_offloaded_engine_moves_states_as_they_are_stored(runs, stage, how):
    pin_memory, _, _ = MOVES[how]
    run = runs["moves", stage][how]
    (before, used, states), (away, left, same), (back, again, equal) = run["seen"]
    assert before == back == {("cuda", False)} and away == {("cpu", pin_memory)}
    # what the allocator rounds up is not counted
    assert used - left >= run["bytes"] and again >= left + run["bytes"]
    assert all(map(torch.equal, states, same)) and all(map(torch.equal, states, equal))
    assert run["losses"] == pytest.approx(runs["stays", stage], rel=TOLERANCE["bf16"])
