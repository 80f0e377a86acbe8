"""The dry run trains every case on two ranks."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.zero_gradients import CASES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long("a benchmark's dry run")
def test_every_case_has_a_row_of_each_rank(tmp_path):
    path = tmp_path / "rows.csv"
    command = [sys.executable, "-m", "benchmarks", "zero_gradients", "--quick", "--output", path]
    subprocess.run(command, cwd=ROOT, check=True)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = [(int(r["stage"]), int(r["micro_batches"]), json.loads(r["keys"]), r["rank"]) for r in rows]
    assert found == [(*case, rank) for case in CASES for rank in "01"]
    # all cases see the same tokens and weights
    assert len({r["loss"] for r in rows}) == 1 and not any(r.get("note") for r in rows)
