"""The COAT layer with Megatron's pipeline schedules: the losses and gradients of one rank."""

import pytest

from tests.megatron_ext.layers import assert_close
from tests.megatron_ext.stages import MICRO_BATCHES, train
from tests.util import run_distributed


@pytest.fixture(scope="module")
def one():
    return run_distributed(train, 1, 1, None, None)[0]


# gloo matches messages by order, so with two interleaved ranks it would confuse them
@pytest.mark.parametrize(("pipeline", "virtual"), [(2, None), (4, 2)], ids=["1F1B", "interleaved"])
def test_pipeline_stages_equal_one_rank(one, pipeline, virtual):
    ranks = run_distributed(train, pipeline, pipeline, virtual, one["weights"])
    grads = {name: grad for rank in ranks for name, grad in rank["grads"].items()}
    # the same GEMMs of the same numbers, summed over the micro-batches in the same order
    assert len(one["losses"]) == MICRO_BATCHES and ranks[-1]["losses"] == one["losses"]
    assert_close(grads, one["grads"], 1e-6)
