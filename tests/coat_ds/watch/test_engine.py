"""A converted Llama that trains under DeepSpeed and is watched, with and without an outlier feature.

One spawn serves all tests.
"""

import csv
import functools
import types
from pathlib import Path
from unittest import mock

import pytest
import torch

from coat_ds.watch.command import verdict
from coat_ds.watch.readings import read
from tests.coat_ds import engines
from tests.coat_ds.engines import adamw
from tests.coat_ds.watch.parts import VOCABULARY, llama
from tests.hosts import TEST_ALL
from tests.util import run_distributed

LENGTH, BATCH, STEPS = 32, 4, 40


# stage 0 steps like a plain loop, which test_watch.py has
STAGES = (0, 1, 3) if TEST_ALL else (1, 3)


def engine_of(model, stage, watch, **more):
    keys = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95]}},
        # otherwise ZeRO-3 keeps small weights whole
        "zero": {"stage3_param_persistence_threshold": 0},
        **more,
    }
    return engines.engine_of(model, stage, {"optimizer": {"min_numel": 0}, "watch": watch}, **keys)


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
    others. Its weights make up for it."""
    factor = 2.0**20
    for layer in model.model.layers:
        with torch.no_grad():
            layer.mlp.up_proj.weight[3] *= factor
            layer.mlp.down_proj.weight[:, 3] /= factor
    return model


def watched_run(stage, folder):
    monitors = {"csv_monitor": {"enabled": True, "output_path": f"{folder}/csv", "job_name": "run"}}
    engine = engine_of(llama(), stage, {"every": 2, "folder": folder}, **monitors)
    seen, logged, callbacks = [], [], engine.coat.watch.callbacks
    engine.coat.watch.add(seen.append)
    before = list(callbacks)
    # Trainer's callback takes the engine's watch, which it neither steps nor ends
    from coat_ds.watch import Callback
    from coat_ds.watch import callback as of_callback

    callback = Callback(types.SimpleNamespace(deepspeed=engine, log=logged.append), {"every": 3})
    with mock.patch.object(of_callback, "log_once") as said:
        callback.on_train_begin(None, None, None)
    losses = []
    for step in range(5):
        losses += train(engine, 1, first=step)
        callback.on_step_end(None, None, None)
    callback.on_train_end(None, None, None)
    assert callbacks == before and [entry["coat/step"] for entry in logged] == [2, 4]
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


def outlier_run(folder):
    """The last reading of a run with an outlier."""
    engine = engine_of(inject(llama()), 1, {"every": 2, "folder": folder})
    train(engine, 3)
    engine.destroy()
    return engine.coat.watch.last


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
    section = adamw(3e-3)
    block = {"enabled": True, "optimizer": {"enabled": False}, "watch": {"every": 1}}
    engine, seen = engine_of(llama(), 1, None, optimizer=section, coat=block), []
    # without a reader before
    idle = not engine.coat.watch.is_active
    engine.coat.watch.add(seen.append)
    train(engine, 2)
    engine.destroy()
    return idle, seen


def everything(folder):
    found = {("watched", stage): watched_run(stage, f"{folder}/{stage}") for stage in STAGES}
    found["outlier"] = outlier_run(f"{folder}/outlier")
    found["accumulated"], found["layers alone"] = accumulated_run(), layers_alone_run()
    return found


@functools.cache
def results(folder):
    return run_distributed(everything, 1, folder)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("watch"))


@pytest.mark.parametrize("stage", STAGES)
def test_watched_engine_takes_readings(folder, stage):
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
    # of Trainer's callback
    assert "config: found {'every': 3}, of no effect" in found["ignored"]
    assert "the engine is not watched. Set coat.watch in its DeepSpeed config" in found["refused"]


def test_watched_step_ends_with_its_last_micro_batch(folder):
    # the reading that is on its way arrives when the engine ends
    assert results(folder)["accumulated"] == ([1], [1, 2])


def test_watched_layers_beside_an_optimizer_of_deepspeeds(folder):
    idle, readings = results(folder)["layers alone"]
    assert idle and [reading.step for reading in readings] == [1, 2]
    figures = {figure for found in readings[-1].groups.values() for figure in found}
    # DeepSpeed's states are not known
    assert figures >= {"input_flushed", "saved_flushed"} and "update_error" not in figures


def test_watched_engine_writes_the_file_and_deepspeeds_monitors(folder):
    last = results(folder)["watched", 1]["last"]
    readings = read(Path(folder) / "1")
    assert [r.step for r in readings] == [2, 4, 6] and readings[-1] == last
    written = {path.stem: path for path in (Path(folder) / "1/csv/run").glob("coat_*.csv")}
    assert len(written) == len(last.flat())
    name = "coat_update_error_model.layers.*.self_attn.q_proj.weight"
    rows = list(csv.reader(written[name].open()))
    assert [samples for samples, _ in rows[1:]] == ["8", "16", "24"]


def test_watch_sees_an_outlier(folder):
    last = results(folder)["outlier"]
    assert last.groups["model.layers.*.mlp.down_proj"]["input_flushed"] > 0.9
    assert verdict(last).startswith("verdict: NOT healthy. input_flushed of model.layers.*.mlp.down_proj")
