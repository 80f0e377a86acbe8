"""Layers that run as CUDA graphs train as layers that run eagerly, to the bit."""

from dataclasses import replace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from coat_ds.config import ActivationsConfig
from coat_ds.layers import fused_layer
from coat_kernels.graphs import end_graphs, max_graphed_work
from coat_kernels.graphs.calls import MAX_MOVES
from coat_kernels.graphs.warm_up import WARM_UP
from coat_kernels.weights import invalidate_weight_caches
from megatron_ext.layer_specs import coat_layer_spec
from megatron_ext.layers.decoder_layer import _no_graph, dense_parts, ranks_of
from megatron_ext.model import ModelShape, build_gpt
from tests.megatron_ext.blocks import batch
from tests.megatron_ext.layers import GPT

S, B, H, FFN, HEADS, VOCAB = 32, 2, 64, 96, 4, 64
STEPS = 50

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("megatron")]


def build(graphs, config=None, activations=None, layers=2):
    return build_gpt(
        ModelShape(layers, H, FFN, HEADS, 2),
        coat_layer_spec,
        seq_length=S,
        vocab_size=VOCAB,
        activations=ActivationsConfig(**{"cuda_graphs": graphs} | (activations or {})),
        **(config or {}),
    )


def counts(model) -> list[int]:
    return [layer.graphs.count for layer in model.decoder.layers]


