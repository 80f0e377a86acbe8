"""Ranks of the processes that a launcher has started, and their process group."""

import datetime
import os

import torch

from coat_launch.errors import LaunchError

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
# the names for these in Open MPI and in a step of Slurm
OTHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
)


def read_ranks(env: dict[str, str]) -> None:
    """Sets RANK, LOCAL_RANK and WORLD_SIZE where mpirun or srun started several processes.

    Raises LaunchError if these would not find each other: each would train alone.
    """
    for names in OTHERS:
        if "WORLD_SIZE" not in env and int(env.get(names[-1], 1)) > 1:
            env.update({ours: env[name] for ours, name in zip(TORCHRUN, names, strict=True) if name in env})
    for name in (*TORCHRUN, "MASTER_ADDR", "MASTER_PORT"):
        if "WORLD_SIZE" in env and not env.get(name):
            raise LaunchError(
                f"{name}: not set, but this is one of {env['WORLD_SIZE']} processes. Start them by a script "
                "of launch/, which sets it; or train in one process, without WORLD_SIZE and the variables of "
                "MPI and Slurm"
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
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1)
    deepspeed.init_distributed(timeout=timeout)
    return device
