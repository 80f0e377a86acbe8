"""Checks what the nodes must have in common before training starts on them: see `coat_launch.cluster`."""

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
from datetime import timedelta
from pathlib import Path

from coat_ds.doctor import machine
from coat_ds.doctor.packages import PYTHON, versions
from coat_launch.json_file import read_object
from coat_launch.settings import ClusterError, Settings, parameter_count

PACKAGES = (PYTHON, "torch", "deepspeed", "megatron-core", "triton", "coat-train")
ROOMS = ("coat_kernels", "coat_ds", "megatron_ext", "coat_launch")
# the program that starts the ranks, and how to install it
TOOLS = {
    "pdsh": ("pdsh", "install the package pdsh"),
    "openmpi": ("mpirun", "install Open MPI (no Python package of it is needed)"),
    "slurm": ("srun", "install Slurm's client"),
}
# Megatron-LM's script
SCRIPT = "pretrain_gpt.py"
# seconds that nodes wait for each other's reports
PATIENCE = 300


def check(settings: Settings, env: dict[str, str]) -> None:
    """Raises ClusterError, with a line for each problem, unless training can start on all nodes."""
    if settings.hosts:
        tool, way_out = TOOLS[settings.launcher]
        if not shutil.which(tool):
            raise ClusterError(
                f"{socket.gethostname()}: LAUNCHER={settings.launcher} needs {tool}, which is not on PATH: "
                f"{way_out}, or set LAUNCHER to another"
            )
        by_slurm = settings.launcher == "slurm"
        reports = reports_by_srun(settings) if by_slurm else reports_by_ssh(settings, env)
    elif settings.nodes > 1 and settings.kind != "deepspeed":
        reports = reports_by_store(settings)
    else:
        reports = [report(settings)]
    if found := problems(settings, reports):
        raise ClusterError("\n".join(["the cluster is not ready:", *found]))


def report(settings: Settings, token: str = "") -> dict:
    """This node's properties, for `problems`; plain values."""
    output = Path(settings.output)
    return {
        "host": socket.gethostname(),
        "versions": versions(PACKAGES),
        "sources": _sources(),
        "gpus": machine.gpus(),
        "free_bytes": machine.free_bytes(output),
        "sees_token": not token or (output / token).is_file(),
        "sees_megatron": settings.kind != "megatron" or Path(settings.megatron_path, SCRIPT).is_file(),
        "mpirun": _mpirun(),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "nccl": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")},
    }


def problems(settings: Settings, reports: list[dict]) -> list[str]:
    """Reasons not to start training on the nodes that wrote these reports; each names the host and the
    fix."""
    out, first = [], reports[0]
    fp8 = _asks_for_fp8(settings.deepspeed_config)
    parameters = parameter_count(settings.shape(), 2**17)
    for node in reports:
        host = node["host"]
        for name, version in node["versions"].items():
            if version != first["versions"][name]:
                out.append(
                    f"{host}: {name} {version or 'is missing'}, but {first['host']} has "
                    f"{first['versions'][name]}. Install the same on both"
                )
        if node["sources"] != first["sources"]:
            out.append(
                f"{host}: this project's sources differ from {first['host']}'s. Bring both to one commit"
            )
        if bool(node["gpus"]) != bool(first["gpus"]):
            out.append(
                f"{host}: {len(node['gpus'])} GPUs, {first['host']} has {len(first['gpus'])}. Leave one out"
            )
        elif node["gpus"] and len(node["gpus"]) < settings.gpus_per_node:
            out.append(
                f"{host}: {len(node['gpus'])} GPUs, GPUS_PER_NODE asks for {settings.gpus_per_node}. Lower "
                "it, or check CUDA_VISIBLE_DEVICES there"
            )
        for gpu in node["gpus"]:
            if fp8 and (why := machine.without_fp8(*gpu)) is not None:
                out.append(f"{host}: {why}")
                break
        if (why := machine.too_little_room(settings.output, node["free_bytes"], parameters)) is not None:
            out.append(f"{host}: {why}. Make room, or set OUTPUT to another folder")
        if not node["sees_token"]:
            out.append(
                f"{host}: does not see {settings.output} of {first['host']}. Set OUTPUT to a folder that "
                "all nodes share: every rank writes its part of a checkpoint there"
            )
        if not node["sees_megatron"]:
            out.append(
                f"{host}: MEGATRON_PATH: no {SCRIPT} in {settings.megatron_path}. Name a checkout of "
                "Megatron-LM"
            )
        if settings.hosts and settings.launcher == "openmpi":
            if not node["mpirun"].startswith("mpirun (Open MPI)"):
                out.append(
                    f"{host}: LAUNCHER=openmpi needs Open MPI's mpirun on PATH, found {node['mpirun']}. "
                    "Install Open MPI there, or set LAUNCHER to pdsh"
                )
            elif node["mpirun"] != first["mpirun"]:
                out.append(
                    f"{host}: {node['mpirun']}, but {first['host']} has {first['mpirun']}. Install the "
                    "same on both"
                )
        out += [f"{host}: {text}" for text in _nccl_problems(settings, node, first)]
    return out


