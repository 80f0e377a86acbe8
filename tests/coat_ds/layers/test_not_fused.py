"""Layers that could run as fused blocks, and changes by users after which they must not."""

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import coat_ds
from tests.coat_ds.layers.measures import (
    fp8_bound,
    fp8_forward_bound,
    fused_calls,
    padded,
    relative,
    run,
    same,
)
from tests.families import FAMILIES
from tests.util import rel_rms


def bias_like(linear: nn.Linear) -> nn.Parameter:
    generator = torch.Generator().manual_seed(1)
    return nn.Parameter(torch.randn(linear.out_features, generator=generator).to(linear.weight))


def biased(name: str):
    def change(model):
        module = model.model.layers[0].get_submodule(name)
        module.bias = bias_like(module)

    return change


def doubled(name: str):
    """A hook that doubles a module's output."""

    def change(model):
        module = model.model.layers[0].get_submodule(name)
        module.register_forward_hook(
            lambda module, args, y: (2 * y[0], *y[1:]) if type(y) is tuple else 2 * y
        )

    return change


def exchanged(name: str):
    """Another module in the place of one: the layer's block would go on with the one that it was made of."""

    def change(model):
        new = FAMILIES["qwen3"].build(seed=1).model.layers[0].get_submodule(name)
        model.model.layers[0].set_submodule(name, new.to(model.lm_head.weight.dtype))

    return change


def patched(name: str):
    def change(model):
        module = model.model.layers[0].get_submodule(name)
        stock = type(module).forward
        module.forward = lambda *args, **given: stock(module, *args, **given)

    return change


def frozen(name: str):
    return lambda model: model.model.layers[0].get_submodule(name).requires_grad_(False)


def both_ways(model) -> None:
    """As in an encoder that is made of a decoder. Without a mask a block would attend to the past alone."""
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


