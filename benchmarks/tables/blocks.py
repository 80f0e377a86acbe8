"""Where tables stand on the pages of docs/, and what they are made of."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.common.harness import RESULTS, read_rows

DOCS = RESULTS.parents[1] / "docs"
BEGIN, END = "<!-- begin: python -m benchmarks report, {} -->\n", "<!-- end -->"
MARK = re.compile(re.escape(BEGIN).replace(r"\{\}", "(.+?)"))


class Results:
    """The rows of a folder of results."""

    def __init__(self, folder: Path):
        self.folder = folder

    def rows(self, file: str, **where) -> list[dict]:
        """Rows of a file with these values. Raises ValueError if there are none."""
        found = [r for r in read_rows(self.folder / file) if all(r.get(k) == v for k, v in where.items())]
        if not found:
            raise ValueError(f"{file}: expected rows with {where}, found none")
        return found

    def row(self, file: str, **where) -> dict:
        """The last of them, which is the latest."""
        return self.rows(file, **where)[-1]


BLOCKS: dict[str, dict[str, Callable[[Results], str]]] = {}


def block(page: str, name: str) -> Callable:
    """Registers a function of `Results` as what stands on a page between the marks of that name."""

    def register(made: Callable[[Results], str]) -> Callable[[Results], str]:
        BLOCKS.setdefault(page, {})[name] = made
        return made

    return register


def table(*lines: Iterable[str]) -> str:
    """The first line heads it."""
    head, *body = ([*line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *body))


def between(values: Iterable[float], form: str) -> str:
    low, high = (form.format(f(values)) for f in (min, max))
    return low if low == high else f"{low} to {high}"


def percent(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f} %"


def gb(row: dict) -> str:
    return f"{row['peak_mb'] / 1e3:.1f}"


def data(file: str, title: str = "") -> str:
    """A link to a file of benchmarks/results, as pages of docs/ have it."""
    return f"[{title or file.removesuffix('.csv')}](../benchmarks/results/{file})"


def filled(text: str, made: dict[str, str], name: str) -> str:
    """A page with each block between its marks.

    Raises ValueError unless the page `name` has the marks of each block once, and of no other.
    """
    marked = MARK.findall(text)
    if sorted(marked) != sorted(made):
        raise ValueError(f"{name}: expected marks of {sorted(made)}, found {sorted(marked)}")
    for title, content in made.items():
        before, begin, rest = text.partition(BEGIN.format(title))
        _, end, after = rest.partition(END)
        if not end:
            raise ValueError(f"{name}: expected {END!r} behind the mark of {title!r}")
        text = before + begin + content + end + after
    return text


def page(name: str, results: Path = RESULTS) -> str:
    """A page of docs/ as it has to be."""
    found = Results(results)
    made = {title: make(found) for title, make in BLOCKS[name].items()}
    return filled((DOCS / name).read_text(), made, name)


def write() -> None:
    """Fills the tables of all pages."""
    for name in BLOCKS:
        (DOCS / name).write_text(page(name))
