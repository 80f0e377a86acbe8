"""The entry point with a fault in it, as a script for launchers or forked by `tests.launch.ranks`.

    faulty.py '{"kill_at_step": [1, 5]}' --steps 8 ...

torchrun starts a process that has ended again, with the same arguments: `once` names what happens once only.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch

from coat_launch import pretrain_gpt
from coat_launch.batches import Split
from coat_launch.trainer import Trainer

# events that change a folder; the path is the first argument
FILE_EVENTS = ("os.mkdir", "open", "os.rename", "os.remove", "os.rmdir")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_step(rank: int, step: int, once: str = "") -> None:
    """kill -9 in the middle of a step; with the path `once`, only if that file does not exist yet."""

    def kill():
        if not (once and os.path.exists(once)):
            if once:
                Path(once).touch()
            die()

    _at_step(rank, step, kill)


def signal_at_step(rank: int, step: int, number: int) -> None:
    _at_step(rank, step, lambda: os.kill(os.getpid(), number))


def nan_at_step(rank: int, step: int) -> None:
    _at_step(rank, step, lambda: float("nan"))


def _at_step(rank: int, step: int, action) -> None:
    """`action()` before the loss of each micro-batch of a step. The loss is multiplied with its result."""
    train_step, plain = Trainer._train_step, Trainer._loss

    def changed(trainer):
        if (trainer.rank, trainer.step + 1) == (rank, step):
            trainer._loss = lambda model, batch: (action() or 1) * plain(model, batch)
        try:
            return train_step(trainer)
        finally:
            vars(trainer).pop("_loss", None)

    Trainer._train_step = changed


def kill_in_save(rank: int, file: int) -> None:
    """kill -9 after half of the `file`-th file (from 0) of a checkpoint is written."""
    save, count = torch.save, iter(range(1000))

    def half(value, path, **options):
        save(value, path, **options)
        is_file = isinstance(path, (str, os.PathLike))
        if is_file and int(os.environ["RANK"]) == rank and next(count) == file:
            os.truncate(path, os.path.getsize(path) // 2)
            die()

    torch.save = half


def kill_at_event(folder: str, index: int) -> None:
    """kill -9 before the `index`-th change (from 0) in the folder; changes by torch.save are not counted."""
    count = iter(range(1000))

    def hook(event, args):
        if event in FILE_EVENTS and str(args[0]).startswith(folder):
            reading = event == "open" and not str(args[1]).startswith(("w", "a", "x"))
            if not reading and next(count) == index:
                die()

    sys.addaudithook(hook)


def record(folder: str) -> None:
    """Writes the samples of each step by rank."""
    batch, train_step, now = Split.batch, Trainer._train_step, []

    def timed(trainer):
        now[:] = [trainer.step + 1]
        try:
            return train_step(trainer)
        finally:
            now.clear()

    def noted(split, positions):
        out = batch(split, positions)
        with open(f"{folder}/samples{os.environ['RANK']}", "a") as file:
            for row in out.tokens if now else ():
                file.write(f"{now[0]} {hashlib.sha256(row.numpy().tobytes()).hexdigest()}\n")
        return out

    Trainer._train_step = timed
    Split.batch = noted


def main(faults: dict, argv: list[str]) -> None:
    for name, arguments in faults.items():
        globals()[name](*arguments)
    pretrain_gpt.main(argv)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
