"""A step is taken apart; the times themselves are not tested."""

import csv

import pytest
import torch

from benchmarks.common.timing import Span
from benchmarks.step import kind_of, rows_of
from tests.benchmarks.test_harness import run, run_here


@pytest.mark.parametrize(
    "kernel, kind",
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "messages"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("nvjet_sm90_qrtst_128x160_128x5_2x1_v_bz_coopA_algo2_TNT", "products"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        (
            "void at::native::vectorized_elementwise_kernel<8, at::native::copy",
            "torch's own kernels",
        ),
        ("triton_poi_fused_mul_silu_split_0", "torch's own kernels"),
        ("quantize_columns_kernel", "quantize_columns_kernel"),
    ],
)
def test_kernels_have_kinds(kernel, kind):
    assert kind_of(kernel) == kind


def test_messages_that_run_beside_kernels_are_counted_apart():
    spans = [Span("nccl", 0, 3000), Span("nvjet", 1000, 2000), Span("nvjet", 2500, 4000)]
    rows = {row["what"]: row for row in rows_of([(1.0, 2.0, 3.0, 7.0), (3.0, 4.0, 5.0, 9.0)], spans)}
    assert rows["step"]["ms"] == 8 and rows["host: backward"]["ms"] == 3
    assert rows["GPU: anything"]["ms"] == 4 and rows["GPU: anything but messages"]["ms"] == 2.5
    assert rows["messages"]["ms"] == 3 and rows["messages"]["launches"] == 1
    assert rows["products"]["ms"] == 2.5 and rows["products"]["launches"] == 2


@pytest.mark.long("a benchmark's dry run")
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs, or none")
def test_two_ranks_and_two_systems(tmp_path):
    path = tmp_path / "step.csv"
    result = run("step", "--quick", "--output", str(path))
    assert result.returncode == 0, result.stderr
    rows = list(csv.DictReader(path.open()))
    for system in ("BF16", "COAT"):
        found = {row["what"]: float(row["ms"]) for row in rows if row["system"] == system}
        parts = [found[f"host: {part}"] for part in ("forward", "backward", "optimizer")]
        assert all(ms > 0 for ms in parts) and found["step"] >= max(parts)
        assert ("messages" in found) == torch.cuda.is_available()


def test_ranks_that_do_not_fit_are_refused(tmp_path):
    result = run_here("step", "--gpus", "3", "--output", str(tmp_path / "step.csv"))
    assert result.returncode == 1 and "--way tp2: 2 does not divide --gpus 3" in result.stderr
