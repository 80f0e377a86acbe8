"""Ranks of the processes that a launcher has started, and their process group."""

import datetime
import os

import torch

from coat_launch.errors import LaunchError

# variables of a process of mpirun or srun, with the number of processes
_OTHERS = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def check_ranks(env: dict[str, str]) -> None:
    """Raises LaunchError if processes of a launcher would not find each other: each would train alone."""
    others = (env[name] for name in _OTHERS if int(env.get(name, 1)) > 1)
    if (count := env.get("WORLD_SIZE") or next(others, None)) is None:
        return
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not env.get(name):
            raise LaunchError(
                f"{name}: not set, but this is one of {count} processes. Start them by torchrun or a script "
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
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1)
    deepspeed.init_distributed(timeout=timeout)
    return device
