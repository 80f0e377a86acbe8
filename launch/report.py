"""A run's outputs: metrics, the loss curves, the comparison, progress."""

import contextlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean

from coat_launch.json_file import read_object

# rows of the comparison, the key in summary.json first
_ROWS = (
    ("state_bytes_per_param", "optimizer state, bytes per parameter", "{:.3f}"),
    ("saved_bytes_per_token_layer", "saved for backward, bytes per token and layer", "{:,.0f}"),
    ("peak_bytes", "peak memory (GPU allocator), MiB", None),
    ("tokens_per_s", "tokens per second", "{:,.0f}"),
    ("val_loss_start", "validation loss at the start", "{:.4f}"),
    ("val_loss", "validation loss", "{:.4f}"),
)
# rows that are measured on a GPU only, and `peak_kind` there
_OF_GPUS, GPU_PEAK = ("peak_bytes", "tokens_per_s"), "GPU allocator"
_BARS = (
    ("state_bytes_per_param", "optimizer state,\nbytes per parameter"),
    ("saved_bytes_per_token_layer", "saved for backward,\nbytes per token and layer"),
)
# training losses are plotted as means over this number of steps
_SMOOTHED = 10


class OutputError(RuntimeError):
    """The output folder cannot be written; the message names the path, the reason and the fix."""


def show_graphs() -> None:
    """Prints on stderr when layers become CUDA graphs; Python's logging hides these lines by default."""
    logger, shown = logging.getLogger("coat_kernels"), logging.StreamHandler()
    shown.setFormatter(logging.Formatter("COAT: %(message)s"))
    logger.addHandler(shown)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def prepare_folder(folder: str | os.PathLike) -> Path:
    """Creates the folder and tests that files can be written there, before training starts."""
    folder = Path(folder)

    def probe():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass

    writing(folder, probe)
    return folder


def atomic_write(path: str | os.PathLike, data: bytes) -> None:
    """Replaces the file atomically, so that neither a reader nor a crash leaves a partial file."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")

    def write():
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    writing(path, write)


def writing(path: Path, action: Callable[[], object]):
    """The action's return value. Raises OutputError in place of its OSErrors."""
    try:
        return action()
    except OSError as error:
        raise OutputError(
            f"cannot write {path} ({error.strerror}): make room or set the permissions, "
            "or choose another folder with --output"
        ) from error


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
        atomic_write(path, b"".join(_line(record) for record in kept))
        self._file = writing(self._path, lambda: self._path.open("ab"))

    def write(self, step: int, **values: float | int) -> None:
        record = _line({"run": self._run, "step": step, **values})

        def append():
            self._file.write(record)
            self._file.flush()

        writing(self._path, append)

    def close(self) -> None:
        # closing would retry a write that failed on a full disk, which `write` has reported
        with contextlib.suppress(OSError):
            self._file.close()


def _line(record: Mapping) -> bytes:
    return json.dumps(record).encode() + b"\n"


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """All complete records; a last line that was cut off by a crash is left out.

    Raises OutputError for a line that is no record.
    """
    records = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(line) if line else None
            good = record is None or (type(record["run"]) is str and type(record["step"]) is int)
        except (ValueError, TypeError, KeyError, RecursionError):
            good = False
        if not good:
            raise OutputError(
                f"{path}, line {number}: expected a record with run and step, found {line[:60]!r}: remove "
                "the line, or choose another folder with --output"
            )
        if record is not None:
            records.append(record)
    return records


def plot_runs(metrics: list[dict], summary: Mapping[str, Mapping], path: str | os.PathLike) -> None:
    """Plots the losses of all runs; bars of what each stores; for two runs, the distance of their losses."""
    import io

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = list(dict.fromkeys(record["run"] for record in metrics))
    above, below = (key for key, _ in _BARS)
    layout = [["losses", above], ["apart" if len(runs) == 2 else "losses", below]]
    figure, panels = pyplot.subplot_mosaic(
        layout, figsize=(10, 6), width_ratios=(3, 1), height_ratios=(3, 2), layout="constrained"
    )
    _draw_losses(panels["losses"], metrics, runs)
    if len(runs) == 2:
        _draw_distance(panels["apart"], metrics, runs)
    for key, title in _BARS:
        axes = panels[key]
        for index, run in enumerate(run for run in runs if run in summary):
            bar = axes.bar(run.upper(), summary[run][key], color=f"C{index}")
            axes.bar_label(bar, fmt="{:,.4g}")
        axes.set_title(title, fontsize="medium")
        axes.margins(y=0.15)
        axes.set_yticks([])
    image = io.BytesIO()
    figure.savefig(image, dpi=120)
    pyplot.close(figure)
    atomic_write(path, image.getvalue())


