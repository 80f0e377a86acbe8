"""DeepSpeed's Muon with COAT's layers, where the block leaves the optimizer to DeepSpeed."""

import warnings
from importlib.metadata import version

import pytest
import torch
from packaging.version import Version

from coat_ds.config import CoatConfigError
from tests.coat_ds.ways import engine_of, step
from tests.hosts import TEST_ALL
from tests.util import run_distributed

STAGES = (0, 1, 2, 3) if TEST_ALL else (3,)
BLOCKS = {"without": {"enabled": False}, "coat": {"enabled": True, "optimizer": {"enabled": False}}}
# from there on it takes learning rates of its own for the parameters that Adam steps
NEWER = Version(version("deepspeed")) >= Version("0.19")


def built(stage, block):
    # torch's AdamW for the others: DeepSpeed's own would be compiled
    params = {"lr": 0.02, "momentum": 0.95, "adam_lr": 5e-3, "torch_adam": True}
    muon = {"type": "Muon", "params": params}
    # which it refuses to scatter gradients for
    zero = {"stage": stage, "reduce_scatter": stage != 3, "stage3_param_persistence_threshold": 100}
    return engine_of(stage, block, optimizer=muon, zero_optimization=zero)


def by_stages(folder):
    warnings.simplefilter("ignore")
    # compiling Muon's small functions takes longer than running them
    torch._dynamo.config.disable = True
    found = {}
    for stage in STAGES:
        for name, block in BLOCKS.items():
            engine = built(stage, block)
            kind = type(engine.basic_optimizer).__name__
            losses = [step(engine, i) for i in range(4)]
            engine.save_checkpoint(f"{folder}/{stage}-{name}")
            losses += [step(engine, i) for i in (4, 5)]
            said = str(getattr(engine, "coat", None))
            engine.destroy()
            engine = built(stage, block)
            engine.load_checkpoint(f"{folder}/{stage}-{name}")
            again = [step(engine, i) for i in (4, 5)]
            engine.destroy()
            found[stage, name] = kind, losses, said, again
    with pytest.raises(
        CoatConfigError, match="'Muon'. Use one of them or set coat.optimizer.enabled to false"
    ):
        built(1, {"enabled": True})
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if not NEWER:
        pytest.skip("Muon of DeepSpeed before 0.19 takes other arguments")
    return run_distributed(by_stages, 2, str(tmp_path_factory.mktemp("muon")))[0]


@pytest.mark.parametrize("stage", STAGES)
def test_engine_has_fp8_layers_beside_muon(found, stage):
    (kind, expected, *_), (own, losses, said, again) = (found[stage, name] for name in BLOCKS)
    assert kind == own == "MuonWithAuxAdam" and "14 of 15 linear layers in FP8" in said
    assert losses[0] != expected[0]
    learnt = expected[0] - expected[-1]
    assert learnt > 0.5 and max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < learnt / 20
    assert again == losses[4:]
