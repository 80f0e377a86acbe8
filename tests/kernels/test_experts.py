"""Experts in grouped FP8 GEMMs: output and every gradient against the reference, and the saved bytes."""

import functools

import pytest
import torch
import torch.nn.functional as F

from coat_kernels.experts import ExpertsState, KernelGate, TorchGate, grouped_experts, permuted_experts
from coat_kernels.experts.reference import experts_reference
from coat_kernels.weights import WeightCache
from tests.kernels.agreement import BF16_RMS, EXPERTS_BACKWARD, EXPERTS_FORWARD, ROUNDING
from tests.util import rel_rms, saved_tensors

T, K, E, HIDDEN, FFN = 50, 2, 7, 48, 64

# rows in the experts' order: some experts have no rows, and some counts end within a tile
OF_EACH = (9, 0, 16, 1, 21, 3, 0)
IN_ORDER = torch.arange(E).repeat_interleave(torch.tensor(OF_EACH))[:, None]

PLAIN = {"silu": F.silu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}


def plain(kind, both):
    """The gate with torch's operations."""
    gate, up = both.chunk(2, dim=1)
    return PLAIN[kind](gate) * up


def own(both, limit=3.0):
    """The gate of GPT-OSS: interleaved and clamped."""
    gate, up = both[:, ::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


SILU = KernelGate("silu")
GPT_OSS = KernelGate("quick_gelu", limit=3.0, offset=1.0, interleaved=True)


GATES = pytest.mark.parametrize("gate", [SILU, GPT_OSS, TorchGate(own)], ids=["kernels", "gpt-oss", "own"])


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


def exactly(chosen, tensors, gate, grad):
    """The reference's output and gradients in FP64."""
    exact = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    return run(experts_reference, chosen, exact, grad.double(), gate)


def compare(chosen, tensors, gate, reference, fmt="sqrt8", function=grouped_experts, few=1.0):
    """few: by how much bounds are wider, since errors and values are not averaged over many tokens."""
    grad = torch.randn(len(tensors["x"]), HIDDEN, device=chosen.device).bfloat16()
    y, grads = run(function, chosen, tensors, grad, gate)
    expected, wanted = exactly(chosen, tensors, reference, grad)
    assert y.dtype == torch.bfloat16 and rel_rms(y, expected) < few * EXPERTS_FORWARD
    for name, t in tensors.items():
        assert grads[name].dtype == t.dtype, name
        bound = few * EXPERTS_BACKWARD[fmt]
        if few == 1 and chosen.shape[1] == 1 and name == "weights":
            # one gradient for each of T tokens:
            # the sizes of T errors and of T gradients both spread by 1 / sqrt(2 T), so their ratio spreads by
            # 1 / sqrt(T): twice that. Squared ReLU's tails make 17 % of it where T is 50, but its error comes
            # from gate alone, 4 of the bound's 5
            bound *= 1 + 2 / T**0.5
        assert rel_rms(grads[name], wanted[name]) < bound, name
    return grads


# On a CPU few tokens and experts without a gate run by kernels; test_experts_kernels.py has each kernel.
# The two kinds that experts of transformers have; each kind is tested by itself elsewhere.
@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("fmt", ROUNDING)
def test_grouped_experts_agree_with_the_reference(kind, fmt, device):
    chosen, tensors = inputs(device)
    gate = KernelGate(kind, saved_format=fmt)
    grads = compare(chosen, tensors, gate, functools.partial(plain, kind), fmt)
    # the last expert has no tokens
    assert not grads["gate_up"][-1].any() and not grads["down"][-1].any()


def test_grouped_experts_with_biases_and_gpt_oss_gate(device):
    chosen, tensors = inputs(device, weights_in=torch.bfloat16, biases=True)
    compare(chosen, tensors, GPT_OSS, own)


def test_permuted_experts_with_biases_and_gpt_oss_gate(device):
    chosen, tensors = inputs(device, IN_ORDER, biases=True)
    # with one expert per token, the few values that cross the clamp are not averaged: it is out of reach
    gate, reference = GPT_OSS._replace(limit=30.0), functools.partial(own, limit=30.0)
    compare(chosen, tensors, gate, reference, function=permuted)


# E4M3 is too coarse near a clamp for a bound
@pytest.mark.parametrize("fmt, gate", [("sqrt8", own), ("e4m3", functools.partial(plain, "silu"))])
def test_grouped_experts_with_biases_and_own_gate(fmt, gate, device):
    chosen, tensors = inputs(device, biases=True)
    compare(chosen, tensors, TorchGate(gate, saved_format=fmt), gate, fmt)


def check_permuted(kind, gated, fmt, device):
    chosen, tensors = inputs(device, IN_ORDER, gated=gated)
    reference = functools.partial(plain, kind) if gated else lambda x: x.relu().square()
    gate = KernelGate(kind, saved_format=fmt, gated=gated)
    grads = compare(chosen, tensors, gate, reference, fmt, permuted)
    for expert, count in enumerate(OF_EACH):
        assert grads["gate_up"][expert].any() == grads["down"][expert].any() == bool(count)


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("fmt", ROUNDING)
def test_permuted_experts_agree_with_the_reference(kind, fmt, device):
    check_permuted(kind, True, fmt, device)


def test_permuted_experts_without_a_gate(device, kernels):
    check_permuted("squared_relu", False, "sqrt8", device)


@GATES
@pytest.mark.parametrize("biases", [False, True])
def test_permuted_experts_without_rows_have_zero_gradients(gate, biases, device):
    _, tensors = inputs(device, biases=biases)
    tensors |= {"weights": torch.zeros(0, device=device, requires_grad=True)}
    rows = torch.zeros(0, HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True)
    del tensors["x"]
    y = permuted_experts(rows, torch.zeros(E, dtype=torch.int64), gate=gate, **tensors)
    assert y.shape == rows.shape
    for t, grad in zip(tensors.values(), torch.autograd.grad(y.sum(), list(tensors.values())), strict=True):
        assert grad.shape == t.shape and not grad.any()


@pytest.mark.parametrize("keep", ["none", "fp8"])
def test_grouped_experts_with_transposed_weights(keep, device):
    """To the bit: all elements of a weight have one scale."""
    chosen, tensors = inputs(device)
    grad = torch.randn(T, HIDDEN, device=device).bfloat16()
    y, grads = run(grouped_experts, chosen, tensors, grad, SILU)
    stored = {
        n: tensors[n].detach().transpose(1, 2).contiguous().requires_grad_() for n in ("gate_up", "down")
    }
    parameters = {name: torch.nn.Parameter(t) for name, t in stored.items()}
    state = ExpertsState(keep)
    call = functools.partial(grouped_experts, transposed=True, state=state)
    for _ in range(2):
        found, of_all = run(call, chosen, tensors | parameters, grad, SILU)
        assert rel_rms(found, y) < BF16_RMS
        for name, t in grads.items():
            assert rel_rms(of_all[name].mT if name in stored else of_all[name], t) < BF16_RMS, name
    with torch.no_grad():
        assert call(chosen=chosen, gate=SILU, **tensors | parameters).equal(found)


def test_grouped_experts_quantize_cached_weights_once_a_step(device, monkeypatch):
    """Kept codes and predicted scales change no bit, and follow a step and a change of the weights."""
    chosen, tensors = inputs(device)
    for name in ("gate_up", "down"):
        tensors[name] = torch.nn.Parameter(tensors[name].detach())
    grad = torch.randn(T, HIDDEN, device=device).bfloat16()
    state, quantized = ExpertsState("fp8"), []
    for name in ("_quantize", "_requantize"):
        stock = getattr(WeightCache, name)
        monkeypatch.setattr(
            WeightCache, name, lambda self, *a, stock=stock, **k: quantized.append(1) or stock(self, *a, **k)
        )
    optimizer = torch.optim.SGD([tensors["gate_up"], tensors["down"]], lr=1e-3)
    for step in range(2):
        for micro_batch in range(2):
            before = len(quantized)
            y, grads = run(functools.partial(grouped_experts, state=state), chosen, tensors, grad, SILU)
            kept = len(quantized) - before
            expected, wanted = run(grouped_experts, chosen, tensors, grad, SILU)
            assert y.equal(expected) and all(g.equal(wanted[name]) for name, g in grads.items())
            # backward asks twice, and gets what is kept
            assert kept == 2 + 2 * (micro_batch == 0)
        optimizer.step()
        with torch.no_grad():
            tensors["down"] *= 1 + step


@pytest.mark.parametrize("tokens, count, k, biases", [(1, 5, 4, False), (17, 1, 1, False), (7, 3, 2, True)])
def test_grouped_experts_with_few_tokens(tokens, count, k, biases, device, kernels):
    chosen = torch.stack([torch.randperm(count)[:k] for _ in range(tokens)])
    _, tensors = inputs(device, weights_in=torch.bfloat16 if biases else torch.float32, biases=biases)
    weights = torch.rand(tokens, k, device=device).to(tensors["weights"].dtype)
    tensors |= {"x": tensors["x"][:tokens], "weights": weights}
    for name in tensors.keys() - {"x", "weights"}:
        tensors[name] = tensors[name][torch.arange(count) % E]
    tensors = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    # the sizes of errors and of values in few tokens each spread by 1 / sqrt(2 n)
    few = 1 + 2 / (tokens * k) ** 0.5
    # few values that cross a clamp are not averaged: it is out of reach
    gate = GPT_OSS._replace(limit=30.0) if biases else SILU
    reference = functools.partial(own, limit=30.0) if biases else functools.partial(plain, "silu")
    compare(chosen.to(device), tensors, gate, reference, few=few)


def test_grouped_experts_scale_each_gradient_row_by_itself(device):
    """With one scale for all rows, those of 2^-17 of the largest would vanish."""
    chosen, tensors = inputs(device)
    sizes = torch.exp2(torch.linspace(0, -40, T, device=device))[:, None]
    grad = (torch.randn(T, HIDDEN, device=device) * sizes).bfloat16()
    _, grads = run(grouped_experts, chosen, tensors, grad, SILU)
    _, wanted = exactly(chosen, tensors, functools.partial(plain, "silu"), grad)
    for name in ("x", "weights"):
        assert rel_rms(grads[name] / sizes, wanted[name] / sizes) < EXPERTS_BACKWARD["sqrt8"], name


@pytest.mark.parametrize("power", [-30, 30])
def test_grouped_experts_scales_follow_tensors_of_any_size(power, device):
    """Scales are a constant times a power of two, so powers of two change no other bit."""
    chosen, tensors = inputs(device)
    grad, factor = torch.randn(T, HIDDEN, device=device).bfloat16(), 2.0**power
    y, grads = run(grouped_experts, chosen, tensors, grad, SILU)
    factors = {"x": factor, "gate_up": 1 / factor, "weights": 1.0, "down": factor}
    scaled = {name: (t.detach() * factors[name]).requires_grad_() for name, t in tensors.items()}
    found, of_all = run(grouped_experts, chosen, scaled, grad, SILU)
    assert found.equal(y * factor)
    for name, t in grads.items():
        assert of_all[name].equal(t * (factor / factors[name])), name


def test_grouped_experts_of_zeros_and_constants(device):
    chosen, tensors = inputs(device)
    grad = torch.full((T, HIDDEN), -0.5, device=device).bfloat16()
    for value in (0.0, 0.25):
        with torch.no_grad():
            tensors["x"].fill_(value)
        y, grads = run(grouped_experts, chosen, tensors, grad, SILU)
        expected, _ = exactly(chosen, tensors, functools.partial(plain, "silu"), grad)
        assert rel_rms(y, expected) < EXPERTS_FORWARD
        assert all(t.isfinite().all() and bool(t.any()) == bool(value) for t in grads.values())


def test_grouped_experts_with_fp32_weights(device):
    chosen, tensors = inputs(device)
    grad = torch.randn(T, HIDDEN, device=device).bfloat16()
    y, grads = run(grouped_experts, chosen, tensors, grad, SILU)
    wide = {name: tensors[name].detach().float().requires_grad_() for name in ("gate_up", "down")}
    found, of_all = run(grouped_experts, chosen, tensors | wide, grad, SILU)
    assert found.equal(y) and all(of_all[name].equal(t) for name, t in grads.items() if name not in wide)
    for name in wide:
        assert of_all[name].dtype == torch.float32 and of_all[name].equal(grads[name].float())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes", [(8, 2, 4096, 512, 1024), (64, 8, 1000, 256, 128), (128, 8, 17, 2048, 768)], ids=str
)
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_experts_on_a_gpu_agree_with_the_emulation(sizes, skewed, transposed):
    """From the same codes: FP32 sums in another order, and with fast accumulation 2^-13 of partial sums of
    each 128 terms, move few codes by one step."""
    count, k, tokens, h, f = sizes
    generator = torch.Generator().manual_seed(0)
    load = torch.randn(count, generator=generator) * 2 * skewed
    chosen = (torch.rand(tokens, count, generator=generator).log().neg().log().neg() + load).topk(k).indices
    draw = functools.partial(torch.randn, generator=generator)
    tensors = {
        "x": draw(tokens, h).bfloat16(),
        "weights": torch.rand(tokens, k, generator=generator),
        "gate_up": (draw(count, 2 * f, h) / h**0.5).bfloat16(),
        "down": (draw(count, h, f) / f**0.5).bfloat16(),
        "gate_up_bias": draw(count, 2 * f).bfloat16(),
        "down_bias": draw(count, h).bfloat16(),
    }
    if transposed:
        tensors |= {name: tensors[name].mT.contiguous() for name in ("gate_up", "down")}
    grad, found = draw(tokens, h).bfloat16(), []
    for device in ("cpu", "cuda:0"):
        given = {name: t.detach().to(device).requires_grad_() for name, t in tensors.items()}
        call = functools.partial(grouped_experts, transposed=transposed)
        y, grads = run(call, chosen.to(device), given, grad.to(device), SILU)
        found.append({"y": y} | grads)
    for name, t in found[0].items():
        assert rel_rms(found[1][name], t) < 0.2 * EXPERTS_FORWARD, name


