"""The dry run trains every case on two ranks."""

import json

import pytest

from benchmarks.zero_gradients import CASES
from tests.benchmarks.dry import rows_of


@pytest.mark.long("a benchmark's dry run")
def test_every_case_has_a_row_of_each_rank(tmp_path):
    rows = rows_of(tmp_path / "rows.csv", "zero_gradients", "--quick")
    found = [(int(r["stage"]), int(r["micro_batches"]), json.loads(r["keys"]), r["rank"]) for r in rows]
    assert found == [(*case, rank) for case in CASES for rank in "01"]
    # all cases see the same tokens and weights
    assert len({r["loss"] for r in rows}) == 1 and not any(r.get("note") for r in rows)
