"""Cases of `test_zero3_units.py` on two GPUs with NCCL, where messages overlap with kernels, and with weights
that DeepSpeed gathers in 8 bits by its own kernels."""

import pytest
import torch
from torch.utils.cpp_extension import CUDA_HOME

from tests.megatron_ext.units import CASES, Case, gpt, start, train
from tests.util import rel_rms, run_distributed

RANKS = 2
NAMES = [
    *("sqrt8", "small buckets", "accumulation", "full recompute", "reentrant", "not reentrant"),
    *("two forwards", "evaluation, tied", "experts", "hybrid", "frozen part", "Megatron's"),
    "secondary partitions",
]
QUANTIZED = Case(gpt, zero={"zero_quantized_weights": True}, base=3)
# here and not in `work`: an unknown name fails when the file is imported, on every machine
HERE = {name: CASES[name] for name in NAMES} | {"quantized": QUANTIZED}
# attention's backward sums in any order; a value that this moves across a border of E5M2 changes by 2^-2 of
# itself
GRADIENT_BOUND = 2e-2
# The error of a loss from weights gathered in 8 bits, in groups of up to 16,000 elements that units and
# modules fill differently
QUANTIZED_BOUND = 1e-2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs"),
]


def work(names: list[str]) -> dict:
    start("nccl")
    out = {}
    for name in names:
        case = HERE[name]
        out[name] = train(case, 3, case.wanted), train(case, case.base, False)
    return out


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(work, RANKS, NAMES, gpus=True)


@pytest.mark.parametrize("name", NAMES)
def test_layer_units_compute_what_stage_1_computes(ranks, name):
    for rank in ranks:
        units, base = rank[name]
        assert units["losses"][0] == base["losses"][0]
        assert units["losses"] == pytest.approx(base["losses"], rel=1e-3)
        assert units["kept"] == base["kept"]
        assert units["units"] == CASES[name].units and base["units"] == 0
        for parameter, grad in base["grads"].items():
            assert rel_rms(units["grads"][parameter], grad) < GRADIENT_BOUND, parameter


@pytest.mark.skipif(CUDA_HOME is None, reason="needs nvcc for DeepSpeed's quantizer")
def test_layer_units_with_weights_gathered_in_8_bits():
    for rank in run_distributed(work, RANKS, ["quantized"], gpus=True):
        units, base = rank["quantized"]
        assert units["losses"] == pytest.approx(base["losses"], rel=QUANTIZED_BOUND)
        assert units["losses"][-1] < units["losses"][0]
        assert units["kept"] == base["kept"] and units["units"] == 2
