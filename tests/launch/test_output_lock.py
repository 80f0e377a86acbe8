"""Ownership of an OUTPUT folder: by live processes, killed processes, processes with a reused id, and
processes on another machine."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coat_launch.output_lock import NAME, OutputLock, Owner
from coat_launch.report import OutputError

ROOT = Path(__file__).parents[2]
# takes the lock, prints "taken" or the reason why not, and waits for the end of its input
TAKE = """
import sys
from coat_launch.output_lock import OutputLock
from coat_launch.report import OutputError
lock = OutputLock(sys.argv[1])
try:
    lock.take(lambda text: print(text, flush=True))
    print("taken", flush=True)
except OutputError as error:
    print(error, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def take(tmp_path):
    """Starts a process that takes the lock of `tmp_path`; returns the lines of its output."""
    processes = []

    def start() -> subprocess.Popen:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen([sys.executable, "-c", TAKE, str(tmp_path)], cwd=ROOT, **pipes))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def refused(lock: OutputLock) -> str:
    with pytest.raises(OutputError) as error:
        lock.take(print)
    return str(error.value)


def test_two_processes_and_a_killed_one(tmp_path, take):
    first = take()
    assert first.stdout.readline() == "taken\n"
    lock, said = OutputLock(tmp_path), []
    why = refused(lock)
    held = Owner.read(tmp_path / NAME)
    assert f"--output {tmp_path}: in use by process {first.pid} on {held.host} since {held.since} (" in why
    assert "Wait for its end, or stop it; or choose another folder with --output" in why
    assert why.split() == take().stdout.readline().split()

    first.kill()
    # a zombie, whose exit code has not been read by its parent, counts as ended
    while Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    lock.take(said.append)
    assert len(said) == 1 and f"taken over from process {first.pid} on " in said[0]
    assert Owner.read(tmp_path / NAME).pid == os.getpid()
    assert f"in use by process {os.getpid()} on" in take().stdout.readline()
    lock.check()
    lock.release()
    assert os.listdir(tmp_path) == []
    again = take()
    assert again.stdout.readline() == "taken\n"


def held_by(tmp_path, **changes) -> OutputLock:
    """The lock of the folder as if this process held it, with these changes."""
    owner = dataclasses.replace(Owner.this(), **changes)
    (tmp_path / NAME).write_text(json.dumps(dataclasses.asdict(owner)))
    return OutputLock(tmp_path)


GONE = {
    "a process that has another's id": {"started": 1},
    "an id that no process has": {"pid": 2**22 + 1},
    "an id that no process can have": {"pid": 2**70},
    "the machine has started again": {"boot": "before", "pids": "pid:[1]"},
    "the job was put back into the queue, elsewhere": {"host": "x", "boot": "y", "job": "7", "restarts": 0},
}


@pytest.mark.parametrize("changes", GONE.values(), ids=GONE)
def test_locks_left_behind(tmp_path, changes, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    lock, said = held_by(tmp_path, **changes), []
    lock.take(said.append)
    assert len(said) == 1 and os.listdir(tmp_path) == [NAME]
    lock.check()


UNKNOWN = {
    "another machine": {"host": "node7", "boot": "other"},
    "a container of this machine": {"pids": "pid:[1]"},
    "another node of this job": {"host": "node7", "boot": "other", "job": "7", "restarts": 1},
    "another job of another machine": {"host": "node7", "boot": "other", "job": "8", "restarts": 0},
}


def test_a_lock_that_was_taken_away(tmp_path):
    lock = OutputLock(tmp_path)
    lock.take(print)
    (tmp_path / NAME).unlink()
    with pytest.raises(OutputError, match="has lost it to whoever removed the lock"):
        lock.check()
    other = OutputLock(tmp_path)
    other.take(print)
    with pytest.raises(OutputError, match=f"has lost it to process {os.getpid()} on"):
        lock.check()
    lock.release()
    other.check()


def test_one_of_many_takes_over(tmp_path, take):
    """Several processes find one stale lock."""
    held_by(tmp_path, started=1)
    processes = [take() for _ in range(6)]
    first = [process.stdout.readline() for process in processes]
    # the process that takes over prints this line before it prints "taken"
    assert sum("taken over from" in line for line in first) == 1
    assert sum("in use by" in line or "another run is just taking it over" in line for line in first) == 5
    assert os.listdir(tmp_path) == [NAME]
