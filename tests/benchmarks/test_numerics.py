"""Errors of layers, and which of their differences are larger than chance."""

import math

import pytest

from benchmarks.numerics import mean_ratios, root_mean_squares
from tests.benchmarks.dry import rows_of

BESIDE = "ours, saved E4M3"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A tiny run by data, layer and figure, and the folder of its files."""
    path = tmp_path_factory.mktemp("numerics") / "numerics.csv"
    size = "--quick", "--steps", "2", "--models", "1"
    layers = "--layers", "BF16", "ours", BESIDE
    rows = rows_of(path, "numerics", *size, *layers, "--to", BESIDE)
    return {(row["data"], row["layer"], row["figure"]): row for row in rows}, path


@pytest.mark.long("a benchmark's dry run")
def test_errors_are_those_of_the_formats_on_three_kinds_of_data(table):
    rows, path = table
    for data in ("trained", "outliers", "random"):
        # BF16 has 8 significant bits and E4M3 has 4: errors of 2^-9 and 2^-5 at most, several times
        assert float(rows[data, "BF16", "RMS error"]["linear_fc1"]) < 64**0.5 * 2**-9
        assert 2**-6 < float(rows[data, "ours", "RMS error"]["linear_fc1"]) < 64**0.5 * 2**-5


@pytest.mark.long("a benchmark's dry run")
def test_ratios_have_standard_errors(table):
    rows, path = table
    for data in ("trained", "outliers", "random"):
        ratio, deviation = rows[data, "ours", f"to {BESIDE}"], rows[data, "ours", "standard error"]
        # the format saved for backward does not change the forward pass, to the bit
        assert (float(ratio["y"]), float(deviation["y"])) == (1, 0)
    # RMS errors of normal values: E5M2 5.3 %, in both; E4M3 2.7 %; square roots 0.7 %. To the gradient's 5.3
    # and the GEMM's own 2.7, which both have, ours adds 0.7 and the other one 2.7
    expected = math.hypot(5.3, 2.7, 0.7) / math.hypot(5.3, 2.7, 2.7)
    found, deviation = (float(row["linear_fc2"]) for row in (ratio, deviation))
    assert abs(found - expected) < 0.03 and 0 < deviation < 0.01
    assert (BESIDE, f"to {BESIDE}") not in {key[1:] for key in rows}
    assert path.with_stem("numerics_ratios").with_suffix(".png").stat().st_size > 0


def test_layers_count_as_independent_and_their_batches_do_not():
    others = [[{"y": size, "dx": 3.0}] * 2 for size in (1.0, 5.0, 0.2)]
    # the layers' mean logarithms of ratios: 0, ln 4 and ln 16
    errors = [
        [{"y": 2.0, "dx": 3.0}, {"y": 0.5, "dx": 3.0}],
        [{"y": 20.0, "dx": 3.0}, {"y": 20.0, "dx": 3.0}],
        [{"y": 3.2, "dx": 3.0}, {"y": 3.2, "dx": 3.0}],
    ]
    means, deviations = mean_ratios(errors, others)
    # their deviation from ln 4 is ln 4, 0 and -ln 4: a variance of ln(4)^2, over three layers
    assert means == pytest.approx({"y": 4.0, "dx": 1.0})
    assert deviations == pytest.approx({"y": 4 * math.log(4) / 3**0.5, "dx": 0.0})


def test_errors_are_averaged_as_squares():
    errors = [[{"y": 1.0}, {"y": 1.0}], [{"y": 5.0}, {"y": 1.0}]]
    assert root_mean_squares(errors) == pytest.approx({"y": 7**0.5})
