"""Partly converted models, parts of converted models, and what others put over COAT's forwards later on."""

import types

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import coat_ds
from coat_ds.layers.modules.converted_forward import converted_forward
from tests.coat_ds.layers.parts import plain, rewritten
from tests.families import FAMILIES

LLAMA = FAMILIES["llama"]


def test_unconvert_of_a_model_with_a_merged_adapter():
    """`merge_and_unload` takes the model out of the wrapper that was converted."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model, batch = LLAMA.build(), LLAMA.batch()
    merged = coat_ds.convert(peft.get_peft_model(model, config)).merge_and_unload()
    assert merged is model and converted_forward(merged.model.layers[0].mlp) is not None
    stock = LLAMA.build()
    stock.load_state_dict(merged.state_dict())
    with torch.no_grad():
        expected, fp8 = stock(**batch).loss, merged(**batch).loss
        assert fp8 != expected
        # converted again, the whole model is reported
        assert len(coat_ds.conversion_of(coat_ds.convert(merged)).converted["linear"]) == 14
        assert merged(**batch).loss == fp8
        again = coat_ds.convert(peft.get_peft_model(LLAMA.build(), config)).merge_and_unload()
        again.load_state_dict(stock.state_dict())
        assert coat_ds.unconvert(again)(**batch).loss == expected
    assert not any(map(converted_forward, again.modules())) and again.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("wrapped", ["down_proj that PEFT saves", "a checkpoint", "torch.compile"])
def test_unconvert_finds_modules_within_wrappers(wrapped):
    model, batch = coat_ds.convert(LLAMA.build()), LLAMA.batch()
    layers = model.model.layers
    if wrapped == "a checkpoint":
        layers[0] = checkpoint_wrapper(layers[0])
    elif wrapped == "torch.compile":
        layers[0] = torch.compile(layers[0], backend="eager")
    else:
        peft = pytest.importorskip("peft")
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["down_proj"]))
    with torch.no_grad():
        assert coat_ds.unconvert(model)(**batch).loss == LLAMA.build()(**batch).loss
    assert not any(map(converted_forward, model.modules()))


def test_unconvert_of_a_part_and_then_of_the_model():
    model, batch = coat_ds.convert(LLAMA.build()), LLAMA.batch()
    coat_ds.unconvert(model.model.layers[0])
    # a module that was put in since has no converted forward either
    model.model.layers[1].mlp.up_proj = LLAMA.build().model.layers[1].mlp.up_proj
    coat_ds.unconvert(model)
    assert not any(map(converted_forward, model.modules())) and coat_ds.conversion_of(model) is None
    with torch.no_grad():
        assert model(**batch).loss == LLAMA.build()(**batch).loss


def test_convert_of_a_partly_converted_model():
    model = LLAMA.build()
    coat_ds.convert(model.model.layers[0], {"saved_format": "e4m3"})
    around = nn.ModuleDict({"model": model, "value": nn.Linear(64, 64)}).bfloat16()
    assert coat_ds.convert(around, filter=lambda name, module: name != "value") is around
    conversion = coat_ds.conversion_of(around)
    assert len(conversion.converted["linear"]) == 14 and conversion.left["value"] == "the filter"
    assert {m.saved_format for m in map(converted_forward, around.modules()) if m} == {"sqrt8"}
    assert coat_ds.conversion_of(coat_ds.unconvert(around)) is None


@pytest.mark.parametrize("name", ["up", "norm", "act"])
def test_unconvert_refuses_forwards_that_others_replaced_later(name):
    model = coat_ds.convert(plain())
    module = getattr(model[0], name)
    module.forward = types.MethodType(rewritten, module)
    with pytest.raises(RuntimeError, match=rf"unconvert: 0\.{name}: .*Undo what replaced it first"):
        coat_ds.unconvert(model)
    assert converted_forward(model[0].down) and coat_ds.conversion_of(model)


@pytest.mark.parametrize("wrap", ["checkpoint", "adapter"])
def test_unconvert_refuses_replaced_forwards_within_wrappers(wrap):
    model = coat_ds.convert(plain())
    up = model[0].up
    if wrap == "checkpoint":
        model[0].up = checkpoint_wrapper(up)
    else:
        peft = pytest.importorskip("peft")
        peft.inject_adapter_in_model(peft.LoraConfig(r=16, target_modules=["up"]), model)
    assert model[0].up is not up
    up.forward = types.MethodType(rewritten, up)
    with pytest.raises(RuntimeError, match=r"unconvert: 0\.up: .*Undo what replaced it first"):
        coat_ds.unconvert(model)
