"""Every way in which DeepSpeed drives the optimizer: a small model trained by 1 and 2 processes and by AdamW.

One spawn of each size serves all cells.
"""

import warnings
from importlib.metadata import version

import deepspeed
import pytest
import torch
from packaging.version import Version
from torch import nn

import coat_ds
from tests.coat_ds.cells import (
    BATCH,
    CELLS,
    FP8_BOUND,
    STEPS,
    TOLERANCE,
    Tied,
    Wide,
    cell,
    ds_config,
    run_stock,
    start,
    train_step,
)
from tests.util import Made, listening, run_distributed

# The border between two ranks cuts a group in two, each with a scale of its own: its 128 elements are
# rounded otherwise, which moves what the loss falls by as above, by the errors of 128 of 20,000 elements
CUT_GROUP = 4 * 2**-4 / 3**0.5 * 128**0.5 / 20_000
# A sum over ranks rounds 16-bit gradients otherwise, by 2^-9. Ratios whose codes are 1.5 / 127 of themselves
# apart, the finest, then take another code in one case of six, a new error of such a step / sqrt(6) in the
# mean square; four deviations of 100 elements' mean, as above
TIPPED = 4 * (2**-9 / (1.5 / 127)) ** 0.5 * (1.5 / 127) / 6**0.5 / 100**0.5


# engines that also offload their states and reload them: each kind of state, one and several groups
MOVED = ("bf16-1", "bf16-2", "bf16-3", "master16-1", "master16-3", "groups-2")
# engines that are saved and loaded: stage 0 has a wrapper of its own for each type
RESUMED = ("fp32-0", "bf16-0", "fp16-0", "bf16-1", "bf16-2", "bf16-3")


def stored(engine):
    return [
        t.clone()
        for state in engine.basic_optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq")
        for t in state[name].stored()
    ]


def resume(engine, cell, folder):
    """Losses of two more steps; and whether moments arrive in a fresh engine and in this one, which has
    stepped, and the losses there."""
    saved = stored(engine)
    engine.save_checkpoint(folder)
    found = {"next": [train_step(engine) for _ in range(2)], "arrived": [], "again": []}
    for target in (start(cell), engine):
        target.load_checkpoint(folder)
        found["arrived"].append(all(map(torch.equal, saved, stored(target))))
        found["again"].append([train_step(target) for _ in range(2)])
    return found


def run_cell(cell, moves, folder=None):
    engine = start(cell)
    seen = set()

    def look(optimizer, args, kwargs):
        params = (p for group in optimizer.param_groups for p in group["params"])
        seen.update((p.element_size(), p.grad.element_size()) for p in params if p.grad is not None)

    engine.basic_optimizer.register_step_pre_hook(look)
    out = {"losses": [train_step(engine) for _ in range(2)]}
    if moves:
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind

        before = stored(engine)
        # ZeRO-3 cannot offload the weights of a model with frozen ones
        partial = cell["stage"] == 3 and cell["model"] is Tied
        include = [Kind.optim_states, Kind.hp_params] if partial else None
        engine.offload_states(include=include, pin_memory=False)
        engine.reload_states()
        assert all(map(torch.equal, before, stored(engine)))
    out["losses"] += [train_step(engine) for _ in range(STEPS - 2)]
    out["bytes"], out["sizes"] = coat_ds.state_bytes(engine), set(seen)
    if folder:
        out |= resume(engine, cell, folder)
    if cell["dtype"] == "fp16":
        before = stored(engine)
        train_step(engine, 1e30)
        out["skipped"] = engine.skipped_steps == 1 and all(map(torch.equal, before, stored(engine)))
    return out


