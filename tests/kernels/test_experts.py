"""Experts in one grouped GEMM: output and every gradient against the reference, and the saved bytes."""

import functools

import pytest
import torch
import torch.nn.functional as F

from coat_kernels.agreement import BF16_RMS, EXPERTS_BACKWARD, EXPERTS_FORWARD, ROUNDING
from coat_kernels.experts import (
    KernelGate,
    OwnGate,
    experts_reference,
    grouped_experts,
    permuted_experts,
)
from tests.util import rel_rms

T, K, E, HIDDEN, FFN = 50, 3, 7, 48, 64

# the gradient of gate_up also has one rounding of the rows
OF_ROWS = {fmt: (EXPERTS_BACKWARD[fmt] ** 2 + rms**2) ** 0.5 for fmt, rms in ROUNDING.items()}

# rows in the experts' order: some experts have no rows, and some counts end within a tile
OF_EACH = (9, 0, 16, 1, 21, 3, 0)
IN_ORDER = torch.arange(E).repeat_interleave(torch.tensor(OF_EACH))[:, None]

PLAIN = {"silu": F.silu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}


def plain(kind, both):
    """The gate with torch's operations."""
    gate, up = both.chunk(2, dim=1)
    return PLAIN[kind](gate) * up


def own(both):
    """The gate of GPT-OSS: interleaved and clamped."""
    gate, up = both[:, ::2].clamp(max=3), both[:, 1::2].clamp(-3, 3)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def permuted(x, chosen, weights, **rest):
    """`permuted_experts` with the arguments of `grouped_experts`, for tokens with one expert each, in
    order."""
    return permuted_experts(x, torch.bincount(chosen[:, 0], minlength=E), weights[:, 0], **rest)


def inputs(device, chosen=None, weights_in=torch.float32, biases=False, gated=True):
    torch.manual_seed(1)
    if chosen is None:
        # the last expert gets no token
        chosen = torch.stack([torch.randperm(E - 1)[:K] for _ in range(T)])
    tensors = {
        "x": torch.randn(T, HIDDEN),
        "weights": torch.rand(chosen.shape),
        "gate_up": torch.randn(E, (1 + gated) * FFN, HIDDEN) / HIDDEN**0.5,
        "down": torch.randn(E, HIDDEN, FFN) / FFN**0.5,
    }
    if biases:
        tensors |= {"gate_up_bias": torch.randn(E, (1 + gated) * FFN), "down_bias": torch.randn(E, HIDDEN)}
    for name, value in tensors.items():
        value = value.to(device, weights_in if name == "weights" else torch.bfloat16)
        tensors[name] = value.requires_grad_()
    return chosen.to(device), tensors


def run(function, chosen, tensors, grad, gate):
    y = function(chosen=chosen, gate=gate, **tensors)
    return y, dict(zip(tensors, torch.autograd.grad(y, list(tensors.values()), grad), strict=True))


def compare(chosen, tensors, gate, reference, fmt="sqrt8", function=grouped_experts):
    grad = torch.randn(T, HIDDEN, device=chosen.device).bfloat16()
    y, grads = run(function, chosen, tensors, grad, gate)
    exact = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    expected, wanted = run(experts_reference, chosen, exact, grad.double(), reference)
    assert y.dtype == torch.bfloat16 and rel_rms(y, expected) < EXPERTS_FORWARD
    for name, t in tensors.items():
        assert grads[name].dtype == t.dtype, name
        bound = (OF_ROWS if function is permuted and name == "gate_up" else EXPERTS_BACKWARD)[fmt]
        if function is permuted and name == "weights":
            # the sizes of T errors and of T gradients both spread by 1 / sqrt(2 T), so their ratio spreads by
            # 1 / sqrt(T): twice that. Squared ReLU's tails make 17 % of it where T is 50, but its error comes
            # from gate alone, 4 of the bound's 5
            bound *= 1 + 2 / T**0.5
        assert rel_rms(grads[name], wanted[name]) < bound, name
    return grads


# the two kinds that experts of transformers have; each kind is tested by itself elsewhere
@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("fmt", ROUNDING)
def test_against_the_reference(kind, fmt, device, kernels):
    chosen, tensors = inputs(device)
    gate = KernelGate(kind, saved_format=fmt)
    grads = compare(chosen, tensors, gate, functools.partial(plain, kind), fmt)
    # the last expert has no tokens
    assert not grads["gate_up"][-1].any() and not grads["down"][-1].any()


