"""Checkpoints between COAT and every AdamW that DeepSpeed and torch make by themselves, both directions.

One rank serves all rows but those of plain state dicts. Where there is no GPU, DeepSpeed's
FusedAdam is its own class all the same, which runs its C++ for CPUs, as DeepSpeedCPUAdam does everywhere.
Only `make test-all` compiles that for minutes: in `make test` torch's AdamW takes the place of the C++, and
everything around it, which makes the states and counts the steps, is DeepSpeed's.
"""

import functools
import importlib.metadata
import warnings
from unittest import mock

import deepspeed
import pytest
import torch

from coat_ds import CoatAdamW
from coat_ds.optim.moment import Moment
from coat_ds.optim.options import MOMENTS
from tests.coat_ds.cells import FP8_BOUND, OFFLOAD, TOLERANCE, Tied, Wide, cell, ds_config, train_step
from tests.coat_ds.checkpointed import full_states, of_moments, to_universal
from tests.coat_ds.faithful import assert_ratio_faithful, assert_second_faithful
from tests.hosts import without_compilation
from tests.util import run_distributed

SECTIONS = {"FusedAdam": {}, "DeepSpeedCPUAdam": {}, "AdamW": {"torch_adam": True}}
# the optimizer, the stage, the type, and whether the checkpoint is made universal
ROWS = [
    *(("FusedAdam", stage, "bf16", False) for stage in (0, 1, 3)),
    *(("AdamW", stage, "bf16", False) for stage in (2, 3)),
    *(("FusedAdam", 0, dtype, False) for dtype in ("fp32", "fp16")),
    ("AdamW", 0, "fp32", False),
    *(("DeepSpeedCPUAdam", stage, "bf16", False) for stage in (1, 3)),
    ("FusedAdam", 1, "bf16", True),
    ("AdamW", 3, "bf16", True),
    ("DeepSpeedCPUAdam", 2, "bf16", True),
]
# DeepSpeed keeps a master of each parameter around torch's AdamW there: another layout than COAT's
REFUSED = [("AdamW", 0, "bf16", False), ("client AdamW", 0, "bf16", False), ("AdamW", 0, "fp16", False)]
STEPS = 3
OLD = importlib.metadata.version("deepspeed").startswith("0.18.")


