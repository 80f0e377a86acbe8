"""A converted Llama that trains under DeepSpeed and is watched; an outlier feature, and what is done about
it.

One spawn serves all tests. There two readings above a limit count, not three.
"""

import csv
import functools
import json
import math
import types
from pathlib import Path
from unittest import mock

import deepspeed
import pytest
import torch

from coat_ds.watch import fallback as of_fallback
from coat_ds.watch.readings import read
from tests.coat_ds.watch.parts import VOCABULARY, llama
from tests.util import run_distributed

LENGTH, BATCH, STEPS = 32, 4, 40
NOTHING = {"layers": [], "states": []}


def engine_of(model, stage, watch, **more):
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95]}},
        "bf16": {"enabled": True},
        # otherwise ZeRO-3 keeps small weights whole
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "coat": {"enabled": True, "optimizer": {"min_numel": 0}, "watch": watch},
        **more,
    }
    return deepspeed.initialize(model=model, config=config)[0]


def train(engine, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        ids = (torch.arange(LENGTH) * (1 + step % 3) + 8 * torch.arange(BATCH)[:, None]) % VOCABULARY
        loss = engine(ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def inject(model):
    """An outlier feature: in each layer one channel of what down_proj reads is so large that FP8 loses all
    others. Its weights make up for it and are not trained, so that in BF16 it does no harm."""
    factor = 2.0**20
    for layer in model.model.layers:
        up, down = layer.mlp.up_proj.weight, layer.mlp.down_proj.weight
        with torch.no_grad():
            up[3] *= factor
            down[:, 3] /= factor
        up.register_hook(lambda grad: grad.index_fill(0, torch.tensor([3]), 0))
        down.register_hook(lambda grad: grad.index_fill(1, torch.tensor([3]), 0))
    return model


def watched_run(stage, folder):
    monitors = {"csv_monitor": {"enabled": True, "output_path": f"{folder}/csv", "job_name": "run"}}
    engine = engine_of(llama(), stage, {"every": 2, "folder": folder}, **monitors)
    seen, logged, outs = [], [], engine.coat.watch.outs
    engine.coat.watch.add(seen.append)
    before = list(outs)
    # Trainer's callback takes the engine's watch, which it neither steps nor ends
    from coat_ds.watch import Callback
    from coat_ds.watch import callback as of_callback

    callback = Callback(types.SimpleNamespace(deepspeed=engine, log=logged.append), {"every": 3})
    with mock.patch.object(of_callback, "say_once") as said:
        callback.on_train_begin(None, None, None)
    losses = []
    for step in range(5):
        losses += train(engine, 1, first=step)
        callback.on_step_end(None, None, None)
    callback.on_train_end(None, None, None)
    assert outs == before and [entry["coat/step"] for entry in logged] == [2, 4]
    losses += train(engine, 2, first=5)
    found = {"last": engine.coat.watch.last, "ignored": said.call_args.args[0]}
    engine.destroy()
    plain = engine_of(llama(), stage, False)
    same = train(plain, 7) == losses
    assert plain.coat.watch is None
    try:
        Callback(types.SimpleNamespace(deepspeed=plain)).on_train_begin(None, None, None)
    except ValueError as error:
        found["refused"] = str(error)
    plain.destroy()
    return found | {"steps": [r.step for r in seen], "same": same}


def outlier_run(folder, act):
    """A run with outliers in BF16, or in FP8 where `act` says what is done, and its checkpoints."""
    watch = {"every": 2, "act": "off" if act == "bf16" else act, "folder": f"{folder}/{act}"}
    block = {"enabled": True, "optimizer": {"min_numel": 0}, "activations": act != "bf16", "watch": watch}
    engine = engine_of(inject(llama()), 1, watch, coat=block)
    fallback = engine.coat.watch.fallback
    with mock.patch.object(of_fallback, "say") as said:
        losses = train(engine, STEPS if act != "warn" else 6)
    lines = [call.args[0] for call in said.call_args_list]
    found = {"losses": losses, "said": lines, "state": fallback.state(), "last": engine.coat.watch.last}
    if act != "act":
        engine.destroy()
        return found
    engine.save_checkpoint(folder, tag="outlier")
    after = train(engine, 3, first=STEPS)
    engine.destroy()
    resumed = engine_of(inject(llama()), 1, watch)
    # the latest
    resumed.load_checkpoint(folder)
    fallback, forward = resumed.coat.watch.fallback, resumed.module.model.layers[0].mlp.down_proj.forward
    found |= {"resumed": fallback.state(), "paused": forward.paused}
    found["equal"] = train(resumed, 3, first=STEPS) == after
    # and back again, in a checkpoint of the same name too
    found["files"] = []
    for _ in range(2):
        resumed.save_checkpoint(folder, tag="again")
        found["files"].append(Path(folder, "again/coat_watch.json").exists())
        fallback.restore({})
    found["undone"] = fallback.state(), forward.paused
    resumed.destroy()
    off = engine_of(llama(), 1, {"every": 2, "act": "off"})
    off.load_checkpoint(folder, tag="outlier")
    found["not taken"] = off.coat.watch.fallback.state()
    off.destroy()
    return found


def states_run(folder, stage):
    """The moments of one tensor go to FP32, with a limit that any error passes."""
    watch = {"every": 1, "act": "act", "update_error": 1e-6, "folder": folder}
    engine = engine_of(llama(), stage, watch)
    train(engine, 1)
    before = engine.coat.states["by_codec"]
    train(engine, 3, first=1)
    after = engine.coat.states["by_codec"]
    engine.save_checkpoint(folder, tag="states")
    moments = full_states(engine)
    # where DeepSpeed finds nothing the run goes on as it was
    assert engine.load_checkpoint(f"{folder}/none") == (None, None)
    losses = train(engine, 2, first=4)
    fallen = engine.coat.watch.fallback.state()
    engine.destroy()
    resumed = engine_of(llama(), stage, watch)
    resumed.load_checkpoint(folder, tag="states")
    same = all(map(torch.equal, full_states(resumed), moments))
    found = {"before": before, "after": after, "fallen": fallen, "same": same}
    found["resumed"] = resumed.coat.states["by_codec"]
    found["equal"] = train(resumed, 2, first=4) == losses
    resumed.coat.watch.fallback.restore({})
    found["undone"] = resumed.coat.states["by_codec"]
    found["goes on"] = train(resumed, 1, first=6)
    resumed.destroy()
    return found


def accumulated_run():
    """The steps with readings where two micro-batches make one, before the engine ends and after
    that."""
    engine, seen = engine_of(llama(), 1, {"every": 1}, gradient_accumulation_steps=2), []
    engine.coat.watch.add(lambda reading: seen.append(reading.step))
    train(engine, 4)
    before = list(seen)
    engine.destroy()
    return before, seen


def layers_alone_run():
    """Readings with an optimizer of DeepSpeed's."""
    section = {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}
    block = {"enabled": True, "optimizer": {"enabled": False}, "watch": {"every": 1}}
    engine, seen = engine_of(llama(), 1, None, optimizer=section, coat=block), []
    # without a reader before
    idle = not engine.coat.watch.is_active
    engine.coat.watch.add(seen.append)
    train(engine, 2)
    engine.destroy()
    return idle, seen


def full_states(engine):
    from deepspeed.utils import safe_get_full_optimizer_state

    return [
        safe_get_full_optimizer_state(p, name).clone()
        for p in engine.module.parameters()
        for name in ("exp_avg", "exp_avg_sq")
    ]


def everything(folder):
    of_fallback.READINGS = 2
    found = {("watched", stage): watched_run(stage, f"{folder}/{stage}") for stage in (0, 1, 3)}
    found |= {
        ("outlier", act): outlier_run(f"{folder}/outlier", act) for act in ("bf16", "off", "warn", "act")
    }
    found["accumulated"], found["layers alone"] = accumulated_run(), layers_alone_run()
    found |= {("states", stage): states_run(f"{folder}/states{stage}", stage) for stage in (1, 3)}
    return found


@functools.cache
def results(folder):
    return run_distributed(everything, 1, folder)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("watch"))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_readings_in_a_run(folder, stage):
    found = results(folder)["watched", stage]
    assert found["steps"] == [2, 4, 6]
    assert found["same"], "watching changed what is computed"
    last = found["last"]
    group = last.groups["model.layers.*.self_attn.q_proj.weight"]
    assert 1e-3 < group["update_error"] < 0.05 and group["stalled"] < 0.2 and group["underflowed"] == 0
    assert "update_error" not in last.groups.get("model.norm.weight", {}), "it keeps FP32 moments"
    layer = last.groups["model.layers.*.mlp.down_proj"]
    assert set(layer) >= {"input_flushed", "gradient_flushed", "input_saturated", "gradient_saturated"}
    assert last.groups["saved activations"]["saved_flushed"] < 0.05
    assert last.fallen == []
    # of Trainer's callback
    assert "config: found {'every': 3}, of no effect" in found["ignored"]
    assert "the engine is not watched. Set coat.watch in its DeepSpeed config" in found["refused"]


def test_a_step_ends_with_its_last_micro_batch(folder):
    # the reading that is on its way arrives when the engine ends
    assert results(folder)["accumulated"] == ([1], [1, 2])


def test_layers_are_watched_beside_an_optimizer_of_deepspeeds(folder):
    idle, readings = results(folder)["layers alone"]
    assert idle and [reading.step for reading in readings] == [1, 2]
    figures = {figure for found in readings[-1].groups.values() for figure in found}
    # DeepSpeed's states are not known
    assert figures >= {"input_flushed", "saved_flushed"} and "update_error" not in figures


def test_readings_arrive_in_the_file_and_in_deepspeeds_monitors(folder):
    last = results(folder)["watched", 1]["last"]
    readings = read(Path(folder) / "1")
    assert [r.step for r in readings] == [2, 4, 6] and readings[-1] == last
    written = {path.stem: path for path in (Path(folder) / "1/csv/run").glob("coat_*.csv")}
    assert len(written) == len(last.flat())
    rows = list(csv.reader(written["coat_fallen"].open()))
    assert rows[1:] == [[samples, "0.0"] for samples in ("8", "16", "24")]


def test_an_outlier_is_seen_and_the_run_is_saved(folder):
    bf16, off, warn, act = (results(folder)["outlier", how] for how in ("bf16", "off", "warn", "act"))
    fallen = [f"model.layers.{i}.mlp.{part}" for i in range(2) for part in ("both", "down_proj")]
    for run in (off, warn):
        assert run["last"].groups["model.layers.*.mlp.down_proj"]["input_flushed"] > 0.9
        assert run["state"] == NOTHING and run["last"].fallen == []
    assert off["said"] == []
    # the second reading is of step 4, and is taken in at the end of step 5
    lines = {"warn": "would have it fall back", "act": "computes in BF16 from now on"}
    for run, end in ((warn, lines["warn"]), (act, lines["act"])):
        assert len(run["said"]) == len(fallen)
        for name, line in zip(fallen, run["said"], strict=True):
            assert line.startswith(f"step 4: {name}: ") and end in line
    assert act["state"] == {"layers": fallen, "states": []} and act["last"].fallen == fallen
    assert warn["losses"] == off["losses"][:6]
    assert act["losses"][:5] == off["losses"][:5]
    # what FP8 loses comes back, nearly all of it
    reached = {how: sum(run["losses"][-6:]) / 6 for how, run in (("bf16", bf16), ("off", off), ("act", act))}
    assert reached["off"] > reached["bf16"] + 0.2
    assert reached["act"] < reached["bf16"] + (reached["off"] - reached["bf16"]) / 3


def test_the_checkpoint_remembers_and_the_way_back(folder):
    act = results(folder)["outlier", "act"]
    assert act["resumed"] == act["state"] and act["paused"] and act["equal"]
    assert act["undone"] == (NOTHING, False) and act["files"] == [True, False]
    assert act["not taken"] == NOTHING
    held = json.loads((Path(folder) / "outlier/outlier/coat_watch.json").read_text())
    assert held == act["state"]


@pytest.mark.parametrize("stage", [1, 3])
def test_states_go_to_fp32_and_come_back(folder, stage):
    found = results(folder)["states", stage]
    assert set(found["before"]) == {"fp32", "log8", "ratio8"}
    assert set(found["after"]) == {"fp32"}
    assert "model.layers.0.self_attn.q_proj.weight" in found["fallen"]["states"]
    assert found["fallen"]["layers"] == []
    assert found["same"] and found["equal"] and found["resumed"] == found["after"]
    assert found["undone"] == found["before"] and all(map(math.isfinite, found["goes on"]))
