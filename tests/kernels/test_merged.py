"""One GEMM with several weights against the same GEMM with their concatenation."""

import pytest
import torch

from coat_kernels import weights as quantizing
from coat_kernels.fp8 import E4M3
from coat_kernels.linear import LinearState, fp8_linear
from coat_kernels.tensorwise import predicted
from coat_kernels.tensorwise.quantize import quantize_tensor_reference
from coat_kernels.weights import WeightCache, invalidate_weight_caches
from tests.interpreter import take_kernels

ROWS, K, TOKENS = (48, 16, 32), 64, 24


def weights_of(device, trained=True):
    generator = torch.Generator().manual_seed(0)
    # the largest magnitude is in the last weight
    weights = [torch.randn(n, K, generator=generator) * (i + 1) for i, n in enumerate(ROWS)]
    return tuple(torch.nn.Parameter(w.to(device, torch.bfloat16), requires_grad=trained) for w in weights)


@pytest.fixture
def kernels(takes_kernels, monkeypatch):
    if takes_kernels:
        take_kernels(monkeypatch)


@pytest.mark.parametrize("keep", ["none", "fp8"])
def test_merged_codes_are_those_of_the_whole(keep, kernels, device):
    weights, cache = weights_of(device), WeightCache(keep)
    for scale in (1.0, 2.0**30, None):
        if scale and cache._predicted:
            cache._predicted.on(device).fill_(scale)
        whole = torch.cat([w.detach() for w in weights])
        amax = whole.abs().amax().float().view(1)
        expected = quantize_tensor_reference(whole, amax, E4M3, columns=True)
        bound = cache.of(weights)
        rows, found = bound.forward(weights)
        columns = bound.columns(weights, found)
        assert found.equal(amax)
        for codes in (rows, columns, bound.rows(weights, found)):
            assert codes.scale.equal(expected.scale)
        if quantizing.uses_kernels(weights[0]):
            # so the next forward does not quantize with a wrong scale
            assert cache._predicted.on(device).equal(expected.scale)
        assert rows.rows.float().equal(expected.rows.float())
        assert columns.columns.float().equal(expected.columns.float())
        assert (cache.nbytes > 0) == (keep != "none")
        with torch.no_grad():
            weights[1].mul_(300)


def test_merged_products_and_gradients_are_those_of_the_whole(device):
    weights, x = weights_of(device), torch.randn(2, TOKENS, K, device=device).bfloat16()[0].requires_grad_()
    grad = torch.randn(TOKENS, sum(ROWS), device=device).bfloat16()
    gemm = LinearState()
    whole = torch.nn.Parameter(torch.cat([w.detach() for w in weights]))
    expected = fp8_linear(x, whole, None, LinearState().options(whole))
    grad_x, grad_w = torch.autograd.grad(expected, (x, whole), grad)
    y = fp8_linear(x, weights, None, gemm.options(weights))
    found_x, *found = torch.autograd.grad(y, (x, *weights), grad)
    assert y.equal(expected) and found_x.equal(grad_x)
    assert torch.cat(found).equal(grad_w)
    # slices of one GEMM's output, without a copy
    assert len({g.untyped_storage().data_ptr() for g in found}) == 1
    frozen = weights_of(device, trained=False)
    y = fp8_linear(x, frozen, None, gemm.options(frozen))
    assert torch.autograd.grad(y, x, grad)[0].equal(grad_x)


def test_merged_weight_that_changes_before_backward_is_refused(device):
    weights, x = weights_of(device), torch.randn(TOKENS, K, device=device).bfloat16().requires_grad_()
    y = fp8_linear(x, weights, None, LinearState().options(weights))
    with torch.no_grad():
        weights[2].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_merged_copies_belong_to_these_weights(device):
    cache, weights = WeightCache("fp8"), weights_of(device)
    first, _ = cache.of(weights).forward(weights)
    assert cache.of(weights).forward(weights)[0] is first
    others = weights_of(device)
    assert cache.of(others).forward(others)[0] is not first
    # a backward pass runs after the forward pass of other weights
    smaller = tuple(torch.nn.Parameter(w / 300) for w in weights)
    bound = cache.of(smaller)
    kept, amax = bound.forward(smaller)
    cache.of(others).forward(others)
    for codes in (bound.columns(smaller, amax), bound.rows(smaller, amax)):
        assert codes.scale.equal(kept.scale)
    second, _ = cache.of(others).forward(others)
    invalidate_weight_caches()
    assert cache.of(others).forward(others)[0] is not second


def test_merged_copies_of_a_graph_are_written_in_place(kernels, device, monkeypatch):
    cache, weights = WeightCache("fp8"), weights_of(device)
    places = cache.of(weights).refresh_for_graph(weights)
    with torch.no_grad():
        weights[1].mul_(300)
    with monkeypatch.context() as patched:
        patched.setattr(predicted, "empty_operands", None)
        assert cache.of(weights).refresh_for_graph(weights) == places
    found, amax = cache.of(weights).forward(weights)
    assert (cache, *(t.data_ptr() for t in (amax, *found[:3]))) == places
    expected, most = WeightCache("fp8").of(weights).forward(weights)
    assert amax.equal(most) and found.scale.equal(expected.scale)
    assert found.rows.float().equal(expected.rows.float())
    assert found.columns.float().equal(expected.columns.float())


def test_merged_copies_of_a_graph_take_no_other_weights(device):
    cache, weights = WeightCache("fp8"), weights_of(device)
    for given in (weights, weights[:2]):
        cache.of(given).refresh_for_graph(given)
        assert cache.nbytes == 2 * sum(w.numel() for w in given) + 8


def masked(memory, values):
    return torch.mul(values, 2, out=memory)


def parameter(memory, values):
    memory.copy_(values)
    return torch.nn.Parameter(memory)


@pytest.mark.parametrize("keep", ["none", "fp8"])
@pytest.mark.parametrize("weight_of", [masked, parameter])
def test_merged_copies_are_not_of_other_weights_at_the_same_place(weight_of, keep, device):
    memories = [torch.empty(n, K, device=device) for n in ROWS]
    gemm, x = LinearState(weight_cache=keep), torch.randn(TOKENS, K, device=device)
    for _ in range(3):
        # separate tensors, whose version counters start at 0
        weights = tuple(weight_of(m.data, torch.randn(m.shape, device=device)) for m in memories)
        y = fp8_linear(x, weights, None, gemm.options(weights))
        assert y.equal(fp8_linear(x, weights, None, LinearState().options(weights)))
        del weights
    # codes of computed weights are not cached
    assert (gemm.cache.nbytes > 0) == (keep == "fp8" and weight_of is parameter)
