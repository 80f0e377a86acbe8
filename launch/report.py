"""A run's outputs: metrics, the loss curves, the comparison, progress."""

import contextlib
import io
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from coat_launch.errors import LaunchError
from coat_launch.files import atomic_write, read_object, writing

# rows of the comparison: the key in summary.json, the title, its unit and its format
_ROWS = (
    ("state_bytes_per_param", "optimizer state, bytes per parameter", 1, "{:.3f}"),
    ("saved_bytes_per_token_layer", "saved for backward, bytes per token and layer", 1, "{:,.0f}"),
    ("peak_bytes", "peak memory (GPU allocator), MiB", 2**20, "{:,.0f}"),
    ("tokens_per_s", "tokens per second", 1, "{:,.0f}"),
    ("val_loss_start", "validation loss at the start", 1, "{:.4f}"),
    ("val_loss", "validation loss", 1, "{:.4f}"),
)
# rows that are measured on a GPU only, and `peak_kind` there
_OF_GPUS, GPU_PEAK = ("peak_bytes", "tokens_per_s"), "GPU allocator"
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
    """Appends one JSON object per line and flushes it, so that records survive a crash.

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
        with writing(path):
            self._file = self._path.open("ab")

    def write(self, step: int, **values: float | int) -> None:
        with writing(self._path):
            self._file.write(_line({"run": self._run, "step": step, **values}))
            self._file.flush()

    def close(self) -> None:
        # closing would retry a write that failed on a full disk, which `write` has reported
        with contextlib.suppress(OSError):
            self._file.close()


def _line(record: Mapping) -> bytes:
    return json.dumps(record).encode() + b"\n"


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """All complete records; a last line that was cut off by a crash is left out.

    Raises LaunchError for a line that is no record.
    """
    records = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
            _ = record["run"], record["step"] + 1
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise LaunchError(
                f"{path}, line {number}: expected a record with run and step, found {line[:60]!r}: remove "
                "the line, or choose another folder with --output"
            ) from error
        records.append(record)
    return records


def plot_runs(metrics: list[dict], path: str | os.PathLike) -> None:
    """Plots the losses of all runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for index, run in enumerate(dict.fromkeys(record["run"] for record in metrics)):
        color, name = f"C{index}", run.upper()
        losses, validations = (_points(metrics, run, key) for key in ("loss", "val_loss"))
        label = f"{name} training, mean of {_SMOOTHED} steps"
        axes.plot(list(losses), _means(list(losses.values())), color=color, lw=1, label=label)
        axes.plot(list(validations), list(validations.values()), "o", color=color, label=f"{name} validation")
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    image = io.BytesIO()
    figure.savefig(image, dpi=120)
    pyplot.close(figure)
    atomic_write(path, image.getvalue())


def _points(metrics: list[dict], run: str, key: str) -> dict[int, float]:
    return {record["step"]: record[key] for record in metrics if record["run"] == run and key in record}


def _means(values: list[float]) -> list[float]:
    """Running means over the last `_SMOOTHED` values."""
    return [fmean(values[max(0, i + 1 - _SMOOTHED) : i + 1]) for i in range(len(values))]


def write_summary(path: str | os.PathLike, summary: Mapping) -> None:
    """Writes `summary`, or `{"bf16": {...}, "coat": {...}}`, each with the keys of the comparison."""
    atomic_write(path, json.dumps(summary, indent=2).encode() + b"\n")


def read_summary(path: str | os.PathLike) -> dict:
    """Reads one run from the file of `write_summary`. Raises LaunchError for any other content."""
    try:
        summary = read_object(path)
        if missing := {"peak_kind", *(key for key, *_ in _ROWS)} - summary.keys():
            raise ValueError(f"no {min(missing)} in it")
    except ValueError as error:
        raise LaunchError(f"{path}: {error}: remove it, or choose another folder with --output") from error
    return summary


def comparison_table(summary: Mapping[str, Mapping]) -> str:
    """The runs as columns, with the ratio of the last to the first if there are two."""
    runs = list(summary)
    rows = [["", *(run.upper() for run in runs), *(["ratio"] if len(runs) == 2 else [])]]
    on_gpu = all(summary[run]["peak_kind"] == GPU_PEAK for run in runs)
    for key, title, unit, form in _ROWS:
        if key in _OF_GPUS and not on_gpu:
            continue
        values = [summary[run][key] for run in runs]
        cells = [form.format(value / unit) for value in values]
        if len(runs) == 2:
            cells.append(f"{values[1] / values[0]:.3f}" if values[0] else "-")
        rows.append([title, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    if len(runs) == 2:
        lines += ["", "Losses are of one seed. Another seed may reverse their order: try --seed."]
    if not on_gpu:
        lines += ["", "Speed and peak memory are shown on a GPU only: CPU figures do not apply to GPUs."]
    return "\n".join(lines)


class Progress:
    """About twenty lines per run."""

    def __init__(self, total: int, initial: int, description: str):
        self._total, self._description = total, description
        self._every = max(1, (total - initial) // 20)

    def update(self, step: int, *, loss: float, tokens_per_s: float, memory_bytes: int | None) -> None:
        """Reports a step. Speed is shown only with `memory_bytes`, which is the GPU's."""
        if step % self._every == 0 or step == self._total:
            shown = f"loss {loss:.4f}"
            if memory_bytes is not None:
                shown += f", {tokens_per_s:,.0f} tokens/s, {memory_bytes / 2**30:.2f} GiB"
            self.say(f"step {step}/{self._total}: {shown}")

    def say(self, text: str) -> None:
        print(f"{self._description}: {text}", flush=True)
