"""The files of an output folder: its lock, and writes that a crash cannot cut off."""

import fcntl
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from coat_launch.errors import LaunchError

LOCK = "run.lock"


@contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """Raises LaunchError in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise LaunchError(
            f"cannot write {path} ({error.strerror}): make room or set the permissions, "
            "or choose another folder with --output"
        ) from error


def atomic_write(path: str | os.PathLike, data: bytes) -> None:
    """Replaces the file atomically, so that neither a reader nor a crash leaves a partial file."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with writing(path):
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise


def lock_folder(folder: str | os.PathLike) -> IO[str]:
    """Creates the folder and locks it for this process: until the returned file is closed, or the process
    ends, however it ends. Raises LaunchError if another process holds the lock, of this node or another one.
    """
    folder = Path(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise LaunchError(
                f"--output {folder}: in use by {file.read().strip()}. Wait for its end, stop it, or choose "
                "another folder with --output"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} ({shlex.join(sys.argv)[:1000]})\n")
        file.flush()
    return file
