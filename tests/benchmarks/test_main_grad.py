"""All ways add the same weight gradient; nothing here is timed."""

import csv

import pytest
import torch

from tests.benchmarks.test_harness import run

ON_GPU = torch.cuda.is_available()


@pytest.mark.long("a benchmark's dry run")
def test_every_way_adds_the_product(tmp_path):
    path = tmp_path / "main_grad.csv"
    result = run("main_grad", "--quick", "--output", str(path))
    assert result.returncode == 0, result.stderr
    rows = {(row["sums"], row["way"]): row for row in csv.DictReader(path.open())}
    ways = ["product", "product, torch's add_", "product, our add", "ours"]
    assert list(rows) == [(sums, way) for sums in ("fast", "full") for way in ways]
    for (sums, way), row in rows.items():
        # FP32 loses at most 2^-24 with each of 64 terms. What is written is rounded to BF16, by 2^-9 at most,
        # after two steps of 32 terms of which a GPU may lose 2^-13 each
        unrounded = (sums, way) == ("fast", "ours") and not ON_GPU
        least, most = (0, 64 * 2**-24) if unrounded else (2**-12, 2**-9 + 2 * 2**-13)
        assert least <= float(row["error"]) < most, row
        assert float(row["ms"]) > 0 and (way != ways[1] or float(row["to_add"]) == 1), row