def _nccl_problems(settings: Settings, node: dict, first: dict) -> list[str]:
    out, nccl = [], node["nccl"]
    named = settings.interface or nccl.get("NCCL_SOCKET_IFNAME", "")
    # NCCL's own syntax: prefixes, "=" for whole names, "^" for exclusions
    prefixes = [name.removeprefix("=") for name in named.split(",") if name and not named.startswith("^")]
    if prefixes and not any(i.startswith(tuple(prefixes)) for i in node["interfaces"]):
        out.append(
            f"no network interface {named}, there are {', '.join(node['interfaces'])}. Set INTERFACE to one "
            "of them"
        )
    if settings.nodes > 1 and prefixes == ["lo"]:
        out.append("the loopback interface reaches no other node. Set INTERFACE to another")
    if nccl.get("NCCL_DEBUG", "WARN").upper() not in ("VERSION", "WARN", "INFO", "TRACE", "ABORT"):
        out.append(f"NCCL_DEBUG is {nccl['NCCL_DEBUG']}. Set it to VERSION, WARN, INFO or TRACE")
    for name in sorted((nccl.keys() | first["nccl"].keys()) - {"NCCL_SOCKET_IFNAME", "NCCL_DEBUG_FILE"}):
        if nccl.get(name) != first["nccl"].get(name):
            out.append(
                f"{name} is {nccl.get(name, 'unset')}, on {first['host']} it is "
                f"{first['nccl'].get(name, 'unset')}. Set it to the same"
            )
    return out


def reports_by_ssh(settings: Settings, env: dict[str, str]) -> list[dict]:
    """Reports of the hosts of HOSTFILE. Raises ClusterError for one that cannot be reached."""
    out = []
    with _token(settings) as token:
        for host in settings.hosts:
            remote = ["env", *(f"{name}={env[name]}" for name in ("PYTHONPATH", "OUTPUT") if name in env)]
            remote += _asking(settings, token)
            done = _run(["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", host, shlex.join(remote)])
            if done.returncode:
                raise ClusterError(
                    f"{host}: cannot be asked by ssh ({_last_line(done.stderr)}). `ssh {host} "
                    f"{sys.executable} -V` has to work without a password, and this project has to be "
                    "installed for it there, at the same path as here"
                )
            out.append({**json.loads(done.stdout.splitlines()[-1]), "host": host})
    return out


def reports_by_srun(settings: Settings) -> list[dict]:
    """Reports of the nodes of Slurm's allocation. Raises ClusterError where one does not answer."""
    nodes = [f"--nodes={settings.nodes}", f"--ntasks={settings.nodes}", "--ntasks-per-node=1"]
    nodes.append(f"--nodelist={','.join(settings.hosts)}")
    with _token(settings) as token:
        # labels are "0: ", numbers of tasks, in the order of the nodes
        done = _run(["srun", *nodes, "--label", *_asking(settings, token)])
    if done.returncode:
        # srun's own lines only report that a task failed
        tasks = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("srun:"))
        raise ClusterError(
            f"{' '.join(settings.hosts)}: cannot be asked by srun ({_last_line(tasks or done.stderr)}). "
            f"`srun {' '.join(nodes)} {sys.executable} -V` has to work here, and this project has to be "
            "installed for it on every node, at the same path"
        )
    last = dict(line.strip().partition(": ")[::2] for line in done.stdout.splitlines())
    return [{**json.loads(last[str(task)]), "host": host} for task, host in enumerate(settings.hosts)]


