"""Ranks of the processes that a launcher has started, and their process group."""

import datetime
import os
import re

import torch

from coat_launch.errors import LaunchError

# the names in Open MPI and in a step of Slurm for torchrun's RANK, LOCAL_RANK and WORLD_SIZE
RANK_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
)


def read_ranks(env: dict[str, str]) -> None:
    """Sets RANK, LOCAL_RANK and WORLD_SIZE where mpirun or srun started several processes.

    Raises LaunchError if these would not find each other: each would train alone.
    """
    port = env.get("MASTER_PORT", "1")
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
        raise LaunchError(f"MASTER_PORT: expected a number from 1 to 65535, found {port[:60]!r}")
    if "WORLD_SIZE" in env:
        _check_set(env, "RANK", "LOCAL_RANK", "WORLD_SIZE")
        return
    for rank, local_rank, size in RANK_VARIABLES:
        if int(env.get(size, 1)) > 1:
            _check_set(env, rank, local_rank, size)
            env.update(RANK=env[rank], LOCAL_RANK=env[local_rank], WORLD_SIZE=env[size])
            return


def _check_set(env: dict[str, str], rank: str, local_rank: str, size: str) -> None:
    """Raises LaunchError if a launcher has set the number of processes and not the other variables."""
    for name in (rank, local_rank, "MASTER_ADDR", "MASTER_PORT"):
        if not env.get(name):
            value = "this process's number" if name in (rank, local_rank) else "where rank 0 runs"
            raise LaunchError(
                f"{name}: not set, but this is one of {env[size]} processes ({size}): set it to {value}, or "
                f"start by a script of launch/; to train in one process, unset {size}"
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
