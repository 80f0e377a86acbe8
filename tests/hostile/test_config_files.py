"""Files that the entry point and launchers read: used as written, or refused by a message that names the file
or key."""

import argparse
import dataclasses
import json

from hypothesis import given

from coat_ds import CoatConfig, CoatConfigError
from coat_launch.args import SHAPE_FLAGS
from coat_launch.deepspeed_config import read_deepspeed_config, set_batch_sizes
from coat_launch.errors import LaunchError
from coat_launch.model import load_model_shape
from tests.hostile.files import ROOT, json_files, tries

HOST = json.loads((ROOT / "configs/ds_zero1_coat.json").read_text())
BLOCK = {
    "enabled": True,
    "optimizer": {
        "enabled": True,
        "exp_avg_format": "fp8_expanded",
        "min_numel": 128,
        "keep_fp32": ["*norm*"],
    },
    "activations": {"saved_format": "sqrt8", "weight_cache": "none"},
    "fp8_activation_checkpointing": False,
}


@tries()
@given(json_files({**HOST, "coat": BLOCK}))
def test_deepspeed_configs(folder, data):
    from coat_ds.zero import deepspeed_config

    path = folder / "ds.json"
    path.write_bytes(data)
    args = argparse.Namespace(deepspeed_config=str(path), variant=None, lr=1e-3, warmup_steps=None)
    try:
        config = read_deepspeed_config(args)
        set_batch_sizes(dict(config), argparse.Namespace(micro_batch_size=None, global_batch_size=None), 1)
        coat = deepspeed_config.checked_config(config, None)
    except LaunchError as error:
        assert str(path) in str(error) or "train_" in str(error) or "gradient_acc" in str(error), error
        return
    except CoatConfigError as error:
        key, _, rest = str(error).partition(":")
        top = key.split(".")[0]
        assert top == "coat" or key == str(path) or top in config, error
        assert rest
        return
    # an accepted config has the requested values
    assert isinstance(coat, CoatConfig) and coat.enabled == (config.get("coat") or {}).get("enabled", False)


SHAPE = json.loads((ROOT / "configs/model_quickstart.json").read_text())


@tries()
@given(json_files(SHAPE))
def test_model_configs(folder, data):
    path = folder / "model.json"
    path.write_bytes(data)
    flags = dict.fromkeys(SHAPE_FLAGS)
    shape = None
    try:
        shape = load_model_shape(argparse.Namespace(model_config=str(path), **flags))
    except LaunchError as error:
        assert str(path) in str(error)
    if shape is not None:
        assert json.loads(data).items() <= dataclasses.asdict(shape).items()
