"""The entry point, started as users start it, through the command line, or in forked ranks."""

import json
import os
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from coat_ds.watch.readings import read
from coat_ds.zero.deepspeed_config import optimizer_options
from coat_launch import pretrain_gpt, report
from coat_launch.args import parse_args
from coat_launch.deepspeed_config import set_batch_sizes, use_torch_adamw
from coat_launch.errors import LaunchError
from coat_launch.model import warmup_cosine
from coat_launch.process_group import check_launcher
from tests.launch.ranks import run_ranks
from tests.util import free_port

pytestmark = pytest.mark.early

ROOT = Path(__file__).parents[2]
TINY_SIZES = {
    "--num-layers": 2,
    "--hidden-size": 64,
    "--ffn-hidden-size": 128,
    "--num-attention-heads": 4,
    "--num-query-groups": 2,
    "--seq-length": 64,
    "--micro-batch-size": 4,
    "--eval-batches": 2,
}
TINY = [str(item) for pair in TINY_SIZES.items() for item in pair]
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(*arguments) -> list[str]:
    return [sys.executable, str(ROOT / "launch/pretrain_gpt.py"), *TINY, *map(str, arguments)]


def pretrain(*arguments, env: dict = ENV) -> subprocess.CompletedProcess:
    return subprocess.run(command(*arguments), env=env, capture_output=True, text=True, timeout=300)


def forked(folder: Path, *arguments, ranks: int = 1) -> str:
    """What ranks on the CPU print in a run without errors."""
    folder.mkdir(parents=True, exist_ok=True)
    ended = run_ranks([*TINY, *arguments, "--output", folder], folder, ranks=ranks)
    assert ended.codes == [0] * ranks, ended.text
    return ended.text


def losses(folder, key="loss"):
    return {r["step"]: r[key] for r in report.read_metrics(Path(folder) / "metrics.jsonl") if key in r}


def test_quickstart_at_a_reduced_size(tmp_path):
    env = {**ENV, "COAT_CONFIG": "of Megatron-LM's scripts.json"}
    done = pretrain("--compare", "--steps", 25, "--lr", 3e-3, "--output", tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("COAT_CONFIG is of no effect") == 2
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary) == ["bf16", "coat"]
    bf16, coat = summary["bf16"], summary["coat"]
    # ln(256) = 5.5 is the loss of an untrained model
    for run in summary.values():
        assert 5.3 < run["val_loss_start"] < 6.5
        assert run["val_loss"] < run["val_loss_start"] - 1.5
        assert run["tokens_per_s"] > 0 and (run["peak_bytes"] is not None) == torch.cuda.is_available()
    assert coat["val_loss"] == pytest.approx(bf16["val_loss"], rel=0.02)
    # AdamW has two FP32 moments, and "step" for each tensor
    assert 8.0 <= bf16["state_bytes_per_param"] < 8.01
    # two codes, four and five bytes of metadata per 128 elements, and FP32 moments for the norms' weights
    parameters, norms = 2 * (384 * 64) + 2 * (64 * 128 + 64 * 64 + 256 * 64 + 128 * 64), 5 * 64
    expected = 2 + 9 / 128 + (8 - 2 - 9 / 128) * norms / (parameters + norms)
    assert coat["state_bytes_per_param"] == pytest.approx(expected, rel=2e-3)
    assert coat["saved_bytes_per_token_layer"] < 0.6 * bf16["saved_bytes_per_token_layer"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    metrics = report.read_metrics(tmp_path / "metrics.jsonl")
    for run in summary:
        assert [r["step"] for r in metrics if r["run"] == run and "loss" in r] == list(range(1, 26))
        # same data in the same order: the first losses differ by rounding only
    first = {r["run"]: r["loss"] for r in metrics if r["step"] == 1 and "loss" in r}
    # FP8 rounding moves each logit by a few per cent of its small initial spread
    assert first["coat"] == pytest.approx(first["bf16"], rel=0.01)
    assert "validation loss at the start" in done.stdout and "ratio" in done.stdout


def test_the_optimizers_name_stands_for_the_block(tmp_path):
    config = host_config(tmp_path, optimizer={"type": "CoatAdamW", "params": {"lr": 1e-3}})
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "coat"}))
    text = forked(tmp_path / "run", "--deepspeed-config", config, "--steps", 1)
    assert list(losses(tmp_path / "run")) == [1] and "8 of 9 linear layers in FP8" in text
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert list(summary) == ["coat"] and summary["coat"]["state_bytes_per_param"] < 2.2


