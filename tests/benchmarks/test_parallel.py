"""The benchmark of parallel layers counts what is sent and kept; nothing here is timed."""

import csv

import pytest
import torch

from benchmarks import parallel
from benchmarks.common.shapes import LAYERS
from benchmarks.layer import GATE
from tests.benchmarks.test_harness import run

COUNT = 1


@pytest.mark.long("a benchmark's dry run")
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs 2 GPUs or none")
def test_messages_are_counted(tmp_path):
    path = tmp_path / "parallel.csv"
    result = run("parallel", "--quick", "--rounds", "1", "--layers", str(COUNT), "--output", str(path))
    assert result.returncode == 0, result.stderr
    rows = {
        (int(row["tensor_parallel"]), row["sequence_parallel"] == "True", row["layer"]): row
        for row in csv.DictReader(path.open())
    }
    for split in parallel.SPLITS:
        bf16, coat = (rows[*split, layer] for layer in ("BF16", "COAT"))
        assert float(bf16["y_error"]) == 0 < float(coat["y_error"]) < GATE
        assert float(coat["saved_mb"]) < float(bf16["saved_mb"]) / 2
        assert float(coat["sum_mb"]) == float(bf16["sum_mb"])
        assert int(float(bf16["amax_count"])) == 0
    shape = LAYERS["tiny"]
    size = 2 * shape.tokens * shape.hidden * COUNT / 1e6
    # four sums over two ranks, each sending as much as it has: of two outputs and of two gradients
    assert float(rows[2, False, "BF16"]["sum_mb"]) == pytest.approx(4 * size)
    assert all(float(rows[2, False, layer]["gather_mb"]) == 0 for layer in ("BF16", "COAT"))
    # each but half of it; and six gathers of halves: of two inputs, twice, and of two gradients
    assert float(rows[2, True, "BF16"]["sum_mb"]) == pytest.approx(4 * size / 2)
    assert float(rows[2, True, "BF16"]["gather_mb"]) == pytest.approx(6 * size / 2)
    # one byte instead of two
    assert float(rows[2, True, "COAT"]["gather_mb"]) == pytest.approx(6 * size / 4)
    # nothing is kept whole on either rank, but for numbers a tensor
    kept = [float(rows[*split, "COAT"]["saved_mb"]) for split in ((1, False), (2, True))]
    assert kept[1] == pytest.approx(kept[0] / 2, rel=0.1)
    assert path.with_suffix(".png").stat().st_size > 0
