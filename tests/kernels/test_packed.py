"""Variable-length attention: results and gradients of documents one by one, and what it saves."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from coat_kernels.attention import Documents, causal_attention, takes_packed
from coat_kernels.attention import packed_attention as attention
from coat_kernels.attention.packed import (
    LONG,
    Part,
    _cudnn,
    _cudnn_backward,
    _flash,
    _flash_backward,
    parts_of,
)
from coat_kernels.autograd.origin import origin_of
from coat_kernels.fp8 import E4M3
from coat_kernels.tensorwise.quantize import quantize_tensor
from tests.kernels.agreement import E4M3_RMS, ROUNDING
from tests.util import rel_rms, saved_tensors

N, D = 4, 32
packed_attention = partial(attention, batch_first=True)
LENGTHS = {
    "one document": [37],
    "ends inside of groups": [5, 33, 1, 17, 40],
    "200 documents": [1 + i % 7 for i in range(200)],
}
LAYOUTS = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)


def packed(lengths, device, window=None) -> Documents:
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    return Documents(starts, max(lengths), window)


def with_borders(lengths, device) -> Documents:
    """The same, and its borders are known on the CPU."""
    return Documents.between([0, *torch.tensor(lengths).cumsum(0).tolist()], device)


def qkv(tokens, device, groups=N, dtype=torch.bfloat16, sinks=False):
    """Queries, keys and values, and the sinks of the heads if there are some."""
    torch.manual_seed(0)
    shapes = [(1, tokens, n, D) for n in (N, groups, groups)]
    inputs = [torch.randn(s).to(device, dtype).requires_grad_() for s in shapes]
    if sinks:
        inputs.append(torch.tensor([-9.0, 0.0, 1.0, 4.0]).to(device, dtype).requires_grad_())
    return inputs


def one_by_one(q, k, v, sinks=None, *, lengths, window=None, scale=None) -> torch.Tensor:
    """Each document by torch's attention in FP64. A sink is the score of a key of zeros, whose value is
    zero."""
    found = []
    for heads in zip(*(x[0].double().split(lengths) for x in (q, k, v)), strict=True):
        q, *others = (x.transpose(0, 1)[None] for x in heads)
        length = q.shape[2]
        seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        mask = seen if window is None else seen.triu(-window)
        if sinks is not None:
            others = [F.pad(x, (0, 0, 0, 1)) for x in others]
            scores = torch.zeros_like(mask, dtype=torch.float64).masked_fill(~mask, -torch.inf)
            mask = torch.cat(
                [scores.expand(N, -1, -1), sinks.double().view(N, 1, 1).expand(-1, length, 1)], 2
            )
        y = F.scaled_dot_product_attention(q, *others, attn_mask=mask, scale=scale, enable_gqa=True)
        found.append(y[0].transpose(0, 1).flatten(1))
    return torch.cat(found)[None]


def check_origin(y, fmt):
    """The rows of the output [.., .., channels] are recomputed from what attention has saved."""
    amax = y.detach().abs().amax().float()
    origin = origin_of(y)
    found = origin.columns(*origin.tensors, amax, E4M3)
    expected = quantize_tensor(y.detach().flatten(0, 1), amax, E4M3, rows=False, columns=True)
    assert found.scale.equal(expected.scale)
    found, expected = found.columns.float(), expected.columns.float()
    # saved in groups, values are rounded once more, and some fall on the neighbouring code of E4M3
    assert rel_rms(found, expected) <= (0 if fmt is None else E4M3_RMS)


@pytest.mark.pairwise
@LAYOUTS
@pytest.mark.parametrize("groups, sinks", [(N, False), (2, False), (2, True)])
@pytest.mark.parametrize("window", [None, 8])
def test_packed_attention_attends_within_documents(window, groups, sinks, lengths, device):
    inputs = qkv(sum(lengths), device, groups, sinks=sinks)
    grad = torch.randn(1, sum(lengths), N * D, dtype=torch.bfloat16, device=device)
    scale = None if sinks else 0.3
    expected = one_by_one(*inputs, lengths=lengths, window=window, scale=scale)
    how = {"scale": scale, "sinks": inputs[3] if sinks else None}
    y = packed_attention(*inputs[:3], packed(lengths, device, window), **how)
    # The output is rounded to BF16, with sinks twice. Tensor cores also round probabilities and, in backward,
    # gradients of scores. Each rounding is at most 2^-9 of its number.
    assert rel_rms(y, expected) < 2**-8 * 2 ** (sinks / 2)
    found = torch.autograd.grad(y, inputs, grad)
    for a, e in zip(found, torch.autograd.grad(expected, inputs, grad.double()), strict=True):
        assert rel_rms(a, e) < 2**-6


@pytest.mark.parametrize("rows, sinks", [(1, False), (2, False), (1, True)])
def test_packed_attention_reference_is_exact(rows, sinks):
    """Documents may lie in several rows of a batch."""
    lengths = [7, 13, 20]
    given = [x.detach() for x in qkv(40, "cpu", 2, torch.float64, sinks)]
    inputs = [x.view(rows, -1, *x.shape[2:]) for x in given[:3]] + given[3:]
    inputs = [x.requires_grad_() for x in inputs]
    y = packed_attention(*inputs[:3], packed(lengths, "cpu", 5), sinks=inputs[3] if sinks else None)
    whole = [x.view(1, 40, *x.shape[2:]) for x in inputs[:3]]
    expected = one_by_one(*whole, *inputs[3:], lengths=lengths, window=5).view(y.shape)
    grad = torch.randn_like(y)
    pairs = [(y, expected), *zip(*(torch.autograd.grad(t, inputs, grad) for t in (y, expected)), strict=True)]
    # sums of at most 40 x 32 terms in FP64
    for a, e in pairs:
        assert rel_rms(a, e) < 40 * 32 * 2**-53


@pytest.mark.parametrize("fmt", [None, "sqrt8"])
@pytest.mark.parametrize("sinks", [False, True])
def test_packed_attention_takes_megatrons_order(sinks, fmt, device):
    """Two sequences, whose tokens alternate in memory, give the bits of one after the other."""
    inputs, documents = qkv(2 * 37, device, 2), packed([30, 7, 20, 17], device, 8)
    how = {"sinks": torch.arange(N, device=device).bfloat16() if sinks else None, "saved_format": fmt}
    grad = torch.randn(2, 37, N * D, dtype=torch.bfloat16, device=device)
    rows = [x.view(2, 37, *x.shape[2:]) for x in inputs]
    columns = [x.transpose(0, 1).contiguous() for x in rows]
    expected, y = packed_attention(*rows, documents, **how), attention(*columns, documents, **how)
    assert y.is_contiguous() and y.transpose(0, 1).equal(expected)
    wanted = torch.autograd.grad(expected, inputs, grad)
    found = torch.autograd.grad(y, inputs, grad.transpose(0, 1), retain_graph=True)
    # FlashAttention adds up gradients in any order, in FP32, and rounds them to BF16
    assert all(rel_rms(a, e) <= (2**-8 if a.is_cuda else 0) for a, e in zip(found, wanted, strict=True))
    check_origin(y, fmt)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("fmt", [None, "sqrt8"])
def test_packed_attention_of_equal_documents_is_causal_attention(fmt, batch_first, device):
    """With the bits of `causal_attention`, whose backends are faster."""
    inputs = qkv(4 * 9, device, 2)
    grad = torch.randn(4, 9, N * D, dtype=torch.bfloat16, device=device)
    rows = [x.view(4, 9, *x.shape[2:]) for x in inputs]
    expected = causal_attention(*rows, saved_format=fmt, batch_first=True)
    given = inputs if batch_first else [x.transpose(0, 1) for x in inputs]
    y = attention(*given, packed([9] * 4, device), saved_format=fmt, batch_first=batch_first)
    assert y.shape[:2] == ((1, 36) if batch_first else (36, 1)) and y.view_as(expected).equal(expected)
    wanted = torch.autograd.grad(expected, inputs, grad)
    found = torch.autograd.grad(y, inputs, grad.view_as(y), retain_graph=True)
    # kernels add up gradients in any order, in FP32, and round them to BF16
    assert all(rel_rms(a, e) <= (2**-8 if a.is_cuda else 0) for a, e in zip(found, wanted, strict=True))
    check_origin(y, fmt)


@pytest.mark.parametrize("window", [None, 8])
def test_packed_attention_arguments_fit_torchs_flash_attention(window):
    """In this release of torch, by its shapes alone."""
    q, k, v = (torch.empty(96, n, D, dtype=torch.bfloat16, device="meta") for n in (N, 2, 2))
    documents = packed([5, 91], "meta", window)
    y, lse = _flash(q, k, v, documents, 0.3)
    assert y.shape == q.shape and lse.shape == (N, 96) and lse.dtype == torch.float32
    found = _flash_backward(torch.empty_like(y), q, k, v, y, lse, documents, 0.3)
    assert [g.shape for g in found] == [x.shape for x in (q, k, v)]


def test_cudnn_arguments_fit_torchs_operators():
    q, k, v = (torch.empty(1, n, 96, D, dtype=torch.bfloat16, device="meta") for n in (N, 2, 2))
    y, lse = _cudnn(q, k, v, 0.3)
    assert y.shape == q.shape and lse.dtype == torch.float32
    found = _cudnn_backward(torch.empty_like(y), q, k, v, y, lse, 0.3)
    assert [g.shape for g in found] == [x.shape for x in (q, k, v)]


def test_parts_of_long_documents_are_apart():
    lengths = [3, 0, LONG - 1, LONG, 0, LONG + 7, 5, 2, LONG, 0]
    borders = with_borders(lengths, "cpu").cu_seqlens_cpu
    parts = parts_of(borders)
    assert [(p.first, p.last, p.max_seqlen) for p in parts] == [
        (0, 3, LONG - 1),
        (3, 4, LONG),
        (5, 6, LONG + 7),
        (6, 8, 5),
        (8, 9, LONG),
    ]
    assert all((p.start, p.end) == (borders[p.first], borders[p.last]) for p in parts)
    starts = torch.tensor(borders)
    assert parts[0].documents(starts).cu_seqlens.tolist() == [0, 3, 3, LONG + 2]
    assert parts[3].documents(starts).cu_seqlens.tolist() == [0, 5, 7]


@pytest.mark.parametrize("length", [LONG, LONG + 1, 2 * LONG - 1, 2 * LONG, 5 * LONG + 3])
def test_sequences_of_long_documents_have_few_lengths(length):
    """At most one eighth longer than the document; the last one of a batch ends in zeros."""
    tokens = length + 40
    x = torch.arange(2.0 * tokens).view(tokens, 1, 2)
    found = Part(40, tokens, 0, 1, length).sequence(x)
    s = found.shape[2]
    octave = 2 ** (length - 1).bit_length()
    assert found.shape == (1, 1, s, 2) and length <= s <= length * 9 / 8 and s * 16 % octave == 0
    assert found[0, 0, :length].equal(x[40:, 0]) and not found[0, 0, length:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [N, 2])
@pytest.mark.parametrize("fmt", [None, "sqrt8"])
@pytest.mark.parametrize("lengths", [[5, LONG + 1, 700, 33, 2 * LONG - 100, 3], [LONG, 3 * LONG // 2 + 9]])
def test_long_documents_attend_within_themselves(lengths, fmt, groups, device):
    inputs = qkv(sum(lengths), device, groups)
    grad = torch.randn(1, sum(lengths), N * D, dtype=torch.bfloat16, device=device)
    expected = one_by_one(*inputs, lengths=lengths)
    y = packed_attention(*inputs, with_borders(lengths, device), saved_format=fmt)
    # as in test_packed_attention_attends_within_documents; backward sees groups as in
    # test_packed_attention_gradients_see_one_rounding_of_each_tensor
    assert rel_rms(y, expected) < 2**-8
    score = 2**0.5 * ROUNDING[fmt] if fmt else 0
    bounds = (2 * score + 2 * ROUNDING[fmt],) * 2 + (1.5 * score,) if fmt else (0,) * 3
    found = torch.autograd.grad(y, inputs, grad, retain_graph=True)
    wanted = torch.autograd.grad(expected, inputs, grad.double())
    for a, e, bound in zip(found, wanted, bounds, strict=True):
        assert rel_rms(a, e) < bound + 2**-6
    check_origin(y, fmt)


@pytest.mark.gpu
def test_long_documents_repeat_to_the_bit_with_deterministic_algorithms(device, request):
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(True)
    inputs, documents = qkv(LONG + 700, device), with_borders([700, LONG], device)
    y = packed_attention(*inputs, documents)
    first, again = (torch.autograd.grad(y, inputs, torch.ones_like(y), retain_graph=True) for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))


@LAYOUTS
@pytest.mark.parametrize("fmt", ROUNDING)
def test_packed_attention_gradients_see_one_rounding_of_each_tensor(fmt, lengths, device):
    inputs, documents = qkv(sum(lengths), device, 2), packed(lengths, device)
    exact = packed_attention(*inputs, documents)
    grad = torch.randn_like(exact)
    expected = torch.autograd.grad(exact, inputs, grad)
    y = packed_attention(*inputs, documents, saved_format=fmt)
    assert y.equal(exact)
    # as of causal_attention (test_attention.py)
    score = 2**0.5 * ROUNDING[fmt]
    bounds = (2 * score + 2 * ROUNDING[fmt],) * 2 + (1.5 * score,)
    for a, e, bound in zip(torch.autograd.grad(y, inputs, grad), expected, bounds, strict=True):
        assert rel_rms(a, e) < bound + 2**-9


@pytest.mark.parametrize("fmt", [None, "sqrt8"])
def test_packed_attention_saves_no_mask(fmt, device):
    """q, k, v and the output, a number for each head of a token, and the borders: no mask."""
    lengths = LENGTHS["ends inside of groups"]
    tokens = sum(lengths)
    inputs, documents = qkv(tokens, device, 2), packed(lengths, device)
    with saved_tensors() as tensors:
        packed_attention(*inputs, documents, saved_format=fmt)
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    elements = tokens * D * (2 * N + 2 * 2)
    heads = 2 * elements if fmt is None else elements + elements // 16 * 2
    assert sum(kept.values()) <= heads + 4 * N * tokens + 4 * (len(lengths) + 1)


def test_takes_packed_refuses_heads_beyond_flash_attention():
    gpu, half = torch.device("cuda"), torch.bfloat16
    assert takes_packed(torch.float32, torch.device("cpu"), 20, 12)
    for dtype, d, e in ((torch.float32, 64, 64), (half, 64, 32), (half, 20, 20), (half, 512, 512)):
        assert not takes_packed(dtype, gpu, d, e)
