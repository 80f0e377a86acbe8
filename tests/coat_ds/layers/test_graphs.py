"""Layers of converted models, replayed as CUDA graphs, train as those that are launched, to the bit."""

import copy
import threading

import pytest
import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

import coat_ds
from coat_ds.layers.fused_layer import uses_graphs
from coat_ds.layers.modules.converted_forward import converted_forward
from coat_ds.watch import codes
from coat_ds.watch.watch import Watch
from coat_kernels.graphs import MOVES_IN_BACKWARD, max_graphed_work
from coat_kernels.graphs.memory import Constant
from coat_kernels.graphs.recording import Recording
from coat_kernels.graphs.warm_up import PAID_OFF, WARM_UP
from tests.coat_ds.layers.graphed import (
    ROWS,
    STEPS,
    TOKENS,
    VARIANTS,
    assert_halves_are_equal,
    batch,
    converted,
    counts,
    gradients,
    graphs_of,
    recorded,
    step,
    trained_alike,
)
from tests.families import FAMILIES, LAYERS

on_gpu = pytest.mark.gpu


@on_gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_layer_graphs_train_as_launches(variant, padded):
    models = [converted(graphs, *VARIANTS[variant]) for graphs in (True, False)]
    trained_alike(models, how=lambda number: {"padding": (1 + number % 7) * padded})
    assert counts(models[0]) == [1] * LAYERS and counts(models[1]) == [0] * LAYERS


@on_gpu
def test_layer_graphs_under_autocast():
    models = [converted(graphs) for graphs in (True, False)]
    with torch.autocast("cuda", torch.bfloat16):
        trained_alike(models)
    assert counts(models[0]) == [1] * LAYERS


@on_gpu
def test_layer_graphs_of_lengths_that_change():
    """Graphs of one length are held at a time, their memory is freed, and each change makes the next
    graphs wait longer."""
    models = [converted(graphs, layers=4) for graphs in (True, False)]
    lengths = [64] * 4 + [48] * 2 + [64] * 4 + [48] * 6 + [32, 64, 48] * 2
    seen = []
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    for number, tokens in enumerate(lengths):
        # one micro-batch
        found = [step(*pair, 3 * number, tokens=tokens) for pair in zip(models, optimizers, strict=True)]
        assert all(map(torch.equal, *found)), number
        assert len(set(counts(models[0]))) == 1
        seen.append(counts(models[0])[0])
    # 48 comes twice, 64 then for one call too few, and 48 for two too many
    assert seen == [0, 0, 1, 1] + [0, 0] + [0, 0, 0, 0] + [0, 0, 0, 0, 1, 1] + [0] * 6


