"""Keys of the block that are of no effect in a DeepSpeed engine: each is warned of in the log, or refused."""

import logging

import pytest
import torch

import coat_ds
from tests.coat_ds.engines import engine_of
from tests.util import listening, run_distributed

OTHER = {"min_numel": 64, "checkpoint_layout": "compressed", "keep_fp32": ["*0*"]}


def model():
    nn = torch.nn
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32))


def of_own(block=None, **options):
    """An engine with the script's own optimizer."""
    net = model()
    optimizer = coat_ds.CoatAdamW(net.named_parameters(), **options)
    return engine_of(net, 1, block, {"optimizer": optimizer}, optimizer=None)


def work():
    import deepspeed

    deepspeed.init_distributed("gloo")
    coat_ds.install()
    rounded = {"optimizer": {"bf16_params": "stochastic"}}
    masters = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    runs = {
        "FP32 masters": lambda: engine_of(model(), 1, block=rounded),
        "BF16 masters": lambda: engine_of(model(), 2, block=rounded, bf16=masters),
        "units, ZeRO 2": lambda: engine_of(model(), 2, block={"zero3_layer_units": True}),
        "units, ZeRO 3": lambda: engine_of(model(), 3, block={"zero3_layer_units": True}),
        "FP32": lambda: engine_of(model(), 1, bf16=None),
        "FP32, autocast": lambda: engine_of(model(), 1, bf16=None, torch_autocast={"enabled": True}),
        "own": lambda: of_own(block={"optimizer": OTHER}),
        "own, without keys": lambda: of_own(**OTHER),
    }
    found = {}
    with listening(logging.WARNING) as lines:
        for name, run in runs.items():
            lines.clear()
            run().destroy()
            found[name] = [line for line in lines if "of no effect" in line or "bf16.enabled" in line]
        with pytest.raises(coat_ds.CoatConfigError) as error:
            engine_of(torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3)), block={"require": True})
        found["no linear layer, required"] = [str(error.value)]
    return found


@pytest.fixture(scope="module")
def found():
    return run_distributed(work, 1)[0]


@pytest.mark.parametrize(
    "run, keys",
    [
        ("FP32 masters", ["coat.optimizer.bf16_params"]),
        ("BF16 masters", []),
        ("units, ZeRO 2", ["coat.zero3_layer_units"]),
        ("units, ZeRO 3", []),
        ("FP32", ["bf16.enabled"]),
        ("FP32, autocast", []),
        ("own", ["coat.optimizer"]),
        ("own, without keys", []),
        ("no linear layer, required", ["coat.activations.enabled"]),
    ],
)
def test_engine_warns_of_block_keys_without_effect(found, run, keys):
    assert [line.removeprefix("COAT: ").partition(":")[0] for line in found[run]] == keys