@pytest.mark.gpu
def test_compressed_checkpoints_of_a_gpu(tmp_path):
    config = host_config(tmp_path, coat={"enabled": True, "optimizer": {"checkpoint_layout": "compressed"}})
    arguments = ["--deepspeed-config", config, "--steps", 4, "--save-interval", 2, "--resume"]
    arguments += ["--output", tmp_path / "run"]
    done = pretrain(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = losses(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/coat/checkpoints/step4")
    done = pretrain(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on from" in done.stdout and losses(tmp_path / "run") == whole


@pytest.mark.gpu
def test_a_rank_without_a_gpu_of_its_own_is_refused(tmp_path):
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    rank = str(torch.cuda.device_count())
    done = pretrain("--steps", 1, "--output", tmp_path, env={**ENV, **torchrun, "LOCAL_RANK": rank})
    assert done.returncode == 1 and f"local number {rank}" in done.stderr


def test_a_watched_run_resumes_with_its_readings(tmp_path):
    config = host_config(tmp_path, coat={"enabled": True, "watch": {"every": 2}})
    arguments = ["--steps", 4, "--save-interval", 2, "--deepspeed-config", config]
    forked(tmp_path, *arguments)
    whole = losses(tmp_path)
    # each checkpoint includes the reading of its step; readings are in the run's folder
    readings = read(tmp_path / "coat")
    assert [reading.step for reading in readings] == [2, 4]
    assert "input_flushed" in readings[0].groups["decoder.layers.*.mlp.linear_fc1"]
    # a run does not overwrite later checkpoints
    shutil.rmtree(tmp_path / "coat/checkpoints/step4")
    text = forked(tmp_path, *arguments, "--resume", tmp_path / "coat/checkpoints/step2")
    assert "step 3/4" in text and losses(tmp_path) == whole
    assert [reading.groups for reading in read(tmp_path / "coat")] == [r.groups for r in readings]


def test_interrupt_keeps_the_metrics(tmp_path):
    argv = [*TINY, "--variant", "bf16", "--steps", 100000, "--output", tmp_path]
    ended = run_ranks(argv, tmp_path, faults={"signal_at_step": [0, 3, signal.SIGINT]})
    assert ended.codes == [130] and list(losses(tmp_path)) == [1, 2]
    assert "stopped after step" in ended.text and "metrics.jsonl" in ended.text
    assert "Traceback" not in ended.text


def fails(capsys, tmp_path, *arguments) -> str:
    """The text with which the entry point ends."""
    with pytest.raises(SystemExit) as end:
        pretrain_gpt.main([*TINY, "--output", str(tmp_path / "run"), *map(str, arguments)])
    text = str(end.value.code) if isinstance(end.value.code, str) else capsys.readouterr().err
    assert "error: " in text
    return text


def host_config(tmp_path, **changes) -> Path:
    config = json.loads((ROOT / "configs/ds_zero1_coat.json").read_text()) | changes
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ["--num-query-groups", 3],
        ["--compare", "--variant", "coat"],
        ["--compare", "--resume", "somewhere"],
        ["--steps", 0],
        *(["--lr", lr] for lr in ("nan", -1, "inf")),
        ["--data", ""],
        ["--output", ""],
        *(["--seed", seed] for seed in (-1, 2**63)),
    ],
    ids=str,
)
def test_arguments_are_refused(tmp_path, capsys, arguments):
    assert arguments[0].lstrip("-").replace("-", "_") in fails(capsys, tmp_path, *arguments).replace("-", "_")


# the JSON's micro-batch, its accumulation and its global batch; the arguments; ranks; what the run takes
BATCHES = [
    ((2, 3, None), (None, None), 4, (2, 24)),
    ((None, None, None), (2, 16), 2, (2, 16)),
    ((8, None, 32), (2, 16), 2, (2, 16)),
    ((None, None, 64), (None, None), 2, (4, 64)),
    (("auto", None, None), (None, None), 1, (4, 4)),
    ((None, 2, 64), (None, None), 2, (16, 64)),
    ((8, 2, 64), (2, 16), 2, (2, 16)),
    ((None, 16, None), (None, 8), 1, (4, 8)),
    # two of the three determine the third, as in DeepSpeed
    ((8, 2, 64), (None, None), 2, "train_batch_size: 64 is not the micro-batch 8 times 2"),
    ((None, None, 0), (None, None), 3, "train_batch_size: expected a whole number above 0"),
    ((None, None, 64), (None, None), 3, "64 is not the micro-batch 4 times 3"),
]


@pytest.mark.parametrize("in_json, given, ranks, expected", BATCHES)
def test_batch_sizes(in_json, given, ranks, expected):
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    config = {key: value for key, value in zip(keys, in_json, strict=True) if value is not None}
    args = Namespace(micro_batch_size=given[0], global_batch_size=given[1])
    if isinstance(expected, str):
        with pytest.raises(LaunchError, match=expected):
            set_batch_sizes(config, args, ranks)
    else:
        assert set_batch_sizes(config, args, ranks) == expected
        assert config[keys[0]] * config[keys[1]] * ranks == config[keys[2]]


@pytest.mark.parametrize("given", [{}, {"weight_decay": 0.3}])
def test_weights_of_both_runs_decay_alike(given):
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, **given}}}
    coat = optimizer_options(config)
    use_torch_adamw(config)
    # the arguments that DeepSpeed itself reads are removed
    bf16 = {key: value for key, value in config["optimizer"]["params"].items() if key != "torch_adam"}
    built = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))], **bf16)
    assert built.param_groups[0]["weight_decay"] == coat["weight_decay"]


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_processes_of_mpirun_or_srun_alone_are_refused(tmp_path, capsys, monkeypatch, name):
    """A batch script of Slurm and an interactive step are one process each, whatever the job requested."""
    rank = {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for env in ({}, {name: "1"}, {name: "4", **rank}):
        check_launcher(env)
    monkeypatch.setenv(name, "4")
    assert "WORLD_SIZE: not set, but this is one of 4 processes" in fails(capsys, tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "MASTER_PORT: not set, but WORLD_SIZE is 4" in fails(capsys, tmp_path)
    for variable, value in rank.items():
        monkeypatch.setenv(variable, value)
    assert "--compare: trains in one process" in fails(capsys, tmp_path, "--compare")


def test_schedule():
    factors = [warmup_cosine(step, warmup=10, total=110) for step in range(112)]
    assert factors[0] == 0.1 and factors[9] == 1.0 == factors[10]
    assert factors[60] == pytest.approx(0.55) and factors[110] == factors[111] == pytest.approx(0.1)
    assert warmup_cosine(0, warmup=0, total=1) == 1.0
    assert [parse_args(["--steps", steps]).eval_interval for steps in ("4", "50")] == [1, 10]
