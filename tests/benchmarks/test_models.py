"""Converted models are measured; the tests do not check the times."""

import argparse
import warnings

import pytest

from benchmarks import evaluation
from benchmarks.models import family_row, shape_row


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_families():
    llama, vit = (family_row(name, steps=2) for name in ("llama", "vit"))
    assert (llama["linear"], llama["attention"], llama["layer"]) == ("14/15", "2/2", "2/2")
    assert llama["COAT, 8-bit attention / BF16"] < llama["COAT / BF16"] < 0.45
    assert abs(vit["COAT loss"] - vit["BF16 loss"]) < 0.1


@pytest.mark.parametrize("shape", ["qwen3-8b", "vlm"])
def test_shapes(shape):
    arguments = argparse.Namespace(quick=True, layers=None)
    row = shape_row(shape, "COAT, recomputed attention", arguments)
    assert row["ms"] > 0 and row["note"] == ""


def test_evaluation_as_stock_has_no_error():
    arguments = argparse.Namespace(quick=True, layers=None)
    bf16, fp8, stock = (evaluation.row("qwen3-0.6b", s, arguments) for s in evaluation.SYSTEMS)
    assert bf16["error"] == stock["error"] == 0 < fp8["error"] < 0.1
    assert all(one["ms"] > 0 and one["ms_next_token"] > 0 for one in (bf16, fp8, stock))