# by name: the family, the change, and how many layers still run as fused blocks
CHANGES = {
    # queries' bias stands for all three
    "values with a bias": ("llama", biased("self_attn.v_proj"), 1),
    "queries with a bias": ("llama", biased("self_attn.q_proj"), 1),
    "up with a bias": ("llama", biased("mlp.up_proj"), 1),
    "keys with a hook": ("llama", doubled("self_attn.k_proj"), 1),
    "up with a hook": ("llama", doubled("mlp.up_proj"), 1),
    "attention with a hook": ("llama", doubled("self_attn"), 1),
    "head norm with a hook": ("qwen3", doubled("self_attn.q_norm"), 1),
    "activation with a hook": ("qwen3", doubled("mlp.act_fn"), 1),
    "another activation": ("qwen3", lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.GELU()), 1),
    "another head norm": ("qwen3", exchanged("self_attn.q_norm"), 1),
    "another norm": ("qwen3", exchanged("input_layernorm"), 1),
    "another feed-forward": ("qwen3", exchanged("mlp"), 1),
    "a patched norm": ("qwen3", patched("self_attn.q_norm"), 1),
    "a frozen head norm": ("qwen3", frozen("self_attn.k_norm"), 1),
    "a frozen weight": ("llama", frozen("mlp.down_proj"), 1),
    "attention in both directions": ("llama", both_ways, 0),
    # with experts, only attention is fused
    "keys with a hook, experts": ("mixtral", doubled("self_attn.k_proj"), 1),
    "a frozen output projection, experts": ("mixtral", frozen("self_attn.o_proj"), 1),
    "experts with a hook": ("mixtral", doubled("mlp.experts"), 2),
    "a layer of experts with a hook": ("mixtral", doubled("mlp"), 2),
    "a second norm with a hook": ("mixtral", doubled("post_attention_layernorm"), 2),
    "a frozen router": ("mixtral", frozen("mlp.gate"), 2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_layer_that_was_changed_after_convert_runs_unfused(name, monkeypatch):
    """And computes the change."""
    name, change, fused = CHANGES[name]
    family, batch = FAMILIES[name], FAMILIES[name].batch()
    stock, ours = family.build().float(), coat_ds.convert(family.build())
    for model in (stock, ours):
        change(model)
    taken = fused_calls(monkeypatch)
    (_, expected), (_, found) = (run(model, batch) for model in (stock, ours))
    assert len(taken) == fused
    assert relative(found, expected) < fp8_bound(14)


class ByPosition(nn.Module):
    """Reads more than the norm's output, and returns more than its own."""

    def forward(self, x, positions):
        return x * positions[..., None], positions


class AroundExperts(nn.Module):
    def forward(self, hidden_states, position_ids=None, **kwargs):
        x, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        x = hidden_states + x
        y = self.post_attention_layernorm(x)
        return x + (self.mlp(y, position_ids)[0] if isinstance(self.mlp, ByPosition) else self.mlp(y))


@pytest.mark.parametrize("mlp", [ByPosition, None])
def test_layers_of_other_code_around_unknown_feed_forwards_run_unfused(mlp, monkeypatch):
    model, taken = FAMILIES["mixtral"].build(), fused_calls(monkeypatch)
    layer = model.model.layers[0]
    layer.__class__ = type("Layer", (AroundExperts, type(layer)), {})
    if mlp is not None:
        layer.mlp = mlp()
    coat_ds.convert(model)
    assert coat_ds.conversion_of(model).converted["attention_block"] == ["model.layers.1"]
    run(model, FAMILIES["mixtral"].batch())
    assert len(taken) == 1


def test_layers_run_fused_after_router_logits_were_recorded(monkeypatch):
    """transformers' recorders stay on every attention."""
    family, taken = FAMILIES["mixtral"], fused_calls(monkeypatch)
    stock, model = family.build().float(), coat_ds.convert(family.build())
    for _ in range(2):
        outputs = [one(**family.batch(), output_router_logits=True) for one in (stock, model)]
        expected, found = (out.router_logits for out in outputs)
        assert len(expected) == len(found) == 2
        assert all(rel_rms(y, x) < fp8_forward_bound(14) for x, y in zip(expected, found, strict=True))
        assert outputs[1].aux_loss.isfinite()
    assert len(taken) == 4


def test_layers_with_masks_run_fused(monkeypatch):
    """Except with masks that attention cannot take without a gradient, and with a cache."""
    model, batch = coat_ds.convert(FAMILIES["llama"].build()), FAMILIES["llama"].batch()
    taken = fused_calls(monkeypatch)
    scores = torch.zeros(2, 1, 64, 64).masked_fill_(torch.ones(64, 64).triu(1).bool(), -torch.inf)
    for more, fused in (
        ({}, 2),
        ({"attention_mask": torch.ones_like(batch["input_ids"])}, 2),
        (padded(batch, 8), 2),
        ({"attention_mask": scores.bfloat16()}, 2),
        # attention that is recomputed hands a bias no gradient
        ({"attention_mask": scores}, 0),
        ({"attention_mask": scores.bfloat16().requires_grad_()}, 0),
        ({"use_cache": True}, 0),
    ):
        taken.clear()
        run(model, batch | more)
        assert len(taken) == fused, more


def test_layers_under_autocast_run_fused(monkeypatch):
    model, batch = coat_ds.convert(FAMILIES["llama"].build()), FAMILIES["llama"].batch()
    expected, taken = run(model, batch), fused_calls(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        same(run(model, batch), expected)
        assert len(taken) == 2
        # norms and the residual in FP32, products in BF16
        run(coat_ds.convert(FAMILIES["llama"].build(torch.float32)), batch)
    assert len(taken) == 2


def test_layers_with_a_mask_by_position_run_unfused(monkeypatch):
    models = FAMILIES["llama"].build(), coat_ds.convert(FAMILIES["llama"].build())
    x, taken = torch.randn(2, 16, 128).bfloat16(), fused_calls(monkeypatch)
    angles, mask = models[0].model.rotary_emb(x, torch.arange(16)[None]), torch.eye(16).bool()[None, None]
    expected, y = (m.model.layers[0](x, mask, position_embeddings=angles) for m in models)
    assert not taken and rel_rms(y, expected) < fp8_forward_bound(7)


def test_layer_with_a_backward_hook_runs_unfused(monkeypatch):
    model, taken = coat_ds.convert(FAMILIES["llama"].build()), fused_calls(monkeypatch)
    model.model.layers[0].mlp.register_full_backward_hook(lambda *a: None)
    run(model, FAMILIES["llama"].batch())
    assert len(taken) == 1


@pytest.mark.parametrize("package", ["user", "deepspeed.profiling"])
def test_layers_under_global_hooks_run_unfused(package, monkeypatch):
    model, seen = coat_ds.convert(FAMILIES["llama"].build()), set()
    taken = fused_calls(monkeypatch)

    def hook(module, args, output):
        seen.add(module)

    hook.__module__ = package
    with register_module_forward_hook(hook):
        run(model, FAMILIES["llama"].batch())
    layer = model.model.layers[0]
    assert not taken and {layer.self_attn.k_proj, layer.mlp.up_proj} <= seen


def test_layer_with_an_fp32_norm_runs_unfused_under_autocast(monkeypatch):
    """Autocast then casts what it gives."""
    model, taken = coat_ds.convert(FAMILIES["llama"].build()), fused_calls(monkeypatch)
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
def test_layers_make_no_cache_without_use_cache(name, monkeypatch):
    taken = fused_calls(monkeypatch)
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


@pytest.mark.parametrize("name", ["attention_dropout", "dropout"])
def test_layer_with_dropout_set_after_convert_runs_unfused(name, monkeypatch):
    """While it trains."""
    family, taken = FAMILIES["llama"], fused_calls(monkeypatch)
    stock = family.build()
    for layer in stock.model.layers:
        setattr(layer.self_attn, name, 0.0)
    model = coat_ds.convert(stock)
    setattr(model.model.layers[0].self_attn, name, 0.5)
    run(model, family.batch())
    assert len(taken) == 1
    run(model.eval(), family.batch())
    assert len(taken) == 1 + 2
