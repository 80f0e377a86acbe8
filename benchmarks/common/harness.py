"""One registry and one table format."""

import csv
import io
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.environment import environment
from benchmarks.common.memory import release
from coat_launch.files import atomic_write


class Benchmark(NamedTuple):
    run: Callable
    needs_gpu: bool
    options: Callable | None
    writes_table: bool


BENCHMARKS: dict[str, Benchmark] = {}
RESULTS = Path(__file__).parents[1] / "results"


def benchmark(
    run: Callable | None = None,
    *,
    needs_gpu: bool = True,
    options: Callable | None = None,
    writes_table: bool = True,
) -> Callable:
    """Registers `run(arguments, table)` under its function's name; its docstring is the help text.

    `options(parser)` adds arguments of its own to those that every benchmark has. One that writes no table
    is given None.
    """
    if run is None:
        return partial(benchmark, needs_gpu=needs_gpu, options=options, writes_table=writes_table)
    BENCHMARKS[run.__name__] = Benchmark(run, needs_gpu, options, writes_table)
    return run


def reason(error: Exception) -> str:
    """The kind of an error and the start of what it says, for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def row_or_note(measure: Callable[[], dict]) -> dict:
    """The row that `measure` returns; a row that says why where it fails, so that the others go on."""
    try:
        row = measure()
    except Exception as error:
        row = {"note": reason(error)}
    # not in the handler: the traceback holds the tensors
    release()
    return row


def read_rows(path: Path) -> list[dict]:
    """Rows of a table that was written, numbers as numbers, without empty cells; none if there is no file."""

    def value(text: str) -> object:
        if text in ("True", "False"):
            return text == "True"
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                pass
        return text

    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{k: value(v) for k, v in row.items() if v != ""} for row in csv.DictReader(file)]


class Table:
    """Rows that are printed as they come and written to one CSV file, headed by the environment.

    The file has each row at once: an interrupted benchmark keeps what was measured.
    """

    def __init__(self, name: str, path: Path | None):
        self.environment, self.name = environment(), name
        self.path = path or RESULTS / f"{name}.csv"
        self.rows: list[dict[str, object]] = []
        print("  ".join(f"{k} {v}" for k, v in self.environment.items()), flush=True)

    def add(self, **row: object) -> None:
        """Prints a row and writes the file."""
        self.extend([row])

    def extend(self, rows: Iterable[dict[str, object]]) -> None:
        """Prints rows and writes the file once."""
        for row in rows:
            self.rows.append(row)
            shown = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values())
            if len(self.rows) == 1 or list(row) != list(self.rows[-2]):
                print("  ".join(f"{k:>14}" for k in row), flush=True)
            print("  ".join(f"{v:>14}" for v in shown), flush=True)
        self.write()

    def write(self) -> None:
        """Writes what rows there are, which may have changed; one that was measured earlier brings its own
        environment."""
        if not self.rows:
            return
        own = [k for row in self.rows for k in row if k not in self.environment]
        columns = [*dict.fromkeys(own), *self.environment]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        for row in self.rows:
            writer.writerow(row if "date" in row else self.environment | row)
        atomic_write(self.path, text.getvalue().encode())
