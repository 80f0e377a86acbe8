"""The tables of docs/ match the committed results, and measured figures occur in tables only."""

import csv
import re
import shutil

import pytest

from benchmarks import tables
from benchmarks.common.harness import RESULTS

# a measured figure; sizes that a user chooses are excluded
FIGURE = re.compile(
    r"\d (?:ns|ms|MB|tokens per second|TFLOP/s)\b|\d(?:\.\d+)? times (?:as|faster|less)|\d\.\d (?:%|GB)"
)
BLOCK = re.compile(r"<!-- begin: .*?<!-- end -->|^```.*?^```", re.S | re.M)
# from other sources: arithmetic that the page shows
ELSEWHERE = {
    "design.md": ["which gives 0.4 % more error"],
}


@pytest.mark.parametrize("name", tables.BLOCKS)
def test_the_committed_tables_are_those_of_the_committed_files(name):
    committed = (tables.DOCS / name).read_text()
    assert tables.page(name) == committed, "run python -m benchmarks report"


def test_tables_follow_the_results(tmp_path):
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "train_8b_2gpu.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["tokens_per_s_gpu"] = "1234.5"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    made = tables.BLOCKS["performance.md"]["same batch"](tables.Results(tmp_path))
    assert "(../benchmarks/results/train_8b_2gpu.csv) | 1,234 | – | 1,234 | 110.5 | – | 65.6 |" in made
    assert tables.page("performance.md", tmp_path) != (tables.DOCS / "performance.md").read_text()
    path.unlink()
    with pytest.raises(ValueError, match="train_8b_2gpu.csv: expected rows with .*found none"):
        tables.page("performance.md", tmp_path)


def test_no_figure_is_typed():
    for path in tables.DOCS.glob("*.md"):
        text = BLOCK.sub("", path.read_text())
        for sentence in ELSEWHERE.get(path.name, []):
            assert sentence in text, f"{path.name}: {sentence} is not there any more"
            text = text.replace(sentence, "")
        typed = [line for line in text.splitlines() if FIGURE.search(line)]
        assert typed == [], f"{path.name}: move these into benchmarks/tables"
