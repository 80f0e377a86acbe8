"""The kernels around the experts' GEMMs against their references."""

import pytest
import torch

from coat_kernels.activation.reference import dequantize_parts
from coat_kernels.experts import KernelGate
from coat_kernels.experts.gate_kernels import gate_grad_triton, gate_output_triton, launch_gate_forward
from coat_kernels.experts.kernels import (
    gather_columns_triton,
    gather_rows_triton,
    order_triton,
    padded_triton,
    quantize_each_row_triton,
    repeat_scales,
    sum_to_tokens_triton,
)
from coat_kernels.experts.order import Rows
from coat_kernels.experts.reference import (
    gate_forward_reference,
    gate_grad_reference,
    gate_output_reference,
    gate_reference,
    gather_columns_reference,
    gather_rows_reference,
    order_reference,
    padded_reference,
    quantize_each_row_reference,
    sum_to_tokens_reference,
    weights_grad_reference,
)
from coat_kernels.fp8 import E4M3
from coat_kernels.groups import GROUP_SIZE, empty_grouped, quantize_groups_reference
from coat_kernels.tensorwise.quantize import empty_operands
from coat_kernels.tensorwise.scale import Scales
from tests.kernels.agreement import FP32, ROUNDING, exact, rounded

# rows in the experts' order: some experts have no rows, and some counts end within a tile
OF_EACH = (9, 0, 16, 1, 21, 3, 0)
GATES = {
    "plain": KernelGate("gelu_tanh", gated=False),
    "gated": KernelGate("gelu_tanh"),
    "clamped": KernelGate("silu", limit=0.5, offset=0.25),
    "gpt-oss": KernelGate("quick_gelu", limit=1.0, offset=1.0, interleaved=True),
}


def rows_of(of_each, device, k=None):
    """Rows with `of_each` tokens for the experts; with k choices a token, in a random order."""
    offs = torch.tensor(of_each, device=device).cumsum(0).int()
    if k is None:
        return Rows(offs)
    expert = torch.arange(len(of_each)).repeat_interleave(torch.tensor(of_each))
    expert = expert[torch.randperm(len(expert))]
    return Rows(*order_reference(expert.view(-1, k).to(device), len(of_each)))