def moves(stage):
    """Whether each move exchanges the tensors of the states, and whether what DeepSpeed writes then arrives
    there; and of all moves how many tensors of codes of first moments they made more than of second ones."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind
    from deepspeed.utils import safe_set_full_optimizer_state

    engine, found, more = start(cell(stage, model=Wide)), [], []
    p, wanted = engine.module[2].weight, 0.0

    def held():
        return [state["exp_avg_sq"] for state in engine.basic_optimizer.state.values()]

    for move in (
        lambda: engine.offload_states(include=[Kind.hp_params], pin_memory=False),
        lambda: engine.offload_states(include=[Kind.optim_states], pin_memory=False),
        lambda: engine.offload_states(include=[Kind.optim_states], pin_memory=False),
        engine.reload_states,
        engine.reload_states,
        # all of them
        lambda: engine.optimizer.offload_states(pin_memory=False),
        engine.reload_states,
    ):
        before, wanted = held(), wanted + 1
        with Made() as made:
            move()
        # those of log8 and of ratio8
        second, first = (made.over(512).get(dtype, 0) for dtype in (torch.uint8, torch.int8))
        more.append(first - second)
        safe_set_full_optimizer_state(p, torch.full((47, 512), wanted), "exp_avg_sq")
        # and not what was written before
        arrives = any(t.decode().max() > wanted - 0.5 for t in held())
        found.append((any(a is not b for a, b in zip(before, held(), strict=True)), arrives))
    return found, more


def transposed(layer, x):
    return x @ layer.weight


def run_pipeline(coat):
    """Losses of a pipeline with one stage per process, its tied weight, and what is logged about
    patterns."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    torch.manual_seed(0)
    module = PipelineModule(
        [
            TiedLayerSpec("embed", nn.Linear, 47, 131, bias=False),
            LayerSpec(nn.Linear, 131, 61),
            LayerSpec(nn.LayerNorm, 61),
            LayerSpec(nn.Linear, 61, 131),
            TiedLayerSpec("embed", nn.Linear, 47, 131, bias=False, forward_fn=transposed),
        ],
        num_stages=torch.distributed.get_world_size(),
        loss_fn=lambda y, wanted: (y.float() - wanted).square().mean(),
        partition_method="uniform",
        # every weight is drawn from a seed of its own, at any number of stages
        seed_layers=True,
    )
    config = ds_config(cell(1, accumulation=2), coat)
    config["train_micro_batch_size_per_gpu"] = BATCH // 2
    if coat:
        # of the last layer that has weights of its own
        config["coat"]["optimizer"]["keep_fp32"] = ["3.weight"]
    with listening() as lines:
        engine, *_ = deepspeed.initialize(
            model=module, model_parameters=[p for p in module.parameters() if p.requires_grad], config=config
        )
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(BATCH, 47, generator=generator).split(BATCH // 2) for _ in range(2))
    losses = []
    for _ in range(STEPS):
        batches = iter([(a.bfloat16(), b) for a, b in zip(x, y, strict=True)])
        losses.append(engine.train_batch(batches).item())
    (tied,) = (m.weight.detach().clone() for m in module.tied_modules.values())
    return losses, tied, [line for line in lines if "matches no parameter" in line]


def work(folder):
    warnings.simplefilter("ignore")
    deepspeed.init_distributed("gloo")
    out, known = {}, {}
    for name, of in CELLS.items():
        out[name] = run_cell(of, name in MOVED, f"{folder}/{name}" if name in RESUMED else None)
    out["pipeline"] = run_pipeline(True)
    if torch.distributed.get_world_size() == 1:
        out["stock pipeline"] = run_pipeline(False)
        out["moves"] = {stage: moves(stage) for stage in (1, 2, 3)}
        for name, of in CELLS.items():
            out[name]["stock"] = run_stock(of, known)
    return out


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return run_distributed(work, 1, str(tmp_path_factory.mktemp("one")))[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_distributed(work, 2, str(tmp_path_factory.mktemp("two")))


every_cell = pytest.mark.parametrize("name", CELLS)


@every_cell
def test_zero_ranks_train_as_one(one, two, name):
    if name == "summed32-1" and Version(version("deepspeed")) < Version("0.19"):
        pytest.skip("the BF16_Optimizer of DeepSpeed before 0.19 does not, with stock AdamW either")
    losses = one[name]["losses"]
    dtype = CELLS[name]["dtype"]
    rounded = (CUT_GROUP + (TIPPED if dtype != "fp32" else 0)) * (losses[0] - losses[-1])
    for rank in two:
        for found, expected in zip(rank[name]["losses"], losses, strict=True):
            assert abs(found - expected) <= rounded + TOLERANCE[dtype] * expected


@every_cell
def test_zero_losses_are_those_of_stock_adamw(one, name):
    ours, stock = one[name]["losses"], one[name]["stock"]
    assert stock[0] - stock[-1] > 0.05 * stock[0]
    tolerance = TOLERANCE[CELLS[name]["dtype"]]
    for a, b in zip(ours, stock, strict=True):
        assert abs(a - b) <= FP8_BOUND * (stock[0] - b) + tolerance * b


@pytest.mark.parametrize("name", RESUMED)
def test_zero_resumes_with_the_same_moments_and_losses(one, two, name):
    for run in (rank[name] for rank in (one, *two)):
        assert run["arrived"] == [True, True] and run["again"] == [run["next"]] * 2


def test_pipeline_of_two_stages_trains_as_one(one, two):
    (losses, *_), (stock, *_) = one["pipeline"], one["stock pipeline"]
    for ours, *_ in (rank["pipeline"] for rank in two):
        assert ours == pytest.approx(losses, rel=TOLERANCE["bf16"])
    for a, b in zip(losses, stock, strict=True):
        assert abs(a - b) <= FP8_BOUND * (stock[0] - b) + TOLERANCE["bf16"] * b
    # the copies of the tied weight, next to other tensors in each stage's flat one, stay the same bits
    (_, first, _), (_, last, _) = (rank["pipeline"] for rank in two)
    assert torch.equal(first, last)
    # a pattern of another stage's layer is none without effect
    assert [run["pipeline"][2] for run in (one, *two)] == [[], [], []]


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_bf16_masters_with_remainders_are_fp32_masters(one, two, stage):
    """The same losses as with FP32 masters, to the bit, in 6.1 bytes per parameter, 8.1 with the gradient."""
    # without clipping, and without the sum over ranks, BF16 gradients lose nothing. One master in 2^16 lies
    # halfway between two weights: the remainder's rule rounds it up, the cast to even; of the 48,128 weights
    # perhaps one in a step then moves by 2^-8 of itself, which 48,127 others drown
    ours, exact = (one[f"master{bits}-{stage}"]["losses"] for bits in (16, 32))
    assert ours[:3] == exact[:3] and ours == pytest.approx(exact, rel=2**-16)
    for rank in (one, *two):
        run = rank[f"master16-{stage}"]
        ((master, gradient),) = run["sizes"]
        held = master + run["bytes"]["bytes_per_parameter"]
        assert held <= 6.1 and held + gradient <= 8.1
        assert rank[f"master32-{stage}"]["sizes"] == {(4, 4)}


def test_zero_step_with_non_finite_gradients_changes_nothing(one, two):
    for rank in (one, *two):
        assert all(rank[name]["skipped"] for name in CELLS if name.startswith("fp16"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_states_move_on_offload_states(one, stage):
    """And once; DeepSpeed then finds them where they are. Stages 1 and 2 forget parameters while these are
    offloaded, too."""
    expected = [(moved, True) for moved in (False, True, False, True, False)]
    found, more = one["moves"][stage]
    assert found == [*expected, (True, stage == 3), (True, True)]
    # a first moment does not take a copy of the second along
    assert not any(more)


@every_cell
def test_zero_states_are_compressed(one, two, name):
    # twice a byte and 5 in 128 more, and a little for what is small or cut; remainders take 2
    more = 2 if name.startswith("master16") else 0
    for rank in (one, *two):
        assert rank[name]["bytes"]["bytes_per_parameter"] < 2.1 + 0.25 + more
