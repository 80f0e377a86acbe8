"""The parallel layers on two GPUs with NCCL: the cases of `test_parallel.py`, `test_pipeline.py` and
`test_data_parallel.py`.
"""

import tempfile

import pytest
import torch
import torch.distributed as dist

from coat_kernels.graphs.warm_up import WARM_UP
from tests.megatron_ext import stages as pipeline
from tests.megatron_ext import test_data_parallel as data_parallel
from tests.megatron_ext import test_parallel as tensor_parallel
from tests.megatron_ext.layers import loss_of
from tests.util import rel_rms, run_distributed

RANKS = 2
# The part of FP8 in a loss: it moves the losses of these untrained models by at most 3e-4
LOSS_BOUND = 1e-3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs"),
]


def check_gradients(found, one, exact):
    """That gradients are as near to those of one rank as roundings allow.

    Tensor cores sum with 14 bits, in an order that depends on the split. A value that this moves by e of
    itself changes sides of a border between two codes of E4M3 with a chance of e / 2^-3, and then moves by
    2^-3: in the mean square e becomes e 2^-3, and three roundings make 2^-14 into what rounding itself is off
    by. So two runs are as far apart as two whose roundings have nothing in common: sqrt(2) times one's
    distance to the gradient without rounding, which is computed on the CPU. A CPU run with noise of 2^-13
    after each GEMM gave 0.68 of that distance at most.
    """
    assert found.keys() == one.keys() == exact.keys()
    for name, grad in one.items():
        assert rel_rms(found[name], grad) < 2**0.5 * rel_rms(grad, exact[name]), name


@pytest.fixture(scope="module")
def layers():
    cases = tensor_parallel.ONE + tensor_parallel.TWO
    return run_distributed(tensor_parallel.run_cases, RANKS, cases, False, gpus=True)


@pytest.fixture(scope="module")
def exact_layers():
    return run_distributed(tensor_parallel.run_cases, 1, tensor_parallel.ONE, True)[0]


@pytest.mark.parametrize("case", tensor_parallel.TWO, ids=str)
def test_tensor_parallel_layers_equal_one_rank(layers, exact_layers, case):
    one = 1, False, case[2]
    for rank in layers:
        found, expected = rank[case], rank[one]
        assert abs(found["loss"] - expected["loss"]) < LOSS_BOUND * expected["loss"]
        check_gradients(found["grads"], expected["grads"], exact_layers[one]["grads"])
        for name, grad in found["grads"].items():
            assert grad.equal(layers[0][case]["grads"][name]), name


def test_tensor_parallel_messages_are_fp8_and_overlap(layers):
    runs = False, None, layers, None
    tensor_parallel.test_sequence_parallelism_moves_one_byte_an_element(runs)
    tensor_parallel.test_tensor_parallel_messages_overlap_with_gemms(runs)


def _end_beside_a_model(sequence_parallel, ends):
    """The number of graphs of each layer of a model that existed, with its loss, when process groups
    ended."""
    device = data_parallel._setup()
    model = data_parallel._model(2, sequence_parallel, bf16=True)
    tokens = data_parallel._batches(device)[0, 0]
    for _ in range(WARM_UP + 2):
        loss = loss_of(model, tokens)
        loss.backward()
    found = [layer.graphs.count for layer in model.decoder.layers]
    # the first only ends the groups of tensor parallelism
    for group in [model.decoder.layers[0].self_attention.linear_qkv.tp_group, None][:ends]:
        dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("ends", [1, 2], ids=["one group", "all of them"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_process_groups_end_while_graphs_hold_collectives(sequence_parallel, ends):
    for counts in run_distributed(_end_beside_a_model, RANKS, sequence_parallel, ends, gpus=True):
        assert counts == [1, 1]


@pytest.fixture(scope="module")
def one_stage():
    return run_distributed(pipeline.train, 1, 1, None, None, gpus=True)[0]


@pytest.fixture(scope="module")
def exact_stage(one_stage):
    return run_distributed(pipeline.train, 1, 1, None, one_stage["weights"], True)[0]


@pytest.mark.parametrize("virtual", [None, 2], ids=["1F1B", "interleaved"])
def test_pipeline_stages_equal_one_rank(one_stage, exact_stage, virtual):
    one = one_stage
    ranks = run_distributed(pipeline.train, RANKS, RANKS, virtual, one["weights"], gpus=True)
    grads = {name: grad for rank in ranks for name, grad in rank["grads"].items()}
    assert ranks[-1]["losses"] == pytest.approx(one["losses"], rel=LOSS_BOUND)
    check_gradients(grads, one["grads"], exact_stage["grads"])


@pytest.fixture(scope="module")
def data_parallel_ranks():
    with tempfile.TemporaryDirectory() as folder:
        return run_distributed(data_parallel.work, RANKS, folder, gpus=True)


@pytest.fixture(scope="module")
def exact_gradients():
    return run_distributed(data_parallel.exact_gradients, RANKS)[0]


ZERO = [name for name in data_parallel.SPLIT if not name.startswith("exact")]


@pytest.mark.parametrize("name", ZERO)
def test_zero_over_two_tensor_parallel_ranks(data_parallel_ranks, name):
    for rank in data_parallel_ranks:
        runs = rank["zero"]
        data_parallel.check_losses(runs, name)
        # attention's backward sums its gradients in any order
        resumed = [loss for loss, _ in runs[name]["resumed"]]
        assert resumed == pytest.approx(runs[name]["losses"][data_parallel.SAVED_AT :], rel=2**-9)
    ((first, second),) = data_parallel.pairs(data_parallel_ranks, name)
    assert data_parallel.same(first, second)


def test_shared_parameters_drift_apart_without_sum_shared_gradients(data_parallel_ranks):
    data_parallel.test_shared_parameters_drift_apart_without_sum_shared_gradients(data_parallel_ranks)


@pytest.mark.parametrize("case", [case for case in data_parallel.MEGATRON if not case[-1]], ids=str)
def test_megatron_ddp_over_two_tensor_parallel_ranks(data_parallel_ranks, exact_gradients, case):
    one = data_parallel_ranks[0]["megatron"]["one", False]
    for rank in data_parallel_ranks:
        data_parallel.check_wrapper(rank["megatron"], case)
        check_gradients(rank["megatron"][case]["grads"], one, exact_gradients)
