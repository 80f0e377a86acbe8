"""Cached FP8 weights: used while valid, never stale, counted."""

import pytest
import torch

from coat_kernels import tensorwise, weights
from coat_kernels.fp8 import E4M3
from coat_kernels.linear import LinearState, fp8_linear
from coat_kernels.tensorwise.quantize import quantize_tensor_reference
from coat_kernels.weights import WeightCache, invalidate_weight_caches
from tests.interpreter import take_kernels


@pytest.fixture
def work(monkeypatch):
    """Counts how often weights are quantized with a scale that is not known yet, and with a known one."""
    counts = {"fp8_operands": 0, "quantize_tensor": 0}
    for name in counts:
        original = getattr(weights, name)

        def counting(*args, original=original, name=name, **kwargs):
            counts[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(weights, name, counting)
    return counts


@pytest.fixture
def kernels(takes_kernels, monkeypatch):
    if takes_kernels:
        take_kernels(monkeypatch)


def layer(device):
    weight = torch.nn.Parameter(torch.randn(32, 64, device=device))
    x = torch.randn(16, 64, device=device, requires_grad=True)
    return x, weight


def product(x, weight, gemm):
    return fp8_linear(x, weight, None, gemm.options(weight))


@pytest.mark.parametrize("keep, passes", [("none", (3, 3)), ("fp8", (1, 0))])
def test_weight_cache_passes_and_bytes_of_three_micro_batches(keep, passes, work, device):
    x, weight = layer(device)
    gemm = LinearState(weight_cache=keep)
    for _ in range(3):
        product(x, weight, gemm).sum().backward()
    assert tuple(work.values()) == passes
    # the codes in two layouts and two FP32 numbers: the largest magnitude and the scale
    assert gemm.cache.nbytes == {"none": 0, "fp8": 2 * weight.numel() + 8}[keep]


def by_optimizer(weight):
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=1.0).step()


def behind_autograd_in_a_step(weight):
    """Writes as ZeRO does: an optimizer steps on a master, whose values are then copied into the weight's
    memory."""
    master = weight.detach().clone().requires_grad_()
    by_optimizer(master)
    weight.data.copy_(master.detach())


def in_place(weight):
    with torch.no_grad():
        weight.mul_(-3)


def load_state_dict(weight):
    module = torch.nn.Module()
    module.weight = weight
    module.load_state_dict({"weight": weight.detach() + 1})


def other_memory(weight):
    weight.data = weight.detach() + 1


def by_hand(weight):
    weight.data.add_(1)
    invalidate_weight_caches()


IN_STEPS = [by_optimizer, behind_autograd_in_a_step]
CHANGES = [in_place, load_state_dict, other_memory, by_hand]


@pytest.mark.parametrize(
    ("change", "trains"),
    [*((change, True) for change in IN_STEPS + CHANGES), *((change, False) for change in CHANGES)],
)
def test_weight_cache_is_never_stale(change, trains, device):
    x, weight = layer(device)
    weight.requires_grad_(trains)
    gemm = LinearState(weight_cache="fp8")
    before = product(x, weight, gemm)
    change(weight)
    after = product(x, weight, gemm)
    assert after.equal(fp8_linear(x, weight)) and not after.equal(before)


def masked(memory, values):
    """A weight that is computed for one forward, in the memory of the previous one."""
    memory.data.copy_(values)
    return memory.data


def another_parameter(memory, values):
    return torch.nn.Parameter(masked(memory, values))


def part_of_another(memory, values):
    return another_parameter(memory, values).view_as(values)


@pytest.mark.parametrize("weight_of", [masked, another_parameter, part_of_another])
def test_weight_cache_of_another_weight_at_the_same_place(weight_of, device):
    """Replaced between forwards, and between a forward and its backward, where a GEMM reads the weight
    again."""
    memory, kept = torch.empty(64, 64, device=device), LinearState(weight_cache="fp8")
    x = torch.randn(16, 64, device=device, requires_grad=True)
    for _ in range(3):
        weight = weight_of(memory, torch.randn(64, 64, device=device))
        results = []
        for gemm in (kept, LinearState()):
            y = product(x, weight, gemm)
            results.append((y.detach(), *torch.autograd.grad(y.sum(), x)))
        for found, expected in zip(*results, strict=True):
            assert found.equal(expected)
        del weight, y


