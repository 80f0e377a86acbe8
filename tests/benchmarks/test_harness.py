"""The registry, the entry point and the table; nothing here is timed."""

import csv
import time
from pathlib import Path

import pytest
import torch

from benchmarks.common.harness import RESULTS, Table
from benchmarks.common.timing import Span, covered_ms, gpu_spans
from tests.benchmarks.dry import run_here

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_the_reason_is_given_and_nothing_is_written():
    before = (RESULTS / "adamw.csv").read_text()
    result = run_here("adamw")
    assert result.returncode == 1 and "needs a CUDA GPU, found none" in result.stderr
    assert (RESULTS / "adamw.csv").read_text() == before


def test_rows_of_different_columns_share_a_file_headed_by_the_environment(tmp_path, capsys):
    table = Table("name", tmp_path / "deep" / "name.csv")
    table.add(optimizer="copy", ms=2.0)
    table.add(optimizer="ours", ms=2.1, peak_mb=0.5)
    # after this point a kill loses neither row
    rows = list(csv.DictReader((tmp_path / "deep" / "name.csv").open()))
    assert [r["ms"] for r in rows] == ["2.0", "2.1"] and [r["peak_mb"] for r in rows] == ["", "0.5"]
    assert rows[0]["torch"] == torch.__version__ and rows[0]["commit"]
    assert list(rows[0])[:3] == ["optimizer", "ms", "peak_mb"]
    assert "torch " + torch.__version__ in capsys.readouterr().out


def test_stored_results_name_their_conditions():
    for path in RESULTS.glob("*.csv"):
        for row in csv.DictReader(path.open()):
            assert all(row[key] for key in ("date", "device", "torch", "triton", "commit", "command")), path


def test_intervals_are_counted_once():
    assert covered_ms([]) == 0
    spans = [(3, 4), (0, 2), (1, 2.5), (0.5, 1), (4, 5)]
    assert covered_ms(Span("kernel", 1e3 * start, 1e3 * end) for start, end in spans) == 4.5


@pytest.mark.gpu
def test_waiting_for_the_host_is_no_computing():
    x = torch.randn(4096, 4096, device="cuda")

    def call():
        x @ x
        time.sleep(0.2)
        x @ x

    call()
    assert 0 < covered_ms(gpu_spans(call)) < 200
