"""`coat watch RUN`: a run's readings as a short table and as pictures."""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from coat_ds.config import CoatConfigError
from coat_ds.watch.readings import FILE, Reading, read

# figures of the table and the pictures; a large number is bad
FIGURES = {
    "update_error": "error of the update, relative RMS",
    "stalled": "decay of second moments that rounding undid",
    "underflowed": "second moments too small for their code",
    "input_flushed": "FP8 inputs that are zero",
    "gradient_flushed": "FP8 gradients that are zero",
    "saved_flushed": "saved activations that are zero",
    "input_saturated": "FP8 inputs of the largest code",
    "gradient_saturated": "FP8 gradients of the largest code",
    "saved_saturated": "saved activations of the largest code",
}
_IN_BF16 = (
    "Keep the layer in BF16: by the filter of coat_ds.convert, or by Megatron's --te-precision-config-file."
)
# figures with a limit, and what helps above it
LIMIT = 0.5
FIXES = {
    "update_error": "Add the name to coat.optimizer.keep_fp32.",
    "input_flushed": _IN_BF16,
    "gradient_flushed": _IN_BF16,
}
# layer groups of a picture that have a name in its legend
NAMED = 6


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help=f"the folder of coat.watch.folder, or its {FILE}")
    parser.add_argument(
        "--pictures", metavar="FOLDER", help="write errors.png there (default: the run's folder)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the table and draws; 0. Raises CoatConfigError where there is no reading, and where --pictures
    is given without matplotlib."""
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
    except (OSError, ValueError) as error:
        raise CoatConfigError(f"RUN: {error}. Correct the file, or name another run.") from error
    print(table(readings))
    if find_spec("matplotlib") is None:
        why = "pictures: matplotlib is not installed. pip install matplotlib"
        if arguments.pictures:
            raise CoatConfigError(why)
        print(f"no {why}", file=sys.stderr)
        return 0
    try:
        written = draw(readings, Path(arguments.pictures or (path if path.is_dir() else path.parent)))
    except OSError as error:
        # for example of another user's run
        raise CoatConfigError(
            f"cannot write {error.filename} ({error.strerror}). Name another folder with --pictures."
        ) from error
    print(f"wrote {written}")
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
    return "\n".join([*lines, verdict(last)])


def verdict(last: Reading) -> str:
    """A line: whether the last reading is within the limits; if not, what helps."""
    measured: list[str] = []
    for figure, fix in FIXES.items():
        found = [(figures[figure], group) for group, figures in last.groups.items() if figure in figures]
        if found:
            measured.append(figure)
            value, group = max(found, key=_badness)
            # also if it is NaN
            if not value <= LIMIT:
                return (
                    f"verdict: NOT healthy. {figure} of {group} is {value:.2%}, the limit {LIMIT:.0%}. {fix}"
                )
    if not measured:
        return "verdict: none. The last reading has no figure with a limit."
    return f"verdict: healthy. At step {last.step} within limits: {', '.join(measured)}."


def _badness(found: tuple[float, Any]) -> tuple:
    """A key that sorts figures with their origin: a NaN is the worst."""
    return found[0] != found[0], *found


def draw(readings: Sequence[Reading], folder: Path) -> Path:
    """Writes errors.png, a plot of each figure over the steps."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    steps = [reading.step for reading in readings]
    shown = [f for f in FIGURES if any(f in g for r in readings for g in r.groups.values())]
    rows = -(-max(len(shown), 1) // 2)
    figure, axes = plt.subplots(rows, 2, figsize=(12, 2.7 * rows), layout="constrained", squeeze=False)
    for name, axis in zip(shown, axes.flat, strict=False):
        groups = dict.fromkeys(g for r in readings for g, found in r.groups.items() if name in found)
        lines = {g: [r.groups.get(g, {}).get(name, float("nan")) for r in readings] for g in groups}
        # the worst have a colour and a name, the others are seen to be there
        order = sorted(lines, key=lambda g: max((v for v in lines[g] if v == v), default=0.0), reverse=True)
        for group in reversed(order[NAMED:]):
            axis.plot(steps, [100 * v for v in lines[group]], color="#d5d9de", linewidth=0.8)
        for group in order[:NAMED]:
            axis.plot(steps, [100 * v for v in lines[group]], marker=".", linewidth=1.2, label=group)
        axis.set_title(FIGURES[name], size=10)
        axis.set(xlabel="step", ylabel="%", ylim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=6, frameon=False)
    for axis in list(axes.flat)[len(shown) :]:
        axis.set_visible(False)
    errors = folder / "errors.png"
    figure.savefig(errors, dpi=110)
    plt.close(figure)
    return errors
