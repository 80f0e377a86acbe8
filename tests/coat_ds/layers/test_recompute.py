"""Converted models whose layers are recomputed in backward."""

from functools import partial

import pytest
import torch

import coat_ds
from coat_ds.checkpointing import compressed_checkpoints
from coat_kernels.autograd import checkpointing as saved
from tests.coat_ds.layers.measures import fused_calls, run, same, saved_bytes
from tests.families import FAMILIES


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_gradient_checkpointing_changes_nothing(name, reentrant):
    family, batch = FAMILIES[name], FAMILIES[name].batch()
    losses = []
    for checkpoints in (False, True):
        model = coat_ds.convert(family.build())
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            losses.append(run(model, batch))
            optimizer.step()
    for without, within in zip(losses[:3], losses[3:], strict=True):
        same(within, without)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_gradient_checkpointing_keeps_the_inputs_of_layers_alone(name):
    """Also where a layer runs as fused blocks, as Llama's, in the place of its own forward."""
    model, batch = FAMILIES[name].build(), FAMILIES[name].batch()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    expected = saved_bytes(model.train(), batch)
    # it also counts what the last norm and the head save
    assert saved_bytes(coat_ds.convert(model), batch) <= expected


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "no gradients"])
def test_gradient_checkpointing_is_of_the_layers_of_stock(trains, gradients, monkeypatch):
    family, calls, taken = FAMILIES["llama"], [], fused_calls(monkeypatch)
    for model in (family.build(), coat_ds.convert(family.build())):
        model.train(trains).gradient_checkpointing_enable({"use_reentrant": True})
        calls.append([])
        for layer in model.model.layers:
            checkpoint = layer._gradient_checkpointing_func
            layer._gradient_checkpointing_func = partial(count_calls, calls[-1], checkpoint)
        with torch.set_grad_enabled(gradients):
            model(**family.batch(), use_cache=False)
    assert len(taken) == 2 and len(calls[0]) == len(calls[1])


def test_convert_checkpoints_no_layer():
    """Also not where layers do so in `__call__` whether there are gradients or not, as in older releases of
    transformers."""
    model, calls = FAMILIES["llama"].build().train(), []
    model.gradient_checkpointing_enable({"use_reentrant": True})

    class Older(type(model.model.layers[0])):
        def __call__(self, *args, **kwargs):
            function = partial(super().__call__, **kwargs)
            if self.gradient_checkpointing and self.training:
                return self._gradient_checkpointing_func(function, *args)
            return function(*args)

    for layer in model.model.layers:
        layer.__class__ = Older
        layer._gradient_checkpointing_func = partial(count_calls, calls, layer._gradient_checkpointing_func)
    found = coat_ds.conversion_of(coat_ds.convert(model)).converted["layer"]
    assert len(found) == 2 and not calls
    model(**FAMILIES["llama"].batch(), use_cache=False).loss.backward()
    assert calls


def count_calls(calls, function, *args, **kwargs):
    calls.append(1)
    return function(*args, **kwargs)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_gradient_checkpointing_compressed_keeps_the_input_of_each_layer_in_fp8(name, reentrant, monkeypatch):
    monkeypatch.setattr(saved, "MIN_NUMEL", 1)
    model, batch = FAMILIES[name].build(), FAMILIES[name].batch()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    coat_ds.convert(model.train())
    inputs, before = [], set(saved.alive_compressed())
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].numel()))
    with compressed_checkpoints():
        loss = model(**batch).loss
    found = sorted(p.shape.numel() for p in set(saved.alive_compressed()) - before)
    assert found == sorted(inputs) and len(found) > 1
    loss.backward()
