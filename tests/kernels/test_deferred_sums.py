"""Sums of deferred tensors: biases' gradients, whose BF16 gradients are never written."""

import pytest
import torch

from coat_kernels import deferred, rope, tensorwise
from coat_kernels.deferred import fp8_operands
from coat_kernels.fp8 import E4M3, E5M2
from coat_kernels.linear import fp8_linear
from tests.kernels.inputs import check_sums, hard
from tests.kernels.producers import Activation, Rotation, Seen, same

pytestmark = pytest.mark.early

# of which tiles and the rows that are summed end anywhere
SUMMED = {
    "gated": lambda device: Activation(device, (4, 10)),
    "plain": lambda device: Activation(device, (4, 10), gated=False),
    "rotation": lambda device: Rotation(device, (2, 10, 1, 1, 16, 16)),
    "no rotation": lambda device: Rotation(device, (2, 10, 1, 1, 16, 0)),
}


@pytest.mark.parametrize("name", SUMMED)
def test_sums_of_a_gradient(name, kernels, device, monkeypatch):
    """Whatever was predicted, with whatever layouts, of whatever values; the gradient is not made."""
    monkeypatch.setattr(rope.kernels, "OPERANDS_TOKENS", 16)
    monkeypatch.setattr(rope.kernels, "OPERANDS_HEADS", 2)
    producer = SUMMED[name](device)
    x = producer.input()
    y, plain = producer(x), producer(x, False)
    n = y.shape[-1]
    broken = torch.randn(y.shape, device=device)
    for row, vector in zip(broken.view(-1, n)[1::2], hard(n).values(), strict=False):
        row.copy_(vector)
    for values, cases in (
        (torch.randn(y.shape, device=device), [((True, True), 2.0**-40)]),
        (broken, [((True, True), torch.nan), ((True, False), None), ((False, True), None)]),
    ):
        (expected,) = torch.autograd.grad(plain, x, values.to(y), retain_graph=True)
        expected = expected.flatten(0, -2)
        for layouts, predicted in cases:
            if predicted is not None:
                producer.scales["grad_scale"].on(device).fill_(predicted)
            (found,) = torch.autograd.grad(y, x, values.to(y), retain_graph=True)
            out, largest = fp8_operands(found, E5M2, *layouts, sums=True)
            assert found.is_pending
            check_sums(out.sums, expected)
            wanted = tensorwise.quantize_tensor_reference(expected, largest, E5M2, *layouts)
            for a, e in zip(out[:3], wanted[:3], strict=True):
                assert a is e is None or not same(a, e)


def first_layer(producer, deferred, weights=(True, True), between=lambda y: y):
    """Of a linear layer in front of a producer: the bias's gradient, and what it is the sum of."""
    torch.manual_seed(1)
    x = producer.input().requires_grad_(weights[0])
    size = x.shape[-1]
    weight = torch.randn(size, size, device=x.device).mul(0.2).to(x).requires_grad_(weights[1])
    bias = torch.randn(size, device=x.device, requires_grad=True)
    seen = Seen()
    y = producer(seen.keep(between(fp8_linear(x, weight, bias))), deferred)
    y.backward(torch.randn(y.shape, device=x.device).to(y))
    return bias.grad, seen.grad


def doubled(y):
    y.register_hook(lambda grad: grad * 2)
    return y


@pytest.mark.parametrize("name", SUMMED)
@pytest.mark.parametrize("between", [lambda y: y, doubled], ids=["only", "read"])
def test_a_bias_in_front_of_a_producer(name, between, device, monkeypatch):
    """Its gradient needs no BF16 gradient, unless somebody reads that or nothing else is trained."""
    made = []
    value = deferred.Source.value
    monkeypatch.setattr(deferred.Source, "value", lambda self: made.append(self.shape) or value(self))
    for weights in ((True, True), (True, False), (False, True), (False, False)):
        producer = SUMMED[name](device)
        _, grad = first_layer(producer, False, weights, between)
        made.clear()
        sums, _ = first_layer(producer, True, weights, between)
        check_sums(sums, grad.flatten(0, 1))
        reads = between is doubled or weights == (False, False)
        assert made.count(grad.flatten(0, 1).shape) == reads


def test_sums_of_an_output(output):
    """Its operands were made without them."""
    y = output(output.input()).detach()
    found, _ = fp8_operands(y, E4M3, sums=True)
    plain = y.flatten(0, 1) * 1
    check_sums(found.sums, plain)
