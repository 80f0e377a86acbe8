"""Processes of distributed benchmarks, each on a GPU of its own if there are any."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# a rank that waits longer for another ends
PATIENCE = timedelta(seconds=180)


class Rank(NamedTuple):
    """A process's place among those that were started with it."""

    rank: int
    ranks: int
    folder: str
    """Where they meet."""


def run_ranks(
    main: Callable[..., Iterator[dict]],
    ranks: int,
    *arguments: object,
    take: Callable[[dict], None] = lambda row: None,
) -> tuple[list[list[dict]], str | None]:
    """Runs the generator `main(Rank, *arguments)` in `ranks` processes, which yield rows.

    Returns the rows of each rank, and the last line of the first failure, None if there was none. `take` is
    called with each row of rank 0 within a second or so.
    """
    rows: list[list[dict]] = [[] for _ in range(ranks)]
    failure = None
    with tempfile.TemporaryDirectory() as folder:

        def read() -> None:
            for rank, own in enumerate(rows):
                path = _lines_of(folder, rank)
                lines = path.read_text().split("\n")[:-1] if path.exists() else []
                for line in lines[len(own) :]:
                    own.append(json.loads(line))
                    if rank == 0:
                        take(own[-1])

        try:
            context = mp.spawn(_write_rows, (main, ranks, folder, arguments), nprocs=ranks, join=False)
            while not context.join(timeout=1):
                read()
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            print(error, flush=True)
            # the last line of a rank's traceback, or how it ended
            failure = str(error).strip().splitlines()[-1][:160]
        read()
    return rows, failure


def _lines_of(folder: str, rank: int) -> Path:
    return Path(folder, f"{rank}.jsonl")


def _write_rows(rank: int, main: Callable[..., Iterator[dict]], ranks: int, folder: str, arguments) -> None:
    """What runs in each process: a line of JSON for each row."""
    with _lines_of(folder, rank).open("w") as lines:
        for row in main(Rank(rank, ranks, folder), *arguments):
            print(json.dumps(row), file=lines, flush=True)
    dist.destroy_process_group()


def join(place: Rank) -> None:
    """Makes this process one of its ranks in torch.distributed."""
    rank, ranks = str(place.rank), str(place.ranks)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    if torch.cuda.is_available():
        torch.cuda.set_device(place.rank)
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
        torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(place.folder, "store"), place.ranks)
    dist.init_process_group(
        _backend(), store=store, rank=place.rank, world_size=place.ranks, timeout=PATIENCE
    )


def join_deepspeed(place: Rank) -> None:
    """`join`, and DeepSpeed's own initialization."""
    join(place)
    import deepspeed

    if not torch.cuda.is_available():
        # every rank would compile DeepSpeed's shared-memory collectives; gloo does the same
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(_backend())


def _backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


@contextmanager
def one_process() -> Iterator[None]:
    """Megatron's process groups for this process alone; on a CPU, with what lets Megatron run there."""
    # the other benchmarks do without Megatron
    from megatron.core import parallel_state

    from megatron_ext import cpu
    from megatron_ext.model import initialize_model_parallel

    cpu.enable()
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        cpu.disable()