def _asking(settings: Settings, token: str) -> list[str]:
    return [sys.executable, "-m", "coat_launch.preflight", settings.output, token]


def _run(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def reports_by_store(settings: Settings) -> list[dict]:
    """Reports of all nodes; every node calls this function. Raises ClusterError for missing nodes."""
    from torch.distributed import DistError, TCPStore

    main = settings.node_rank == 0
    listener = _listener(settings) if main else None
    try:
        store = TCPStore(
            settings.master_addr,
            settings.master_port + 1,
            is_master=main,
            timeout=timedelta(seconds=PATIENCE),
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener else None,
        )
    except (DistError, RuntimeError) as error:
        raise ClusterError(
            f"{settings.master_addr}:{settings.master_port + 1}: node 0 does not answer in {PATIENCE} s "
            f"({str(error).splitlines()[0]}). Start it too; check MASTER_ADDR, MASTER_PORT and firewalls"
        ) from error
    with _token(settings, wanted=main) as token:
        if main:
            store.set("token", token)
        try:
            common = store.get("token").decode()
        except (DistError, RuntimeError) as error:
            raise ClusterError(
                f"{settings.master_addr}: node 0 has left before the nodes were compared "
                f"({str(error).splitlines()[0]}). Read its output, and start all nodes again"
            ) from error
        found = report(settings, common)
        store.set(f"node{settings.node_rank}", json.dumps(found))
        out = []
        for rank in range(settings.nodes):
            try:
                out.append(json.loads(store.get(f"node{rank}")))
            except (DistError, RuntimeError) as error:
                raise ClusterError(
                    f"node {rank} of {settings.nodes} has not reported in {PATIENCE} s. Start the script "
                    f"there with NODE_RANK={rank}; check that it reaches {settings.master_addr}"
                ) from error
        # the store runs in node 0's process
        store.set(f"read{settings.node_rank}", "")
        if main:
            store.wait([f"read{rank}" for rank in range(settings.nodes)])
    return out


class _token:
    """A file in OUTPUT, which shows whether other nodes have the same folder; its name."""

    def __init__(self, settings: Settings, wanted: bool = True):
        self._path = Path(settings.output) / f".seen-{uuid.uuid4().hex}" if wanted else None

    def __enter__(self) -> str:
        if self._path is None:
            return ""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError as error:
            raise ClusterError(f"OUTPUT {self._path.parent}: cannot be written ({error.strerror})") from error
        return self._path.name

    def __exit__(self, *_) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _asks_for_fp8(path: str) -> bool:
    """Whether the config requests layers that compute in FP8."""
    from coat_ds.zero.deepspeed_config import block_of

    try:
        coat = block_of(read_object(path))
    except ValueError as error:
        raise ClusterError(f"DEEPSPEED_CONFIG {path}: {error}") from error
    return coat.enabled and coat.activations.enabled


def _mpirun() -> str:
    """The first line of `mpirun --version` for the mpirun on PATH, whichever MPI it belongs to."""
    if not shutil.which("mpirun"):
        return "none"
    return (_run(["mpirun", "--version"]).stdout.splitlines() or ["one without a version"])[0]


def _sources() -> str:
    digest = hashlib.sha256()
    for room in ROOMS:
        folder = Path(importlib.util.find_spec(room).origin).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{room}/{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _listener(settings: Settings) -> socket.socket:
    """Node 0's socket for the store, bound here, since the store itself would listen on every interface."""
    address, port = settings.master_addr, settings.master_port + 1
    try:
        family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family)
    except OSError as error:
        raise ClusterError(
            f"MASTER_ADDR {address}, MASTER_PORT {settings.master_port}: this is node 0, but cannot listen "
            f"on port {port} there ({error.strerror}). Set NODE_RANK if it is another node, MASTER_ADDR to "
            "an address of this one, MASTER_PORT to the first of two free ports"
        ) from error


if __name__ == "__main__":
    # called by ssh or srun with two arguments: the folder of the output, the token
    print(json.dumps(report(Settings.from_environment("torchrun", {"OUTPUT": sys.argv[1]}), sys.argv[2])))
