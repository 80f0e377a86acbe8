"""Layers that could run as fused blocks, and changes by users after which they must not."""

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import coat_ds
from tests.coat_ds.layers.measures import blocks_taken, fp8_bound, relative, run
from tests.families import FAMILIES


def biases_values_alone(layer: nn.Module) -> None:
    """Queries, whose bias stands for all three, have none."""
    layer.self_attn.v_proj.bias = bias_like(layer.self_attn.v_proj)


def biases_queries_alone(layer: nn.Module) -> None:
    layer.self_attn.q_proj.bias = bias_like(layer.self_attn.q_proj)


def biases_up_alone(layer: nn.Module) -> None:
    layer.mlp.up_proj.bias = bias_like(layer.mlp.up_proj)


def bias_like(linear: nn.Linear) -> nn.Parameter:
    generator = torch.Generator().manual_seed(1)
    return nn.Parameter(torch.randn(linear.out_features, generator=generator).to(linear.weight))


def doubles_attention(layer: nn.Module) -> None:
    attention = layer.self_attn
    stock = type(attention).forward
    attention.forward = lambda *args, **given: tuple(
        2 * y if i == 0 else y for i, y in enumerate(stock(attention, *args, **given))
    )


@pytest.mark.parametrize(
    "change",
    [biases_values_alone, biases_queries_alone, biases_up_alone, doubles_attention],
)
def test_changes_after_convert_are_computed(change, monkeypatch):
    family, batch = FAMILIES["llama"], FAMILIES["llama"].batch()
    stock, ours = family.build().float(), coat_ds.convert(family.build())
    for model in (stock, ours):
        change(model.model.layers[0])
    taken = blocks_taken(monkeypatch)
    (_, expected), (_, found) = (run(model, batch) for model in (stock, ours))
    assert len(taken) == 1
    assert relative(found, expected) < fp8_bound(14)


@pytest.mark.parametrize("package", ["user", "deepspeed.profiling"])
def test_global_hooks_see_all_modules(package, monkeypatch):
    model, seen = coat_ds.convert(FAMILIES["llama"].build()), set()
    taken = blocks_taken(monkeypatch)

    def hook(module, args, output):
        seen.add(module)

    hook.__module__ = package
    with register_module_forward_hook(hook):
        run(model, FAMILIES["llama"].batch())
    layer = model.model.layers[0]
    assert not taken and {layer.self_attn.k_proj, layer.mlp.up_proj} <= seen


def test_a_norm_that_is_kept_in_fp32(monkeypatch):
    """Autocast then casts what it gives."""
    model, taken = coat_ds.convert(FAMILIES["llama"].build()), blocks_taken(monkeypatch)
    model.model.layers[0].input_layernorm.float()
    with torch.autocast("cpu", torch.bfloat16):
        run(model, FAMILIES["llama"].batch())
    assert len(taken) == 1


VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}


def picture_model(name):
    """A vision-language model of transformers whose text layers are Qwen2's."""
    transformers = pytest.importorskip("transformers")
    text = {"model_type": "qwen2", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=VISION)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).bfloat16().train()


@pytest.mark.parametrize("name", ["Llava", "LlavaOnevision"])
def test_a_cache_that_no_call_asks_for_is_not_made(name, monkeypatch):
    taken = blocks_taken(monkeypatch)
    model = coat_ds.convert(picture_model(name))
    ids = torch.arange(10, 42)[None]
    output = model(input_ids=ids, labels=ids)
    assert len(taken) == 2 and output.past_key_values is None
    taken.clear()
    output = model(input_ids=ids, use_cache=True)
    assert not taken and output.past_key_values.get_seq_length() == 32
    with torch.no_grad():
        assert model.eval()(input_ids=ids).past_key_values.get_seq_length() == 32
    coat_ds.unconvert(model.train())
    assert model(input_ids=ids).past_key_values.get_seq_length() == 32


def test_dropout_of_any_name_that_is_set_after_convert(monkeypatch):
    family, taken = FAMILIES["llama"], blocks_taken(monkeypatch)
    stock = family.build()
    for layer in stock.model.layers:
        layer.self_attn.dropout = 0.0
    model = coat_ds.convert(stock)
    run(model, family.batch())
    assert len(taken) == 2
    taken.clear()
    model.model.layers[0].self_attn.dropout = 0.5
    run(model, family.batch())
    assert len(taken) == 1