def test_weight_cache_of_another_view_of_a_parameter(device):
    weight, gemm = torch.nn.Parameter(torch.randn(64, 64, device=device)), LinearState(weight_cache="fp8")
    x, amax = torch.randn(16, 64, device=device), weight.detach().abs().max().view(1)
    for view in (weight, weight.t(), weight.view_as(weight)):
        assert product(x, view, gemm).equal(fp8_linear(x, view))
        # the cache holds the codes of this view
        codes = gemm.cache._codes.rows
        assert gemm.cache.nbytes > 0 and codes.equal(quantize_tensor_reference(view, amax, E4M3).rows)


@pytest.mark.parametrize("keep", ["none", "fp8"])
def test_weight_cache_codes_do_not_depend_on_predictions(keep, kernels, device):
    """The previous scale is right, too large or too small."""
    _, weight = layer(device)
    cache = WeightCache(keep)
    for factor in (1, 1, 2.0**20, 2.0**-40, torch.nan, 3):
        with torch.no_grad():
            weight.mul_(factor)
            if factor != factor:
                weight.copy_(torch.randn(weight.shape))[0, 1] = torch.nan
        for trains in (False, True, True):
            codes, amax = cache.forward((weight.detach(),), trains)
            expected = quantize_tensor_reference(weight.detach(), amax, E4M3, columns=True)
            columns = cache.columns((weight.detach(),), amax)
            assert amax == weight.nan_to_num().abs().max()
            assert codes.scale.equal(expected.scale) and columns.scale.equal(expected.scale)
            for a, e in ((codes.rows, expected.rows), (columns.columns, expected.columns)):
                torch.testing.assert_close(a.float(), e.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("keep", ["none", "fp8"])
def test_weight_cache_codes_of_a_transposed_weight(keep, kernels, device):
    """As in transformers' Conv1D."""
    weight, cache = layer(device)[1].detach().t(), WeightCache(keep)
    codes, amax = cache.forward((weight,))
    expected = quantize_tensor_reference(weight, amax, E4M3, columns=True)
    columns = cache.columns((weight,), amax).columns
    assert codes.rows.equal(expected.rows) and columns.equal(expected.columns)


def test_weight_cache_backward_uses_the_weight_of_its_forward_or_refuses(device):
    x, weight = layer(device)
    y = product(x, weight, LinearState(weight_cache="fp8"))
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_weight_cache_is_neither_filled_nor_used_by_evaluation(device):
    x, weight = layer(device)
    gemm = LinearState(weight_cache="fp8")
    with torch.no_grad():
        product(x, weight, gemm)
        assert gemm.cache.nbytes == 0
    product(x, weight, gemm)
    with torch.no_grad():
        # an averaged weight is swapped in through `.data`, unnoticed by autograd
        weight.data.mul_(-1)
        assert product(x, weight, gemm).equal(fp8_linear(x, weight))


def test_weight_cache_writes_copies_of_a_graph_in_place(kernels, device, monkeypatch):
    # columns are padded
    weight = torch.nn.Parameter(torch.randn(40, 64, device=device))
    cache = WeightCache("fp8")
    places = cache.refresh_for_graph((weight,))
    with torch.no_grad():
        weight.mul_(300)
    with monkeypatch.context() as patched:
        patched.setattr(tensorwise.predicted, "empty_operands", None)
        assert cache.refresh_for_graph((weight,)) == places
    found, amax = cache.forward((weight,))
    expected, _ = WeightCache("fp8").forward((weight,))
    assert (cache, *(t.data_ptr() for t in (amax, *found[:3]))) == places
    assert amax == weight.abs().max() and found.scale.equal(expected.scale)
    assert found.rows.float().equal(expected.rows.float())
    assert found.columns.float().equal(expected.columns.float())


def test_weight_cache_writes_no_other_weight_into_copies_of_a_graph(device):
    """The new weight may have another shape."""
    cache = WeightCache("fp8")
    for rows in (32, 48):
        weight = torch.nn.Parameter(torch.randn(rows, 64, device=device))
        cache.of((weight,)).refresh_for_graph((weight,))
        assert cache.nbytes == 2 * weight.numel() + 8
