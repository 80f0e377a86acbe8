"""What is counted and timed is there; the times themselves are not tested."""

import csv

import pytest
import torch

from benchmarks import host
from tests.benchmarks.test_harness import run


@pytest.mark.long("a benchmark's dry run")
def test_layers_and_what_they_are_made_of(tmp_path):
    path = tmp_path / "host.csv"
    names = ["BF16", "ours, cache fp8"]
    result = run("host", "--rows", *names, "--profile", names[1], "--output", str(path))
    assert result.returncode == 0, result.stderr
    rows = list(csv.DictReader(path.open()))
    assert [row["what"] for row in rows if row["us"]] == list(host.operations())
    layers = [row for row in rows if row["shape"] and not row.get("note")]
    for shape in host.SHAPES:
        found = [row["what"] for row in layers if row["shape"] == shape]
        assert found[0] == names[0] and names[1] in found
    for row in layers:
        forward, backward, both = (float(row[f"{k}_ms"]) for k in ("forward", "backward", "both"))
        assert 0 < forward < both and 0 < backward < both
        assert not torch.cuda.is_available() or int(row["kernels"]) > 20
    # a profile of each shape, of both directions
    assert result.stdout.count("function calls") == 2 * len(host.SHAPES)
