"""The parallel layers on two GPUs with NCCL: the cases of `test_parallel.py`, `test_pipeline.py` and
`test_data_parallel.py`.
"""

import tempfile

import pytest
import torch

from tests.megatron_ext import test_data_parallel as data_parallel
from tests.megatron_ext import test_parallel as tensor_parallel
from tests.megatron_ext import test_pipeline as pipeline
from tests.util import rel_rms, run_distributed

RANKS = 2
# As derived in test_parallel.py: of values that are off by e of themselves, e / 2^-3 change sides of a border
# between two codes of E4M3, by 2^-3, and e / 2^-2 of E5M2, by 2^-2. Tensor cores sum with 14 bits: in the
# mean square that is 2^-17 and 2^-16 for each rounding, of which 16 of activations and 8 of gradients lie
# between two layers' weights and the first one's gradient, in either of two runs: 2^-11. Twice as much,
# since gradients differ in their share. Found: 0.042 (Llama) and 0.009 (GPT)
BOUND = 2 * (2 * (16 * 2**-17 + 8 * 2**-16)) ** 0.5

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs"),
]


@pytest.fixture(scope="module")
def layers():
    cases = tensor_parallel.ONE + tensor_parallel.TWO
    return run_distributed(tensor_parallel.run_cases, RANKS, cases, False, gpus=True)


@pytest.mark.parametrize("case", tensor_parallel.TWO, ids=str)
def test_tensor_parallel_layers_equal_one_rank(layers, case):
    for rank in layers:
        found, expected = rank[case], rank[1, False, case[2]]
        assert abs(found["loss"] - expected["loss"]) < BOUND * expected["loss"]
        for name, grad in expected["grads"].items():
            assert rel_rms(found["grads"][name], grad) < BOUND, name
            assert found["grads"][name].equal(layers[0][case]["grads"][name]), name


def test_messages_are_fp8_and_hidden(layers):
    runs = False, None, layers, None
    tensor_parallel.test_sequence_parallelism_moves_one_byte_an_element(runs)
    tensor_parallel.test_messages_travel_while_products_are_computed(runs)


@pytest.mark.parametrize("virtual", [None, 2], ids=["1F1B", "interleaved"])
def test_two_stages_equal_one(virtual):
    one = run_distributed(pipeline.train, 1, 1, None, None, gpus=True)[0]
    ranks = run_distributed(pipeline.train, RANKS, RANKS, virtual, one["weights"], gpus=True)
    grads = {name: grad for rank in ranks for name, grad in rank["grads"].items()}
    assert grads.keys() == one["grads"].keys()
    assert ranks[-1]["losses"] == pytest.approx(one["losses"], rel=BOUND)
    for name, grad in one["grads"].items():
        assert rel_rms(grads[name], grad) < BOUND, name


@pytest.fixture(scope="module")
def hosts():
    with tempfile.TemporaryDirectory() as folder:
        return run_distributed(data_parallel.work, RANKS, folder, gpus=True)


ZERO = [name for name in data_parallel.SPLIT if not name.startswith("exact")]


@pytest.mark.parametrize("name", ZERO)
def test_zero_over_two_tensor_parallel_ranks(hosts, name):
    for rank in hosts:
        runs = rank["zero"]
        data_parallel.check_losses(runs, name)
        # attention sums its gradients in any order
        resumed = [loss for loss, _ in runs[name]["resumed"]]
        assert resumed == pytest.approx(runs[name]["losses"][data_parallel.SAVED_AT :], rel=2**-9)
    ((first, second),) = data_parallel.pairs(hosts, name)
    assert data_parallel.same(first, second)


def test_without_the_sum_ranks_would_drift_apart(hosts):
    data_parallel.test_without_the_sum_they_would_drift_apart(hosts)


@pytest.mark.parametrize("case", [case for case in data_parallel.MEGATRON if not case[-1]], ids=str)
def test_megatrons_data_parallelism_over_two_tensor_parallel_ranks(hosts, case):
    for rank in hosts:
        data_parallel.check_gradients(rank["megatron"], case, BOUND)
