"""Megatron's hybrid stack with this project's layers: the numbers of GPTModel, and two ranks give those of
one."""

import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from coat_ds.config import ActivationsConfig
from megatron_ext.hybrid_specs import coat_hybrid_stack_spec, sdpa_hybrid_stack_spec
from megatron_ext.layer_specs import coat_layer_spec, sdpa_layer_spec
from megatron_ext.layers.settings import set_activations
from megatron_ext.model import ModelShape, build_gpt
from megatron_ext.mpu import sum_shared_gradients
from tests.megatron_ext.hybrid import EXPERTS, VOCAB, B, S, hybrid_of
from tests.megatron_ext.layers import assert_close, loss_of, random_tokens, whole, without_rounding
from tests.megatron_ext.ranks import join
from tests.util import run_distributed

without_te = pytest.mark.skipif(HAVE_TE, reason="Transformer Engine is here")

SHAPE = ModelShape(2, 64, 96, 4, 2)
PATTERNS: dict[str, dict] = {"*-*-": {"qk_layernorm": True}, "*E": EXPERTS}


def _gpt(spec=coat_layer_spec, **config):
    return build_gpt(SHAPE, spec, seq_length=S, vocab_size=VOCAB, **config)


@without_rounding()
def _run(tp):
    join(tp)
    result = {}
    for pattern, config in PATTERNS.items():
        model = hybrid_of(pattern, _gpt(bf16=False, sequence_parallel=tp > 1, **config))
        sum_shared_gradients(model)
        losses, grads = [], None
        for _ in range(4):
            model.zero_grad()
            loss = loss_of(model, random_tokens(B, S, VOCAB))
            loss.backward()
            losses.append(loss.item())
            grads = grads or {name: whole(p, p.grad.clone()) for name, p in model.named_parameters()}
            for parameter in model.parameters():
                parameter.data.sub_(0.1 * parameter.grad)
        result[pattern] = losses, grads
    return result


@pytest.fixture(scope="module")
def runs():
    return run_distributed(_run, 1, 1)[0], run_distributed(_run, 2, 2)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_hybrid_stack_on_two_ranks_trains_as_on_one(runs, pattern):
    one, two = runs
    losses, grads = one[pattern]
    assert losses[-1] < losses[0] - 0.1
    for rank in two:
        # sums of at most S * B FP32 terms in another order
        assert rank[pattern][0] == pytest.approx(losses, rel=1e-5)
        assert_close(rank[pattern][1], grads, 1e-5)


@pytest.mark.parametrize(
    "pattern, config",
    [("*-*-", {}), ("*E*E", EXPERTS), ("*-*E", EXPERTS | {"moe_layer_freq": [0, 1]})],
    ids=["dense", "experts", "both"],
)
@pytest.mark.parametrize(
    "layers, stack",
    [(coat_layer_spec, coat_hybrid_stack_spec), (sdpa_layer_spec, sdpa_hybrid_stack_spec)],
    ids=["coat", "sdpa"],
)
def test_hybrid_stack_equals_gpt_model(megatron, layers, stack, pattern, config):
    gpt = _gpt(layers, **config)
    hybrid = hybrid_of(pattern, gpt, stack)
    for model in (gpt, hybrid):
        set_activations(model, ActivationsConfig(attention_format="sqrt8"))

    def name_in_gpt(name):
        name = name.replace("final_norm.", "final_layernorm.")
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(int(parts[2]) // 2)
        return ".".join(parts)

    theirs = dict(gpt.named_parameters())
    ours = {name_in_gpt(name): p for name, p in hybrid.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        parameter.data.copy_(theirs[name])
    kinds = set()
    for layer in hybrid.decoder.layers:
        layer.register_forward_hook(
            # some layers return a pair
            lambda *found: kinds.add(type(found[-1][0] if isinstance(found[-1], tuple) else found[-1]))
        )
    losses = [loss_of(model, random_tokens(B, S, VOCAB)) for model in (hybrid, gpt)]
    assert losses[0].equal(losses[1])
    # no layer returns a deferred sum: the next layer may be on another pipeline stage
    assert kinds == {torch.Tensor}
    for loss in losses:
        loss.backward()
    for name, parameter in ours.items():
        assert parameter.grad.equal(theirs[name].grad), name


@without_te
def test_hybrid_stack_refuses_other_layers_without_transformer_engine(megatron):
    gpt = _gpt()
    with pytest.raises(ValueError, match="need Transformer Engine. Use only"):
        hybrid_of("M*", gpt)
