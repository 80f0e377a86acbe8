"""What the scripts refuse to start, and the commands that they print before a start."""

import contextlib
import dataclasses
import io
import json
import os
import shlex
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
from torch.distributed.elastic.utils import macros

from coat_launch import preflight
from coat_launch.args import parse_args
from coat_launch.commands import command, environment, script_words
from coat_launch.errors import LaunchError
from coat_launch.settings import Settings
from tests.util import free_port, run_distributed

ROOT = Path(preflight.__file__).parents[1]


def settings(tmp_path, **variables) -> Settings:
    return Settings.from_environment({"OUTPUT": str(tmp_path), "GPUS_PER_NODE": "1", **variables})


@pytest.mark.parametrize(
    "variables",
    [
        {"NODES": "two"},
        {"MASTER_ADDR": "", "NODES": "2"},
        {"NODE_RANK": "1"},
        # an option of the training script
        {"SEQ_LENGTH": "9"},
        {"MAX_RESTARTS": "9" * 5000},
        {"MASTER_PORT": "99999999"},
        {"MASTER_ADDR": "a;id"},
    ],
    ids="-".join,
)
def test_settings_are_refused(tmp_path, variables):
    with pytest.raises(LaunchError, match=f"^{next(iter(variables))}"):
        settings(tmp_path, **variables)


@pytest.mark.parametrize(
    "content, key",
    [('{"coat": {"enabled": true, "optimizer": true}}', "coat.optimizer"), ("{", "not a JSON")],
)
def test_configs_are_refused_before_the_start(tmp_path, content, key):
    path = tmp_path / "ds.json"
    path.write_text(content)
    mine = settings(tmp_path)
    training = parse_args(script_words(mine, [f"--deepspeed-config={path}"])[1:])
    with pytest.raises(LaunchError, match=f"--deepspeed-config {path}: {key}"):
        preflight.check(mine, training, {})


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """This machine's own report, as node 0 would write it, with GPUs added."""
    path = tmp_path_factory.mktemp("report") / "token"
    path.touch()
    report = preflight.report(path)
    assert report["same"]["torch"] and report["interfaces"]
    return {**report, "host": "a", "gpus": [["H200", 9, 0]]}


PROBLEMS = [
    ({"same": {"torch": "2.0"}}, "b: torch is 2.0, on a it is "),
    ({"same": {"deepspeed": None}}, "b: deepspeed is missing, on a it is "),
    ({"same": {"this project's sources": "other"}}, "b: this project's sources is other, on a it is "),
    ({"same": {"NCCL_P2P_DISABLE": "1"}}, "b: NCCL_P2P_DISABLE is 1, on a it is missing"),
    ({"gpus": []}, "b: 0 GPUs, GPUS_PER_NODE asks for 1"),
    ({"gpus": [["A100", 8, 0]]}, "b: A100 has compute capability 8.0, FP8 needs 8.9"),
    ({"sees_output": False}, "b: does not see "),
    ({"interfaces": ["eth7"]}, "b: no network interface lo, there are eth7"),
]


@pytest.mark.parametrize("change, message", PROBLEMS, ids=lambda value: str(value)[:30])
def test_problems_name_the_host_and_the_fix(tmp_path, good, change, message):
    two, other = settings(tmp_path, INTERFACE="lo"), {**deepcopy(good), "host": "b"}
    assert (
        list(preflight.problems(two, good, good, True))
        == list(preflight.problems(two, other, good, True))
        == []
    )
    for key, value in change.items():
        other[key] = {**other[key], **value} if isinstance(value, dict) else value
    (found,) = preflight.problems(two, other, good, True)
    assert found.startswith(message)
    # a run whose layers do not compute in FP8 needs no such GPU
    assert len(list(preflight.problems(two, other, good, False))) == ("FP8" not in message)


