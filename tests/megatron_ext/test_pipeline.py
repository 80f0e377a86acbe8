"""The COAT layer with Megatron's pipeline schedules: the losses and gradients of one rank."""

import functools
from unittest import mock

import pytest

from megatron_ext import model as models
from megatron_ext.model import build_gpt
from tests.megatron_ext.layers import LATENT, assert_close
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


def train_latent(*args):
    """With latent attention for the heads of that model."""
    latent = LATENT | {"qk_head_dim": 16, "v_head_dim": 8}
    with mock.patch.object(models, "build_gpt", functools.partial(build_gpt, **latent)):
        return train(*args)


def test_latent_attention_in_pipeline_stages_equals_one_rank():
    one = run_distributed(train_latent, 1, 1, None, None)[0]
    ranks = run_distributed(train_latent, 2, 2, None, one["weights"])
    grads = {name: grad for rank in ranks for name, grad in rank["grads"].items()}
    assert ranks[-1]["losses"] == one["losses"]
    assert_close(grads, one["grads"], 1e-6)
