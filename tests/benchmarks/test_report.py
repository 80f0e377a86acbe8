"""The page of results matches the committed files."""

import csv
import shutil

import pytest

from benchmarks import (
    __main__,  # noqa: F401  (fills the registry)
    front_page,
    loss_picture,
    report,
)
from benchmarks.common import plot
from benchmarks.common.harness import RESULTS

ENVIRONMENT = {
    "date": "2026-11-21", "device": "H200", "cuda": "13.0", "torch": "2.11", "triton": "3.6", "commit": "abc",
    "command": "python -m benchmarks x",
}  # fmt: skip


def write(path, rows):
    columns = [*dict.fromkeys(k for row in rows for k in row), *ENVIRONMENT]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(row | ENVIRONMENT for row in rows)


def test_the_committed_page_is_that_of_the_committed_files():
    expected = report.build(RESULTS)
    assert report.PAGE.read_text() == expected, "run python -m benchmarks report"


@pytest.mark.parametrize("picture", [front_page, loss_picture])
def test_the_committed_pictures_show_the_committed_files(picture, tmp_path):
    assert plot.digest_of(picture.PICTURE) == plot.digest(picture.drawn(RESULTS)), (
        "run python -m benchmarks report"
    )
    picture.plot(RESULTS, tmp_path / "drawn.png")
    assert plot.digest_of(tmp_path / "drawn.png") == plot.digest_of(picture.PICTURE)


def test_every_file_and_plot_is_on_the_page_and_every_table_has_conditions(tmp_path):
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    write(tmp_path / "something.csv", [{"what": "new | odd", "large": 1234567.8, "small": 0.123456}])
    page = report.build(tmp_path)
    for path in (*tmp_path.glob("*.csv"), *tmp_path.glob("*.png")):
        assert f"](results/{path.name})" in page, path
    assert page.count("\nConditions: ") == page.count("\n### ") == len(list(tmp_path.glob("*.csv")))
    assert "| new \\| odd | 1,234,568 | 0.1235 |" in page


def test_what_is_claimed_of_convergence_is_checked(tmp_path):
    losses = {"bf16": (2.0, 2.01), "coat": (2.013,), "coat-fastest": (2.009, 2.003)}
    rows = [
        {"run": kind, "seed": s, "val_loss": v}
        for kind, values in losses.items()
        for s, v in enumerate(values)
    ]
    write(tmp_path / "converge.csv", rows)
    page = report.build(tmp_path)
    assert "at most 0.01 nat above their mean, 2.0050. Spread of 2 seeds: 2.0000 to 2.0100." in page
    beside = "+0.0080 nat, +0.0130 to BF16 of the same seeds, 0.0030 above the spread"
    assert f"- coat, 1 seed: 2.0130, {beside}: does not hold." in page
    assert "- coat-fastest, 2 seeds: 2.0060, +0.0010 nat: holds." in page