def test_dry_run_prints_what_each_node_runs(tmp_path):
    """Words pass through the shell unchanged, and the training script's own parser accepts them."""
    data = tmp_path / 'a $(touch pwned) "b" corpus'
    env = {**os.environ, "PYTHON": sys.executable, "OUTPUT": str(tmp_path / "o u t")}
    env |= {"NODES": "2", "MASTER_ADDR": "10.0.0.1", "GPUS_PER_NODE": "4", "INTERFACE": "eth9"}
    script = ["bash", str(ROOT / "launch/torchrun_multinode.sh"), "--dry-run"]
    done = subprocess.run(
        [*script, "--lr", "0.5", "--data", str(data), "/c"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not (tmp_path / "pwned").exists()
    lines = [shlex.split(line) for line in done.stdout.splitlines() if not line.startswith("#")]
    assert len(lines) == 2
    for rank, words in enumerate(lines):
        assert {"NCCL_SOCKET_IFNAME=eth9", "GLOO_SOCKET_IFNAME=eth9"} <= set(words)
        assert f"is_host={int(rank == 0)}," in " ".join(words) and "--nproc-per-node=4" in words
        script = words.index(str(ROOT / "launch/pretrain_gpt.py"))
        # as torchrun's agents do
        args = parse_args(macros.substitute(words[script + 1 :], "0"))
        assert args.data == [str(data), "/c"] and args.resume == "" and args.lr == 0.5
        assert args.output == str(tmp_path / "o u t")


def test_each_node_is_told_its_part(tmp_path):
    mine = settings(tmp_path, NODES="2", NODE_RANK="1", MASTER_ADDR="a", INTERFACE="lo", GPUS_PER_NODE="4")
    first, second = (command(mine, rank, ["script"]) for rank in range(2))
    assert "is_host=1," in " ".join(first) and "is_host=0," in " ".join(second)
    # only the node itself knows the address of an interface
    assert "--local-addr=127.0.0.1" in second and not any("--local-addr" in word for word in first)
    # the comparison of the nodes: one process on each, over the next port
    trial = command(mine, 1, ["script"], trial=True)
    assert {"--nproc-per-node=1", "--rdzv-endpoint=a:29501"} <= set(trial)
    assert {"--nproc-per-node=4", "--rdzv-endpoint=a:29500"} <= set(second)


def test_what_was_set_reaches_the_training_script(tmp_path):
    mine = settings(tmp_path, MAX_RESTARTS="3", JOB="mine")
    assert {"--max-restarts=3", "--rdzv-id=mine"} <= set(command(mine, 0, []))
    assert environment(mine, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"
    args = parse_args(script_words(mine, ["--save-interval", "7", "--lr", "0.5"])[1:])
    assert (args.output, args.save_interval, args.resume, args.lr) == (str(tmp_path), 7, "", 0.5)
    # ranks of other nodes start in other folders
    assert os.path.isabs(settings(tmp_path, OUTPUT="runs/mine").output)


def _compared(path):
    """What one process of two prints, each on a node of its own."""
    os.environ["NCCL_ALGO"] = "Tree" if os.environ["RANK"] == "1" else "Ring"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        preflight.main(path)
    return out.getvalue().splitlines()


def test_every_node_prints_the_problems_of_all(tmp_path):
    path = tmp_path / "settings.json"
    given = {"fp8": True, "settings": dataclasses.asdict(settings(tmp_path))}
    path.write_text(json.dumps(given))
    for lines in run_distributed(_compared, 2, str(path)):
        (line,) = lines
        assert line.startswith(preflight.MARK) and "NCCL_ALGO is Tree" in line and "it is Ring" in line
    for (line,) in run_distributed(_compared, 2, str(tmp_path / "nowhere.json")):
        assert "no node sees" in line


@pytest.mark.long("six processes that import the frameworks for each case")
@pytest.mark.parametrize("same", [False, True])
def test_two_nodes_compare_themselves(tmp_path, same):
    """Real processes of torchrun, on two nodes that are both this machine."""
    code = (
        "import sys; from coat_launch import args, preflight; from coat_launch.settings import Settings\n"
        "s = Settings.from_environment(dict(w.split('=') for w in sys.argv[1:]))\n"
        "try: preflight.check(s, args.parse_args(['--output', s.output]), None); print('ready')\n"
        "except preflight.LaunchError as e: print(e)\n"
    )
    two = {"NODES": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port() - 1, "GPUS_PER_NODE": 1}
    processes = []
    for rank in range(2):
        words = [f"{k}={v}" for k, v in {**two, "NODE_RANK": rank, "OUTPUT": tmp_path}.items()]
        env = {**os.environ, "NCCL_ALGO": "Tree" if same or rank else "Ring"}
        command = [sys.executable, "-c", code, *words]
        processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True))
    for process in processes:
        out, _ = process.communicate(timeout=400)
        # node 0 is the one whose process came first
        assert ("not ready" in out) == ("NCCL_ALGO is " in out) == (not same), out
    assert not list(tmp_path.iterdir())
