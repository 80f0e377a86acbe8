"""Dry runs on a CPU, where copies to and from the GPU are plain ones."""

from types import SimpleNamespace

import pytest

from benchmarks import host_states


@pytest.fixture
def rows():
    return []


@pytest.fixture
def table(rows):
    return SimpleNamespace(add=lambda **row: rows.append(row))


@pytest.mark.long("a benchmark's dry run")
def test_a_small_llama_trains_in_every_way_but_deepspeeds(table, rows):
    """DeepSpeed's needs its optimizer in C++."""
    systems = [name for name in host_states.SYSTEMS if name != "ZeRO-Offload"]
    arguments = SimpleNamespace(
        quick=True, model="7b", layers=None, systems=systems, gpu_gb=80, sequence=64, micro_batches=[1],
        activations={}, checkpointing=True, steps=1,
    )  # fmt: skip
    host_states.one_gpu(arguments, table)
    assert [row["system"] for row in rows] == systems and not any("note" in row for row in rows)
    assert all(row["tokens_per_s"] > 0 < row["host_gb"] for row in rows)