@pytest.mark.parametrize("count, tokens, k", [(7, 50, 3), (1, 5, 1), (128, 200, 8), (300, 17, 4)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_expert_choices_are_ordered_by_expert_and_token(count, tokens, k, dtype, device, monkeypatch):
    """By one program for each 16 choices, and by programs with several tiles."""
    chosen = torch.rand(tokens, count).pow(3).topk(min(k, count)).indices.to(device, dtype)
    expected = order_reference(chosen, count)
    for programs in (256, 2):
        monkeypatch.setattr("coat_kernels.experts.kernels.ORDER_PROGRAMS", programs)
        found = order_triton(chosen, count)
        assert all(a.equal(e) and a.dtype == e.dtype for a, e in zip(found, expected, strict=True))
    # the expert of each row in order, and a choice's row holds the choice
    assert Rows(*expected).experts(chosen.numel()).equal(chosen.flatten().sort().values.long())
    assert expected[1][expected[2].flatten()].tolist() == list(range(chosen.numel()))


def test_expert_rows_have_places_in_whole_words(device):
    """Whatever the counts: an expert without rows, at the end too, counts of 16 and next to it."""
    for of_each in (OF_EACH, (0,), (50,), (16, 0, 17, 15), (0, 0, 0)):
        n, rows = sum(of_each), rows_of(of_each, device)
        row, token, offs = padded_triton(rows, n)
        assert token is row
        assert all(a.equal(e) for a, e in zip((row, offs), padded_reference(rows, n)[::2], strict=True))
        whole = [max(-(-count // 16) * 16, 16) for count in of_each]
        assert offs.tolist() == torch.tensor(whole).cumsum(0).tolist() and len(row) >= sum(whole)
        assert len(row) % 16 == 0 and len(row) <= n + 16 * len(of_each)
        begin, first = 0, 0
        for count, size in zip(of_each, whole, strict=True):
            rows = [*range(first, first + count), *[n] * (size - count)]
            assert row[begin : begin + size].tolist() == rows
            begin, first = begin + size, first + count
        assert row[begin:].eq(n).all()
        if n:
            k = 5 if n % 5 == 0 else 3
            rows = rows_of(of_each, device, k)
            found, expected = padded_triton(rows, n), padded_reference(rows, n)
            assert all(a.equal(e) for a, e in zip(found, expected, strict=True)) and found[0].equal(row)
            token = torch.cat((rows.order, rows.order.new_full((1,), n))) // k
            assert found[1].equal(token[row])


def hard_rows(n, m, seed=0):
    """Rows of very different sizes, of zeros, with NaN, an infinity, subnormal and huge values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, m, generator=generator) * torch.exp(3 * torch.randn(n, 1, generator=generator))
    x[0], x[1 % n, 0], x[2 % n, m - 1], x[3 % n] = 0, torch.nan, -torch.inf, 1e-39
    x[4 % n, ::2] = 3e38
    return x.bfloat16()


# rows and columns have masks of their own, whatever rows mean: every way to choose with and without biases
@pytest.mark.parametrize(
    "n, m, k, biased",
    [
        *((1, 16, None, False), (3, 5008, None, True), (1, 16, 1, False)),
        *((7, 48, 1, True), (130, 144, 3, False), (7, 48, 3, True)),
    ],
)
def test_expert_row_kernels_agree_with_the_references(n, m, k, biased, device):
    x = hard_rows(n, m).to(device)
    counts = torch.bincount(torch.randint(0, 4, (n * (k or 1),)), minlength=5).tolist()
    rows = rows_of(counts, device, k)
    bias = torch.randn(5, m).bfloat16().to(device) if biased else None
    *found, dots = quantize_each_row_triton(x, rows, bias)
    *expected, wanted = quantize_each_row_reference(x, rows, bias)
    for a, e in zip(found, expected, strict=True):
        assert exact(a, e) == 0
    assert (dots is None) == (wanted is None) != biased
    if biased:
        finite = wanted.isfinite()
        # sums of m terms of either sign; subnormal ones have no relative precision
        sizes = x.double().nan_to_num(0, 0, 0).norm(dim=1, keepdim=True) * bias.double().norm(dim=1).max()
        assert ((dots - wanted).abs() <= FP32 * sizes + 2.0**-126)[finite].all()
        assert exact(dots[~finite].isfinite(), wanted[~finite].isfinite()) == 0
    if k is not None:
        codes = expected[0][:n]
        assert exact(gather_rows_triton(codes, rows), gather_rows_reference(codes, rows)) == 0
    values, weights = torch.randn(n * (k or 1), m).bfloat16().to(device), torch.rand(n, k or 1, device=device)
    if k is not None or biased:
        options = rows, weights, bias
        assert rounded(sum_to_tokens_triton(values, *options), sum_to_tokens_reference(values, *options)) <= 1


@pytest.mark.parametrize("n, m", [(1, 16), (7, 48), (130, 144), (3, 5008)])
def test_expert_column_kernels_agree_with_the_references(n, m, device):
    source = torch.cat((torch.randint(0, n + 1, (29,)), torch.tensor([n, 0, n]))).int().to(device)
    x = hard_rows(n, m).to(device)
    codes, amax = x.float().clamp(-448, 448).to(E4M3.dtype), torch.tensor([3.0], device=device)
    for given in ((codes, source), (x, source, amax), (x.float(), source, amax)):
        found, expected = gather_columns_triton(*given), gather_columns_reference(*given)
        assert exact(found[0], expected[0]) == 0 and (found[1] is None or found[1].equal(expected[1]))


def test_expert_scales_are_repeated(device):
    a, b = torch.tensor([2.0], device=device), torch.tensor([3.0], device=device)
    for n_a, n_b in ((0, 5), (1, 1), (33, 2000)):
        of_a, of_b = repeat_scales(a, n_a, b, n_b)
        assert of_a.equal(a.expand(n_a)) and of_b.equal(b.expand(n_b))
        # a multiple of 128 bytes
        assert of_b.storage_offset() % 32 == 0


@pytest.mark.each_value
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@pytest.mark.parametrize("f", [48, 256])
@pytest.mark.parametrize("fmt", ROUNDING)
def test_expert_gate_kernels_agree_with_the_references(fmt, f, gate, device):
    """Codes differ at most at the rare value next to a tie."""
    gate = gate._replace(saved_format=fmt)
    n, k, width = 60, 3, (1 + gate.gated) * f
    rows = rows_of((10, 0, 16, 1, 21, 12, 0), device, k)
    weights, source = torch.rand(n // k, k, device=device), padded_reference(rows, n)[0]
    amax = torch.tensor([4.0], device=device)
    both = torch.randn(n, width).bfloat16().to(device)
    for bias in (None, torch.randn(7, width).bfloat16().to(device)):
        q, out = (
            empty_grouped(n, f, GROUP_SIZE, fmt, device, 1 + gate.gated),
            empty_operands(n, f, E4M3, torch.device(device), True, False, False),
        )
        scales = Scales(out.scale.fill_(4 / 448), torch.empty_like(out.scale))
        maxima = launch_gate_forward(both, weights, bias, rows, gate, q, out, scales)
        a, wanted = gate_forward_reference(both, weights, bias, rows, gate, True)
        # a value may be rounded to BF16's other neighbour, and its code then, too
        assert rounded(maxima.amax().bfloat16(), a.abs().amax()) <= 1
        codes = (a.float() / out.scale).clamp(-448, 448).to(E4M3.dtype)
        assert rounded(out.rows.view(torch.uint8), codes.view(torch.uint8)) <= 1
        for x, e in zip(q.tensors, wanted.tensors, strict=True):
            assert rounded(x, e) <= 1
    q = quantize_groups_reference(torch.randn(n, width).bfloat16().to(device), GROUP_SIZE, fmt)
    grad, dots = hard_rows(n, f).to(device), torch.randn(n // k, k, device=device)
    # one huge value: a sum of several of both signs overflows, or does not, by its order
    grad[4, 2:] = 1
    given, options = (grad, q, weights, rows, source), (amax, dots, gate)
    found, expected = gate_output_triton(*given, *options), gate_output_reference(*given, *options)
    assert rounded(*(codes[0].view(torch.uint8) for codes in (found, expected))) <= 1
    assert found[1].equal(expected[1])
    finite = expected[2].isfinite()
    assert exact(found[2][~finite].isnan(), expected[2][~finite].isnan()) == 0
    # sums of f terms in FP32, in any order, and the roundings of each term
    terms = (grad.float() * gate_reference(*dequantize_parts(q, gate.gated), gate=gate)[0]).abs().sum(1)
    bound = (f * 2**-24 + FP32) * weights_grad_reference(terms, weights, rows, dots.abs())
    assert ((found[2] - expected[2]).abs() <= bound)[finite].all()
    torch.testing.assert_close(found[3], expected[3], rtol=FP32, atol=0)
    assert found[4].equal(found[3].amax(0, keepdim=True))
    maxima, amax = expected[3:]
    found = gate_grad_triton(*given, maxima, amax, gate)
    expected = gate_grad_reference(*given, maxima, amax, gate)
    for a, e in zip(found, expected, strict=True):
        a, e = (t.view(torch.uint8) if t.dtype == E4M3.dtype else t for t in (a, e))
        assert (rounded if a.dtype == torch.uint8 else exact)(a, e) <= 1
    # what is not needed is not written
    assert gate_output_triton(*given, *options, False, False) == (None,) * 5
