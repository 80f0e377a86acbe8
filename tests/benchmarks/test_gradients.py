"""Emulated gradients are what the formats hold, and their errors are those of the formats."""

import csv
import shutil

import pytest
import torch

from benchmarks.common.harness import RESULTS
from benchmarks.finetune import pretrained
from benchmarks.gradients import Sample, errors_of, gradients_of
from benchmarks.gradients.times import WAYS
from benchmarks.gradients.variants import VARIANTS, Emulated, rounded
from benchmarks.tables.blocks import Results
from benchmarks.tables.gradients import ERRORS, LINEARS, gradients
from coat_kernels.fp8 import E4M3, E5M2
from tests.benchmarks.dry import rows_of


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_stochastic_rounding_takes_a_neighbour_and_keeps_the_mean(fmt):
    x = torch.tensor([[0.9, 0.3, -0.01, 1e-4]]).repeat(20_000, 1)
    found = rounded(x, fmt, stochastic=True)
    for column, value in zip(found.T, x[0], strict=True):
        codes = column.unique()
        assert len(codes) == 2 and codes[0] < value < codes[1]
        # the deviation of a mean of n values between two codes is at most half their distance / sqrt(n)
        assert abs(column.mean() - value) < 4 * (codes[1] - codes[0]) / 2 / len(column) ** 0.5


def test_each_row_has_a_scale_of_its_own():
    x = torch.tensor([[1.0, 0.5], [2.0**-20, 2.0**-21]])
    assert rounded(x, E4M3)[1].tolist() == [0, 0]
    # E4M3 has three bits after the first one
    assert torch.allclose(rounded(x, E4M3, 1), x, rtol=2**-4)
    assert torch.allclose(rounded(x.T, E4M3, 0).T, x, rtol=2**-4)


@pytest.fixture(scope="module")
def sample():
    start = pretrained.tiny()
    torch.manual_seed(0)
    return Sample({}, pretrained.hugging_face(start).model.float(), torch.randint(512, (2, 64)))


def test_errors_are_those_of_the_formats(sample):
    def errors(name):
        exact = gradients_of(sample, Emulated(VARIANTS[name], 2, backward=False))
        return errors_of(gradients_of(sample, Emulated(VARIANTS[name], 2)), exact)

    e5m2, e4m3, ends, bf16 = map(errors, ("E5M2", "E4M3", "E5M2, first and last layer in BF16", "BF16"))
    # the gradient of the last layer's output is exact before it is rounded. RMS errors of normal values: E5M2
    # 5.3 %, E4M3 2.7 %, and the input's 2.7 % in both: sqrt(2.7^2 + 2.7^2) over sqrt(5.3^2 + 2.7^2) is 0.64
    last = "model.layers.1.mlp.down_proj"
    assert abs(e4m3[last] / e5m2[last] - 0.64) < 0.06
    # both layers of this model are at an end
    assert ends == bf16
    # BF16 has 8 significant bits
    assert max(bf16.values()) < 64**0.5 * 2**-9


def test_without_rounding_gradients_are_the_stock_ones(sample):
    found = gradients_of(sample, lambda layer, operand, x: x)
    model = pretrained.hugging_face(pretrained.tiny()).model.float()
    model(input_ids=sample.tokens, labels=sample.tokens).loss.backward()
    for name, layer in model.named_modules():
        if name in found:
            torch.testing.assert_close(found[name], layer.weight.grad)


@pytest.mark.long("a benchmark's dry run")
def test_the_dry_run_has_each_variant_and_each_gemm(tmp_path):
    rows = rows_of(tmp_path / "gradients.csv", "gradients", "--quick")
    assert {row["variant"] for row in rows if row["what"] == "errors"} == set(VARIANTS)
    assert len([row for row in rows if row["what"] == "time" and float(row["wgrad_ms"]) > 0]) == 16


def test_the_table_adds_the_gemms_of_a_variant_to_the_measured_layer(tmp_path):
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    errors = dict.fromkeys(("total_to_e5m2", "backward_to_e5m2", "dx_to_e5m2"), 0.7) | {"flushed": 0.001}
    rows = [{"what": "errors", "variant": name} | errors for name in ("E5M2", "E4M3", "E5M2, stochastic")]
    gemms = dict.fromkeys(("forward_ms", "dgrad_ms", "wgrad_ms", "quantize_ms"), 1.0)
    for linear in LINEARS:
        rows += [{"what": "time", "linear": linear, "way": way} | gemms for way in WAYS]
    next(row for row in rows if row.get("way") == "E4M3")["wgrad_ms"] = 3.0
    with (tmp_path / ERRORS).open("w", newline="") as file:
        writer = csv.DictWriter(file, {k: None for row in rows for k in row})
        writer.writeheader()
        writer.writerows(rows)
    lines = gradients(Results(tmp_path)).splitlines()
    e5m2 = Results(RESULTS).row("layer_h200.csv", layer="ours")["ms"]
    assert lines[3].startswith(f"| E4M3 | 0.70 | 0.70 | 0.70 | up to 0.10 % | {e5m2 + 2:.2f} |")
    # the variants that were not trained have no losses
    assert lines[4] == f"| E5M2, stochastic | 0.70 | 0.70 | 0.70 | up to 0.10 % | {e5m2:.2f} |{'  |' * 7}"
