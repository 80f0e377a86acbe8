"""Partly converted models, and parts of converted models."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import coat_ds
from coat_ds.layers.modules.replaced import replaced
from tests.families import FAMILIES

LLAMA = FAMILIES["llama"]


def test_an_adapter_that_is_merged_leaves_a_part_that_can_be_given_back():
    """`merge_and_unload` takes the model out of the wrapper that was converted."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model, batch = LLAMA.build(), LLAMA.batch()
    merged = coat_ds.convert(peft.get_peft_model(model, config)).merge_and_unload()
    assert merged is model and replaced(merged.model.layers[0].mlp) is not None
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
    assert not any(map(replaced, again.modules())) and again.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("wrapped", ["down_proj that PEFT saves", "a checkpoint", "torch.compile"])
def test_what_was_put_around_converted_modules_does_not_keep_them(wrapped):
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
    assert not any(map(replaced, model.modules()))


def test_a_part_is_given_back_and_then_the_model():
    model, batch = coat_ds.convert(LLAMA.build()), LLAMA.batch()
    coat_ds.unconvert(model.model.layers[0])
    # a module that was put in since has no converted forward either
    model.model.layers[1].mlp.up_proj = LLAMA.build().model.layers[1].mlp.up_proj
    coat_ds.unconvert(model)
    assert not any(map(replaced, model.modules())) and coat_ds.conversion_of(model) is None
    with torch.no_grad():
        assert model(**batch).loss == LLAMA.build()(**batch).loss


def test_a_model_of_which_a_part_was_converted_is_converted_as_a_whole():
    model = LLAMA.build()
    coat_ds.convert(model.model.layers[0], {"saved_format": "e4m3"})
    around = nn.ModuleDict({"model": model, "value": nn.Linear(64, 64)}).bfloat16()
    assert coat_ds.convert(around, filter=lambda name, module: name != "value") is around
    conversion = coat_ds.conversion_of(around)
    assert len(conversion.converted["linear"]) == 14 and conversion.left["value"] == "the filter"
    assert {m.saved_format for m in map(replaced, around.modules()) if m} == {"sqrt8"}
    assert coat_ds.conversion_of(coat_ds.unconvert(around)) is None
