"""Checks what the nodes must have in common before training starts on them: see `coat_launch.cluster`."""

import contextlib
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from coat_ds.doctor import machine
from coat_ds.doctor.packages import PYTHON, versions
from coat_launch.errors import LaunchError
from coat_launch.files import read_object, writing
from coat_launch.settings import Settings

PACKAGES = (PYTHON, "torch", "deepspeed", "megatron-core", "triton", "coat-train")
ROOMS = ("coat_kernels", "coat_ds", "megatron_ext", "coat_launch")
# Megatron-LM's script
SCRIPT = "pretrain_gpt.py"
# NCCL's variables that may differ from node to node
OF_NODES = ("NCCL_SOCKET_IFNAME", "NCCL_DEBUG_FILE")
# seconds that nodes wait for each other's reports
PATIENCE = 300


def check(settings: Settings, env: dict[str, str]) -> None:
    """Raises LaunchError, with a line for each problem, unless training can start on all nodes."""
    fp8 = _asks_for_fp8(settings.deepspeed_config)
    if settings.hosts:
        if not shutil.which("pdsh"):
            raise LaunchError(f"{socket.gethostname()}: no pdsh on PATH. Install the package pdsh")
        reports = reports_by_ssh(settings, env)
    elif settings.nodes > 1:
        reports = reports_by_store(settings)
    else:
        reports = [report(settings)]
    if found := [line for node in reports for line in problems(settings, node, reports[0], fp8)]:
        raise LaunchError("\n".join(["the cluster is not ready:", *found]))


def report(settings: Settings, token: str = "") -> dict:
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
        "sees_token": not token or Path(settings.output, token).is_file(),
        "sees_megatron": settings.kind != "megatron" or Path(settings.megatron_path, SCRIPT).is_file(),
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
    if not node["sees_token"]:
        yield (
            f"{host}: does not see {settings.output} of {first['host']}. Set OUTPUT to a folder that "
            "all nodes share: every rank writes its part of a checkpoint there"
        )
    if not node["sees_megatron"]:
        yield (
            f"{host}: MEGATRON_PATH: no {SCRIPT} in {settings.megatron_path}. Name a checkout of Megatron-LM"
        )
    if settings.interface and settings.interface not in node["interfaces"]:
        yield (
            f"{host}: no network interface {settings.interface}, there are {', '.join(node['interfaces'])}. "
            "Set INTERFACE to one of them"
        )


def reports_by_ssh(settings: Settings, env: dict[str, str]) -> list[dict]:
    """Reports of the hosts of HOSTFILE. Raises LaunchError for one that cannot be reached."""
    out = []
    with _token(settings) as token:
        for host in settings.hosts:
            remote = ["env", *(f"{name}={env[name]}" for name in ("PYTHONPATH", "OUTPUT") if name in env)]
            remote += [sys.executable, "-m", "coat_launch.preflight", settings.output, token]
            ssh = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", host, shlex.join(remote)]
            done = subprocess.run(ssh, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            if done.returncode:
                raise LaunchError(
                    f"{host}: cannot be asked by ssh ({done.stderr.strip()}). `ssh {host} "
                    f"{sys.executable} -V` has to work without a password, and this project has to be "
                    "installed for it there, at the same path as here"
                )
            out.append({**json.loads(done.stdout.splitlines()[-1]), "host": host})
    return out


def reports_by_store(settings: Settings) -> list[dict]:
    """Reports of all nodes; every node calls this function. Raises LaunchError for missing nodes."""
    from torch.distributed import DistError, TCPStore

    main, port = settings.node_rank == 0, settings.master_port + 1
    listener = _listener(settings.address, port).detach() if main else None
    waiting = "node 0"
    try:
        store = TCPStore(
            settings.address,
            port,
            is_master=main,
            timeout=timedelta(seconds=PATIENCE),
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        with _token(settings) if main else contextlib.nullcontext("") as token:
            if main:
                store.set("token", token)
            found = report(settings, store.get("token").decode())
            store.set(f"node{settings.node_rank}", json.dumps(found))
            reports = []
            for rank in range(settings.nodes):
                waiting = f"node {rank}"
                reports.append(json.loads(store.get(f"node{rank}")))
            # the store and the token are node 0's
            store.set(f"read{settings.node_rank}", "")
            if main:
                store.wait([f"read{rank}" for rank in range(settings.nodes)])
    except (DistError, RuntimeError) as error:
        raise LaunchError(
            f"{waiting} of {settings.nodes} nodes has not reported in {PATIENCE} s, or has left "
            f"({str(error).splitlines()[0]}). Start the script on each node with its own NODE_RANK; check "
            f"that each reaches {settings.address}:{port} (MASTER_ADDR, MASTER_PORT, firewalls)"
        ) from error
    return reports


def _listener(address: str, port: int) -> socket.socket:
    """Node 0's socket for the store, bound here, since the store itself would listen on every interface."""
    try:
        family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family)
    except OSError as error:
        raise LaunchError(
            f"MASTER_ADDR {address}, MASTER_PORT {port - 1}: this is node 0, but cannot listen on port "
            f"{port} there ({error.strerror}). Set NODE_RANK if it is another node, MASTER_ADDR to an "
            "address of this one, MASTER_PORT to the first of two free ports"
        ) from error


@contextlib.contextmanager
def _token(settings: Settings) -> Iterator[str]:
    """A file in OUTPUT, which shows whether other nodes have the same folder; its name."""
    path = Path(settings.output) / f".seen-{uuid.uuid4().hex}"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    try:
        yield path.name
    finally:
        path.unlink(missing_ok=True)


def _asks_for_fp8(path: str) -> bool:
    """Whether the config requests layers that compute in FP8."""
    from coat_ds.zero.deepspeed_config import block_of

    try:
        coat = block_of(read_object(path))
    except ValueError as error:
        raise LaunchError(f"DEEPSPEED_CONFIG {path}: {error}") from error
    return coat.enabled and coat.activations.enabled


def _sources() -> str:
    digest = hashlib.sha256()
    for room in ROOMS:
        folder = Path(importlib.util.find_spec(room).origin).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{room}/{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return f"of digest {digest.hexdigest()[:12]}"


if __name__ == "__main__":
    # called by ssh with two arguments: the folder of the output, the token
    print(json.dumps(report(Settings.from_environment("torchrun", {"OUTPUT": sys.argv[1]}), sys.argv[2])))