@on_gpu
def test_layer_graphs_with_a_short_last_batch_of_each_epoch():
    """Graphs that have paid off come back as soon as the first did."""
    models = [converted(graphs) for graphs in (True, False)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    seen, steps = [], WARM_UP + PAID_OFF + 1
    for number in range(3 * steps):
        rows = ROWS - (number % steps == steps - 1)
        found = [step(*pair, 3 * number, rows=rows) for pair in zip(models, optimizers, strict=True)]
        assert all(map(torch.equal, *found)), number
        seen.append(counts(models[0]))
    epoch = [[0] * LAYERS] * WARM_UP + [[1] * LAYERS] * PAID_OFF + [[0] * LAYERS]
    assert seen == 3 * epoch


@on_gpu
def test_layer_graphs_give_back_memory_of_another_length():
    model = converted(True, layers=4)
    torch.cuda.empty_cache()

    def train(tokens, times):
        for number in range(times):
            model(**batch(number, tokens=tokens)).loss.backward()
            model.zero_grad()

    train(512, WARM_UP + 2)
    torch.cuda.empty_cache()
    recorded = torch.cuda.memory_reserved()
    assert counts(model) == [1] * 4
    train(64, 1)
    torch.cuda.empty_cache()
    assert counts(model) == [0] * 4 and torch.cuda.memory_reserved() < recorded


@on_gpu
@pytest.mark.parametrize("padding", [(0, 0), (5, 9)], ids=["whole", "padded"])
def test_layer_graphs_of_two_forwards_before_their_backwards(padding):
    """The second is launched; neither reads the other's angles or mask."""
    found = []
    for model in recorded():
        batches = [batch(i, padding=p) for i, p in enumerate(padding)]
        # one of them starts elsewhere
        batches[1]["position_ids"] = torch.arange(7, 7 + TOKENS, device="cuda").expand(ROWS, -1)
        if padding[0]:
            for _ in range(2):
                # with a mask it is another function, recorded at its third call
                for one in batches:
                    model(**one).loss.backward()
            model.zero_grad()
        losses = [model(**one).loss for one in batches]
        for loss in losses:
            loss.backward()
        found.append([*(loss.detach() for loss in losses), *gradients(model)])
    assert all(map(torch.equal, *found))


@on_gpu
def test_layer_graphs_with_masks_that_come_and_go():
    """transformers leaves the mask out where all tokens are seen: a function of its own."""
    models = [converted(graphs) for graphs in (True, False)]
    trained_alike(models, how=lambda number: {"padding": 3 * (number % 2)})
    assert counts(models[0]) == [2] * LAYERS


@on_gpu
def test_layer_graphs_with_weights_that_move_between_forward_and_backward():
    """As under FSDP, which frees and re-gathers them: the recorded backward has their addresses."""
    found = []
    for model in recorded():
        for number in range(3):
            loss = model(**batch(number)).loss
            others = []
            for p in model.parameters():
                values, storage = p.detach().clone(), p.untyped_storage()
                size = storage.nbytes()
                with _unsafe_preserve_version_counter(p), torch.no_grad():
                    storage.resize_(0)
                    # which takes the memory
                    others.append(torch.full_like(values, torch.nan))
                    storage.resize_(size)
                    p.copy_(values)
            loss.backward()
            found.append([loss.detach(), *gradients(model)])
    assert_halves_are_equal(found)


@on_gpu
def test_layer_graphs_of_two_models_at_once():
    """The second one's angles may not overwrite what the first one's graphs still read: it is launched."""
    found = []
    for graphs in (True, False):
        models = [converted(graphs) for _ in range(2)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
        for number in range(8):
            losses = [model(**batch(2 * number + i)).loss for i, model in enumerate(models)]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                found.append(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
        assert [counts(model) for model in models] == [[int(graphs)] * LAYERS, [0] * LAYERS]
    assert found[:16] == found[16:]


@on_gpu
def test_layer_graphs_of_a_forward_without_a_backward():
    """Its backward is recorded after another forward, whose angles are newer."""
    models = [converted(graphs) for graphs in (True, False)]
    for _ in range(WARM_UP):
        models[0](**batch(7)).loss.backward()
    models[0](**batch(7))
    assert counts(models[0]) == [1] * LAYERS
    trained_alike(models, 4)
    assert counts(models[0]) == [1] * LAYERS
    assert all(graphs._memory.refusal is None for graphs in graphs_of(models[0]))


@on_gpu
def test_layer_graphs_are_not_warmed_up_by_forwards_alone():
    """As a first look at losses: what backward compiles cannot be compiled while it is recorded."""
    models = [converted(graphs) for graphs in (True, False)]
    for number in range(WARM_UP + 2):
        models[0](**batch(number))
    assert counts(models[0]) == [0] * LAYERS
    trained_alike(models, 4)
    assert counts(models[0]) == [1] * LAYERS


@on_gpu
def test_layer_graphs_with_outputs_that_are_changed_in_place():
    """As by hooks that steer a model."""
    models = [converted(graphs) for graphs in (True, False)]
    for model in models:
        for layer in model.model.layers:
            layer.register_forward_hook(lambda layer, args, y: y.add_(0.5))
    trained_alike(models, 5)
    assert counts(models[0]) == [1] * LAYERS


@on_gpu
def test_layer_graphs_are_left_where_anomalies_are_looked_for():
    models = [converted(graphs) for graphs in (True, False)]
    with torch.autograd.set_detect_anomaly(True):
        trained_alike(models, 3)
    assert counts(models[0]) == [0] * LAYERS
    trained_alike(models, 3)
    assert counts(models[0]) == [1] * LAYERS


@on_gpu
def test_layer_graphs_keep_nothing_of_inference_mode():
    models = [converted(graphs, activations={"weight_cache": "fp8"}) for graphs in (True, False)]
    for _ in range(WARM_UP + 2):
        for model in models:
            with torch.inference_mode():
                model(**batch(7))
        trained_alike(models, 1)
    assert counts(models[0]) == [1] * LAYERS


@on_gpu
def test_layer_graphs_of_models_in_threads_of_their_own():
    """They share a stream, but no buffers."""
    models = [converted(graphs) for graphs in (True, True, False)]
    results = [[] for _ in models]

    def train(model, found):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for number in range(STEPS):
            found += step(model, optimizer, number)

    threads = [threading.Thread(target=train, args=args) for args in zip(models, results, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found in results[:2]:
        assert all(map(torch.equal, found, results[2]))
    assert counts(models[0]) == counts(models[1]) == [1] * LAYERS


@on_gpu
@pytest.mark.parametrize("reentrant", [False, True])
def test_layer_graphs_leave_what_is_recomputed(reentrant):
    models = [converted(graphs) for graphs in (True, False)]
    for model in models:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    trained_alike(models, 5)
    assert counts(models[0]) == [0] * LAYERS


@on_gpu
def test_layer_graphs_of_copies_are_recorded_anew():
    model = copy.deepcopy(recorded()[0])
    assert counts(model) == [0] * LAYERS
    for number in range(WARM_UP + 1):
        model(**batch(number)).loss.backward()
    assert counts(model) == [1] * LAYERS


@on_gpu
def test_layer_graphs_refuse_what_is_changed_before_its_backward():
    model, _ = recorded()
    loss = model(**batch(0)).loss
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_gpu
def test_layer_graphs_take_turns_in_being_watched(monkeypatch):
    model, plain = recorded(layers=3)
    replays, forward = [], Recording.forward
    monkeypatch.setattr(Recording, "forward", lambda *args: (replays.append(1), forward(*args))[1])
    readings = []
    monkeypatch.setattr(codes, "TURNS", 3)
    watch = Watch(model, None, {"every": 1}, [readings.append])
    in_python = []
    for number in range(6):
        replays.clear()
        for one in (model, plain):
            one.zero_grad()
            one(**batch(number)).loss.backward()
        watch.end_step()
        in_python.append(3 - len(replays))
        assert all(map(torch.equal, gradients(model), gradients(plain)))
    watch.close()
    assert set(in_python) == {1} and len(readings) == 6


@on_gpu
def test_layer_graphs_are_taken_by_themselves():
    for wanted in (None, True, False):
        layer = converted_forward(converted(wanted).model.layers[0])
        weights = [linear.weight for linears in layer.gemms for linear in linears]
        numel, x = sum(w.numel() for w in weights), torch.empty(1, 1, 1, device="cuda")

        def taken(x, wanted=layer.cuda_graphs, weights=weights):
            return uses_graphs(wanted, x, weights)

        for leave in (False, True):
            for p in layer.module.parameters():
                setattr(p, MOVES_IN_BACKWARD, leave)
            small = int(max_graphed_work(gradients_move=leave)) // numel
            found = [taken(x.expand(1, tokens, 1)) for tokens in (small, small + 1)]
            assert found == [wanted is not False, wanted is True]
        assert not taken(torch.empty(1, 1, 1))


def test_layer_graphs_keep_a_constant_while_it_is_to_be_read():
    mask = torch.randn(1, 1, 5, 8)[..., :5]
    constant = Constant(mask)
    assert constant.buffer.stride() == mask.stride()
    assert constant.update(mask) and constant.buffer.equal(mask)
    constant.readers += 1
    assert constant.update(mask)
    # another one, or the same with other values
    other = mask + 1
    assert not constant.update(other)
    mask.add_(1)
    assert not constant.update(mask) and not constant.buffer.equal(mask)
    constant.readers -= 1
    assert constant.update(other) and constant.buffer.equal(other)


def test_cuda_graphs_key_warns_where_it_has_no_effect(caplog):
    model = coat_ds.convert(FAMILIES["llama"].build(), {"cuda_graphs": True})
    model(**FAMILIES["llama"].batch()).loss.backward()
    (line,) = [m for m in caplog.messages if "cuda_graphs" in m]
    assert "coat.activations.cuda_graphs: found True, of no effect on a CPU" in line
