"""What a run leaves behind and shows: metrics, the loss curves, the comparison, progress."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tqdm import tqdm

from launch.json_file import read_object

# rows of the comparison, the key in summary.json first
_ROWS = (
    ("val_loss_start", "validation loss at the start", "{:.4f}"),
    ("val_loss", "validation loss", "{:.4f}"),
    ("state_bytes_per_param", "optimizer state, bytes per parameter", "{:.3f}"),
    ("saved_bytes_per_token_layer", "saved for backward, bytes per token and layer", "{:,.0f}"),
    ("peak_bytes", "peak memory ({peak_kind}), MiB", None),
    ("tokens_per_s", "tokens per second", "{:,.0f}"),
)


class OutputError(RuntimeError):
    """The output folder cannot be written; the message names the path, the reason and the way out."""


def prepare_folder(folder: str | os.PathLike) -> Path:
    """Makes the folder and shows that files can be written there, before any time is spent on training."""
    folder = Path(folder)

    def probe():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass

    writing(folder, probe)
    return folder


def atomic_write(path: str | os.PathLike, data: bytes) -> None:
    """Replaces the file in one step, so that a reader or a crash never meets half of it."""
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
    """What the action returns. Raises OutputError in place of its OSErrors."""
    try:
        return action()
    except OSError as error:
        raise OutputError(
            f"cannot write {path} ({error.strerror}): make room or set the permissions, "
            "or choose another folder with --output"
        ) from error


class MetricsWriter:
    """Appends one JSON object a line and flushes it, so that what was measured survives any end.

    Args:
        path: the file; several runs may share it one after the other.
        run: written as "run" into each record.
        resume_step: records of this run beyond that step are dropped first, for they are about to be measured
            again. None drops all records of this run.
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


def plot_losses(metrics: list[dict], path: str | os.PathLike) -> None:
    """Training loss as thin lines and validation loss as marked ones, one colour for each run."""
    import io

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for index, run in enumerate(dict.fromkeys(record["run"] for record in metrics)):
        for key, style in (("loss", {"linewidth": 0.8, "alpha": 0.6}), ("val_loss", {"marker": "o"})):
            points = [(r["step"], r[key]) for r in metrics if r["run"] == run and key in r]
            if points:
                label = f"{run.upper()} {'training' if key == 'loss' else 'validation'}"
                axes.plot(*zip(*points, strict=True), color=f"C{index}", label=label, **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    image = io.BytesIO()
    figure.savefig(image, dpi=120)
    pyplot.close(figure)
    atomic_write(path, image.getvalue())


def write_summary(path: str | os.PathLike, summary: Mapping[str, Mapping]) -> None:
    """Writes `{"bf16": {...}, "coat": {...}}`, each with the keys of the comparison."""
    atomic_write(path, json.dumps(summary, indent=2).encode() + b"\n")


def read_summary(path: str | os.PathLike) -> dict:
    """What `write_summary` has written of one run. Raises OutputError for anything else."""
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
    """The runs side by side, with the last over the first where there are two."""
    runs = list(summary)
    rows = [["", *(run.upper() for run in runs), *(["ratio"] if len(runs) == 2 else [])]]
    for key, title, form in _ROWS:
        values = [summary[run][key] for run in runs]
        if key == "peak_bytes":
            title = title.format(peak_kind=summary[runs[0]]["peak_kind"])
            cells = [f"{value / 2**20:,.0f}" for value in values]
        else:
            cells = [form.format(value) for value in values]
        if len(runs) == 2:
            cells.append(f"{values[1] / values[0]:.3f}" if values[0] else "-")
        rows.append([title, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


class Progress:
    """A bar on a terminal, else about twenty lines a run."""

    def __init__(self, total: int, initial: int, description: str, *, stream=None):
        self._stream = stream if stream is not None else sys.stdout
        self._total, self._step, self._description = total, initial, description
        self._every = max(1, (total - initial) // 20)
        terminal = self._stream.isatty()
        self._bar = (
            tqdm(total=total, initial=initial, desc=description, unit="step", file=self._stream)
            if terminal
            else None
        )

    def update(self, *, loss: float, tokens_per_s: float, memory_bytes: int | None = None) -> None:
        """One more step done. `memory_bytes` is shown where there is a GPU."""
        self._step += 1
        shown = f"loss {loss:.4f}, {tokens_per_s:,.0f} tokens/s"
        if memory_bytes is not None:
            shown += f", {memory_bytes / 2**30:.2f} GiB"
        if self._bar is not None:
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update()
        elif self._step % self._every == 0 or self._step == self._total:
            self.say(f"step {self._step}/{self._total}: {shown}")

    def say(self, text: str) -> None:
        """A line that does not break the bar."""
        if self._bar is not None:
            self._bar.write(f"{self._description}: {text}", file=self._stream)
        else:
            print(f"{self._description}: {text}", file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