def _points(metrics: list[dict], run: str, key: str) -> dict[int, float]:
    return {record["step"]: record[key] for record in metrics if record["run"] == run and key in record}


def _means(values: list[float]) -> list[float]:
    """Running means over the last `_SMOOTHED` values."""
    return [fmean(values[max(0, i + 1 - _SMOOTHED) : i + 1]) for i in range(len(values))]


def _draw_losses(axes, metrics: list[dict], runs: list[str]) -> None:
    for index, run in enumerate(runs):
        losses, validations = _points(metrics, run, "loss"), _points(metrics, run, "val_loss")
        color, dashed = f"C{index}", "--" if index else "-"
        if losses:
            label = f"{run.upper()} training, mean of {_SMOOTHED} steps"
            axes.plot(list(losses), _means(list(losses.values())), dashed, color=color, lw=1, label=label)
        if validations:
            points = list(validations), list(validations.values())
            axes.plot(
                *points, "o", color=color, mfc="none" if index else color, label=f"{run.upper()} validation"
            )
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()


def _draw_distance(axes, metrics: list[dict], runs: list[str]) -> None:
    """The second run's training loss minus the first's on the same batches. The band is the first run's
    scatter from batch to batch, measured over the second half of the run."""
    first, second = (_points(metrics, run, "loss") for run in runs)
    steps = [step for step in first if step in second]
    if len(steps) > 2 * _SMOOTHED:
        values = [first[step] for step in steps]
        rest = [value - mean for value, mean in zip(values, _means(values), strict=True)][len(steps) // 2 :]
        scatter = fmean(r * r for r in rest) ** 0.5 / _SMOOTHED**0.5
        axes.axhspan(-scatter, scatter, color="0.85", label=f"{runs[0].upper()}'s own scatter")
    apart = _means([second[step] - first[step] for step in steps])
    axes.plot(steps, apart, color="C1", label=f"{runs[1].upper()} minus {runs[0].upper()}, same batches")
    axes.axhline(0, color="0.5", lw=0.5)
    axes.set(xlabel="step", ylabel="nats")
    axes.legend(fontsize="small")


def write_summary(path: str | os.PathLike, summary: Mapping[str, Mapping]) -> None:
    """Writes `{"bf16": {...}, "coat": {...}}`, each with the keys of the comparison."""
    atomic_write(path, json.dumps(summary, indent=2).encode() + b"\n")


def read_summary(path: str | os.PathLike) -> dict:
    """Reads one run from the file of `write_summary`. Raises OutputError for any other content."""
    try:
        summary = read_object(path)
        for key, *_ in _ROWS:
            if type(summary.get(key)) not in (int, float):
                raise ValueError(f"{key}: expected a number, found {summary.get(key)!r}")
        if type(summary.get("peak_kind")) is not str:
            raise ValueError(f"peak_kind: expected a string, found {summary.get('peak_kind')!r}")
    except ValueError as error:
        raise OutputError(f"{path}: {error}: remove it, or choose another folder with --output") from error
    return summary


def comparison_table(summary: Mapping[str, Mapping]) -> str:
    """The runs as columns, with the ratio of the last to the first if there are two."""
    runs = list(summary)
    rows = [["", *(run.upper() for run in runs), *(["ratio"] if len(runs) == 2 else [])]]
    on_gpu = all(summary[run]["peak_kind"] == GPU_PEAK for run in runs)
    for key, title, form in _ROWS:
        if key in _OF_GPUS and not on_gpu:
            continue
        values = [summary[run][key] for run in runs]
        cells = [f"{v / 2**20:,.0f}" if key == "peak_bytes" else form.format(v) for v in values]
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
    """A bar on a terminal, else about twenty lines per run."""

    def __init__(self, total: int, initial: int, description: str, *, stream=None):
        self._stream = stream if stream is not None else sys.stdout
        self._total, self._step, self._description = total, initial, description
        self._every = max(1, (total - initial) // 20)
        self._bar = None
        if self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=initial, desc=description, unit="step", file=self._stream)

    def update(self, *, loss: float, tokens_per_s: float, memory_bytes: int | None = None) -> None:
        """Reports one more step. Speed is shown only with `memory_bytes`, which is the GPU's."""
        self._step += 1
        shown = f"loss {loss:.4f}"
        if memory_bytes is not None:
            shown += f", {tokens_per_s:,.0f} tokens/s, {memory_bytes / 2**30:.2f} GiB"
        if self._bar is not None:
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update()
        elif self._step % self._every == 0 or self._step == self._total:
            self.say(f"step {self._step}/{self._total}: {shown}")

    def say(self, text: str) -> None:
        """Prints a line without breaking the bar."""
        if self._bar is not None:
            self._bar.write(f"{self._description}: {text}", file=self._stream)
        else:
            print(f"{self._description}: {text}", file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
