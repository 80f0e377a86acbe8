"""Dry runs on a CPU, where copies to and from the GPU are plain ones."""

from types import SimpleNamespace

import pytest

from benchmarks import host_states
from coat_ds.optim import host_states as streamed


@pytest.fixture
def rows():
    return []


@pytest.fixture
def table(rows):
    return SimpleNamespace(add=lambda **row: rows.append(row))


@pytest.mark.long("a benchmark's dry run")
def test_every_number_of_slots_has_a_row(table, rows, monkeypatch):
    monkeypatch.setattr(host_states, "llama_sizes", lambda *_: [(1,)] + [(100, 70)] * 2)
    monkeypatch.setattr(host_states, "CASES", host_states.CASES[:2])
    usual = streamed.SLOTS, streamed.CHUNK
    host_states.host_states(SimpleNamespace(quick=True), table)
    assert [(row["slots"], row["chunk"]) for row in rows] == host_states.CASES
    assert all(0 < row["cpu_ms"] and row["parameters"] == 14000 for row in rows)
    assert (streamed.SLOTS, streamed.CHUNK) == usual


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