@pytest.mark.gpu
def test_grouped_experts_do_not_wait_for_the_gpu():
    chosen, tensors = inputs("cuda:0", biases=True)
    grad = torch.randn(T, HIDDEN, device="cuda:0").bfloat16()
    # compiles kernels
    run(grouped_experts, chosen, tensors, grad, SILU)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(grouped_experts, chosen, tensors, grad, SILU)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.gpu
def test_backward_holds_no_fp8_weights_beside_all_gradients():
    count, f, h, tokens = 8, 1024, 1024, 16
    draw = functools.partial(torch.randn, device="cuda:0", dtype=torch.bfloat16)
    x, gate_up, down = draw(tokens, h), draw(count, 2 * f, h), draw(count, h, f)
    parts = [t.requires_grad_() for t in (x, gate_up, down)]
    chosen = torch.arange(2 * tokens, device="cuda:0").view(tokens, 2) % count
    weights = torch.full((tokens, 2), 0.5, device="cuda:0")

    def backward() -> int:
        y = grouped_experts(x, chosen, weights, gate_up, down, SILU)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        torch.autograd.grad(y.sum(), parts)
        return torch.cuda.max_memory_allocated() - held

    backward()
    gradients = gate_up.nbytes + down.nbytes
    # gate_up in FP8 would add a third, and what is held for tokens adds less than a twentieth
    assert backward() < 1.1 * gradients


