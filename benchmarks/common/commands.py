"""Benchmarks as processes of their own: what this machine allows, and the rows that they leave."""

import contextlib
import hashlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common.environment import visible_gpus
from benchmarks.common.harness import BENCHMARKS, read_rows

ROOT = Path(__file__).parents[2]
PROGRAM = (sys.executable, "-m", "benchmarks")
# these stop in time, and skip what --output holds already
RESUMING = ("train", "converge")
# in the notes of rows that a package lacks for
ABSENT = ("not installed", "ModuleNotFoundError")
# from one look at the running commands to the next
POLL_S = 0.2


class NotRunnable(Exception):
    """Why something cannot be measured here."""


class Needs(NamedTuple):
    """What a command takes: GPUs, of a name that holds `gpu` and with `gb` 10^9 bytes each."""

    gpus: int
    gpu: str = ""
    gb: float = 0


def check_machine(needs: Needs) -> None:
    """Raises NotRunnable where this machine has less."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < needs.gpus:
        raise NotRunnable(f"needs {needs.gpus} GPU{'s' * (needs.gpus > 1)}, found {found}")
    if not needs.gpus:
        return
    if needs.gpu not in (name := torch.cuda.get_device_name()):
        raise NotRunnable(f"the figure is of {needs.gpu}, this is {name}")
    if (size := torch.cuda.get_device_properties(0).total_memory / 1e9) < needs.gb:
        raise NotRunnable(f"needs GPUs of {needs.gb:g} GB, found {size:.0f}")


class Process(NamedTuple):
    """A command that runs."""

    popen: subprocess.Popen
    log: Path
    gpus: list[str]
    started: float

    @property
    def places(self) -> int:
        """Without a GPU one."""
        return max(1, len(self.gpus))


class Commands:
    """Runs benchmarks by their command line, each once, into files of a folder; side by side, each on GPUs of
    its own, where there are several.

    Those that the folder holds are not run again, or go on where they stopped. What one prints is in a .log
    file next to its table, and is printed when it ends.
    """

    def __init__(self, folder: Path, deadline: float, quick: bool):
        """`deadline`: by `time.monotonic`; nothing is started after it. `quick`: small sizes."""
        # commands run in the repository
        self.folder, self.deadline, self.quick = folder.resolve(), deadline, quick
        self.gpus = visible_gpus()
        """Those that nothing runs on."""
        # without a GPU one command runs at a time
        self.places = max(1, len(self.gpus))
        self.waiting: dict[str, int] = {}
        """The places that a command takes."""
        self.running: dict[str, Process] = {}
        self.failures: dict[str, str | NotRunnable] = {}
        """By ended command: what went wrong, or nothing."""
        self.cut: set[str] = set()
        """Commands that time was over in: rows may lack."""

    def want(self, command: str, needs: Needs) -> None:
        """Queues `python -m benchmarks COMMAND` after the commands that were queued before.

        Raises NotRunnable where this machine has less than it needs. With small sizes any will do.
        """
        if not self.quick:
            check_machine(needs)
        if command not in self.failures and command not in self.running:
            self.waiting.setdefault(command, min(max(1, needs.gpus), self.places))

    def want_all(self, wanted: Iterable[tuple[str, Needs]]) -> None:
        """`want` for each command that this machine can run."""
        for command, needs in wanted:
            with contextlib.suppress(NotRunnable):
                self.want(command, needs)

    def rows(self, command: str, needs: Needs) -> list[dict]:
        """Rows of a command, which is wanted now if it was not before.

        Raises NotRunnable if this machine cannot run it, time is over or it is no such command; RuntimeError
        if it fails.
        """
        self.want(command, needs)
        while command not in self.failures:
            self._advance()
        failure = self.failures[command]
        if isinstance(failure, NotRunnable):
            raise failure
        if failure:
            raise RuntimeError(failure)
        return read_rows(self._path(command))

    def earlier_rows(self, command: str) -> list[dict]:
        """Rows of a command that an earlier call has left, on whatever machine."""
        path = self._path(command)
        return read_rows(path) if path.exists() else []

    def __enter__(self) -> "Commands":
        return self

    def __exit__(self, *error) -> None:
        """Ends what still runs."""
        for process in self.running.values():
            process.popen.terminate()
            process.popen.wait()

    def _path(self, command: str) -> Path:
        identity = hashlib.sha256(f"{command} {self.quick}".encode()).hexdigest()[:8]
        return self.folder / f"{shlex.split(command)[0]}-{identity}.csv"

    def _advance(self) -> None:
        """Starts what there are places for, and waits a while for one to end.

        In order: a command of many GPUs holds up later ones, or it would never get its turn.
        """
        taken = sum(process.places for process in self.running.values())
        while self.waiting and taken + next(iter(self.waiting.values())) <= self.places:
            command = next(iter(self.waiting))
            places = self.waiting.pop(command)
            try:
                taken += self._start(command, places)
            except NotRunnable as error:
                self.failures[command] = error
        ended = [c for c, process in self.running.items() if process.popen.poll() is not None]
        for command in ended:
            self.failures[command] = self._ended(command, self.running.pop(command))
        if self.running and not ended:
            time.sleep(POLL_S)

    def _start(self, command: str, places: int) -> int:
        """Returns how many places the command takes: none if the folder holds what it would measure."""
        name, *options = shlex.split(command)
        if name not in BENCHMARKS:
            raise NotRunnable(f"run it by hand: {command}")
        path = self._path(command)
        if name not in RESUMING:
            if path.exists():
                print(f"\n{path}: measured before", flush=True)
                self.failures[command] = ""
                return 0
            # what ends in the middle must not be taken for the whole
            path = path.with_suffix(".part")
        minutes = (self.deadline - time.monotonic()) / 60
        if minutes <= 0:
            raise NotRunnable("no time left")
        if name in RESUMING and minutes != float("inf"):
            options = [*options, "--minutes", f"{minutes:.2f}"]
        if self.quick:
            options = [*options, "--quick"]
        words = [*PROGRAM, name, *options, "--output", str(path)]
        gpus, self.gpus = self.gpus[:places], self.gpus[places:]
        # so that a traceback is the last that a log holds
        env = os.environ | {"PYTHONUNBUFFERED": "1"}
        env |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        where = f"on GPU {', '.join(gpus)}" if gpus else "here"
        log = path.with_suffix(".log")
        self.folder.mkdir(parents=True, exist_ok=True)
        print(f"\n{shlex.join(words[1:])}\nruns {where}, prints to {log}", flush=True)
        with log.open("w") as file:
            popen = subprocess.Popen(words, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT)
        self.running[command] = Process(popen, log, gpus, time.monotonic())
        return places

    def _ended(self, command: str, process: Process) -> str:
        """Returns what went wrong, or nothing."""
        self.gpus += process.gpus
        status, name = process.popen.returncode, shlex.split(command)[0]
        printed = process.log.read_text(errors="replace").strip()
        took = time.monotonic() - process.started
        print(f"\n{command}\nended after {took:.0f} s, exit status {status}:\n{printed}", flush=True)
        if name in RESUMING and time.monotonic() > self.deadline:
            self.cut.add(command)
        if not status:
            if (part := self._path(command).with_suffix(".part")).exists():
                part.replace(self._path(command))
            return ""
        last = (printed or "no message").splitlines()[-1]
        return f"exit status {status}: {last[:160]}"


def value_of(row: dict, column: str) -> float:
    """A figure of a row. Raises NotRunnable if a package lacked, RuntimeError if the row failed otherwise."""
    note = row.get("note", "")
    if any(part in note for part in ABSENT):
        raise NotRunnable(note)
    if note or column not in row:
        raise RuntimeError(note or f"the row has no {column}")
    return row[column]
