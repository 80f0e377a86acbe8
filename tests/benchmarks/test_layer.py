"""Every implementation's layer is the same function, and bytes are counted correctly; nothing here is
timed."""

import csv

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.__main__ import main
from benchmarks.common.layers import (
    REFERENCE,
    layer_makers,
    megatron_layer,
    qkv_rows,
    random_weights,
    result_of,
    torch_layer,
)
from benchmarks.common.shapes import LAYERS, TINY
from benchmarks.layer.floor import flops
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


def test_a_run_writes_a_row_for_every_maker(tmp_path):
    path = tmp_path / "layer.csv"
    run_distributed(main, 1, ["layer", "--shape", "tiny", "--rounds", "1", "--output", str(path)])
    rows = {row["layer"]: row for row in csv.DictReader(path.open())}
    assert rows.keys() == {"floor", *layer_makers()}
    for name, row in rows.items():
        assert bool(row["ms"]) != bool(row["note"]), name
    saved = {name: float(rows[name]["saved_h"]) for name in (REFERENCE, "ours")}
    assert saved["ours"] < 0.55 * saved[REFERENCE]
