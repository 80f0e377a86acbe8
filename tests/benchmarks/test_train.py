"""The end-to-end benchmark: its search, its arithmetic, and a dry run; nothing here is timed."""

import math

import pytest
import torch

from benchmarks.common.harness import read_rows
from benchmarks.common.whole_models import Job
from benchmarks.train.search import identity, next_case
from tests.benchmarks.dry import rows_of

JOB = Job("llama2-7b", "zero2", "BF16", 32, 4)


def search(
    fixed: float, slope: float, limit: float, fits=lambda peak, limit: peak <= limit, planned: int = 0
) -> list[dict]:
    """Rows of a complete search, where the peak of micro-batch m is `fixed + slope * m` bytes."""
    rows = []
    while (case := next_case([JOB], rows, limit, {JOB: planned})) is not None:
        assert len(rows) < 20
        peak = fixed + slope * case.micro_batch
        if case.limited and not fits(peak, limit):
            rows.append(identity(case) | {"note": "OutOfMemoryError: CUDA out of memory"})
        else:
            rows.append(identity(case) | {"peak_mb": peak / 1e6, "between_steps_mb": 0.9 * fixed / 1e6})
    return rows


@pytest.mark.parametrize("slope", [1e9, 3.3e9, 7e9, 26e9])
def test_the_search_ends_at_the_largest_micro_batch_that_fits(slope):
    rows = search(50e9, slope, 80e9)
    largest = max((row["micro_batch"] for row in rows if row["limited"] and "peak_mb" in row), default=0)
    assert largest == int(30e9 / slope)
    assert rows[0]["micro_batch"] == JOB.micro_batch and not rows[0]["limited"]


@pytest.mark.parametrize(
    ("planned", "tried"),
    [(30, [4, 30, 15]), (29, [4, 29, 30, 15]), (31, [4, 31, 15, 30]), (40, [4, 40, 15, 30])],
)
def test_the_search_begins_where_the_plan_ends(planned, tried):
    rows = search(50e9, 1e9, 80e9, planned=planned)
    assert [row["micro_batch"] for row in rows] == tried
    assert ["peak_mb" in row for row in rows] == [size <= 30 for size in tried]


@pytest.mark.long("a benchmark's dry run")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a dry run, for machines without a GPU")
def test_a_dry_run_counts_what_is_predicted(tmp_path):
    size, systems = "--gpus 1 --ways zero1 --steps 2 --layers 1 3", ("BF16", "COAT", "COAT, fastest")
    rows_of(tmp_path / "train.csv", "train", *size.split(), "--systems", *systems, "TE FP8")
    rows = read_rows(tmp_path / "train.csv")
    found = {(row["system"], row["layers"]): row for row in rows if "note" not in row}
    assert found.keys() == {(system, layers) for system in systems for layers in (1, 2, 3)}
    for (_, layers), row in found.items():
        for part in ("weights", "masters", "copies"):
            assert row[f"{part}_mb"] == pytest.approx(row[f"{part}_predicted_mb"], abs=1e-3), (part, row)
        # tensors below 4,096 elements keep FP32 moments
        assert row["states_mb"] == pytest.approx(row["states_predicted_mb"], rel=0.02)
        assert row["gpus"] == 1 and row["micro_batch"] == 2 and row["limited"] is False
        if layers != 2:
            assert row["loss_first"] == pytest.approx(math.log(512), abs=0.1)
        # on a GPU, small layers save tensors in their CUDA graphs, together with an input and two gradients
        # of 64 channels
        saved = row["saved_predicted_mb"] or row["graphs_predicted_mb"] - 3 * 2 * (2 * 64) * 64 / 1e6
        # on a CPU Megatron's layers save more than on a GPU: FP32 inputs of norms, and qkv in addition to its
        # parts
        assert saved <= row["saved_mb"] < 1.6 * saved
    for system in systems:
        one, two, three = (found[system, layers] for layers in (1, 2, 3))
        assert two["extrapolated_from"] == "1 and 3 layers" and "loss_first" not in two
        for name in ("ms", "weights_mb", "states_mb", "saved_mb"):
            assert two[name] == pytest.approx((one[name] + three[name]) / 2)
        # for an unknown device
        assert "mfu" not in two
        assert two["tokens_per_s_gpu"] == pytest.approx(2 * 64 / two["ms"] * 1e3)
    assert found["COAT", 3]["saved_mb"] < 0.4 * found["BF16", 3]["saved_mb"]
