"""Where readings go. An out is a function of one reading; one rank calls it, as a rule rank 0."""

import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

FILE = "watch.jsonl"


class Reading(NamedTuple):
    """What was found in one step."""

    step: int
    """Counted from 1."""
    samples: int
    """Sequences seen until then; 0 where nobody counts them."""
    groups: dict[str, dict[str, float]]
    """By layer group, the names of tensors and layers with `*` for numbers: figures by name."""
    memory: dict[str, int]
    """Bytes by role, of the rank that gives out readings."""
    fallen: list[str]
    """Layers in BF16 and tensors with FP32 moments, by the fallback, before this reading."""

    def flat(self) -> dict[str, float]:
        """Every number by one name, as coat/update_error/layers.*.weight."""
        numbers = {
            f"coat/{figure}/{group}": value
            for group, figures in self.groups.items()
            for figure, value in figures.items()
        }
        numbers |= {f"coat/bytes/{role}": float(size) for role, size in self.memory.items()}
        return numbers | {"coat/fallen": float(len(self.fallen))}


Out = Callable[[Reading], None]


def jsonl(folder: str | Path) -> Out:
    """Appends each reading to watch.jsonl in `folder`, which is made if it is not there. Where it cannot be
    written, the function raises OSError, and leaves no part of a line."""
    path = Path(folder) / FILE

    def write(reading: Reading) -> None:
        line = json.dumps(reading._asdict()).encode() + b"\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            if (written := file.write(line)) < len(line):
                # as many bytes as the disk had room for
                file.truncate(file.tell() - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    return write


def check_folder(folder: str | Path) -> None:
    """Makes `folder`, and raises OSError unless files can be written there."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def monitor(of: Any) -> Out:
    """To `of.write_events`, DeepSpeed's monitors (TensorBoard, W&B, CSV, Comet), over the samples seen."""

    def write(reading: Reading) -> None:
        of.write_events([(name, value, reading.samples) for name, value in reading.flat().items()])

    return write


def writer(tensorboard: Any = None, wandb: Any = None) -> Out:
    """To a TensorBoard SummaryWriter's `add_scalar` and to `wandb.log`, which Megatron's
    `get_tensorboard_writer` and `get_wandb_writer` give; None where there is none."""

    def write(reading: Reading) -> None:
        numbers = reading.flat()
        if tensorboard is not None:
            for name, value in numbers.items():
                tensorboard.add_scalar(name, value, reading.step)
        if wandb is not None:
            wandb.log(numbers, step=reading.step)

    return write


def read(folder: str | Path) -> list[Reading]:
    """The readings of a run's folder by step; of a step that was run twice the last one.

    Raises FileNotFoundError and ValueError where there are none.
    """
    path = Path(folder)
    path = path / FILE if path.is_dir() else path
    found: dict[int, Reading] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            reading = Reading(**json.loads(line))
        except (TypeError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path}: line {number} is no reading: {error}") from error
        found[reading.step] = reading
    if not found:
        raise ValueError(f"{path}: expected a reading on each line, found none")
    return [found[step] for step in sorted(found)]


def grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by layer group, as the optimizer's `layout` groups them."""
    groups: dict[str, list[str]] = {}
    for name in names:
        group = ".".join("*" if part.isdigit() else part for part in name.split("."))
        groups.setdefault(group, []).append(name)
    return groups