def test_grouped_experts_show_non_finite_values_in_their_tokens_alone(device):
    chosen, tensors = inputs(device)
    with torch.no_grad():
        tensors["x"][3, 5] = torch.nan
        tensors["x"][7, 0] = torch.inf
    grad = torch.randn(T, HIDDEN, device=device).bfloat16()
    y, grads = run(grouped_experts, chosen, tensors, grad, SILU)
    broken = torch.zeros(T, dtype=torch.bool, device=device)
    broken[[3, 7]] = True
    assert not y[broken].isfinite().all(1).any() and y[~broken].isfinite().all()
    assert grads["x"][~broken].isfinite().all() and not grads["x"][3].isfinite().all()
    touched = torch.zeros(E, dtype=torch.bool, device=device)
    touched[chosen[[3, 7]].flatten()] = True
    assert grads["gate_up"][~touched].isfinite().all() and not grads["gate_up"][touched].isfinite().all()


@GATES
def test_grouped_experts_with_frozen_parts(gate, device):
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
    known = {t.data_ptr() for t in tensors.values()}
    with saved_tensors() as saved:
        call()
    return sum({t.data_ptr(): t.nbytes for t in saved if t.data_ptr() not in known}.values())


@GATES
def test_grouped_experts_save_8_bits_and_the_input(gate, device):
    chosen, tensors = inputs(device)
    call = functools.partial(grouped_experts, chosen=chosen, gate=gate, **tensors)
    # the order, the ends, and the amax of the input, of the gate's output and of two weights
    others = 8 * T * K + 4 * E + 4 * 4
    assert kept(call, tensors) == T * K * 2 * FFN * 17 // 16 + others
    with torch.no_grad():
        assert kept(call, tensors) == 0 and call().grad_fn is None


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_permuted_experts_save_8_bits(gated, frozen, device):
    chosen, tensors = inputs(device, IN_ORDER, gated=gated)
    tensors["gate_up"].requires_grad_(not frozen)
    call = functools.partial(permuted, chosen=chosen, gate=KernelGate("silu", gated=gated), **tensors)
    others = 4 * E + 4 * 3
    codes = 0 if frozen else T * HIDDEN + 4
    assert kept(call, tensors) == T * (1 + gated) * FFN * 17 // 16 + codes + others


