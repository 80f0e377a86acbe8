"""Dry runs on a CPU, where copies to and from the GPU are plain ones."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import one_gpu


@pytest.fixture
def rows():
    return []


@pytest.fixture
def table(rows):
    return SimpleNamespace(add=lambda **row: rows.append(row))


@pytest.mark.long("a benchmark's dry run")
@pytest.mark.parametrize("model", ["llama2-7b", "qwen3-14b"])
def test_a_small_model_trains_in_every_way_but_deepspeeds(model, table, rows):
    """DeepSpeed's needs its optimizer in C++."""
    systems = [name for name in one_gpu.SYSTEMS if name != "ZeRO-Offload"]
    arguments = SimpleNamespace(
        quick=True, models=[model], layers=None, systems=systems, gpu_gb=80, sequences=[64], tokens=[128],
        micro_tokens=64, activations={}, optimizer={}, checkpointing=True, steps=1,
    )  # fmt: skip
    one_gpu.one_gpu(arguments, table)
    assert [row["system"] for row in rows] == systems and not any("note" in row for row in rows)
    for row in rows:
        assert row["tokens_per_s"] > 0 < row["host_gb"] and row["passes_s"] > 0
        released = "release" in row["system"]
        assert (row["micro_batch"], row["accumulation"]) == ((2, 1) if released else (1, 2))
        assert ("predicted_gb" in row) == released


def test_passes_alone_change_no_weight():
    arguments = SimpleNamespace(quick=True, layers=None, activations={}, optimizer={}, checkpointing=False)
    for offload, release in filter(None, one_gpu.SYSTEMS.values()):
        model = one_gpu.built(arguments, "llama2-7b")
        run = one_gpu.with_coat(arguments, model, offload, release)
        ids = torch.arange(64).view(1, 64)
        before = [p.detach().clone() for p in model.parameters()]
        run.passes([{"input_ids": ids, "labels": ids}])
        assert all(map(torch.equal, before, model.parameters()))
        run.step([{"input_ids": ids, "labels": ids}])
        assert not all(map(torch.equal, before, model.parameters()))
