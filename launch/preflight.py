"""Compares the nodes and checks each of them before training starts: see `coat_launch.cluster`.

The launcher that will start the training starts this module first, in one process on every node. So its
addresses, ports and network are tested too.
"""

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from coat_ds.doctor import machine
from coat_ds.doctor.packages import PYTHON, versions
from coat_launch.commands import PATIENCE, command
from coat_launch.errors import LaunchError
from coat_launch.files import read_object, writing
from coat_launch.settings import Settings

PACKAGES = (PYTHON, "torch", "deepspeed", "megatron-core", "triton", "coat-train")
ROOMS = ("coat_kernels", "coat_ds", "megatron_ext", "coat_launch")
# NCCL's variables that may differ from node to node
OF_NODES = ("NCCL_SOCKET_IFNAME", "NCCL_DEBUG_FILE")
# begins the lines of the processes that are meant for the user
MARK = "problem: "


def check(settings: Settings, training: argparse.Namespace, env: dict[str, str]) -> None:
    """Raises LaunchError, with a line for each problem, unless training can start on all nodes.

    training: arguments of the training script. env: variables for the launcher.
    """
    fp8 = _asks_for_fp8(training.deepspeed_config)
    path = Path(training.output).absolute() / f".preflight-{uuid.uuid4().hex}.json"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"fp8": fp8, "settings": dataclasses.asdict(settings)}))
    try:
        if settings.nodes == 1:
            mine = report(path)
            found = list(problems(settings, mine, mine, fp8))
        else:
            found = _of_all_nodes(settings, env, path)
    finally:
        path.unlink(missing_ok=True)
    if found:
        raise LaunchError("\n".join(["the cluster is not ready:", *found]))


def _of_all_nodes(settings: Settings, env: dict[str, str], path: Path) -> list[str]:
    print(f"comparing {settings.nodes} nodes, for {PATIENCE} seconds at most", flush=True)
    words = ["--module", "coat_launch.preflight", str(path)]
    done = subprocess.run(
        command(settings, settings.node_rank, words, trial=True), env=env, capture_output=True, text=True
    )
    lines = (done.stdout + done.stderr).splitlines()
    # each process prints all problems
    found = list(dict.fromkeys(line.partition(MARK)[2] for line in lines if MARK in line))
    if done.returncode and not found:
        found = [
            *lines[-20:],
            f"the {settings.nodes} nodes do not find each other. Start the script on all of them within "
            f"{PATIENCE} seconds, each with its NODE_RANK; check MASTER_ADDR, MASTER_PORT (and the port "
            "after it), INTERFACE and firewalls",
        ]
    return found


def report(path: Path) -> dict:
    """This node's properties, for `problems`; plain values. `same` has to be equal on all nodes."""
    nccl = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    return {
        "host": socket.gethostname(),
        "same": {
            **versions(PACKAGES),
            "this project's sources": _sources(),
            **{name: value for name, value in nccl.items() if name not in OF_NODES},
        },
        "gpus": machine.gpus(),
        "output": str(path.parent),
        "sees_output": path.is_file(),
        "interfaces": [name for _, name in socket.if_nameindex()],
    }


def problems(settings: Settings, node: dict, first: dict, fp8: bool) -> Iterator[str]:
    """Reasons not to start training on the node that wrote this report; each names the host and the fix.

    first: node 0's report. fp8: whether layers compute in FP8.
    """
    host = node["host"]
    for name in sorted(node["same"].keys() | first["same"].keys()):
        mine, other = (part["same"].get(name) or "missing" for part in (node, first))
        if mine != other:
            yield f"{host}: {name} is {mine}, on {first['host']} it is {other}. Make both the same"
    if (node["gpus"] or first["gpus"]) and len(node["gpus"]) < settings.gpus_per_node:
        yield (
            f"{host}: {len(node['gpus'])} GPUs, GPUS_PER_NODE asks for {settings.gpus_per_node}. Lower "
            "it, or check CUDA_VISIBLE_DEVICES there"
        )
    without = (machine.without_fp8(*gpu) for gpu in node["gpus"] if fp8)
    if (why := next(filter(None, without), None)) is not None:
        yield f"{host}: {why}"
    if not node["sees_output"]:
        yield (
            f"{host}: does not see {first['output']} of {first['host']}. Set OUTPUT to a folder that "
            "all nodes share: every rank writes its part of a checkpoint there"
        )
    if settings.interface and settings.interface not in node["interfaces"]:
        yield (
            f"{host}: no network interface {settings.interface}, there are {', '.join(node['interfaces'])}. "
            "Set INTERFACE to one of them"
        )


def _asks_for_fp8(path: str) -> bool:
    """Whether the config requests layers that compute in FP8."""
    from coat_ds.zero.deepspeed_config import block_of

    try:
        coat = block_of(read_object(path))
    except ValueError as error:
        raise LaunchError(f"--deepspeed-config {path}: {error}") from error
    return coat.enabled and coat.activations.enabled


def _sources() -> str:
    digest = hashlib.sha256()
    for room in ROOMS:
        folder = Path(importlib.util.find_spec(room).origin).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{room}/{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return f"of digest {digest.hexdigest()[:12]}"


def _gathered(value) -> list:
    from torch import distributed

    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def main(path: str) -> None:
    """In a process that the launcher has started: prints the problems of all nodes."""
    from torch import distributed

    distributed.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    # under torchrun every node has written a file of its own
    given = next(filter(None, _gathered(Path(path).read_text() if Path(path).is_file() else "")), None)
    reports = _gathered(report(Path(_gathered(path)[0])))
    if given is None:
        print(f"{MARK}no node sees {path}. Set OUTPUT to a folder that all nodes share")
    else:
        given = json.loads(given)
        settings = Settings(**given["settings"])
        for node in reports:
            for line in problems(settings, node, reports[0], given["fp8"]):
                print(MARK + line)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
