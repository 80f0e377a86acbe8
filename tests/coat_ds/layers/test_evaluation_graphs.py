"""Layers of converted models, replayed as CUDA graphs, evaluate as those that are launched, to the bit."""

import gc

import pytest
import torch

from coat_ds.layers.modules.converted_forward import converted_forward
from coat_kernels.graphs import Graphs, end_graphs
from coat_kernels.graphs.warm_up import WARM_UP
from tests.coat_ds.layers.graphed import (
    STEPS,
    VARIANTS,
    assert_halves_are_equal,
    batch,
    converted,
    counts,
    evaluated,
    evaluated_counts,
    gradients,
    recorded,
    step,
)
from tests.families import LAYERS
from tests.util import run_distributed

on_gpu = pytest.mark.gpu


@on_gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_evaluation_replays_are_launches(variant, padded):
    """Steps in between change weights and scales, and have graphs of their own."""
    models = [converted(graphs, *VARIANTS[variant]) for graphs in (True, False)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for number in range(STEPS):
        how = {"padding": (1 + number % 7) * padded}
        for _ in range(1 + number % 2):
            logits = [evaluated(model, number, **how) for model in models]
            assert torch.equal(*logits), number
        found = [step(*pair, 3 * number, **how) for pair in zip(models, optimizers, strict=True)]
        assert all(map(torch.equal, *found)), number
    assert evaluated_counts(models[0]) == counts(models[0]) == [1] * LAYERS
    assert evaluated_counts(models[1]) == [0] * LAYERS


@on_gpu
def test_evaluation_replays_keep_earlier_results():
    models = [converted(graphs) for graphs in (True, False)]
    results = [[evaluated(model, number) for number in range(WARM_UP + 3)] for model in models]
    assert all(map(torch.equal, *results))
    assert evaluated_counts(models[0]) == [1] * LAYERS


@on_gpu
def test_evaluation_replays_of_other_lengths():
    """A graph stays until another length has come often enough, longer where it did not pay off."""
    models, seen = [converted(graphs) for graphs in (True, False)], []
    lengths = [64] * 3 + [48] * 2 + [64] + [48] * 3 + [64] * 4 + [64] + [32]
    for number, tokens in enumerate(lengths):
        assert torch.equal(*(evaluated(model, number, tokens=tokens) for model in models)), number
        seen.append(converted_forward(models[0].model.layers[0]).graphs._evaluations._recorded)
    first, second, third = seen[2], seen[8], seen[13]
    assert seen == [None] * 2 + [first] * 6 + [second] * 5 + [third] * 2
    assert None not in (first, second, third) and len({first, second, third}) == 3


@on_gpu
def test_evaluation_replays_between_a_forward_and_its_backward():
    found = []
    for model in recorded():
        for number in range(WARM_UP + 2):
            loss = model(**batch(number)).loss
            logits = evaluated(model, 100 + number, padding=number)
            loss.backward()
            found.append([loss.detach(), logits, *gradients(model)])
            model.zero_grad()
    assert_halves_are_equal(found)


@on_gpu
def test_evaluation_replays_of_a_frozen_reference_beside_training():
    """They share buffers and memory, as DPO's two models."""
    found = []
    for graphs in (True, False):
        policy, reference = converted(graphs), converted(graphs).requires_grad_(False).eval()
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
        for number in range(STEPS):
            with torch.no_grad():
                logits = reference(**batch(number)).logits
            found.append([logits, evaluated(policy, number), *step(policy, optimizer, number)])
        assert evaluated_counts(reference) == evaluated_counts(policy) == [int(graphs)] * LAYERS
        assert counts(reference) == [0] * LAYERS
    assert_halves_are_equal(found)


def held_by_evaluation() -> list[int]:
    """Bytes that the evaluation of 2 and of 8 layers adds to what is reserved."""
    held = []
    for layers in (2, 8):
        model = converted(True, layers=layers)
        evaluated(model, 0, tokens=512)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        for number in range(WARM_UP + 1):
            evaluated(model, number, tokens=512)
        torch.cuda.empty_cache()
        assert evaluated_counts(model) == [1] * layers
        held.append(torch.cuda.memory_reserved() - before)
        del model
        gc.collect()
    return held


@on_gpu
def test_evaluation_replays_hold_the_memory_of_one_layer():
    """No layer's evaluation keeps anything, so that more of them hold no more.

    In a process of its own: what other tests leave decides which segments are reserved.
    """
    ((few, many),) = run_distributed(held_by_evaluation, 1, gpus=True)
    assert many <= few


@on_gpu
def test_evaluation_graphs_are_of_evaluated_layers_alone():
    """Forwards without gradients of a model in training, and those of inference mode, whose tensors do not
    say when they change."""
    model = converted(True)
    for number in range(WARM_UP + 2):
        with torch.no_grad():
            model(**batch(number))
        with torch.inference_mode():
            model.eval()(**batch(number))
        model.train()
    assert evaluated_counts(model) == [0] * LAYERS
    for number in range(WARM_UP + 1):
        evaluated(model, number)
    assert evaluated_counts(model) == [1] * LAYERS
    end_graphs()
    assert evaluated_counts(model) == [0] * LAYERS


def test_graphs_without_gradients_do_not_call_uses():
    """To answer brings kept copies of weights up to date."""

    def uses():
        raise AssertionError

    x = torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        assert Graphs().call(torch.neg, x, (), uses).equal(-x)
    assert Graphs().call(torch.neg, x.detach(), (), uses).equal(-x)
