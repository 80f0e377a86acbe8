"""Codes are counted where they are made, under the names of their layers, and put in by hand."""

import pytest
import torch

import coat_ds
from coat_ds.watch import codes
from coat_ds.watch.codes import OTHER, SAVED, CodeCounter, figures, graphs_of, in_turn, layer_names
from coat_kernels.autograd import observers
from coat_kernels.groups import GROUP_FORMATS, Grouped, quantize_groups
from tests.coat_ds.watch.parts import linear, llama, with_graphs


def figures_of(counter):
    """Figures by layer, of layers that have some."""
    names = layer_names(counter.model)
    rows = counter.sums(names, torch.device("cpu")).tolist()
    return {name: found for name, row in zip(names, rows, strict=True) if (found := figures(row))}


@pytest.fixture
def observed():
    """Observes a model with what it makes."""

    def start(model):
        counter = CodeCounter(model)
        observers.observe(counter)
        return counter

    yield start
    observers.observe(None)


def test_watch_counts_flushed_and_saturated_codes_of_a_linear_layer(observed):
    model = linear()
    counter = observed(model)
    x = torch.ones(16, 64, dtype=torch.bfloat16, requires_grad=True)
    with torch.no_grad():
        # 448 / 2^10 is the amax's code: 2^-10 of the smallest subnormal is lost
        x[:, :16] = 2.0**-30
        x[0] = 0
    y = model(x)
    grad = torch.full_like(y, 2.0**-3)
    grad[:4] = 2.0**-100
    grad[4, 0] = float("inf")
    y.backward(grad)
    # evaluations do not count
    model.eval()(torch.zeros_like(x))
    assert figures_of(counter)["0"] == {
        "input_flushed": (15 * 16 + 64) / (16 * 64),
        "input_saturated": 15 * 48 / (16 * 64),
        "gradient_flushed": 4 / 16,
        # E5M2's largest code is for a power of four: 2^-3 is below it. Infinity is NaN.
        "gradient_saturated": 1 / (16 * 32),
    }


@pytest.mark.parametrize(
    "dtype, largest, next_largest", [(torch.float8_e4m3fn, 448, 416), (torch.float8_e5m2, 57344, 49152)]
)
def test_watch_counts_the_largest_code_and_what_is_not_finite_as_saturated(dtype, largest, next_largest):
    model = linear()
    counter = CodeCounter(model)
    values = [[largest, -largest, next_largest, -next_largest, float("nan"), 1, 0, -0.0]]
    # more samples of a kind than wait to be counted
    for _ in range(codes.WAITING + 1):
        counter.codes("gradient", model[0].forward.grad_scale, torch.tensor(values).to(dtype))
    counter.codes("input", None, torch.zeros(1, 8, dtype=dtype))
    assert figures_of(counter) == {
        "0": {"gradient_flushed": 2 / 8, "gradient_saturated": 3 / 8},
        OTHER: {"input_flushed": 1.0, "input_saturated": 0.0},
    }


@pytest.mark.parametrize("fmt", GROUP_FORMATS)
def test_watch_counts_saved_codes(observed, fmt):
    counter = observed(linear())
    x = torch.full((4, 64), 2.0**-40)
    x[:, ::16] = 1.0
    q = quantize_groups(x, 16, fmt)
    Keeps.apply(torch.ones(2, requires_grad=True), *q.tensors)
    top = (
        q.format.from_codes(q.codes).abs().max()
        == q.format.from_codes(torch.arange(256).byte()).nan_to_num().abs().max()
    )
    assert figures_of(counter) == {SAVED: {"saved_flushed": 15 / 16, "saved_saturated": float(top) / 16}}


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *kept):
        ctx.save_for_backward(*kept)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


def test_watch_counts_the_largest_roots_of_either_sign():
    counter = CodeCounter(linear())
    values = torch.tensor([[127, -127, -128, 126, -126, 1, -1, 0]], dtype=torch.int8)
    exponent = torch.tensor([[9]], dtype=torch.uint8)
    counter.saves(Grouped(values.view(torch.uint8), exponent, GROUP_FORMATS["sqrt8"]))
    assert figures_of(counter) == {SAVED: {"saved_flushed": 1 / 8, "saved_saturated": 3 / 8}}


def test_watch_spreads_a_sample_over_all_columns(monkeypatch):
    monkeypatch.setattr(codes, "SAMPLE", 100)
    x = torch.arange(64, dtype=torch.uint8).expand(50, 64)
    found = codes.sampled(x)
    assert len(found) <= 100 and len(set(found.tolist())) == 64


def test_watch_names_all_products_of_a_llama(observed):
    """By fused blocks. No GEMM is counted under the name of another, and none is missed."""
    model = coat_ds.convert(llama())
    counter = observed(model)
    ids = torch.arange(32).view(1, 32)
    model(ids, labels=ids).loss.backward()
    found = figures_of(counter)
    parts = ("qkv", "self_attn.o_proj", "mlp.gate_up", "mlp.down_proj")
    assert found.keys() == {f"model.layers.{i}.{part}" for i in range(2) for part in parts} | {SAVED}
    assert 0 < found.pop(SAVED)["saved_flushed"] < 0.05
    for name, of_layer in found.items():
        assert 0 <= of_layer["input_flushed"] < 0.1 and "gradient_flushed" in of_layer, name


def test_watch_of_replayed_layers_takes_turns(monkeypatch):
    model = coat_ds.convert(torch.nn.Sequential(*(torch.nn.Sequential(linear()) for _ in range(12))))
    with_graphs(list(model)[:10])
    graphs = graphs_of(model)
    monkeypatch.setattr(codes, "TURNS", 4)

    found = [[graphs.index(g) for g in in_turn(graphs, turn)] for turn in range(5)]
    assert found == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7], [0, 4, 8]]
    assert in_turn([], 0) == []
