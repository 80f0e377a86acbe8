"""Frozen weights of converted models, reference models, and PEFT's adapters on top of them."""

import copy

import pytest
import torch
from torch import nn

import coat_ds
from coat_ds.layers.modules.converted_forward import converted_forward
from coat_kernels.weights import WeightCache
from tests.coat_ds.layers.measures import (
    fp8_bound,
    fused_calls,
    placed,
    relative,
    run,
)
from tests.coat_ds.layers.parts import plain
from tests.families import FAMILIES, LAYERS
from tests.util import rel_rms, saved_tensors

LLAMA = FAMILIES["llama"]


def test_frozen_weights_of_a_model_save_no_input():
    model = plain()
    for block in model:
        block.up.requires_grad_(False)
        block.down.requires_grad_(False)
        block.norm.requires_grad_(False)
    x = torch.randn(64, 64).bfloat16().requires_grad_()
    coat_ds.convert(model, {"weight_cache": "fp8"})
    with saved_tensors() as kept:
        y = model(x)
    # inputs of norms and activations, in groups
    wide = [t for t in kept if t.numel() >= x.numel() and not t.is_leaf]
    assert all(t.dtype == torch.uint8 or t.numel() == 64 * 128 for t in wide)
    assert not any(t.dtype == torch.float8_e4m3fn for t in kept)
    y.sum().backward()
    assert x.grad is not None and all(p.grad is None for p in model.parameters())


def test_frozen_weights_of_a_model_are_quantized_once(monkeypatch):
    count = []
    quantize = WeightCache._quantize
    monkeypatch.setattr(WeightCache, "_quantize", lambda *a, **k: count.append(1) or quantize(*a, **k))
    model = plain()
    model[0].up.requires_grad_(False)
    coat_ds.convert(model, {"weight_cache": "fp8"})
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        model(torch.randn(8, 64).bfloat16()).sum().backward()
        optimizer.step()
    # three that are trained, in each step, and one that is not
    assert len(count) == 3 * 3 + 1
    before = model[0].up(torch.ones(1, 64).bfloat16())
    with torch.no_grad():
        model[0].up.weight.mul_(2)
    bias = model[0].up.bias
    assert rel_rms(model[0].up(torch.ones(1, 64).bfloat16()) - bias, 2 * (before - bias)) < 2**-6


def test_frozen_part_of_a_feed_forward_has_a_scale_of_its_own():
    """By that of the other part its codes would all be zero."""
    mlp = LLAMA.build().model.layers[0].mlp
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        mlp.gate_proj.weight.mul_(2.0**20)
    expected = copy.deepcopy(mlp).float()(x.float())
    mlp.up_proj.requires_grad_(False)
    assert rel_rms(coat_ds.convert(mlp)(x), expected) < fp8_bound(3)


def test_frozen_tower_without_gradients():
    family = FAMILIES["llava"]
    model, batch = family.build(), family.batch()
    model.model.vision_tower.requires_grad_(False)
    stock = run(model, batch)
    coat_ds.convert(model)
    found = run(model, batch)
    assert relative(found[1], stock[1]) < fp8_bound(len(coat_ds.conversion_of(model).converted["linear"]))
    assert not any(name.startswith("model.vision_tower") for name in found[1])


@pytest.mark.parametrize("cached", ["none", "fp8"])
def test_frozen_reference_computes_what_its_policy_does(monkeypatch, cached, device):
    policy = coat_ds.convert(LLAMA.build().to(device), {"weight_cache": cached})
    batch = placed(LLAMA.batch(), device)
    # LLaMA-Factory freezes it, TRL does not
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    taken = fused_calls(monkeypatch)
    expected = policy(**batch, use_cache=False).logits
    assert len(taken) == LAYERS
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(reference(**batch, use_cache=False).logits, expected)
        assert len(taken) == 3 * LAYERS
        # as in the first pass of a reentrant checkpoint, whose second has gradients
        reference.train()(**batch, use_cache=False)
    reference.eval()(**batch, use_cache=False)
    assert len(taken) == 3 * LAYERS


@pytest.mark.parametrize("before", [True, False], ids=["convert first", "peft first"])
def test_lora_trains_converted_layers(before):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(
        r=16, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"], lora_dropout=0.0
    )
    model, batch = LLAMA.build(), LLAMA.batch()

    def adapted(model):
        torch.manual_seed(1)
        model = peft.get_peft_model(model, lora)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.02)
        return model

    stock = run(adapted(copy.deepcopy(model)), batch)
    model = adapted(coat_ds.convert(model)) if before else coat_ds.convert(adapted(model))
    conversion = coat_ds.conversion_of(model)
    assert len(conversion.converted["linear"]) == 14 and len(conversion.converted["feed_forward"]) == 2
    if not before:
        layer = "base_model.model.model.layers.0"
        assert conversion.left[f"{layer}.self_attn.q_proj.lora_A.default"] == "an adapter"
        assert conversion.left[layer] == "no fused block, since its q_proj has an adapter"
        assert "as fused blocks" not in conversion.summary()
    found = run(model, batch)
    assert all("lora" in name for name in found[1])
    assert relative(found[1], stock[1]) < fp8_bound(14)
    coat_ds.unconvert(model)
    assert coat_ds.conversion_of(model) is None and relative(run(model, batch)[1], stock[1]) == 0


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.choice, self.experts = nn.Linear(64, 32), nn.ModuleList(nn.Linear(64, 64) for _ in range(32))


class Chooser(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.gate = (nn.Linear(64, 32) for _ in range(4))

    def forward(self, x):
        return self.gate(x).topk(2)


@pytest.mark.parametrize("kind", ["lora_A", "modules_to_save"])
def test_convert_leaves_heads_and_routers_within_pefts_wrappers(kind):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    causal = LLAMA.build()
    classifier = transformers.LlamaForSequenceClassification(
        causal.config.__class__(**LLAMA.fields, num_labels=32)
    )
    for model, first, head in (
        (causal, "q_proj", "lm_head"),
        (classifier.bfloat16(), "q_proj", "score"),
        # in a module of its own
        (FAMILIES["bert"].build(), "query", "decoder"),
        (Mixture(), "experts.0", "choice"),
        (Chooser(), "first", "gate"),
    ):
        options = {"target_modules": [first, head]} if kind == "lora_A" else {"modules_to_save": [head]}
        wrapped = peft.get_peft_model(model, peft.LoraConfig(r=8, **{"target_modules": [first], **options}))
        coat_ds.convert(wrapped)
        inside = [m for name, m in wrapped.named_modules() if head in name and isinstance(m, nn.Linear)]
        assert len(inside) >= 2 and not any(map(converted_forward, inside))


@pytest.mark.parametrize("kind", ["PromptEncoderConfig", "PrefixTuningConfig"])
def test_convert_leaves_what_makes_pefts_prompts(kind):
    peft = pytest.importorskip("peft")
    sizes = {"encoder_hidden_size": 64, "num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}
    if kind == "PrefixTuningConfig":
        sizes["prefix_projection"] = True
    model = coat_ds.convert(peft.get_peft_model(LLAMA.build(), getattr(peft, kind)(**sizes)))
    left = coat_ds.conversion_of(model).left
    made = [name for name, m in model.prompt_encoder.named_modules() if isinstance(m, nn.Linear)]
    assert made and all(left[f"prompt_encoder.{name}"] == "an adapter" for name in made)
    assert not any(map(converted_forward, model.prompt_encoder.modules()))
