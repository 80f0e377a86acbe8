"""Multi-latent attention over tensor-parallel ranks and pipeline stages: the numbers of one rank."""

import functools
from unittest import mock

import pytest
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)

from megatron_ext import model as models
from megatron_ext import mpu
from megatron_ext.layer_specs import coat_layer_spec
from megatron_ext.model import ModelShape, build_gpt
from tests.megatron_ext import stages
from tests.megatron_ext.layers import assert_close, loss_of, random_tokens, whole, without_rounding
from tests.megatron_ext.ranks import join
from tests.util import run_distributed

S, B, VOCAB, H, HEADS = 32, 2, 64, 64, 4
# a rank's part of each projection consists of whole groups, as on one rank
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 32,
    "qk_layernorm": True,
}
NO_NORMS = LATENT | {"qk_layernorm": False}
VARIANTS = {"v3": LATENT, "no-norms": NO_NORMS, "lite": NO_NORMS | {"q_lora_rank": None, "rope_type": "rope"}}


@without_rounding()
def _run(cases):
    """Loss and gradients of each (tp, sequence parallel, variant), and the shapes in a checkpoint."""
    tokens = random_tokens(B, S, VOCAB)
    results = {}
    for tp, sequence_parallel, variant in cases:
        join(tp)
        model = build_gpt(
            ModelShape(2, H, 96, HEADS, HEADS),
            coat_layer_spec,
            seq_length=S,
            vocab_size=VOCAB,
            bf16=False,
            sequence_parallel=sequence_parallel,
            **VARIANTS[variant],
        )
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        ddp = DistributedDataParallel(config=model.config, ddp_config=ddp_config, module=model)
        loss = loss_of(ddp, tokens)
        loss.backward()
        finalize_model_grads([ddp])
        grads = {name: whole(p, p.main_grad) for name, p in model.named_parameters()}
        summed = mpu.sum_shared_gradients(model)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        places = {
            name: getattr(entry, "global_shape", None)
            for name, entry in model.sharded_state_dict(metadata={"dp_cp_group": group}).items()
        }
        results[tp, sequence_parallel, variant] = {
            "loss": loss.detach(),
            "grads": grads,
            "places": places,
            "summed": summed,
        }
        parallel_state.destroy_model_parallel()
    return results


TWO = [(2, sequence, variant) for sequence in (False, True) for variant in VARIANTS]


@pytest.fixture(scope="module")
def runs():
    one = run_distributed(_run, 1, [(1, False, variant) for variant in VARIANTS])[0]
    return one, run_distributed(_run, 2, TWO)


@pytest.mark.parametrize("case", TWO, ids=str)
def test_latent_attention_over_ranks_equals_one_rank(runs, case):
    one, ranks = runs
    expected = one[1, False, case[2]]
    for rank in ranks:
        found = rank[case]
        assert found["places"] == expected["places"]
        # sums of at most 96 FP32 terms in another order
        bound = 1e-5
        assert abs(found["loss"] - expected["loss"]) < bound * expected["loss"]
        assert_close(found["grads"], expected["grads"], bound)


def test_latent_attention_gradients_are_the_same_bits_on_all_ranks(runs):
    _, (first, second) = runs
    for case, run in first.items():
        for name, grad in run["grads"].items():
            assert grad.equal(second[case]["grads"][name]), (case, name)


def test_latent_attention_sum_shared_gradients(runs):
    """Without sequence parallelism every norm sees all tokens, and the norm of queries is before the split
    into heads."""
    _, (first, _) = runs
    assert first[2, False, "v3"]["summed"] == []
    norms = [
        f"layers.{i}.{n}"
        for i in (0, 1)
        for n in ("input", "pre_mlp", "self_attention.q", "self_attention.kv")
    ]
    assert set(first[2, True, "v3"]["summed"]) == {
        f"decoder.{norm}_layernorm.weight" for norm in [*norms, "final"]
    }


def _train(*args):
    # heads of the model in stages.py
    latent = LATENT | {"qk_head_dim": 16, "v_head_dim": 8}
    with mock.patch.object(models, "build_gpt", functools.partial(build_gpt, **latent)):
        return stages.train(*args)


def test_latent_attention_in_pipeline_stages_equals_one_rank():
    one = run_distributed(_train, 1, 1, None, None)[0]
    ranks = run_distributed(_train, 2, 2, None, one["weights"])
    grads = {name: grad for rank in ranks for name, grad in rank["grads"].items()}
    assert ranks[-1]["losses"] == one["losses"]
    # as in test_pipeline.py
    assert_close(grads, one["grads"], 1e-6)
