"""Benchmarks of Megatron's step and of watching count bytes correctly; nothing here is timed."""

import pytest
import torch

from tests.benchmarks.dry import rows_of


@pytest.mark.long("a benchmark's dry run")
@pytest.mark.skipif(torch.cuda.is_available(), reason="gradients and weights in the allocator's pages")
def test_states_of_a_megatron_step_are_counted(tmp_path):
    found = rows_of(tmp_path / "megatron_step.csv", "megatron_step", "--quick")
    rows = {row["optimizer"]: row for row in found}
    held = {name: float(row["held_bytes_per_parameter"]) for name, row in rows.items() if not row["note"]}
    # weights 2, gradients 4, masters 4, or 2 in addition to the weights, moments 8 or 2.08; norms keep 8
    for name, expected in {"Megatron's Adam": 18, "COAT": 12.08, "COAT, precision aware": 10.08}.items():
        assert expected < held[name] < expected + 0.1, name


@pytest.mark.long("a benchmark's dry run")
def test_readings_are_taken_where_they_are_asked_for(tmp_path):
    off, watched = rows_of(tmp_path / "watch.csv", "watch", "--quick")
    assert [int(row["every"]) for row in (off, watched)] == [0, 4]
    assert int(off["figures"]) == 0 < int(watched["figures"])
