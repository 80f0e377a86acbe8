"""Mixtures of FP8 experts over two expert-parallel ranks, against Megatron's own with the same weights."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import get_mtp_layer_spec
from megatron.core.transformer.spec_utils import build_module

from megatron_ext.layer_specs import _has_experts, coat_layer_spec, sdpa_layer_spec
from megatron_ext.layers.moe import CoatMoELayer, is_moe_layer
from tests.megatron_ext.experts import (
    ALL_TO_ALL,
    EXPERTS,
    PADDED,
    RANKS,
    VOCAB,
    B,
    H,
    S,
    build_mixture,
    train,
)
from tests.megatron_ext.layers import loss_of, random_tokens, rounding_error
from tests.megatron_ext.ranks import join
from tests.util import on_gpus, rel_rms, run_distributed

ROUTED = "decoder.layers.1.mlp.experts.local_experts"


def _trained():
    join(expert_model_parallel_size=RANKS)
    text, losses = random_tokens(B, S, VOCAB, 5 + dist.get_rank()), {}
    for dispatcher in ({}, ALL_TO_ALL):
        model = build_mixture(coat_layer_spec, expert_model_parallel_size=RANKS, **dispatcher)
        losses[model.config.moe_token_dispatcher_type] = train(model, text)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def test_sequential_experts_train_under_megatron_ddp():
    (*losses, first), (*others, second) = run_distributed(_trained, RANKS)
    for found in (*losses, *others):
        assert found["alltoall"][-1] < found["alltoall"][0] - 0.1 and found["alltoall"] == found["allgather"]
    for name, weight in first.items():
        # ranks began with the same weights, which diverge with other tokens
        assert weight.equal(second[name]) != name.startswith(ROUTED), name
        assert weight.isfinite().all()


def test_has_experts_follows_moe_layer_freq(megatron):
    config = build_mixture(coat_layer_spec).config
    for every, expected in ((1, [1, 1, 1, 1]), (2, [1, 0, 1, 0]), ([0, 1, 1, 0], [0, 1, 1, 0])):
        config.moe_layer_freq = every
        assert [is_moe_layer(config, i) for i in range(4)] == expected
    # the second pipeline stage begins with the model's third layer
    config.num_layers, config.pipeline_model_parallel_size = 4, 2
    stage = SimpleNamespace(pp=SimpleNamespace(rank=lambda: 1))
    assert [_has_experts(config, i, pg_collection=stage) for i in (1, 2)] == [True, False]
    config.num_moe_experts = None
    assert not is_moe_layer(config, 1)


@pytest.mark.parametrize("every, last", [([0, 1], True), ([1, 0], False), (2, False)])
def test_has_experts_of_multi_token_prediction(megatron, every, last):
    """As in Megatron's own specs."""
    spec = dataclasses.replace(coat_layer_spec, submodules=get_gpt_layer_local_spec().submodules)
    layer = build_module(
        get_mtp_layer_spec(spec, use_transformer_engine=False),
        config=dataclasses.replace(
            build_mixture(coat_layer_spec, moe_layer_freq=every).config, mtp_num_layers=1
        ),
        layer_number=1,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    (inner,) = (module for module in layer.modules() if type(module) is coat_layer_spec.module)
    assert isinstance(inner.mlp, CoatMoELayer) == last
    # some releases mark these layers with is_mtp_layer, others continue the numbers of the layers
    arguments = {"layer_number": 1, "is_mtp_layer": True}
    assert _has_experts(layer.config, **arguments) == last


# every token meets every expert, so that no rounding chooses others; capacities drop no token then
IN_FP8 = {
    "allgather": {},
    "alltoall": ALL_TO_ALL,
    "alltoall, padded": PADDED | {"moe_expert_capacity_factor": 1.0},
}


def _in_fp8():
    """Loss and gradients of grouped experts, of experts one after another and of Megatron's own in BF16, by
    SequentialMLP's names, with FP8 in all layers."""
    join(expert_model_parallel_size=RANKS)
    tokens, result = random_tokens(B, S, VOCAB, 5 + dist.get_rank()), {}
    kinds = {
        "grouped": (coat_layer_spec, {"moe_grouped_gemm": True}),
        "one after another": (coat_layer_spec, {}),
        "stock": (sdpa_layer_spec, {}),
    }
    for dispatcher, config in IN_FP8.items():
        for kind, (spec, more) in kinds.items():
            every = {"moe_router_topk": EXPERTS["num_moe_experts"]}
            model = build_mixture(spec, expert_model_parallel_size=RANKS, **(config | every | more))
            loss = loss_of(model, tokens)
            loss.backward()
            grads = {}
            for name, p in model.named_parameters():
                before, experts, after = name.partition(".mlp.experts.linear")
                if experts:
                    names = (f"{before}.mlp.experts.local_experts.{i}.linear{after}" for i in range(len(p)))
                    grads |= dict(zip(names, p.grad.cpu(), strict=True))
                else:
                    grads[name] = p.grad.cpu()
            result[dispatcher, kind] = loss.item(), grads
    return result


def _check_in_fp8(results) -> None:
    # no more roundings than in the table of test_layer.py, 21 to E4M3 and 4 to E5M2, and twice that because
    # the derivative of an activation enlarges them; the loss as in test_model.py
    e4m3, e5m2 = (rounding_error(t, "cpu") for t in (torch.float8_e4m3fn, torch.float8_e5m2))
    bound = 2 * (21 * e4m3**2 + 4 * e5m2**2) ** 0.5
    loss_bound = 4 * 0.02 * H**0.5 * 14**0.5 * e4m3 / (S * B) ** 0.5
    for rank in results:
        for dispatcher in IN_FP8:
            expected, stock = rank[dispatcher, "stock"]
            for kind in ("grouped", "one after another"):
                loss, grads = rank[dispatcher, kind]
                assert abs(loss - expected) < loss_bound and grads.keys() == stock.keys()
                for name, grad in stock.items():
                    error, product = rel_rms(grads[name], grad), ".linear_fc" in name
                    # the GEMMs of each expert ran in FP8
                    assert e4m3 / 2 * product < error < bound, (dispatcher, kind, name)


def test_experts_in_fp8_on_two_ranks_equal_megatrons():
    _check_in_fp8(run_distributed(_in_fp8, RANKS))


@on_gpus(2)
def test_experts_in_fp8_on_two_gpus_equal_megatrons():
    _check_in_fp8(run_distributed(_in_fp8, RANKS, gpus=True))
