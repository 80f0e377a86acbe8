"""Codes over many steps: a quick run, and what the figures have to be where they are known."""

import csv

import pytest
import torch

from benchmarks.common.state_codes import cases, dynamic_map
from benchmarks.state_loop import BETA2
from tests.benchmarks.test_harness import run


@pytest.mark.long("a benchmark's dry run")
def test_every_code_has_a_row_for_each_beta2_and_kind_of_matrix(tmp_path):
    path = tmp_path / "state_loop.csv"
    result = run("state_loop", "--quick", "--output", str(path))
    assert result.returncode == 0, result.stderr
    rows = list(csv.DictReader(path.open()))
    kinds = {row["kind"] for row in rows}
    assert kinds == {"embedding", "attention", "MLP", "head", "all"}
    names = {(row["code"], float(row["beta2"])) for row in rows if row["kind"] == "all"}
    assert names == {(name, beta2) for beta2 in BETA2 for name in cases(beta2)}
    error = {(row["code"], row["beta2"]): float(row["stored"]) for row in rows if row["kind"] == "all"}
    # eight bits of which four say how large a value is, against eight that all do
    assert error["ratio8, log8", "0.95"] < 0.5 * error["fp8_expanded, fp8_expanded", "0.95"]
    # BF16 rounds each moment by 2^-9 at most, uniformly
    assert error["bf16, bf16", "0.95"] < 2**-9


@pytest.mark.parametrize("beta2", BETA2)
def test_a_moment_of_ones_is_itself(beta2):
    x = torch.ones(512)
    for name, case in cases(beta2).items():
        for y in case.code(x, x, 1):
            # half a step of the coarsest code, E4M3's, which is dithered in none
            assert (y - 1).abs().max() < 2**-4, name


def test_dynamic_maps_are_those_of_bitsandbytes():
    signed, unsigned = dynamic_map(True), dynamic_map(False)
    assert len(signed) == len(unsigned) == 256 and signed[-1] == unsigned[-1] == 1
    assert signed[0] == pytest.approx(-0.1 - 0.9 * 63.5 / 64) and unsigned[0] == 0
    # the middle of the first half of the lowest decade
    assert unsigned[1] == pytest.approx(0.325e-6)
