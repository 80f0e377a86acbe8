"""What the script for several nodes refuses and prints, and the comparison of nodes."""

import os
import shlex
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
from torch.distributed.elastic.utils import macros

from coat_launch import process_group
from coat_launch.args import parse_args
from coat_launch.errors import LaunchError
from tests.util import run_distributed

SCRIPT = Path(process_group.__file__).with_name("torchrun_multinode.sh")


def dry_run(folder, *arguments, **variables) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", SCRIPT, "--dry-run", *arguments],
        env={**os.environ, "PYTHON": sys.executable, "GPUS_PER_NODE": "4", **variables},
        cwd=folder,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "variables",
    [
        {"NODES": "two"},
        {"MASTER_ADDR": "", "NODES": "2"},
        {"NODE_RANK": "1"},
        {"MAX_RESTARTS": "9" * 5000},
        {"MASTER_PORT": "99999"},
        {"GPUS_PER_NODE": "0"},
        {"INTERFACE": "eth99"},
    ],
    ids="-".join,
)
def test_variables_are_refused(tmp_path, variables):
    done = dry_run(tmp_path, **variables)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {next(iter(variables))}: expected ")


def test_dry_run_prints_what_the_node_runs(tmp_path):
    """Words pass through the shell unchanged, and the training script's own parser accepts them."""
    data = 'a $(touch pwned) "b" corpus'
    cluster = {"NODES": "2", "MASTER_ADDR": "10.0.0.1", "INTERFACE": "lo", "MAX_RESTARTS": "3", "JOB": "mine"}
    for rank in range(2):
        given = ("--lr", "0.5", "--data", data, "/c", "--save-interval=7")
        done = dry_run(tmp_path, *given, OUTPUT="o u t", NODE_RANK=str(rank), **cluster)
        words = shlex.split(done.stdout)
        assert {"--nproc-per-node=4", "--rdzv-endpoint=10.0.0.1:29500", "--local-addr=127.0.0.1"} <= {*words}
        assert {"--nnodes=2", "--max-restarts=3", "--rdzv-id=mine"} <= {*words}
        assert f"is_host={int(rank == 0)}," in " ".join(words)
        script = words.index(str(SCRIPT.with_name("pretrain_gpt.py")))
        # as torchrun's agents do
        args = parse_args(macros.substitute(words[script + 1 :], "0"))
        assert (args.data, args.resume, args.lr, args.save_interval) == ([data, "/c"], "", 0.5, 7)
        # ranks of other nodes start in other folders
        assert args.output == str(tmp_path / "o u t")
    assert not (tmp_path / "pwned").exists()


NODE = {"host": "a", "sees_output": True, "same": {"torch": "2.13", "NCCL_ALGO": "Ring"}}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"torch": "2.0"}, "b: torch is 2.0, on a it is 2.13"),
        ({"torch": None}, "b: torch is missing, on a it is 2.13"),
        ({"NCCL_DEBUG": "INFO"}, "b: NCCL_DEBUG is INFO, on a it is missing"),
        ({"sees_output": False}, "b: does not see out of a"),
    ],
    ids=str,
)
def test_a_difference_names_the_host(change, message):
    other = {**deepcopy(NODE), "host": "b"}
    assert process_group.differences([NODE, other], Path("out")) == []
    (other if "sees_output" in change else other["same"]).update(change)
    (found,) = process_group.differences([NODE, other], Path("out"))
    assert found.startswith(message)


def _checked(folder):
    """Whether equal nodes pass, and why others do not. Each rank is a node of its own."""
    rank = os.environ["RANK"]
    os.environ["LOCAL_RANK"] = "0"
    process_group.start_process_group(process_group.datetime.timedelta(seconds=60))
    process_group.check_nodes(folder)
    os.environ["NCCL_ALGO"] = ("Ring", "Tree")[int(rank)]
    with pytest.raises(LaunchError) as refused:
        process_group.check_nodes(folder)
    return str(refused.value)


def test_every_rank_of_different_nodes_ends(tmp_path):
    for text in run_distributed(_checked, 2, tmp_path):
        first, line = text.splitlines()
        assert first == "the nodes cannot train together:"
        assert "NCCL_ALGO is Tree" in line and "it is Ring" in line
    assert not list(tmp_path.glob(".shared*"))
