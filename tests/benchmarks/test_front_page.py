"""The README's table matches the committed results, and compares cases of one run."""

import csv
import shutil

import pytest

from benchmarks import front_page
from benchmarks.common.harness import RESULTS


@pytest.fixture
def results(tmp_path):
    for name in (front_page.MODELS, front_page.LARGER, front_page.LOSSES):
        shutil.copy(RESULTS / name, tmp_path)
    return tmp_path


def change(path, system, **values):
    """Rewrites the row at equal micro-batch of a system; without values, removes it."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = [r for r in rows if (r["system"], r["way"], r["limited"]) == (system, front_page.WAY, "False")]
    for row in found:
        rows.remove(row) if not values else row.update(values)
    assert found
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_the_committed_table_is_that_of_the_committed_files():
    readme = front_page.README.read_text()
    assert front_page.page(readme, RESULTS) == readme, "run python -m benchmarks report"
    changed = readme.replace("| COAT | ", "| COAT | 1", 1)
    assert changed != readme and front_page.page(changed, RESULTS) == readme
    with pytest.raises(ValueError, match="README.md: expected '<!-- end -->' behind"):
        front_page.page(readme.replace("<!-- end -->", ""), RESULTS)


def test_table_follows_the_results(results):
    change(results / front_page.MODELS, "BF16", peak_mb="96000", tokens_per_s_gpu="10000")
    change(results / front_page.MODELS, "COAT", peak_mb="48000", tokens_per_s_gpu="20000")
    table = front_page.table(results)
    assert "| COAT | 48.0 (0.50×) | 20,000 (2.00×) | 8,730 (4.1×) |" in table
    assert "| BF16 | 96.0 (1.00×) | 10,000 (1.00×) | 2,122 (1.0×) |" in table


def test_the_larger_model_is_shown_at_the_fastest_batch(results):
    with (results / front_page.LARGER).open("w", newline="") as opened:
        rows = csv.writer(opened)
        rows.writerow(["system", "way", "limited", "micro_batch", "tokens_per_s_gpu"])
        rows.writerows([["BF16", "zero3", False, 1, 1000.0], ["BF16", "zero3", True, 1, 1100.0]])
        rows.writerows([["COAT", "zero3", True, 4, 5500.0], ["COAT", "zero3", True, 6, 4400.0]])
        rows.writerows(
            [["COAT", "tp4", False, 1, 9000.0], ["BF16, MLP recomputed", "zero3", True, 3, 2000.0]]
        )
        rows.writerow(["TE FP8", "zero3", False, 1, ""])
    table = front_page.table(results)
    assert "| 1,100 (1.0×) |" in table and "| 5,500 (5.0×) |" in table and "| out of memory |" in table
    assert "BF16 with feed-forward recompute reaches 2,000" in table


def test_rows_of_several_runs_are_not_compared(results):
    change(results / front_page.MODELS, "COAT", commit="0000000")
    with pytest.raises(ValueError, match="of several runs"):
        front_page.table(results)