def start(peer, stage, dtype, universal, coat):
    """An engine with `peer`, or with COAT by the same config and the block."""
    run = cell(stage, dtype, model=Wide, zero=OFFLOAD if peer == "DeepSpeedCPUAdam" else ())
    torch.manual_seed(0)
    model = run["model"]()
    config = ds_config(run, coat)
    config["checkpoint"] = {"load_universal": universal}
    options = config.pop("optimizer")["params"]
    optimizer = None
    if peer == "client AdamW":
        options.pop("torch_adam", None)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        # DeepSpeed would otherwise want its own for CPUs
        config["zero_force_ds_cpu_optimizer"] = False
    else:
        options.pop("torch_adam", None)
        config["optimizer"] = {"type": "AdamW", "params": {**options, **SECTIONS[peer]}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if not coat:
        assert type(engine.basic_optimizer).__name__ == peer.split()[-1]
    return engine


def states(engine):
    """Masters and moments, flat, and the step counts."""
    optimizer, stage = engine.basic_optimizer, engine.zero_optimization_stage()
    steps = [int(state["step"]) for state in optimizer.state.values() if state]
    if stage:
        if isinstance(optimizer, CoatAdamW) is False:
            # DeepSpeed links the states of other optimizers only after the first step
            engine.optimizer._hp_optimizer_states_linked = False
            getattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state", lambda: None)()
        return [t for found in full_states(engine) for t in found], steps
    params = [p for group in optimizer.param_groups for p in group["params"]]
    of_each = [(p, *(optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq"))) for p in params]
    return [
        torch.cat([t.detach().reshape(-1).clone() for t in ts]) for ts in zip(*of_each, strict=True)
    ], steps


def interchange(folder, row):
    """What the peer had and did next, what COAT found of it and did, and what the peer found of that."""
    peer, stage, dtype, universal = row
    out, said, where = [], [], "-".join(map(str, row)).replace(" ", "")
    for i, coat in enumerate((False, True, False)):
        engine = start(*row, coat)
        tag = f"{where}-{i}"
        if i == 0:
            for _ in range(STEPS):
                train_step(engine)
        else:
            with of_moments() as lines:
                engine.load_checkpoint(folder, tag=f"{where}-{i - 1}" + "_universal" * universal)
            said.append(lines)
            # gradients are clipped as before
            assert dtype == "fp32" or engine.optimizer.clip_grad == 1.0
        if i < 2:
            engine.save_checkpoint(folder, tag=tag)
            if universal:
                to_universal(folder, tag)
        found = states(engine)
        out.append((*found, [train_step(engine) for _ in range(2)]))
    return out, said


def of_others(folder, row):
    """The error of stage 0 for a checkpoint that another wrapper has written, whether the weights alone are
    loaded as it says, and what is logged of moments."""
    writer, tag = start(*row, coat=row[1] > 0), "-".join(map(str, row))
    train_step(writer)
    writer.save_checkpoint(folder, tag=tag)
    reader = start("FusedAdam", 0, *row[2:], coat=True)
    with pytest.raises(ValueError) as error:
        reader.load_checkpoint(folder, tag=tag)
    # what was loaded otherwise before is not said to be of this checkpoint
    reader.basic_optimizer.load_state_dict(reader.basic_optimizer.state_dict())
    with of_moments() as lines:
        reader.load_checkpoint(folder, tag=tag, load_optimizer_states=False)
    weights = ([p.detach() for p in engine.module.parameters()] for engine in (writer, reader))
    return str(error.value), all(torch.equal(a, b) for a, b in zip(*weights, strict=True)), lines


def from_codes(folder, peer, stage):
    """States of COAT in the compressed layout, and those of `peer` that goes on from its checkpoint."""
    run, found, tag = cell(stage, "bf16", model=Wide), [], f"codes-{peer}-{stage}"
    for coat in (True, False):
        config = ds_config(run, coat)
        if coat:
            config["coat"]["optimizer"] |= {"checkpoint_layout": "compressed"}
        config["optimizer"]["params"].pop("torch_adam", None)
        config["optimizer"]["params"] |= SECTIONS[peer]
        engine, *_ = deepspeed.initialize(model=run["model"](), config=config)
        if coat:
            train_step(engine)
            engine.save_checkpoint(folder, tag=tag)
        else:
            engine.load_checkpoint(folder, tag=tag)
        found.append(states(engine)[0])
        kinds = {type(x) for state in engine.basic_optimizer.state.values() for x in state.values()}
    return *found, kinds


def codes_of_stage_0():
    """The kind of the moments that stage 0 saves in the compressed layout."""
    config = ds_config(cell(0, "bf16"))
    config["coat"]["optimizer"] |= {"checkpoint_layout": "compressed"}
    engine, *_ = deepspeed.initialize(model=Tied(), config=config)
    train_step(engine)
    saved = engine.optimizer.state_dict()["optimizer_state_dict"]["state"]
    return [isinstance(state[name], Moment) for state in saved.values() for name in MOMENTS]


def work(folder):
    warnings.simplefilter("ignore")
    if not torch.cuda.is_available():
        without_compilation()
    deepspeed.init_distributed()
    outcome = {row: interchange(folder, row) for row in ROWS}
    rows = [("FusedAdam", 0), ("FusedAdam", 1), ("AdamW", 1), ("AdamW", 3)]
    outcome["codes"] = [from_codes(folder, *row) for row in rows]
    outcome["codes of stage 0"] = codes_of_stage_0()
    zero = [("FusedAdam", 1, dtype, False) for dtype in ("bf16", "fp16")]
    outcome["others"] = [of_others(folder, row) for row in (*zero, *REFUSED)]
    return outcome


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    return run_distributed(work, 1, str(tmp_path_factory.mktemp("interchange")))[0]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    return run_distributed(work, 1, str(tmp_path_factory.mktemp("interchange")), gpus=True)[0]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
@pytest.mark.parametrize("where", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_checkpoints_of_stock_engines_go_both_ways(where, row, request):
    if OLD and row[3] and row[1] in (1, 2):
        pytest.skip("DeepSpeed 0.18 names other masters after loading its own universal checkpoint, too")
    outcome, (said, nothing) = request.getfixturevalue(where)[row]
    assert not nothing and "with groups encoded from FP32" in said[0]
    (stock, steps, expected), (coat, coat_steps, losses), (back, back_steps, again) = outcome
    # FusedAdam counts the steps of a group in the state of one of its parameters
    assert set(coat_steps) == {max(steps)}
    # masters, first and second moments
    masters, pairs = stock[::3], zip(stock[1::3], stock[2::3], coat[1::3], coat[2::3], strict=True)
    assert all(map(torch.equal, masters, coat[::3]))
    for exact, its_second, stored, second in pairs:
        assert_ratio_faithful(stored, exact, second)
        assert_second_faithful(second, its_second)
    bound = FP8_BOUND * (expected[0] - expected[1]) + TOLERANCE[row[2]]
    assert losses == pytest.approx(expected, abs=bound)
    assert set(back_steps) == {max(steps)} and all(map(torch.equal, coat, back))
    assert again == pytest.approx(expected, abs=bound)


@pytest.mark.parametrize("where", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_compressed_layout_is_continued_by_adamw(where, request):
    # both are decoded codes: by kernels on a GPU, whose exp2 is off by 2^-22, and by the CPU's reference,
    # where it is by 1.2 * 2^-24. In second moments that counts twice, since roots are squared; two roundings
    # follow on either. Roots for first moments are 2^x, where x is half the log2 of a scale and a part
    # that is exact. Down to -64 log2 is off by 2^-18 on either, x by half of that, and the sum by 2^-20. All
    # that times log(2) is 2^-17.94; what exp2 and products add is below 2^-21
    rtol = (0, 0, 0) if where == "cpu" else (0, 2**-17, 2**-20)
    for saved, loaded, kinds in request.getfixturevalue(where)["codes"]:
        for i, (mine, theirs) in enumerate(zip(saved, loaded, strict=True)):
            torch.testing.assert_close(theirs, mine, rtol=rtol[i % 3], atol=0)
        assert not any(issubclass(kind, Moment) for kind in kinds)


@pytest.mark.parametrize("where", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_checkpoints_of_stage_0_save_codes(where, request):
    assert request.getfixturevalue(where)["codes of stage 0"] == [True, True]


@pytest.mark.parametrize("where", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_checkpoints_of_stage_0_refuse_states_of_other_wrappers(where, request):
    for error, same, (said,) in request.getfixturevalue(where)["others"]:
        assert "load_checkpoint: " in error and "load_optimizer_states=False" in error and same
        assert said.endswith("moments of the checkpoint: none was loaded")


def formats(folder, stage):
    """What an engine's states are stored in, before and after it has loaded those of an engine of another
    format from a universal checkpoint, and the bytes after each flat tensor that its moments are put together
    like."""
    from deepspeed.runtime import base_optimizer

    flats, flatten = [], base_optimizer.map_to_flat_opt_states

    @functools.wraps(flatten)
    def noted(flat, *rest):
        flats.append(flat.untyped_storage().nbytes())
        flatten(flat, *rest)

    run, engines = cell(stage, "fp32"), []
    for universal, second in ((False, "fp8_expanded"), (True, "log8")):
        config = ds_config(run, True) | {"checkpoint": {"load_universal": universal}}
        config["coat"]["optimizer"] |= {"exp_avg_sq_format": second}
        engines.append(deepspeed.initialize(model=run["model"](), config=config)[0])
    first, second = engines
    train_step(first, 0)
    first.save_checkpoint(folder, tag="first")
    to_universal(folder, "first")
    found = []
    for load in (lambda: None, lambda: second.load_checkpoint(folder, tag="first_universal")):
        with mock.patch.object(base_optimizer, flatten.__name__, noted):
            load()
        groups = second.basic_optimizer.param_groups
        found.append(({g["exp_avg_sq_format"] for g in groups}, second.coat.states["by_codec"]))
    # a load that fails leaves them, too: this checkpoint was not made universal
    with pytest.raises((AssertionError, OSError)):
        second.load_checkpoint(folder, tag="first")
    assert all(type(g["exp_avg_sq_format"]) is str for g in groups)
    return *found, flats


@pytest.mark.parametrize("stage", [1, 3])
def test_universal_checkpoint_leaves_formats_as_the_block_says(tmp_path, stage):
    ((before, after, flats),) = run_distributed(formats, 1, str(tmp_path), stage)
    assert before == after and before[0] == {"log8"}
    # a number on the CPU, and not the partition on its device; stage 3 has no flat ones
    assert set(flats) == ({torch.float32.itemsize} if stage == 1 else set())
