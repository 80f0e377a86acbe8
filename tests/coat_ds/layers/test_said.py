"""What has no effect on a converted model, or disables its FP8 later, is logged."""

import logging
import types

import pytest
import torch
import transformers
from torch import nn

import coat_ds
from coat_ds.layers import log
from coat_ds.layers.inventory import layers_of
from coat_ds.layers.modules.replaced import replaced
from tests.families import FAMILIES

LLAMA = FAMILIES["llama"]


@pytest.fixture
def said(caplog):
    """The lines that are logged from now on, each once, except the line of `convert`."""
    log.say_anew()
    caplog.set_level(logging.INFO, log.__name__)
    return lambda: [
        r.getMessage()
        for r in caplog.records
        if r.name == log.__name__ and "linear layers in FP8" not in r.getMessage()
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


def test_a_model_in_float64_has_no_norm_in_8_bits():
    left = coat_ds.conversion_of(coat_ds.convert(plain().double())).left
    assert left == dict.fromkeys("012", "a weight in float64")


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


def test_models_that_accelerate_has_spread_over_devices(said):
    hooks = pytest.importorskip("accelerate.hooks")

    def dispatched(model):
        # as dispatch_model does for several devices
        places = dict.fromkeys(("", "model.layers.0", "model.layers.1"), "cpu")
        hooks.attach_align_device_hook_on_blocks(model, places, offload=dict.fromkeys(places, False))
        return model

    model = coat_ds.convert(dispatched(LLAMA.build()))
    assert not coat_ds.conversion_of(model).converted["linear"]
    (found,) = said()
    assert "accelerate has spread the model over devices, as device_map does. Load it without" in found
    train(dispatched(coat_ds.convert(LLAMA.build())), use_cache=False)
    *_, found = said()
    assert found.endswith(
        "run module by module: accelerate has spread the model over devices, as dispatch_model does."
    )


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


@pytest.mark.parametrize("how", ["under torch.compile", "autocast"])
def test_layers_name_what_keeps_them_apart_whatever_they_are_given(said, how):
    dtype, why = torch.bfloat16, how
    if how == "autocast":
        dtype, why = torch.float32, "their input is torch.float32 under autocast to torch.bfloat16"
    model = coat_ds.convert(LLAMA.build(dtype))
    if how == "under torch.compile":
        torch.compiler.reset()
        for layer in model.model.layers:
            layer.compile(backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        train(model, use_cache=True)
    assert said() == [f"COAT: layers without fused blocks run module by module: {why}."]


def test_weights_that_kernels_cannot_read_are_named(said):
    class Other(torch.Tensor):
        pass

    model, x = coat_ds.convert(plain()), torch.randn(2, 64, dtype=torch.bfloat16)
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Other))
    model[0](x)
    (found,) = said()
    assert "plain tensors, found Other" in found
    model[2].weight = nn.Parameter(model[2].weight.detach().half())
    with pytest.raises(TypeError, match="found FP16"):
        model[2](x)


def test_trainer_runs_fused_blocks(said, tmp_path):
    model = coat_ds.convert(LLAMA.build())
    given = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=1, report_to=[], save_strategy="no", disable_tqdm=True
    )
    batch = LLAMA.batch()
    data = [{name: values[0] for name, values in batch.items()}] * 8
    transformers.Trainer(model, given, train_dataset=data, eval_dataset=data).train()
    assert said() == []


def test_frozen_weights_end_fused_blocks_with_a_line(said):
    model = coat_ds.convert(LLAMA.build())
    model.model.layers[0].mlp.requires_grad_(False)
    train(model, use_cache=False)
    (found,) = said()
    assert "run module by module" in found and "frozen weights" in found


def test_a_second_call_that_wants_something_else_is_an_error():
    def first(name, module):
        return name.startswith("0")

    model = coat_ds.convert(plain(), filter=first)
    assert coat_ds.convert(model, filter=first) is model
    with pytest.raises(RuntimeError, match="other linear layers were not .1, such as '2'.*unconvert"):
        coat_ds.convert(model)
    whole = coat_ds.convert(plain())
    with pytest.raises(RuntimeError, match="`filter` leaves out modules .* .2, such as '1'.*unconvert"):
        coat_ds.convert(whole, filter=first)
    with pytest.raises(RuntimeError, match="enabled: found False, but the model was converted with True"):
        coat_ds.convert(whole, {"enabled": False})
    whole[0] = nn.Linear(64, 64, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="other linear layers were not .1, such as '0'"):
        coat_ds.convert(whole)
    assert replaced(whole[2]) is not None and replaced(whole[0]) is None


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
