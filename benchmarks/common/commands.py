"""Benchmarks as processes of their own: what this machine allows, and the rows that they leave."""

import hashlib
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.common.harness import BENCHMARKS, read_rows

ROOT = Path(__file__).parents[2]
# these stop in time, and skip what --output holds already
RESUMING = ("train", "converge")
# in the notes of rows that a package lacks for
ABSENT = ("not installed", "ModuleNotFoundError")


class NotRunnable(Exception):
    """Why something cannot be measured here."""


def check_machine(gpus: int, gpu: str = "", gb: float = 0) -> None:
    """Raises NotRunnable without so many GPUs, of a name that holds `gpu` and with `gb` 10^9 bytes each."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < gpus:
        raise NotRunnable(f"needs {gpus} GPU{'s' * (gpus > 1)}, found {found}")
    if not gpus:
        return
    if gpu not in (name := torch.cuda.get_device_name()):
        raise NotRunnable(f"the figure is of {gpu}, this is {name}")
    if (size := torch.cuda.get_device_properties(0).total_memory / 1e9) < gb:
        raise NotRunnable(f"needs GPUs of {gb:g} GB, found {size:.0f}")


class Commands:
    """Runs benchmarks by their command line, each once, into files of a folder.

    Those that the folder holds are not run again, or go on where they stopped.
    """

    def __init__(self, folder: Path, deadline: float, quick: bool):
        """`deadline`: by `time.monotonic`; nothing is started after it. `quick`: small sizes."""
        # commands run in the repository
        self.folder, self.deadline, self.quick = folder.resolve(), deadline, quick
        self.failures: dict[str, str] = {}
        self.cut: set[str] = set()
        """Commands that time was over in: rows may lack."""

    def rows(self, command: str) -> list[dict]:
        """Rows of `python -m benchmarks COMMAND`.

        Raises NotRunnable if time is over or it is no such command; RuntimeError if it fails.
        """
        name, *options = shlex.split(command)
        if name not in BENCHMARKS:
            raise NotRunnable(f"run it by hand: {command}")
        identity = hashlib.sha256(f"{command} {self.quick}".encode()).hexdigest()[:8]
        path = self.folder / f"{name}-{identity}.csv"
        if command not in self.failures:
            self.failures[command] = self._run(name, options, path)
            if name in RESUMING and time.monotonic() > self.deadline:
                self.cut.add(command)
        if self.failures[command]:
            raise RuntimeError(self.failures[command])
        return read_rows(path)

    def _run(self, name: str, options: list[str], path: Path) -> str:
        """Returns what went wrong, or nothing."""
        if name not in RESUMING and path.exists():
            print(f"\n{path}: measured before", flush=True)
            return ""
        minutes = (self.deadline - time.monotonic()) / 60
        if minutes <= 0:
            raise NotRunnable("no time left")
        if name in RESUMING and minutes != float("inf"):
            options = [*options, "--minutes", f"{minutes:.2f}"]
        if self.quick:
            options = [*options, "--quick"]
        command = [sys.executable, "-m", "benchmarks", name, *options, "--output", str(path)]
        print(f"\n{shlex.join(command[1:])}", flush=True)
        process = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        print(process.stderr, end="", file=sys.stderr, flush=True)
        if not process.returncode:
            return ""
        if name not in RESUMING:
            # a part would be taken for the whole
            path.unlink(missing_ok=True)
        last = (process.stderr.strip() or "no message").splitlines()[-1]
        return f"exit status {process.returncode}: {last[:160]}"


def value_of(row: dict, column: str) -> float:
    """A figure of a row. Raises NotRunnable if a package lacked, RuntimeError if the row failed otherwise."""
    note = row.get("note", "")
    if any(part in note for part in ABSENT):
        raise NotRunnable(note)
    if note or column not in row:
        raise RuntimeError(note or f"the row has no {column}")
    return row[column]