@pytest.mark.parametrize(
    "change, message",
    [
        ({"gate": KernelGate("tanh")}, "expected one of silu.*found 'tanh'"),
        ({"x": torch.zeros(T, HIDDEN)}, "expected x in BF16 .*found torch.float32"),
        ({"weights": torch.zeros(T, K + 1)}, r"weights \[t, k\] for x \(50, 48\).*found .*\(50, 3\)"),
    ],
    ids=["kind", "dtype", "sizes"],
)
def test_grouped_experts_refuse(change, message):
    chosen, tensors = inputs("cpu")
    with pytest.raises(ValueError, match=message):
        grouped_experts(**{"chosen": chosen, "gate": SILU, **tensors} | change)


def test_permuted_experts_refuse_counts_of_other_experts():
    _, tensors = inputs("cpu", IN_ORDER)
    weights = tensors.pop("weights")[:, 0]
    with pytest.raises(ValueError, match="and 6 experts"):
        permuted_experts(tensors.pop("x"), torch.tensor(OF_EACH[:-1]), weights, gate=SILU, **tensors)


def test_grouped_experts_router_gradient_is_not_rounded_to_bf16(device):
    chosen, tensors = inputs(device)
    y = grouped_experts(chosen=chosen, gate=SILU, **tensors)
    (grad,) = torch.autograd.grad(y.float().sum(), [tensors["weights"]])
    assert not grad.equal(grad.bfloat16().float())
