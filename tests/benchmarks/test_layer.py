"""Every implementation's layer is the same function, and bytes are counted correctly; nothing here is
timed."""

import csv

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import layer as benchmark
from benchmarks.__main__ import main
from benchmarks.common.harness import Table
from benchmarks.common.layers import (
    REFERENCE,
    Layer,
    layer_makers,
    megatron_layer,
    qkv_rows,
    random_weights,
    result_of,
    torch_layer,
)
from benchmarks.common.shapes import LAYERS, TINY
from benchmarks.layer import run_shape
from benchmarks.layer.floor import flops
from benchmarks.layer.measure import weight_copies
from tests.util import run_distributed


def inputs(shape, device):
    generator = torch.Generator().manual_seed(3)
    sizes = (shape.sequence, shape.batch, shape.hidden)
    return [torch.randn(sizes, generator=generator).bfloat16().to(device) for _ in range(2)]


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("name", TINY)
def test_makers_agree_with_exact_arithmetic(device, name):
    shape = LAYERS[name]
    exact = torch_layer(shape, dtype=torch.float64)
    weights = {k: w.bfloat16() for k, w in random_weights(megatron_layer(shape).parameters()).items()}
    exact.load(weights)
    x, grad = inputs(shape, device)
    expected = result_of(exact, x.double(), grad.double())
    back = qkv_rows(shape).argsort()
    in_megatrons_order = {k: g[back] if "linear_qkv" in k else g for k, g in expected.parameters.items()}
    expected = expected._replace(parameters=in_megatrons_order)
    for make in (megatron_layer, torch_layer):
        layer = make(shape)
        layer.load(weights)
        errors = result_of(layer, x, grad).errors(expected, layer)
        assert errors.keys() == {"y", "dx", *weights}
        # each operation rounds to BF16, by 2^-9 at most. Fewer than 64 roundings lie on the way to any
        # tensor, and the sums over tokens that give the gradients of norms and biases may be kept in BF16 too
        assert max(errors.values()) < (64 + shape.tokens) ** 0.5 * 2**-9, errors


def test_weights_that_do_not_fit_are_refused():
    layer = torch_layer(LAYERS["tiny"])
    weights = random_weights(layer.parameters())
    with pytest.raises(ValueError, match="the layer has no extra"):
        layer.load(weights | {"extra": torch.ones(1)})
    weights.popitem()
    with pytest.raises(KeyError):
        layer.load(weights)


@pytest.mark.parametrize("name", TINY)
def test_flops_are_those_of_the_products(device, name):
    shape = LAYERS[name]
    layer = torch_layer(shape, dtype=torch.float32)
    x = torch.randn(shape.batch, shape.sequence, shape.hidden, device=device, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer.forward(x).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counts.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    # q k^T and the GEMM with v: two per pair of positions and channel, each of two operations; half of the
    # pairs; times three for both passes
    attention = 3 * 2 * 2 * shape.tokens * shape.sequence * shape.hidden / 2
    assert flops(shape) == products + attention


class _Copying(torch.autograd.Function):
    """A GEMM that keeps a transposed copy of the weight, either computed on each call or given."""

    @staticmethod
    def forward(ctx, x, weight, copy):
        ctx.save_for_backward(x, weight, weight.t().contiguous() if copy is None else copy)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.saved_tensors[1], None, None


@pytest.mark.parametrize("cached", [False, True])
def test_copies_of_weights_made_by_a_forward_are_counted(cached):
    module = torch.nn.Linear(32, 48, bias=False)
    copy = module.weight.detach().t().contiguous() if cached else None
    layer = Layer(module, lambda x: _Copying.apply(x, module.weight, copy) * 2)
    expected = 0 if cached else 32 * 48 * 4
    assert weight_copies(layer, torch.randn(7, 32, requires_grad=True)) == expected


@pytest.mark.usefixtures("megatron")
def test_wrong_and_broken_layers_are_not_timed(monkeypatch, tmp_path):
    def wrong(shape):
        layer = megatron_layer(shape)
        return layer._replace(forward=lambda x: layer.forward(1.3 * x))

    def broken(shape):
        raise NotImplementedError("no such\nkernel")

    made = {REFERENCE: megatron_layer, "BF16 wrong": wrong, "BF16 broken": broken}
    monkeypatch.setattr(benchmark, "layer_makers", lambda: made | {"not chosen": broken})
    table = Table("layer", tmp_path / "layer.csv")
    run_shape("tiny", LAYERS["tiny"], 1, table, ["wrong", "broken"])
    rows = {row["layer"]: row for row in table.rows}
    assert rows.keys() == {"floor", REFERENCE, "BF16 wrong", "BF16 broken"}
    assert "ms" not in rows["BF16 wrong"] and "from the reference's" in rows["BF16 wrong"]["note"]
    assert rows["BF16 broken"]["note"] == "NotImplementedError: no such kernel"
    assert rows[REFERENCE]["y_error"] == 0 and rows[REFERENCE]["ms"] > 0


def test_a_run_writes_a_row_for_every_maker(tmp_path):
    path = tmp_path / "layer.csv"
    run_distributed(main, 1, ["layer", "--shape", "tiny", "--rounds", "1", "--output", str(path)])
    rows = {row["layer"]: row for row in csv.DictReader(path.open())}
    assert rows.keys() == {"floor", *layer_makers()}
    for name, row in rows.items():
        assert bool(row["ms"]) != bool(row["note"]), name
    saved = {name: float(rows[name]["saved_h"]) for name in (REFERENCE, "ours")}
    assert saved["ours"] < 0.55 * saved[REFERENCE]
