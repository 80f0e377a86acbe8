"""Where readings go. An out is a function of one reading; one rank calls it, as a rule rank 0."""

import errno
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger("coat_ds")
FILE = "watch.jsonl"


class Reading(NamedTuple):
    """What was found in one step."""

    step: int
    """Counted from 1."""
    samples: int
    """Sequences seen until then; 0 where they are not counted."""
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
        with path.open("a+b", buffering=0) as file:
            # after the part of a line that a lost machine has left
            if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                line = b"\n" + line
            if (written := file.write(line)) < len(line):
                # only the bytes that the disk had room for
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
    """The readings of a run's folder by step; of a step that was run twice the last one. A line that was cut
    off, as a lost machine leaves it, is left out, with a word in the log.

    Raises FileNotFoundError, and ValueError where there are none, or something else.
    """
    path = Path(folder)
    path = path / FILE if path.is_dir() else path
    found: dict[int, Reading] = {}
    cut = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        try:
            reading = Reading(**json.loads(line))
        except json.JSONDecodeError:
            cut.append(str(number))
            continue
        except (TypeError, RecursionError) as error:
            raise ValueError(f"{path}: line {number} is no reading: {error}") from error
        found[reading.step] = reading
    if not found:
        raise ValueError(f"{path}: expected a reading on each line, found none")
    if cut:
        lines = f"lines {', '.join(cut)} were" if len(cut) > 1 else f"line {cut[0]} was"
        logger.warning("%s: %s cut off: left out", path, lines)
    return [found[step] for step in sorted(found)]


def grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by layer group, as the optimizer's `layout` groups them."""
    groups: dict[str, list[str]] = {}
    for name in names:
        group = ".".join("*" if part.isdigit() else part for part in name.split("."))
        groups.setdefault(group, []).append(name)
    return groups
