"""A lock file in an OUTPUT folder, so that only one run at a time writes to it.

    lock = OutputLock(folder)
    lock.take(print)   OutputError if another run holds it
    lock.check()       OutputError if this process has lost it since
    lock.release()

The file is created with its whole content, by a hard link, which network file systems make atomically. A
process that is killed leaves the file. The next run on the same machine finds that the process has ended, by
its id and its start time, and takes the file over. Processes of another machine cannot be checked: then the
user has to decide.
"""

import contextlib
import dataclasses
import datetime
import errno
import json
import os
import re
import shlex
import socket
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coat_launch.report import OutputError, writing

NAME = "run.lock"
# for a job that Slurm has requeued: the id stays the same, the count increases
JOB, RESTARTS = "SLURM_JOB_ID", "SLURM_RESTART_COUNT"
# the errors of a file system without hard links
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_TOKEN = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that holds a lock."""

    host: str
    boot: str
    """Changes with each start of the machine."""
    pids: str
    """The namespace of process ids; a machine with containers has several."""
    pid: int
    started: int
    """Start time in ticks of the machine's clock: a later process of the same id has another."""
    since: str
    command: str
    job: str
    restarts: int
    token: str

    @classmethod
    def this(cls) -> "Owner":
        return cls(
            host=socket.gethostname(),
            boot=_boot(),
            pids=_namespace(),
            pid=os.getpid(),
            started=_state_and_start(os.getpid())[1],
            since=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            command=shlex.join(sys.argv)[:1000],
            job=os.environ.get(JOB, ""),
            restarts=int(os.environ.get(RESTARTS) or 0),
            token=uuid.uuid4().hex,
        )

    @classmethod
    def read(cls, path: Path) -> "Owner | None":
        """The owner of the lock; None if there is no lock. Raises OutputError for a file that is no lock."""
        try:
            found = json.loads(path.read_bytes())
            owner = cls(**found)
            for field in dataclasses.fields(cls):
                value = getattr(owner, field.name)
                if type(value) is not field.type or (field.name == "token" and not _TOKEN.fullmatch(value)):
                    raise ValueError(f"{field.name} is {value!r}")
            return owner
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise OutputError(
                f"{path}: expected the lock of a run, found what cannot be read as one ({error}). If no run "
                "writes to this folder, remove it; or choose another folder with --output"
            ) from error

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since} ({self.command})"

    def has_ended(self, here: "Owner") -> bool | None:
        """Whether the process has ended; None if that cannot be determined on the machine of `here`."""
        if (self.boot, self.pids) == (here.boot, here.pids):
            return not _runs(self.pid, self.started)
        if self.job and self.job == here.job and self.restarts < here.restarts:
            return True
        return True if self.host == here.host and self.boot != here.boot else None


class OutputLock:
    """The lock of the folder of `--output`, for one process."""

    def __init__(self, folder: str | os.PathLike):
        self.path = Path(folder) / NAME
        self._owner: Owner | None = None

    def take(self, say: Callable[[str], object]) -> None:
        """Makes this process the owner of the folder, which exists. Calls `say` with one line if the previous
        owner has ended without releasing it.

        Raises OutputError if another process owns it, or may own it, and if the file cannot be written.
        """
        here = Owner.this()
        prepared = self.path.with_name(f".{NAME}.{here.token}")
        try:
            writing(prepared, lambda: prepared.write_text(json.dumps(dataclasses.asdict(here), indent=1)))
            while not writing(self.path, lambda: _link(prepared, self.path)):
                before = Owner.read(self.path)
                # None: released in the meantime
                if before is not None:
                    self._check_ended(before, here)
                    if writing(self.path, lambda before=before: self._replace(before, prepared)):
                        say(f"{self.path.parent}: taken over from {before}, which has ended")
                        break
        finally:
            prepared.unlink(missing_ok=True)
        self._owner = here

    def check(self) -> None:
        """Raises OutputError unless this process still owns the folder."""
        if (now := Owner.read(self.path)) != self._owner:
            raise OutputError(
                f"--output {self.path.parent}: this run has lost it to {now or 'whoever removed the lock'}; "
                "nothing more is written"
            )

    def release(self) -> None:
        """Frees the folder for other runs. Does nothing if this process does not own it."""
        with contextlib.suppress(OutputError, OSError):
            if self._owner is not None and Owner.read(self.path) == self._owner:
                self.path.unlink()
        self._owner = None

    def _check_ended(self, owner: Owner, here: Owner) -> None:
        ended = owner.has_ended(here)
        if ended:
            return
        if ended is None:
            way_out = (
                f"Whether it still runs cannot be seen from {here.host}: if it does not, remove {self.path}"
            )
        else:
            way_out = "Wait for its end, or stop it"
        raise OutputError(
            f"--output {self.path.parent}: in use by {owner}. {way_out}; or choose another folder with "
            "--output"
        )

    def _replace(self, before: Owner, prepared: Path) -> bool:
        """Puts the prepared file in the place of a lock whose process has ended; False if that lock is gone.

        For each such lock only one process at a time may do so, the one that creates a file with the lock's
        token in the name: other processes would remove the new lock.
        """
        turn = self.path.with_name(f"{NAME}.{before.token}")
        if not _link(prepared, turn):
            raise OutputError(
                f"--output {self.path.parent}: another run is just taking it over. Choose another folder "
                f"with --output; or, if there is none, remove {turn}"
            )
        try:
            if Owner.read(self.path) != before:
                return False
            prepared.replace(self.path)
            return True
        finally:
            turn.unlink()


def _link(source: Path, target: Path) -> bool:
    """Creates `target` with the content of `source`; False if it exists already."""
    try:
        os.link(source, target)
    except FileExistsError:
        # over a network the reply to a successful call can get lost, and the call be repeated
        with contextlib.suppress(FileNotFoundError):
            return source.samefile(target)
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        try:
            with target.open("xb") as file:
                file.write(source.read_bytes())
        except FileExistsError:
            return False
    return True


def _runs(pid: int, started: int) -> bool:
    try:
        state, start = _state_and_start(pid)
    except OSError:
        # the process of another user may be hidden
        try:
            os.kill(pid, 0)
        except PermissionError:
            return True
        except (OSError, OverflowError):
            return False
        return True
    return state not in "ZX" and start == started


def _state_and_start(pid: int) -> tuple[str, int]:
    # the name of the program, which may hold anything, ends at the last bracket
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
