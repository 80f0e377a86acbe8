"""Multi-latent attention over pipeline stages: the numbers of one rank."""

import functools
from unittest import mock

from megatron_ext import model as models
from megatron_ext.model import build_gpt
from tests.megatron_ext import test_pipeline
from tests.util import rel_rms, run_distributed

LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 32,
    # heads of test_pipeline.py's model
    "v_head_dim": 8,
    "qk_layernorm": True,
}


def _train(*args):
    with mock.patch.object(models, "build_gpt", functools.partial(build_gpt, **LATENT)):
        return test_pipeline.train(*args)


def test_stages_equal_one_rank():
    one = run_distributed(_train, 1, 1, None, None)[0]
    ranks = run_distributed(_train, 2, 2, None, one["weights"])
    grads = {name: grad for rank in ranks for name, grad in rank["grads"].items()}
    assert ranks[-1]["losses"] == one["losses"] and grads.keys() == one["grads"].keys()
    for name, grad in one["grads"].items():
        # as in test_pipeline.py
        assert rel_rms(grads[name], grad) < 1e-6, name
