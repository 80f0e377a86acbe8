"""Files that the entry point and launchers read: used as written, or refused by a message that names the file
or key."""

import argparse
import dataclasses
import json

from hypothesis import given
from hypothesis import strategies as st

from coat_ds import CoatConfig, CoatConfigError
from coat_launch import preflight
from coat_launch.args import SHAPE_FLAGS
from coat_launch.deepspeed_config import read_deepspeed_config, set_batch_sizes
from coat_launch.errors import LaunchError
from coat_launch.model import load_model_shape
from coat_launch.settings import KINDS, Settings
from tests.hostile.files import HOSTILE_TEXT, ROOT, damaged, json_files, tries

HOST = json.loads((ROOT / "configs/ds_zero1_coat.json").read_text())
BLOCK = {
    "enabled": True,
    "optimizer": {
        "enabled": True,
        "exp_avg_format": "fp8_expanded",
        "group_size": 128,
        "keep_fp32": ["*norm*"],
    },
    "activations": {"saved_format": "sqrt8", "weight_cache": "none", "group_size": 16},
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
        coat = deepspeed_config.check(config, None)
    except LaunchError as error:
        assert str(path) in str(error) or "train_" in str(error) or "gradient_acc" in str(error), error
        return
    except CoatConfigError as error:
        key, _, rest = str(error).partition(":")
        top = key.split(".")[0]
        assert top == "coat" or top in config, error
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
    try:
        env = {"MODEL_CONFIG": str(path), "GPUS_PER_NODE": "2", "TENSOR_SIZE": "2", "OUTPUT": str(folder)}
        Settings.from_environment("torchrun", env)
    except LaunchError as error:
        assert str(path) in str(error)
    if shape is not None:
        assert json.loads(data).items() <= dataclasses.asdict(shape).items()


@tries()
@given(
    st.one_of(
        damaged(b"# hosts\nnode-a slots=8\n\nnode-b.example slots=8 # two\n10.0.0.1 slots=8\n"),
        st.binary(max_size=40),
        st.lists(HOSTILE_TEXT.map(lambda t: f"{t} slots={len(t)}".encode("utf-8", "replace"))).map(
            b"\n".join
        ),
    )
)
def test_hostfiles(folder, data):
    path = folder / "hosts"
    path.write_bytes(data)
    try:
        env = {"HOSTFILE": str(path), "OUTPUT": str(folder), "GPUS_PER_NODE": "1"}
        hosts = Settings.from_environment("deepspeed", env).hosts
    except LaunchError as error:
        assert str(path) in str(error)
        return
    assert hosts and all(
        host and not host.startswith("-") and not set(host) & set(" ;$&`'\"") for host in hosts
    )


VARIABLES = ["NODES", "NODE_RANK", "GPUS_PER_NODE", "LAUNCHER", "MASTER_ADDR", "MASTER_PORT", "TENSOR_SIZE"]
VARIABLES += ["PIPELINE_SIZE", "SEQ_LENGTH", "STEPS", "SAVE_INTERVAL", "MAX_RESTARTS", "JOB"]
VARIABLES += ["SLURM_NNODES", "SLURM_NODEID", "MODEL_CONFIG", "HOSTFILE", "INTERFACE"]


@tries()
@given(
    st.sampled_from(KINDS),
    st.dictionaries(
        st.sampled_from(VARIABLES),
        st.one_of(
            HOSTILE_TEXT, st.sampled_from(["0", "1", "2", "-1", "99999999", "9" * 5000, "²", "١", " 1"])
        ),
        max_size=3,
    ),
)
def test_variables(folder, kind, env):
    env = {name: value.replace("\0", "") for name, value in env.items()}
    try:
        found = Settings.from_environment(kind, {"OUTPUT": str(folder), "MEGATRON_PATH": "/m", **env})
    except LaunchError as error:
        assert any(name in str(error) for name in (*env, "NODES", "MASTER_ADDR", "HOSTFILE")), error
        return
    assert 0 < found.master_port < 2**16 and 0 <= found.node_rank < found.nodes


@tries()
@given(json_files({**HOST, "coat": BLOCK}))
def test_preflight(folder, data):
    path = folder / "preflight.json"
    path.write_bytes(data)
    env = {"OUTPUT": str(folder), "DEEPSPEED_CONFIG": str(path), "GPUS_PER_NODE": "1"}
    try:
        preflight.check(Settings.from_environment("torchrun", env), env)
    except LaunchError as error:
        assert str(path) in str(error)
