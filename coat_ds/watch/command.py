"""`coat watch RUN`: a run's readings as a short table."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coat_ds.config import CoatConfigError, WatchConfig
from coat_ds.watch.readings import FILE, Reading, read

# figures of the table; a large number is bad
FIGURES = (
    *("update_error", "stalled", "underflowed"),
    *("input_flushed", "gradient_flushed", "saved_flushed"),
    *("input_saturated", "gradient_saturated", "saved_saturated"),
)
_IN_BF16 = 'Set coat.watch.act to "act": the layer then runs in BF16.'
# figures with a limit: the key of the limit in `coat.watch`, and what helps
LIMITS = {
    "update_error": (
        "update_error",
        'Add the name to coat.optimizer.keep_fp32, or set coat.watch.act to "act".',
    ),
    "input_flushed": ("flushed", _IN_BF16),
    "gradient_flushed": ("flushed", _IN_BF16),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help=f"the folder of coat.watch.folder, or its {FILE}")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table; 0. Raises CoatConfigError where there is no reading."""
    path = Path(arguments.run)
    try:
        readings = read(path)
    except FileNotFoundError:
        fix = "Name the folder that coat.watch.folder names; without it a run writes no readings."
        # `coat train` writes into a folder of its output
        if beneath := sorted(str(found.parent) for found in path.glob(f"*/{FILE}")):
            fix = f"Name {' or '.join(beneath)}."
        raise CoatConfigError(
            f"RUN: expected a folder with {FILE}, found none in {arguments.run!r}. {fix}"
        ) from None
    except OSError as error:
        raise CoatConfigError(
            f"RUN: cannot read {error.filename} ({error.strerror}). Set its permissions, or name another run."
        ) from error
    except ValueError as error:
        raise CoatConfigError(f"RUN: {error}. Correct the file, or name another run.") from error
    print(table(readings))
    return 0


def table(readings: Sequence[Reading]) -> str:
    """For each figure the worst layer group of the last reading and of all readings."""
    last = readings[-1]
    lines = [
        f"{len(readings)} reading{'s' * (len(readings) > 1)}, steps {readings[0].step} to {last.step}",
        f"{'figure':<20}{'last':>8}{'worst':>8}{'in step':>9}  layer group of the last",
    ]
    for figure in FIGURES:
        now = [(found[figure], group) for group, found in last.groups.items() if figure in found]
        ever = [
            (found[figure], -reading.step)
            for reading in readings
            for found in reading.groups.values()
            if figure in found
        ]
        if ever:
            value, group = max(now, key=_badness, default=(None, "none has it"))
            shown = "-" if value is None else f"{value:.2%}"
            worst, step = max(ever, key=_badness)
            lines.append(f"{figure:<20}{shown:>8}{worst:>8.2%}{-step:>9}  {group}")
    lines.append(f"fallen back: {', '.join(last.fallen) or 'nothing'}")
    return "\n".join([*lines, verdict(last)])


def verdict(last: Reading) -> str:
    """A line: whether the last reading is within the default limits of `coat.watch`; if not, what helps."""
    limits = WatchConfig()
    measured: list[str] = []
    for figure, (limit, fix) in LIMITS.items():
        found = [(figures[figure], group) for group, figures in last.groups.items() if figure in figures]
        if found:
            measured.append(figure)
            value, group = max(found, key=_badness)
            # also if it is NaN
            if not value <= (most := getattr(limits, limit)):
                return (
                    f"verdict: NOT healthy. {figure} of {group} is {value:.2%}, the limit {most:.0%}. {fix}"
                )
    if not measured:
        return "verdict: none. The last reading has no figure with a limit."
    return f"verdict: healthy. At step {last.step} within limits: {', '.join(measured)}."


def _badness(found: tuple[float, Any]) -> tuple:
    """A key that sorts figures with their origin: a NaN is the worst."""
    return found[0] != found[0], *found
