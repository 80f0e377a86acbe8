"""Megatron-LM's own pretrain_gpt.py, unmodified, on a CPU: trains, saves and goes on with our specs.

`MEGATRON_PATH` names a checkout of Megatron-LM. Run on core_v0.16.1 (55ac7082). It needs the packages six,
regex, pyyaml and pybind11, make and a C++ compiler.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.util import free_port

MEGATRON = os.environ.get("MEGATRON_PATH")
pytestmark = pytest.mark.skipif(not MEGATRON, reason="MEGATRON_PATH names no checkout of Megatron-LM")
ROOT = Path(__file__).parents[2]

# without dropout: on a CPU it shares its random state with data loaders, which draw from it when they start
ARGUMENTS = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "lr": 1e-2,
    "lr_decay_style": "constant",
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 127,
    "make_vocab_size_divisible_by": 64,
    "eval_iters": 0,
    "eval_interval": 100,
    "log_interval": 1,
    "distributed_backend": "gloo",
    "ckpt_format": "torch_dist",
    **dict.fromkeys(("bf16", "swiglu", "disable_bias_linear", "mock_data"), ""),
    **dict.fromkeys(("no_persist_layer_norm", "no_rope_fusion", "no_gradient_accumulation_fusion"), ""),
    "untie_embeddings_and_output_weights": "",
}
DISTRIBUTED = {"use_distributed_optimizer": "", "dist_ckpt_optim_fully_reshardable": ""}
SAVED, END = 2, 5


def pretrain(spec, processes=1, variables=None, check=True, **arguments):
    """(loss, norm of the gradient) by iteration, as Megatron logs them, and the whole output."""
    # Megatron compiles with the python3 and python3-config of the path
    path = [str(Path(sys.executable).parent), sysconfig.get_config_var("BINDIR"), os.environ["PATH"]]
    packages = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": packages,
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    command += [f"--master_port={free_port()}", "-m", "megatron_ext.cpu", f"{MEGATRON}/pretrain_gpt.py"]
    command += ["--spec", *spec.split()]
    for name, value in (ARGUMENTS | {"train_iters": END} | arguments).items():
        command += [f"--{name.replace('_', '-')}", *str(value).split()]
    run = subprocess.run(
        command,
        env=os.environ | environment | (variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert not check or run.returncode == 0, run.stdout[-6000:]
    found = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+).*?grad norm: (\S+)", run.stdout)
    return {int(iteration): (float(loss), float(norm)) for iteration, loss, norm in found}, run.stdout


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Losses without interruption, and the folder of a checkpoint on the way: FP8 states, two ranks."""
    folder = tmp_path_factory.mktemp("checkpoint")
    logged, output = pretrain(
        "megatron_ext.with_optimizer coat_layer_spec",
        processes=2,
        save=folder,
        save_interval=SAVED,
        **DISTRIBUTED,
    )
    assert "COAT: AdamW states" in output
    # another run goes on from there, not from the end
    (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    return logged, folder


def test_trains(interrupted):
    logged, _ = interrupted
    assert list(logged) == [1, 2, 3, 4, 5]
    # from about ln 128; mock tokens are soon learned
    assert 4.5 < logged[1][0] < 5.2 and logged[END][0] < logged[1][0] - 0.5


def test_goes_on_to_the_bit(interrupted):
    logged, folder = interrupted
    spec = "megatron_ext.with_optimizer coat_layer_spec"
    again, _ = pretrain(spec, processes=2, load=folder, **DISTRIBUTED)
    assert list(again) == [3, 4, 5]
    # what Megatron logs as the second loss after a start is the mean of two
    assert (again[3], again[4][1], again[5]) == (logged[3], logged[4][1], logged[5])


@pytest.mark.parametrize("size", ["tensor", "pipeline"])
def test_goes_on_at_other_sizes(interrupted, size):
    logged, folder = interrupted
    spec, sizes = "megatron_ext.with_optimizer coat_layer_spec", {f"{size}_model_parallel_size": 2}
    again, _ = pretrain(spec, processes=2, load=folder, **sizes, **DISTRIBUTED)
    # the weights are the same bits, only sums are in another order: BF16 roundings, 2^-9 of each logit
    assert again[3][0] == pytest.approx(logged[3][0], rel=2**-9)
    # updates come from moments that were rounded once more where a group was cut: by 2^-4 at most, which the
    # change of the loss, itself a tenth of it, shows
    assert again[END][0] == pytest.approx(logged[END][0], rel=2**-4 / 4)


PRECISION = """
configs: {plain: {coat: {enabled: false}}}
matchers: {first: {type: glob, pattern: "*layers.0.mlp.linear_fc2", config: plain, enabled: true}}
"""


def test_options_reach_the_run(tmp_path):
    (tmp_path / "layers.yaml").write_text(PRECISION)
    block = {"enabled": True, "optimizer": {"group_size": 64}, "checkpointing": {"compress": True}}
    (tmp_path / "coat.json").write_text(json.dumps({"coat": block}))
    arguments = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "te_precision_config_file": tmp_path / "layers.yaml",
        **dict.fromkeys(("use_distributed_optimizer", "use_precision_aware_optimizer"), ""),
    }
    spec = "megatron_ext.with_optimizer coat_layer_spec"
    logged, output = pretrain(spec, variables={"COAT_CONFIG": str(tmp_path / "coat.json")}, **arguments)
    assert logged[END][0] < logged[1][0] - 0.5
    # a group of 64 costs 2 + 10 / 64 bytes, norms in FP32 and masters' 16 bits beside it
    assert re.search(r"COAT: AdamW states 4\.1\d\d bytes per parameter", output)


def test_errors_name_the_file_and_the_key(tmp_path):
    path = tmp_path / "coat.json"
    path.write_text('{"coat": {"enabled": true, "optimizer": {"group_sise": 64}}}')
    spec = "megatron_ext.with_optimizer coat_layer_spec"
    _, output = pretrain(spec, variables={"COAT_CONFIG": str(path)}, check=False)
    assert f"COAT_CONFIG={path}: coat.optimizer.group_sise: unknown key" in output
