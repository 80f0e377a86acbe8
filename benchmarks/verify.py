"""Whether the headline figures hold: those stored, and those that this machine can measure again."""

import argparse
import csv
import functools
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.commands import Commands, Needs, NotRunnable, value_of
from benchmarks.common.harness import RESULTS, Table, benchmark, read_rows
from benchmarks.converge.table import distance
from benchmarks.report import markdown

EXPECTED = Path(__file__).parent / "expected_results.csv"
HOW = ("ratio", "largest", "difference", "above", "note")


class Expectation(NamedTuple):
    """A line of expected_results.csv; `verify --help` says what the columns are."""

    name: str
    expected: str
    tolerance: str
    better: str
    how: str
    column: str
    rows: str
    base: str
    file: str
    gpus: int
    gpu: str
    gb: float
    command: str

    @property
    def needs(self) -> Needs:
        return Needs(self.gpus, self.gpu, self.gb)


class Verdict(NamedTuple):
    result: str
    """pass, fail or not runnable."""
    found: float | str = ""
    reason: str = ""


def load(path: Path = EXPECTED) -> list[Expectation]:
    """Raises ValueError, naming line and column, for what cannot be."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    made = []
    for number, line in enumerate(lines, 2):
        try:
            numbers = {"gpus": int(line["gpus"] or 0), "gb": float(line["gb"] or 0)}
            one = Expectation(**(line | numbers))
            if one.how not in HOW or one.better not in ("less", "more", ""):
                raise ValueError(f"how {one.how!r}, better {one.better!r}")
            if not (one.file and one.command):
                raise ValueError("expected a file and a command")
            if one.how != "note":
                float(one.expected)
                _tolerance(one)
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(f"{path.name}, line {number} ({line.get('name')}): {error}") from error
        made.append(one)
    if len({one.name for one in made}) < len(made):
        raise ValueError(f"{path.name}: expected names that differ from each other")
    return made


def _tolerance(one: Expectation) -> float:
    """In units of the figure."""
    number, unit = one.tolerance.split()
    if unit not in ("%", "nat"):
        raise ValueError(f"tolerance {one.tolerance!r}: expected a number and % or nat")
    return float(number) * (abs(float(one.expected)) / 100 if unit == "%" else 1)


def picked(rows: list[dict], pick: str) -> list[dict]:
    """Rows in which every `column=value` of a pick, split by `;`, holds. LookupError if there are none."""
    wanted = dict(part.strip().split("=", 1) for part in pick.split(";"))
    found = [row for row in rows if all(str(row.get(k, "")) == v for k, v in wanted.items())]
    if not found:
        raise LookupError(f"no row with {pick}")
    return found


def _one(rows: list[dict], pick: str, column: str) -> float:
    found = picked(rows, pick)
    if len(found) > 1:
        raise LookupError(f"expected one row with {pick}, found {len(found)}")
    return value_of(found[0], column)


def _largest(rows: list[dict], pick: str, column: str) -> float:
    # a search for the largest has rows that did not fit
    if not (ran := [row for row in picked(rows, pick) if "note" not in row]):
        raise RuntimeError(f"none ran of the rows with {pick}")
    return max(value_of(row, column) for row in ran)


def figures(one: Expectation, rows: list[dict]) -> tuple[float | str, float, float]:
    """The figure, and those of row and base that it is made of; NaN where there are none.

    Raises NotRunnable if a package lacked, LookupError if a row is not there, RuntimeError if it failed.
    """
    if one.how == "note":
        notes = [row.get("note", "no note: it ran") for row in picked(rows, one.rows)]
        return next((one.expected for note in notes if one.expected in note), notes[0]), math.nan, math.nan
    if one.how in ("ratio", "largest"):
        of = {"ratio": _one, "largest": _largest}[one.how]
        this, base = of(rows, one.rows, one.column), math.nan
        if one.base:
            base = of(rows, one.base, one.column)
        return this / base if one.base else this, this, base
    found = distance(*([value_of(row, one.column) for row in picked(rows, p)] for p in (one.rows, one.base)))
    return {"difference": found.nats, "above": found.above}[one.how], found.mean, found.base


def judged(one: Expectation, found: float | str) -> Verdict:
    """Against a new measurement: no worse than expected, by more than the tolerance."""
    if one.how == "note":
        return Verdict("pass" if found == one.expected else "fail", found)
    off = found - float(one.expected)
    if abs(off) <= _tolerance(one):
        return Verdict("pass", found)
    if one.better and (off > 0) == (one.better == "more"):
        return Verdict("pass", found, "better than expected")
    return Verdict("fail", found, "worse than expected" if one.better else "not as expected")


def rounded(one: Expectation, found: float | str) -> bool:
    """Whether a stored figure is the expected one, to the digits that it is written with."""
    if one.how in ("note", "difference", "above"):
        return judged(one, found).result == "pass"
    digits = len(one.expected.partition(".")[2])
    return abs(found - float(one.expected)) <= 0.5000001 * 10**-digits


def told(check: Callable[..., Verdict]) -> Callable[..., Verdict]:
    """`check` with a verdict in place of NotRunnable, RuntimeError and LookupError."""

    @functools.wraps(check)
    def checked(*arguments, **keywords) -> Verdict:
        try:
            return check(*arguments, **keywords)
        except NotRunnable as error:
            return Verdict("not runnable", reason=str(error))
        except (RuntimeError, LookupError) as error:
            return Verdict("fail", reason=str(error))

    return checked


@told
def check_stored(one: Expectation, results: Path = RESULTS) -> Verdict:
    """Whether the stored rows give the expected figure."""
    found = figures(one, read_rows(results / one.file))[0]
    if not rounded(one, found):
        return Verdict("fail", found, f"{one.file} has another")
    return Verdict("pass", found)


@told
def check_again(one: Expectation, commands: Commands) -> Verdict:
    """Whether a new measurement gives the expected figure."""
    rows = commands.rows(one.command, one.needs)
    if commands.quick:
        raise NotRunnable(f"a dry run: {len(rows)} rows")
    try:
        found = figures(one, rows)[0]
    except LookupError:
        if one.command in commands.cut:
            raise NotRunnable("no time left") from None
        raise
    if one.how == "largest" and one.command in commands.cut:
        raise NotRunnable("no time left to look for the largest")
    return judged(one, found)


def chosen(only: list[str] | None) -> list[Expectation]:
    """The expectations of these names, or that begin with them; all without any."""
    expectations = load()
    names = [one.name for one in expectations]
    for name in only or ():
        if not any(known.startswith(name) for known in names):
            raise SystemExit(f"--only {name}: expected the start of one of {', '.join(names)}")
    return [one for one in expectations if only is None or one.name.startswith(tuple(only))]


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--stored", action="store_true", help="benchmarks/results alone; measures nothing")
    add("--only", nargs="+", metavar="NAME", help="only these, or those that begin so")
    add("--minutes", type=float, default=math.inf, help="start no command after that")
    add("--work", type=Path, help="folder of measurements; those that it holds are not repeated")


@benchmark(needs_gpu=False, options=options)
def verify(arguments, table: Table) -> None:
    """The headline figures, expected_results.csv: measured again here, as far as the machine allows.

    Prints pass, fail or not runnable for each, the most telling first; the exit status is 1 if one fails or
    none could be measured. With --stored it checks instead that each equals benchmarks/results, from which
    the tables of README and docs are made. Columns of expected_results.csv:
    - expected, tolerance, better: the figure, by how many % or nat it may be off, and whether less or more is
      better, so passes too;
    - how: ratio of a column in the row to that in the base, or the row's own without a base; the largest over
      rows that ran; difference of means; by how much the mean is above all of the base; note: the row
      failed, which its note shows;
    - rows, base: `column=value; column=value`; file: where they are stored;
    - gpus, gpu, gb: how many, what their name holds, and 10^9 bytes of each; command: what measures it.
    """
    deadline = time.monotonic() + 60 * arguments.minutes
    shown, rows = [], chosen(arguments.only)
    with (
        tempfile.TemporaryDirectory() as temporary,
        Commands(arguments.work or Path(temporary), deadline, arguments.quick) as commands,
    ):
        if not arguments.stored:
            commands.want_all((one.command, one.needs) for one in rows)
        for one in rows:
            verdict = check_stored(one) if arguments.stored else check_again(one, commands)
            shown.append({"name": one.name, "result": verdict.result})
            shown[-1] |= {"found": verdict.found, "expected": one.expected, "tolerance": one.tolerance}
            shown[-1] |= {"reason": verdict.reason}
            # what is stored is no measurement
            if not arguments.stored or arguments.output:
                table.add(**shown[-1])
    print("", *markdown(shown), sep="\n")
    results = [row["result"] for row in shown]
    counts = ", ".join(f"{results.count(kind)} {kind}" for kind in ("pass", "fail", "not runnable"))
    print(counts + (" here" if not arguments.stored else ""))
    if "fail" in results or ("pass" not in results and not arguments.quick):
        raise SystemExit(1)
