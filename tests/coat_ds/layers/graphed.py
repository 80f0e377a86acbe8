"""Small converted models with and without CUDA graphs, and steps that both are to make alike."""

import torch

import coat_ds
from coat_ds.layers.modules.converted_forward import converted_forward
from coat_kernels.graphs.warm_up import WARM_UP
from tests.families import FAMILIES, LAYERS

ROWS, TOKENS, STEPS = 2, 64, 14
# families, and activations of the block
VARIANTS = {
    "llama": ("llama", {}),
    "biases": ("qwen2", {}),
    "head norms": ("qwen3", {}),
    "cached": ("llama", {"weight_cache": "fp8"}),
    "8-bit": ("llama", {"attention_format": "sqrt8"}),
    "recomputed": ("llama", {"attention_format": "recompute"}),
    "head norms, recomputed": ("qwen3", {"attention_format": "recompute"}),
}


def converted(graphs, name="llama", activations=None, layers=LAYERS):
    model = FAMILIES[name].deeper(layers).cuda()
    return coat_ds.convert(model, {"cuda_graphs": graphs} | (activations or {}))


def graphs_of(model):
    return [converted_forward(layer).graphs for layer in model.model.layers]


def counts(model) -> list[int]:
    return [graphs.count for graphs in graphs_of(model)]


def batch(number: int, rows=ROWS, tokens=TOKENS, padding=0) -> dict:
    found = {k: v.cuda() for k, v in FAMILIES["llama"].batch(number, rows, tokens).items()}
    if padding:
        found["attention_mask"] = torch.ones_like(found["input_ids"])
        found["attention_mask"][0, -padding:] = 0
    return found


def evaluated_counts(model) -> list[int]:
    return [graphs.evaluated for graphs in graphs_of(model)]


def evaluated(model, number: int, **how) -> torch.Tensor:
    """The logits of an evaluation."""
    model.eval()
    with torch.no_grad():
        found = model(**batch(number, **how)).logits
    model.train()
    return found


def gradients(model) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def step(model, optimizer, number: int, **how) -> list[torch.Tensor]:
    """Losses and gradients of a step. Steps differ in tokens, micro-batches, and in how large gradients are;
    some have an evaluation of another shape in between."""
    found = []
    optimizer.zero_grad()
    for micro_batch in range(1 + number % 3):
        if number % 5 == 2:
            with torch.no_grad():
                found.append(model(**batch(number, tokens=32)).loss)
        loss = model(**batch(100 * number + micro_batch, **how)).loss
        (loss * 8.0 ** (number % 7)).backward()
        found.append(loss.detach())
    found += gradients(model)
    optimizer.step()
    return found


def trained_alike(models, steps=STEPS, how=lambda number: {}):
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    for number in range(steps):
        replayed, launched = (
            step(model, optimizer, number, **how(number))
            for model, optimizer in zip(models, optimizers, strict=True)
        )
        assert all(map(torch.equal, replayed, launched)), number


def recorded(name="llama", **how):
    """A model with graphs, and the same without."""
    models = [converted(graphs, name, **how) for graphs in (True, False)]
    for number in range(WARM_UP + 1):
        models[0](**batch(number)).loss.backward()
        models[0].zero_grad()
    assert counts(models[0]) == [1] * len(models[0].model.layers)
    return models


def assert_halves_are_equal(found):
    """The results of two models, first the first model's."""
    half = len(found) // 2
    for replayed, launched in zip(found[:half], found[half:], strict=True):
        assert all(map(torch.equal, replayed, launched))