# E4M3 is too coarse near a clamp for a bound
@pytest.mark.parametrize("fmt, gate", [("sqrt8", own), ("e4m3", functools.partial(plain, "silu"))])
def test_biases_and_gates_of_torchs_operations(fmt, gate, device):
    chosen, tensors = inputs(device, biases=True)
    compare(chosen, tensors, OwnGate(gate, saved_format=fmt), gate, fmt)


@pytest.mark.parametrize("weights_in", [torch.float32, torch.bfloat16])
def test_one_expert_may_get_all_tokens(weights_in, device):
    chosen, tensors = inputs(device, torch.full((T, 1), 2), weights_in)
    compare(chosen, tensors, KernelGate("silu"), functools.partial(plain, "silu"))


@pytest.mark.parametrize("kind, gated", [("silu", True), ("gelu_tanh", True), ("squared_relu", False)])
@pytest.mark.parametrize("fmt", ROUNDING)
def test_rows_in_order_against_the_reference(kind, gated, fmt, device, kernels):
    chosen, tensors = inputs(device, IN_ORDER, gated=gated)
    reference = functools.partial(plain, kind) if gated else lambda x: x.relu().square()
    gate = KernelGate(kind, saved_format=fmt, gated=gated)
    grads = compare(chosen, tensors, gate, reference, fmt, permuted)
    for expert, count in enumerate(OF_EACH):
        assert grads["gate_up"][expert].any() == grads["down"][expert].any() == bool(count)


@pytest.mark.parametrize("weights_in", [torch.float32, torch.bfloat16])
def test_rows_in_order_with_biases_and_a_gate_of_torchs_operations(weights_in, device):
    chosen, tensors = inputs(device, IN_ORDER, weights_in, biases=True)
    # not clamped: with one expert per token, the few values that cross the clamp are not averaged
    gate = functools.partial(plain, "silu")
    compare(chosen, tensors, OwnGate(gate), gate, function=permuted)


def test_experts_without_rows_where_products_leave_them_out(device, monkeypatch):
    """The grouped GEMM of Blackwell leaves such rows out."""
    chosen, tensors = inputs(device, IN_ORDER)
    grad, product = torch.randn(T, HIDDEN, device=device).bfloat16(), F.grouped_mm
    _, expected = run(permuted, chosen, tensors, grad, KernelGate("silu"))

    def unwritten(a, b, *, offs):
        out = product(a, b, offs=offs)
        if b.ndim == 2:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return out

    monkeypatch.setattr(F, "grouped_mm", unwritten)
    monkeypatch.setattr("coat_kernels.experts._loses_groups", lambda device: True)
    _, found = run(permuted, chosen, tensors, grad, KernelGate("silu"))
    assert all(found[name].equal(expected[name]) for name in tensors)


@pytest.mark.parametrize("gate", [KernelGate("silu"), OwnGate(own)], ids=["kernels", "own"])
@pytest.mark.parametrize("biases", [False, True])
def test_without_rows_gradients_are_zero(gate, biases, device):
    _, tensors = inputs(device, biases=biases)
    tensors |= {"weights": torch.zeros(0, device=device, requires_grad=True)}
    rows = torch.zeros(0, HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True)
    del tensors["x"]
    y = permuted_experts(rows, torch.zeros(E, dtype=torch.int64), gate=gate, **tensors)
    assert y.shape == rows.shape
    for t, grad in zip(tensors.values(), torch.autograd.grad(y.sum(), list(tensors.values())), strict=True):
        assert grad.shape == t.shape and not grad.any()


def test_transposed_weights_are_the_same(device):
    chosen, tensors = inputs(device)
    grad = torch.randn(T, HIDDEN, device=device).bfloat16()
    y, grads = run(grouped_experts, chosen, tensors, grad, KernelGate("silu"))
    stored = {
        n: tensors[n].detach().transpose(1, 2).contiguous().requires_grad_() for n in ("gate_up", "down")
    }
    views = {name: t.transpose(1, 2) for name, t in stored.items()}
    found = grouped_experts(chosen=chosen, gate=KernelGate("silu"), **tensors | views)
    found.backward(grad)
    assert rel_rms(found, y) < BF16_RMS
    for name, t in stored.items():
        assert rel_rms(t.grad.transpose(1, 2), grads[name]) < BF16_RMS


