"""The process group of the ranks that a launcher has started, and the comparison of their nodes."""

import datetime
import hashlib
import importlib.util
import os
import socket
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from coat_ds.doctor.packages import PYTHON, versions
from coat_launch.errors import LaunchError
from coat_launch.files import writing

# variables of a process of mpirun or srun, with the number of processes
_OTHERS = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
# variables that a launcher sets for each process, besides WORLD_SIZE
_OF_RANKS = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# NCCL's variables that may differ from node to node
_OF_NODES = ("NCCL_SOCKET_IFNAME", "NCCL_DEBUG_FILE")
_PACKAGES = (PYTHON, "torch", "deepspeed", "megatron-core", "triton", "coat-train")
_ROOMS = ("coat_kernels", "coat_ds", "megatron_ext", "coat_launch")


def check_launcher(env: dict[str, str]) -> None:
    """Raises LaunchError for processes of mpirun or srun alone, which would train each for itself, and for
    WORLD_SIZE without the other variables of a launcher."""
    missing = [name for name in _OF_RANKS if not env.get(name)]
    if env.get("WORLD_SIZE") and missing:
        raise LaunchError(
            f"{', '.join(missing)}: not set, but WORLD_SIZE is {env['WORLD_SIZE']}. Start the processes by "
            "torchrun or a script of launch/, which set all of them; or unset WORLD_SIZE"
        )
    count = max(int(env.get(name, 1)) for name in _OTHERS)
    if count > 1 and not env.get("WORLD_SIZE"):
        raise LaunchError(
            f"WORLD_SIZE: not set, but this is one of {count} processes. Start them by torchrun or a script "
            "of launch/, which set it; or train in one process, without the variables of other launchers"
        )


def start_process_group(timeout: datetime.timedelta) -> torch.device:
    """Starts torch.distributed from the launcher's environment, or for this process alone."""
    alone = "WORLD_SIZE" not in os.environ
    if alone:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local_rank >= gpus:
            raise LaunchError(
                f"every rank needs its own GPU: this rank has local number {local_rank} (from 0), and "
                f"there are {gpus}. Start one process per GPU."
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from megatron_ext import cpu

        cpu.enable()
    import deepspeed

    if not on_gpu:
        # DeepSpeed would compile its shared-memory collectives for a minute; gloo has the same collectives
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if alone:
        # a store in memory needs no free port
        dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(timeout=timeout)
    return device


def is_main() -> bool:
    return dist.get_rank() == 0


def from_main(make: Callable, group: dist.ProcessGroup | None = None):
    """The value that rank 0 computes, on every rank. Collective.

    Raises rank 0's LaunchError on every rank.
    """
    box = [None]
    if is_main():
        try:
            box = [make()]
        except LaunchError as error:
            box = [error]
    dist.broadcast_object_list(box, group=group)
    if isinstance(box[0], LaunchError):
        raise box[0]
    return box[0]


def check_nodes(output: Path) -> None:
    """Compares versions, sources and NCCL's variables of all nodes. Collective.

    Raises LaunchError, on every rank, if they differ, and if a node does not see the folder `output`.
    """
    if dist.get_world_size() == 1:
        return

    def shared_file() -> Path:
        path = output / f".shared-{uuid.uuid4().hex}"
        with writing(path):
            output.mkdir(parents=True, exist_ok=True)
            path.touch()
        return path

    # gloo: NCCL may not work if its variables differ
    group, nodes = dist.new_group(backend="gloo"), [None] * dist.get_world_size()
    shared = from_main(shared_file, group)
    mine = _node(shared) if int(os.environ["LOCAL_RANK"]) == 0 else None
    dist.all_gather_object(nodes, mine, group)
    if is_main():
        shared.unlink()
    if found := differences(list(filter(None, nodes)), output):
        raise LaunchError("\n".join(["the nodes cannot train together:", *found]))


def _node(shared: Path) -> dict:
    """This node's properties, for `differences`."""
    nccl = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    digest = hashlib.sha256()
    for room in _ROOMS:
        folder = Path(importlib.util.find_spec(room).origin).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{room}/{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return {
        "host": socket.gethostname(),
        "sees_output": shared.is_file(),
        "same": {
            **versions(_PACKAGES),
            **{name: value for name, value in nccl.items() if name not in _OF_NODES},
            "digest of the sources": digest.hexdigest()[:12],
        },
    }


def differences(nodes: list[dict], output: Path) -> list[str]:
    """Why these nodes cannot train together; each line names the host and the fix."""
    first, found = nodes[0], []
    for node in nodes:
        for name in sorted(node["same"].keys() | first["same"].keys()):
            mine, other = (part["same"].get(name) or "missing" for part in (node, first))
            if mine != other:
                found.append(
                    f"{node['host']}: {name} is {mine}, on {first['host']} it is {other}. Make both the same"
                )
        if not node["sees_output"]:
            found.append(
                f"{node['host']}: does not see {output} of {first['host']}. Set OUTPUT to a folder that all "
                "nodes share: every rank writes its part of a checkpoint there"
            )
    return found