def step(model, optimizer, device, number: int) -> list[torch.Tensor]:
    """The losses and gradients of one step. Steps differ in tokens, micro-batches, learning rate and the size
    of gradients, so that their scales change; some steps include a validation loss."""
    found = []
    optimizer.zero_grad()
    for micro_batch in range(1 + number % 3):
        generator = torch.Generator().manual_seed(100 * number + micro_batch)
        tokens = torch.randint(0, VOCAB, (B, S), generator=generator).to(device)
        positions = torch.arange(S, device=device).expand(B, S)
        if number % 5 == 2:
            with torch.no_grad():
                found.append(model(tokens, positions, None, labels=tokens).float().mean())
        loss = model(tokens, positions, None, labels=tokens).float().mean()
        (loss * 8.0 ** (number % 7)).backward()
        found.append(loss.detach())
    found += [p.grad.clone() for p in model.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (1 + number % 4)
    optimizer.step()
    return found


@pytest.mark.parametrize(
    "config, activations",
    [
        ({}, {}),
        (GPT, {}),
        ({}, {"weight_cache": "fp8"}),
        ({}, {"attention_format": "sqrt8"}),
        ({}, {"attention_format": "recompute"}),
        ({"bf16": False}, {}),
        ({"qk_layernorm": True}, {}),
        ({"qk_layernorm": True}, {"attention_format": "recompute"}),
    ],
    ids=[
        "llama",
        "gpt",
        "cached",
        "8-bit attention",
        "recomputed attention",
        "fp32",
        "head norms",
        "head norms, recomputed attention",
    ],
)
def test_graphs_train_as_eager_layers(config, activations, device):
    models = [build(graphs, config, activations) for graphs in (True, False)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for number in range(STEPS):
        replayed, launched = (
            step(model, optimizer, device, number)
            for model, optimizer in zip(models, optimizers, strict=True)
        )
        assert all(map(torch.equal, replayed, launched)), number
    assert counts(models[0]) == [1, 1] and counts(models[1]) == [0, 0]
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize(
    "config, activations",
    [({}, {}), (GPT, {}), ({}, {"weight_cache": "fp8"}), ({"qk_layernorm": True}, {})],
    ids=["llama", "gpt", "cached", "head norms"],
)
def test_graphs_evaluate_as_eager_layers(config, activations, device):
    models = [build(graphs, config, activations) for graphs in (True, False)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    positions = torch.arange(S, device=device).expand(B, S)
    for number in range(12):
        tokens = torch.randint(0, VOCAB, (B, S), generator=torch.Generator().manual_seed(number)).to(device)
        logits = []
        for model in models:
            model.eval()
            with torch.no_grad():
                logits.append(model(tokens, positions, None))
            model.train()
        assert torch.equal(*logits), number
        found = [
            step(model, optimizer, device, number)
            for model, optimizer in zip(models, optimizers, strict=True)
        ]
        assert all(map(torch.equal, *found)), number
    evaluated = [[layer.graphs.evaluated for layer in model.decoder.layers] for model in models]
    assert evaluated == [[1, 1], [0, 0]] and counts(models[0]) == [1, 1]


def test_graphs_add_to_main_grad(device):
    found = []
    for graphs in (True, False):
        model = build(graphs)
        wrapped = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
            model,
        )
        tokens, positions, mask = batch(device)
        for _ in range(4):
            wrapped.zero_grad_buffer()
            for _ in range(2):
                wrapped(tokens, positions, mask, labels=tokens).float().mean().backward()
        assert counts(model) == [int(graphs)] * 2
        found.append([p.main_grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def inputs(device, number=6, s=S):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, B, H, generator=generator).bfloat16().to(device) for _ in range(number)]


def run(layer, x):
    x = x.clone().requires_grad_()
    return x, layer(x, attention_mask=None)[0]


def gradients(layer, x, y, grad, **how):
    layer.zero_grad()
    y.backward(grad, **how)
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def recorded(device, **how):
    """A layer with graphs and the same layer without; the steps before graphs exist have run."""
    layers = [build(graphs, layers=1, **how).decoder.layers[0] for graphs in (True, False)]
    for x in inputs(device, WARM_UP + 1):
        gradients(layers[0], *run(layers[0], x), x)
    assert layers[0].graphs.count == 1
    return layers


def test_graphs_of_two_forwards_in_progress(device):
    """Layers in a row with two forwards in progress, as in a pipeline. Other orders:
    tests/coat_ds/layers/test_graphs.py."""
    found = []
    for graphs in (True, False):
        layers = [layer for _ in range(2) for layer in build(graphs, layers=2).decoder.layers]
        for layer in layers:
            layer.config.pipeline_model_parallel_size = 2
        results, waiting = [], []
        for x in inputs(device, 24):
            y = x.requires_grad_()
            for layer in layers:
                y = layer(y, attention_mask=None)[0]
            waiting.append((x, y))
            # the backward of the forward before the last one
            if len(waiting) == 2:
                x, y = waiting.pop(0)
                y.backward(torch.ones_like(y))
                results += [y.detach(), x.grad]
        found.append(results + [p.grad for layer in layers for p in layer.parameters()])
        assert all(layer.graphs.count > 0 for layer in layers) == graphs
    assert all(t.isfinite().all() for t in found[0])
    assert all(map(torch.equal, *found))


def test_graphs_with_a_second_backward(device):
    layer, plain = recorded(device)
    a, b, *_ = inputs(device)
    x, y = run(layer, a)
    y.backward(b, retain_graph=True)
    other = run(layer, b)
    assert type(other[1].grad_fn).__name__ != "ReplayBackward"
    x.grad = None
    assert all(map(torch.equal, gradients(layer, x, y, b), gradients(plain, *run(plain, a), b)))
    with pytest.raises(RuntimeError, match="retain_graph"):
        y.backward(b)


def test_graphs_do_not_overwrite_returned_tensors(device):
    """The next replay does not overwrite outputs and gradients that the caller keeps."""
    layer, _ = recorded(device)
    kept, copies = [], []
    for x in inputs(device):
        kept += gradients(layer, *run(layer, x), x)
        copies += [t.clone() for t in kept[len(copies) :]]
    assert all(map(torch.equal, kept, copies))


def test_graphs_are_recorded_again_if_weights_move(device):
    layer, plain = recorded(device)
    for move in range(MAX_MOVES + 1):
        for p in layer.parameters():
            p.data = p.data.clone()
        for x in inputs(device, WARM_UP + 1):
            found = gradients(layer, *run(layer, x), x)
            assert all(map(torch.equal, found, gradients(plain, *run(plain, x), x)))
        assert layer.graphs.count == (move < MAX_MOVES)


def test_graphs_are_recorded_again_after_end_graphs(device):
    layer, plain = recorded(device)
    evaluated = build(True, layers=1).decoder.layers[0].eval()
    xs = inputs(device, WARM_UP + 1)
    waiting, y = run(layer, xs[0])
    for _ in range(2):
        with torch.no_grad():
            expected = [evaluated(x, attention_mask=None)[0] for x in xs]
        assert evaluated.graphs.evaluated == 1
        end_graphs()
        assert layer.graphs.count == evaluated.graphs.evaluated == 0
        with torch.no_grad():
            assert torch.equal(evaluated(xs[0], attention_mask=None)[0], expected[0])
    # an output kept its graphs alive, and they have ended nevertheless; torch 2.14 gives the second of the
    # two messages
    with pytest.raises(RuntimeError, match="CUDAGraph::replay without|before calling instantiate"):
        y.backward(xs[0])
    assert waiting.grad is None
    del y
    for x in xs:
        found = gradients(layer, *run(layer, x), x)
        assert all(map(torch.equal, found, gradients(plain, *run(plain, x), x)))
    assert layer.graphs.count == 1


def test_graphs_read_weights_after_invalidate_weight_caches(device):
    """A replay reads new codes, whatever they were computed from."""
    layer, plain = recorded(device, activations={"weight_cache": "fp8"})
    x, *_ = inputs(device)
    for a, b in zip(layer.parameters(), plain.parameters(), strict=True):
        a.data.mul_(-3)
        b.data.mul_(-3)
    invalidate_weight_caches()
    found = gradients(layer, *run(layer, x), x)
    assert all(map(torch.equal, found, gradients(plain, *run(plain, x), x)))
    assert layer.graphs.count == 1


def uses_graphs(parts, x):
    weights = [linear.weight for linear in parts.linears]
    wanted, why_not = parts.attention.activations.cuda_graphs, _no_graph(parts, False)
    return fused_layer.uses_graphs(wanted, x, weights, *ranks_of(parts), why_not)


def test_graphs_are_used_by_default_for_small_layers(device):
    layer = build(None, layers=1).decoder.layers[0]
    parts = dense_parts(layer)
    numel = sum(linear.weight.numel() for linear in parts.linears)
    tokens = int(max_graphed_work()) // numel
    x = torch.empty(1, device=device)
    assert uses_graphs(parts, x.expand(tokens, 1, H))
    assert not uses_graphs(parts, x.expand(tokens + 1, 1, H))
    # as in Megatron's data parallelism
    parts.qkv.weight.main_grad = torch.zeros_like(parts.qkv.weight)
    tokens = int(max_graphed_work(gradients_move=True)) // numel
    assert uses_graphs(parts, x.expand(tokens, 1, H))
    assert not uses_graphs(parts, x.expand(tokens + 1, 1, H))
    for unusual in ({"attention_dropout": 0.1}, {"activations": {"cuda_graphs": False}}):
        how = {"activations": unusual.pop("activations", None), "config": unusual}
        assert not uses_graphs(dense_parts(build(None, layers=1, **how).decoder.layers[0]), x[:, None, None])
    parts.attention.core_attention.register_forward_hook(lambda *_: None)
    assert not uses_graphs(parts, x[:, None, None])


def test_graphs_are_recorded_again_with_other_options(device):
    """The options change after layers have run, as an engine's block changes them."""
    layer, plain = recorded(device)
    for one in (layer, plain):
        for module in reversed(list(one.modules())):
            if hasattr(module, "apply_activations"):
                module.apply_activations(replace(module.activations, saved_format="e4m3"))
    for x in inputs(device, WARM_UP + 2):
        found = gradients(layer, *run(layer, x), x)
        assert all(map(torch.equal, found, gradients(plain, *run(plain, x), x)))
    assert layer.graphs.count == 1