def test_what_is_not_finite_shows_in_its_tokens_alone(device):
    chosen, tensors = inputs(device)
    with torch.no_grad():
        tensors["x"][3, 5] = torch.nan
        tensors["x"][7, 0] = torch.inf
    grad = torch.randn(T, HIDDEN, device=device).bfloat16()
    y, grads = run(grouped_experts, chosen, tensors, grad, KernelGate("silu"))
    broken = torch.zeros(T, dtype=torch.bool, device=device)
    broken[[3, 7]] = True
    assert not y[broken].isfinite().all(1).any() and y[~broken].isfinite().all()
    assert grads["x"][~broken].isfinite().all() and not grads["x"][3].isfinite().all()
    touched = torch.zeros(E, dtype=torch.bool, device=device)
    touched[chosen[[3, 7]].flatten()] = True
    assert grads["gate_up"][~touched].isfinite().all() and not grads["gate_up"][touched].isfinite().all()


@pytest.mark.parametrize("gate", [KernelGate("silu"), OwnGate(own)], ids=["kernels", "own"])
def test_frozen_parts_get_no_gradient_and_others_the_same(gate, device):
    chosen, tensors = inputs(device, biases=True)
    grad = torch.randn(T, HIDDEN, device=device).bfloat16()
    _, everything = run(grouped_experts, chosen, tensors, grad, gate)
    for trained in tensors:
        for name, t in tensors.items():
            t.requires_grad_(name == trained)
        y = grouped_experts(chosen=chosen, gate=gate, **tensors)
        (found,) = torch.autograd.grad(y, [tensors[trained]], grad)
        torch.testing.assert_close(found, everything[trained], rtol=0, atol=0)


def kept(call, tensors):
    """The bytes that autograd saves in `call()`, without `tensors`."""
    known, found = {t.data_ptr() for t in tensors.values()}, {}

    def pack(t):
        if t.data_ptr() not in known:
            # held, so that no address is used twice
            found[t.data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call()
    return sum(t.nbytes for t in found.values())


@pytest.mark.parametrize("gate", [KernelGate("silu"), OwnGate(own)], ids=["kernels", "own"])
def test_backward_keeps_eight_bits_and_the_input(gate, device):
    chosen, tensors = inputs(device)
    call = functools.partial(grouped_experts, chosen=chosen, gate=gate, **tensors)
    order, ends = 8 * T * K, 4 * E
    assert kept(call, tensors) == T * K * 2 * FFN * 17 // 16 + order + ends
    with torch.no_grad():
        assert kept(call, tensors) == 0 and call().grad_fn is None


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_backward_keeps_eight_bits_of_rows_in_order(gated, frozen, device):
    chosen, tensors = inputs(device, IN_ORDER, gated=gated)
    tensors["gate_up"].requires_grad_(not frozen)
    call = functools.partial(permuted, chosen=chosen, gate=KernelGate("silu", gated=gated), **tensors)
    assert kept(call, tensors) == T * ((1 + gated) * FFN + (not frozen) * HIDDEN) * 17 // 16 + 4 * E


def test_second_derivatives_are_refused(device):
    chosen, tensors = inputs(device)
    y = grouped_experts(chosen=chosen, gate=KernelGate("silu"), **tensors)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(y.sum(), [tensors["x"]], create_graph=True)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"gate": KernelGate("tanh")}, "expected one of silu.*found 'tanh'"),
        ({"gate": OwnGate(own, group_size=128)}, "with f in groups of 128"),
        ({"x": torch.zeros(T, HIDDEN)}, "expected BF16, found torch.float32"),
        ({"weights": torch.zeros(T, K + 1)}, r"weights \[t, k\] for x \(50, 48\).*found .*\(50, 4\)"),
    ],
    ids=["kind", "groups", "dtype", "sizes"],
)
def test_what_cannot_be_is_refused(change, message):
    chosen, tensors = inputs("cpu")
    with pytest.raises(ValueError, match=message):
        grouped_experts(**{"chosen": chosen, "gate": KernelGate("silu"), **tensors} | change)


def test_counts_of_other_experts_are_refused():
    _, tensors = inputs("cpu", IN_ORDER)
    weights = tensors.pop("weights")[:, 0]
    with pytest.raises(ValueError, match="and 6 experts"):
        permuted_experts(
            tensors.pop("x"), torch.tensor(OF_EACH[:-1]), weights, gate=KernelGate("silu"), **tensors
        )


def test_gradients_of_weights_in_fp32_are_not_rounded(device):
    chosen, tensors = inputs(device)
    y = grouped_experts(chosen=chosen, gate=KernelGate("silu"), **tensors)
    (grad,) = torch.autograd.grad(y.float().sum(), [tensors["weights"]])
    assert not grad.equal(grad.bfloat16().float())
