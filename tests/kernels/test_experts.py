"""Experts in one grouped product: output and every gradient against the reference, and what is kept."""

import pytest
import torch

from coat_kernels.experts import experts_reference, grouped_experts
from tests.kernels.inputs import ROUNDING, gaussian_rounding_rms
from tests.util import rel_rms

T, K, E, H, F = 50, 3, 7, 48, 64
NAMES = ("x", "weights", "gate_up", "down")
BF16_RMS = gaussian_rounding_rms(7)
# Roundings of the output: gate's, which the activation at most doubles, and up's; behind the activation,
# behind its weight, behind the second product and behind the sum. In quadrature 4 + 1 + 4.
FORWARD = 3 * BF16_RMS
# Backward knows gate and up to one rounding each, of which it doubles gate's. It rounds to BF16 as often as
# forward, and starts from what that has made.
BACKWARD = {fmt: (5 * rms**2 + 2 * FORWARD**2) ** 0.5 for fmt, rms in ROUNDING.items()}


def inputs(device, chosen=None, weights_in=torch.float32):
    torch.manual_seed(1)
    if chosen is None:
        # the last expert gets no token
        chosen = torch.stack([torch.randperm(E - 1)[:K] for _ in range(T)])
    tensors = {
        "x": torch.randn(T, H),
        "weights": torch.rand(T, K),
        "gate_up": torch.randn(E, 2 * F, H) / H**0.5,
        "down": torch.randn(E, H, F) / F**0.5,
    }
    for name, value in tensors.items():
        value = value.to(device, weights_in if name == "weights" else torch.bfloat16)
        tensors[name] = value.requires_grad_()
    return chosen.to(device), tensors


def run(function, chosen, tensors, grad, *options, **keywords):
    y = function(tensors["x"], chosen, *(tensors[n] for n in NAMES[1:]), *options, **keywords)
    return y, dict(zip(NAMES, torch.autograd.grad(y, list(tensors.values()), grad), strict=True))


def exact(tensors):
    return {name: t.detach().double().requires_grad_() for name, t in tensors.items()}


# the two that experts of transformers have; all are tested by themselves
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("fmt", ROUNDING)
def test_against_the_reference(kind, fmt, device, kernels):
    chosen, tensors = inputs(device)
    grad = torch.randn(T, H, device=device).bfloat16()
    y, grads = run(grouped_experts, chosen, tensors, grad, kind, saved_format=fmt)
    expected, wanted = run(experts_reference, chosen, exact(tensors), grad.double(), kind)
    assert y.dtype == torch.bfloat16 and rel_rms(y, expected) < FORWARD
    for name in NAMES:
        assert grads[name].dtype == tensors[name].dtype, name
        assert rel_rms(grads[name], wanted[name]) < BACKWARD[fmt], name
    # an expert without tokens
    assert not grads["gate_up"][-1].any() and not grads["down"][-1].any()


@pytest.mark.parametrize("weights_in", [torch.float32, torch.bfloat16])
def test_one_expert_may_get_all_tokens(weights_in, device):
    chosen, tensors = inputs(device, torch.full((T, 1), 2), weights_in)
    tensors["weights"] = tensors["weights"][:, :1].detach().requires_grad_()
    grad = torch.randn(T, H, device=device).bfloat16()
    y, grads = run(grouped_experts, chosen, tensors, grad, "silu")
    expected, wanted = run(experts_reference, chosen, exact(tensors), grad.double(), "silu")
    assert rel_rms(y, expected) < FORWARD
    for name in NAMES:
        assert rel_rms(grads[name], wanted[name]) < BACKWARD["sqrt8"], name


def test_what_is_not_finite_shows_in_its_tokens_alone(device):
    chosen, tensors = inputs(device)
    with torch.no_grad():
        tensors["x"][3, 5] = torch.nan
        tensors["x"][7, 0] = torch.inf
    grad = torch.randn(T, H, device=device).bfloat16()
    y, grads = run(grouped_experts, chosen, tensors, grad, "silu")
    broken = torch.zeros(T, dtype=torch.bool, device=device)
    broken[[3, 7]] = True
    assert not y[broken].isfinite().all(1).any() and y[~broken].isfinite().all()
    assert grads["x"][~broken].isfinite().all() and not grads["x"][3].isfinite().all()
    touched = torch.zeros(E, dtype=torch.bool, device=device)
    touched[chosen[[3, 7]].flatten()] = True
    assert grads["gate_up"][~touched].isfinite().all() and not grads["gate_up"][touched].isfinite().all()


def test_frozen_parts_get_no_gradient_and_others_the_same(device):
    chosen, tensors = inputs(device)
    grad = torch.randn(T, H, device=device).bfloat16()
    _, everything = run(grouped_experts, chosen, tensors, grad, "silu")
    for trained in NAMES:
        for name, t in tensors.items():
            t.requires_grad_(name == trained)
        y = grouped_experts(tensors["x"], chosen, *(tensors[n] for n in NAMES[1:]), "silu")
        (found,) = torch.autograd.grad(y, [tensors[trained]], grad)
        torch.testing.assert_close(found, everything[trained], rtol=0, atol=0)


def test_backward_keeps_eight_bits_and_the_input(device):
    chosen, tensors = inputs(device)
    own, kept = {t.data_ptr() for t in tensors.values()}, {}

    def pack(t):
        if t.data_ptr() not in own:
            kept[t.data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        grouped_experts(tensors["x"], chosen, *(tensors[n] for n in NAMES[1:]), "silu")
    order, ends = 8 * T * K, 4 * E
    assert sum(kept.values()) == T * K * 2 * F * 17 // 16 + order + ends
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = grouped_experts(tensors["x"], chosen, *(tensors[n] for n in NAMES[1:]), "silu")
    assert y.grad_fn is None


def test_second_derivatives_are_refused(device):
    chosen, tensors = inputs(device)
    y = grouped_experts(tensors["x"], chosen, *(tensors[n] for n in NAMES[1:]), "silu")
    (grad,) = torch.autograd.grad(y.sum(), [tensors["x"]], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        grad.sum().backward()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kind": "tanh"}, "expected one of silu.*found 'tanh'"),
        ({"group_size": 128}, "with f in groups of 128"),
        ({"x": torch.zeros(T, H)}, "expected BF16, found torch.float32"),
        ({"weights": torch.zeros(T, K + 1)}, r"weights \[t, k\].*found .*\(50, 4\)"),
    ],
    ids=["kind", "groups", "dtype", "sizes"],
)
def test_what_cannot_be_is_refused(change, message):
    chosen, tensors = inputs("cpu")
    arguments = {"chosen": chosen, "kind": "silu", **tensors} | change
    with pytest.raises(ValueError, match=message):
        grouped_experts(**arguments)
