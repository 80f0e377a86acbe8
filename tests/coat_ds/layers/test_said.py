"""What has no effect on a converted model, or disables its FP8 later, is logged."""

import types

import pytest
import torch
import transformers
from torch import nn

import coat_ds
from coat_ds import log
from coat_ds.layers.inventory import layers_of
from tests.families import FAMILIES

LLAMA = FAMILIES["llama"]


@pytest.fixture
def said(caplog):
    """The lines that are logged from now on, each once, except the line of `convert`."""
    log.say_anew()
    return lambda: [
        r.getMessage()
        for r in caplog.records
        if r.name == "coat_ds" and "linear layers in FP8" not in r.getMessage()
    ]


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)).bfloat16()


def train(model, **inputs):
    model(**{**LLAMA.batch(), **inputs}).loss.backward()


@pytest.mark.parametrize("compiles", [False, True])
def test_a_model_cast_to_float64_says_once_that_fp8_is_off(said, compiles):
    stock, model = plain().double(), coat_ds.convert(plain()).double()
    if compiles:
        torch.compiler.reset()
        model = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(32, 64, dtype=torch.float64)
    for _ in range(2):
        assert torch.equal(model(x), stock(x))
    (line,) = said()
    assert "found torch.float64" in line and "not in FP8" in line and "model.bfloat16()" in line


@pytest.mark.parametrize(
    "build, activations, line",
    [
        (plain, {"cuda_graphs": True}, "coat.activations.cuda_graphs: found True, but no layer"),
        (plain, {"attention_format": "sqrt8"}, "attention_format: found 'sqrt8', but no attention"),
        (plain, {"attention_format": "recompute"}, "attention_format: found 'recompute', but no attention"),
        (
            FAMILIES["gpt2"].build,
            {"attention_format": "recompute"},
            "attention_format: found 'recompute', but no layer of the model runs as a fused block",
        ),
    ],
)
def test_keys_without_effect(said, build, activations, line):
    coat_ds.convert(build(), activations)
    (found,) = said()
    assert line in found and ("Drop" in found or "Write" in found)


def test_keys_with_effect_are_not_named(said):
    for activations in ({}, {"attention_format": "recompute"}, {"attention_format": "sqrt8"}):
        train(coat_ds.convert(LLAMA.build(), activations), use_cache=False)
    assert said() == []


def test_layers_are_fused_where_flags_ask_for_nothing(said):
    """As Liger's forward of a model hands them on."""
    train(
        coat_ds.convert(LLAMA.build()), use_cache=False, output_attentions=False, output_hidden_states=False
    )
    assert said() == []
    train(coat_ds.convert(LLAMA.build()), use_cache=False, output_hidden_states=True)
    (found,) = said()
    assert "run module by module: they are given output_hidden_states" in found


def test_forwards_that_are_replaced_after_convert_are_named(said):
    """As Liger's patches of an instance do."""
    model = coat_ds.convert(LLAMA.build())
    norm = model.model.layers[0].post_attention_layernorm
    norm.forward = types.MethodType(type(norm).forward, norm)
    train(model, use_cache=False)
    (found,) = said()
    assert "the forward of LlamaRMSNorm was replaced after coat_ds.convert. Convert after" in found


def test_layers_that_are_not_fused_say_why(said):
    model = coat_ds.convert(LLAMA.build())
    padded = torch.ones_like(LLAMA.batch()["input_ids"])
    padded[:, 0] = 0
    train(model, use_cache=False, attention_mask=padded)
    assert said() == []
    causal = torch.ones(1, 1, *padded.shape[-1:] * 2).tril().bool()
    scores = torch.zeros(causal.shape).masked_fill_(~causal, -torch.inf)
    train(model, use_cache=False, attention_mask=scores)
    train(model, use_cache=True)
    mask, cache = said()
    assert "run module by module: their attention_mask is no" in mask
    assert "run module by module" in cache and "use_cache" in cache


def test_weights_outside_of_fp8_are_named_by_their_share():
    model = coat_ds.convert(transformers.JetMoeForCausalLM(transformers.JetMoeConfig(**SMALL_JETMOE)))
    left = layers_of(model, "").weights_left
    experts = sum(p.numel() for n, p in model.named_parameters() if "put_linear" in n)
    total = sum(p.numel() for p in model.parameters())
    assert left["JetMoeParallelExperts"] == pytest.approx(experts / total)
    assert list(left.values()) == sorted(left.values(), reverse=True)


SMALL_JETMOE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "kv_channels": 32,
    "intermediate_size": 128,
    "num_local_experts": 4,
}
