"""A run's outputs: metrics, the loss curves, the comparison."""

import io
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from coat_ds.config import read_object
from coat_launch.errors import LaunchError
from coat_launch.files import atomic_write, writing

# rows of the comparison: the key in summary.json, the title, its unit and its format
_ROWS = (
    ("state_bytes_per_param", "optimizer state, bytes per parameter", 1, "{:.3f}"),
    ("saved_bytes_per_token_layer", "saved for backward, bytes per token and layer", 1, "{:,.0f}"),
    ("peak_bytes", "peak memory (GPU allocator), MiB", 2**20, "{:,.0f}"),
    ("tokens_per_s", "tokens per second", 1, "{:,.0f}"),
    ("val_loss_start", "validation loss at the start", 1, "{:.4f}"),
    ("val_loss", "validation loss", 1, "{:.4f}"),
)
# rows of a GPU only; elsewhere the first is None
_OF_GPUS = ("peak_bytes", "tokens_per_s")
# training losses are plotted as means over this number of steps
_SMOOTHED = 10


def show_graphs() -> None:
    """Prints on stderr when layers become CUDA graphs; Python's logging hides these lines by default."""
    logger, shown = logging.getLogger("coat_kernels"), logging.StreamHandler()
    shown.setFormatter(logging.Formatter("COAT: %(message)s"))
    logger.addHandler(shown)
    logger.setLevel(logging.INFO)
    logger.propagate = False


class MetricsWriter:
    """Appends one JSON object per line to a file that is closed in between, so that records survive a crash.

    Args:
        path: the file; several runs may share it one after the other.
        run: the value of "run" in each record.
        resume_step: records of this run after that step are dropped first, since they are about to be
            measured again. None drops all records of this run.
    """

    def __init__(self, path: str | os.PathLike, run: str, resume_step: int | None = None):
        self._path, self._run = Path(path), run
        kept = [
            record
            for record in (read_metrics(path) if self._path.exists() else [])
            if record["run"] != run or (resume_step is not None and record["step"] <= resume_step)
        ]
        atomic_write(path, b"".join(map(_line, kept)))

    def write(self, step: int, **values: float | int) -> None:
        with writing(self._path), self._path.open("ab") as file:
            file.write(_line({"run": self._run, "step": step, **values}))


def _line(record: Mapping) -> bytes:
    return json.dumps(record).encode() + b"\n"


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """All complete records; a last line that was cut off by a crash is left out. Raises LaunchError for
    another line that is no record."""
    records = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n")[:-1], 1):
        try:
            records.append(json.loads(line))
            if not {"run", "step"} <= records[-1].keys():
                raise ValueError("a key is missing")
        except (ValueError, AttributeError) as error:
            raise LaunchError(
                f'{path}, line {number}: expected an object with "run" and "step", found {line[:60]!r} '
                f"({error}). Remove the line, or choose another folder with --output"
            ) from error
    return records


def plot_runs(metrics: list[dict], path: str | os.PathLike) -> None:
    """Plots the losses of all runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for index, run in enumerate(dict.fromkeys(record["run"] for record in metrics)):
        color, name = f"C{index}", run.upper()
        steps, losses = _points(metrics, run, "loss")
        # means over the last steps
        means = [fmean(losses[max(0, i + 1 - _SMOOTHED) : i + 1]) for i in range(len(losses))]
        axes.plot(steps, means, color=color, lw=1, label=f"{name} training, mean of {_SMOOTHED} steps")
        axes.plot(*_points(metrics, run, "val_loss"), "o", color=color, label=f"{name} validation")
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    image = io.BytesIO()
    figure.savefig(image, dpi=120)
    pyplot.close(figure)
    atomic_write(path, image.getvalue())


def _points(metrics: list[dict], run: str, key: str) -> tuple[list[int], list[float]]:
    found = {record["step"]: record[key] for record in metrics if record["run"] == run and key in record}
    return list(found), list(found.values())


def write_summary(path: str | os.PathLike, summary: Mapping) -> None:
    """Writes `summary`, or `{"bf16": {...}, "coat": {...}}`, each with the keys of the comparison."""
    atomic_write(path, json.dumps(summary, indent=2).encode() + b"\n")


def read_summary(path: str | os.PathLike) -> dict:
    """What `write_summary` wrote for one run. Raises LaunchError or CoatConfigError for any other content."""
    found = read_object(path)
    if missing := [key for key, *_ in _ROWS if key not in found]:
        raise LaunchError(
            f"{path}: expected the key {missing[0]!r}, found none. Remove it: the table then leaves out its "
            "run"
        )
    return found


def comparison_table(summary: Mapping[str, Mapping]) -> str:
    """The runs as columns, with the ratio of the last to the first if there are two."""
    two, on_gpu = len(summary) == 2, all(run["peak_bytes"] for run in summary.values())
    lines = [_row("", [*(run.upper() for run in summary), *(["ratio"] if two else [])])]
    lines.append("-" * len(lines[0]))
    for key, title, unit, form in _ROWS:
        if on_gpu or key not in _OF_GPUS:
            values = [run[key] for run in summary.values()]
            cells = [form.format(value / unit) for value in values]
            if two:
                cells.append(f"{values[1] / values[0]:.3f}" if values[0] else "-")
            lines.append(_row(title, cells))
    if two:
        lines += ["", "Losses are of one seed. Another seed may reverse their order: try --seed."]
    if not on_gpu:
        lines += ["", "Speed and peak memory are shown on a GPU only: CPU figures do not apply to GPUs."]
    return "\n".join(lines)


def _row(title: str, cells: list[str]) -> str:
    return f"{title:<45}" + "".join(f"{cell:>12}" for cell in cells)
