"""Readings, and the file of a run: `watch.jsonl`."""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from coat_ds.log import log_rank_0

FILE = "watch.jsonl"


class Reading(NamedTuple):
    """The figures of one step."""

    step: int
    """Counted from 1."""
    groups: dict[str, dict[str, float]]
    """By layer group, the names of tensors and layers with `*` for numbers: figures by name."""

    def flat(self) -> dict[str, float]:
        """Every number by one name, as coat/update_error/layers.*.weight."""
        return {
            f"coat/{figure}/{group}": value
            for group, figures in self.groups.items()
            for figure, value in figures.items()
        }


ReadingCallback = Callable[[Reading], None]


def append(folder: str, reading: Reading) -> None:
    """Appends a reading to watch.jsonl in `folder`. Raises OSError where it cannot be written. A part of a
    line, as a full disk or a lost machine leaves it, ends before the next reading."""
    path = Path(folder) / FILE
    line = json.dumps(reading._asdict()).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            line = b"\n" + line
        file.write(line)


def read(folder: str | Path) -> list[Reading]:
    """The readings of a run's folder by step; of a step that was run twice the last one. A line that was cut
    off, as `append` may leave it, is left out and logged.

    Raises FileNotFoundError, and ValueError if there is no reading, or another JSON value.
    """
    path = Path(folder)
    path = path / FILE if path.is_dir() else path
    found: dict[int, Reading] = {}
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        try:
            values = json.loads(line)
            # earlier versions wrote more fields
            reading = Reading(*(values[field] for field in Reading._fields))
        except json.JSONDecodeError:
            log_rank_0(f"{path}: line {number} was cut off: left out")
            continue
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}: line {number} is no reading: {error!r}") from error
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
