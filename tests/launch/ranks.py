"""Ranks of the entry point as processes forked from a server that has imported all packages."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from coat_launch import report
from tests.launch import faulty
from tests.util import PRELOADED, meeting_place

HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Ended:
    """Exit codes by rank (negative for signals, None for ranks that were killed after another rank failed),
    and the output."""

    codes: list
    text: str


def run_ranks(argv, folder: Path, *, ranks: int = 1, faults: dict | None = None) -> Ended:
    """Runs the entry point. When a rank fails the others are killed, as launchers do."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, HIDDEN):
        _store, address = meeting_place()
        environment = {**os.environ, **address, "WORLD_SIZE": ranks}
        processes = [
            context.Process(
                target=_rank,
                args=(
                    {**environment, "RANK": r, "LOCAL_RANK": r},
                    folder,
                    faults or {},
                    list(map(str, argv)),
                ),
            )
            for r in range(ranks)
        ]
        for process in processes:
            process.start()
    codes, waiting = [None] * ranks, dict(enumerate(processes))
    try:
        while waiting and all(code in (None, 0) for code in codes):
            done = multiprocessing.connection.wait([p.sentinel for p in waiting.values()], timeout=300)
            assert done, f"no rank ended in 300 s: {_printed(folder, ranks)}"
            for r in [r for r, p in waiting.items() if p.sentinel in done]:
                waiting.pop(r).join()
                codes[r] = processes[r].exitcode
        # ranks that stop for the same reason stop together; ranks that wait for a killed rank may wait
        # forever
        for r, process in list(waiting.items()):
            process.join(5 if any((code or 0) < 0 for code in codes) else 60)
            codes[r] = process.exitcode
    finally:
        for process in waiting.values():
            process.kill()
            process.join()
    return Ended(codes, _printed(folder, ranks))


@contextlib.contextmanager
def full_disk(size: int):
    """Within the context the kernel refuses to write more bytes to a file, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _printed(folder: Path, ranks: int) -> str:
    return "".join((folder / f"rank{r}.log").read_text() for r in range(ranks))


def _rank(environment: dict, folder: Path, faults: dict, argv: list[str]) -> None:
    # a shell's job in the background ignores interrupts, and so do the processes that it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # until now the environment is that of the server
    os.environ.clear()
    os.environ.update({name: str(value) for name, value in environment.items()})
    log = os.open(folder / f"rank{environment['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    try:
        faulty.main(faults, argv)
    except SystemExit as end:
        # multiprocessing would print the exit message to its own stderr
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            sys.exit(1)
        raise
    # any exception: multiprocessing would print it to its own stderr too
    except BaseException:
        traceback.print_exc()
        raise


def measured(folder: Path) -> dict:
    """Losses of training and validation, learning rates and norms by step: all values that must be equal."""
    out = {}
    for record in report.read_metrics(folder / "run/metrics.jsonl"):
        known = {key: value for key, value in record.items() if key != "tokens_per_s"}
        out.setdefault(record["step"], {}).update(known)
    return out
