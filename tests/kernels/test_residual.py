"""The deferred residual addition: what the norm behind it makes is what the addition would have made."""

import weakref

import pytest
import torch

from coat_kernels import deferred, norm, tensorwise
from coat_kernels.deferred import Deferred, fp8_operands
from coat_kernels.fp8 import E4M3
from coat_kernels.groups import Grouped, dequantize_groups_reference
from coat_kernels.norm import deferred_add, is_deferred_sum, may_defer_add, residual, residual_add_reference
from coat_kernels.origin import origin_of
from coat_kernels.tensorwise import PredictedScale
from tests.kernels.inputs import SHAPES, hard, wide
from tests.kernels.test_norm import EPS, KERNEL_RMS, LAYER_NORM, apply, close, same
from tests.util import rel_rms


@pytest.fixture
def kernels(takes_kernels, monkeypatch):
    """With the references, and with the kernels, in which nobody else may make a sum."""
    if takes_kernels:
        for module in (norm.op, deferred):
            monkeypatch.setattr(module, "uses_kernels", lambda x: True)
        monkeypatch.setattr(norm.kernels, "FORWARD_TILE", 1024)
        monkeypatch.setattr(tensorwise.scale, "CORRECTING_PROGRAMS", 3)
        monkeypatch.setattr(residual, "residual_add_reference", None)
    return takes_kernels


def run(tensors, defer, layer_norm, predicted=1.0, **options):
    """Addition, norm, and everything that comes of them."""
    *addends, weight, norm_bias = (None if t is None else t.clone().requires_grad_() for t in tensors)
    x = (deferred_add if defer else residual_add_reference)(*addends)
    y_scale = PredictedScale(E4M3)
    y_scale.on(x.device).fill_(predicted)
    y, handed_on = apply(x, weight, norm_bias, layer_norm, residual=True, y_scale=y_scale, **options)
    assert not is_deferred_sum(x) and type(handed_on) is torch.Tensor
    assert handed_on.data_ptr() == x.data_ptr()
    (rows, *_), largest = fp8_operands(y, E4M3)
    codes, exponent, rstd = origin_of(y).tensors
    kept = dequantize_groups_reference(Grouped(codes, exponent), options["group_size"])
    inputs = [t for t in (*addends, weight, norm_bias) if t is not None]
    torch.manual_seed(1)
    grads = torch.randn(2, *x.shape, device=x.device).to(x)
    found = torch.autograd.grad((y, handed_on), inputs, list(grads))
    return x.detach() * 1, [y.detach() * 1, rows.float(), largest, y_scale.on(x.device), kept, rstd, *found]


def check(tensors, layer_norm, **options):
    made, expected = run(tensors, False, layer_norm, **options)
    # 1 is wrong, and what the first run leaves is right
    for predicted in (1.0, expected[3].item()):
        total, found = run(tensors, True, layer_norm, predicted, **options)
        same(total, made)
        for a, e in zip(found, expected, strict=True):
            close(a, e)


def inputs(shape, biased, layer_norm, device, dtype=torch.bfloat16):
    branch_bias = torch.randn(shape[-1], device=device).to(dtype) if biased else None
    weight, norm_bias = torch.randn(2, shape[-1], device=device)
    addends = [wide(*shape).to(device, dtype) for _ in range(2)]
    return *addends, branch_bias, weight, norm_bias if layer_norm else None


@pytest.mark.pairwise
@LAYER_NORM
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_the_plain_addition(shape, layer_norm, device, kernels):
    tensors = inputs(shape, layer_norm, layer_norm, device)
    check(tensors, layer_norm, group_size=16, saved_format="sqrt8", zero_centered=True)


@LAYER_NORM
def test_is_the_plain_addition_in_fp32_and_of_more_dimensions(layer_norm, device, kernels):
    tensors = inputs((3, 7, 48), True, layer_norm, device, torch.float32)
    # as attention leaves it: not contiguous
    tensors = (tensors[0].transpose(0, 1).contiguous().transpose(0, 1), *tensors[1:])
    check(tensors, layer_norm, group_size=64, saved_format="e4m3")


@pytest.mark.parametrize("case", hard(64))
def test_is_the_plain_addition_of_hard_inputs(case, device, kernels):
    """In a row of each, in one of both, and in all rows through the bias."""
    for residual_row, branch_row, biased in ((1, 2, False), (1, 1, False), (1, 1, True)):
        tensors = inputs((4, 64), biased, False, device)
        for t, row in zip(tensors, (residual_row, branch_row), strict=False):
            t[row] = hard(64)[case].to(t)
        if biased:
            tensors[2].copy_(hard(64)[case])
        check(tensors, False, group_size=16, saved_format="sqrt8")


def test_gradients_are_those_of_autograd(device):
    """To the bit: nothing is computed but the sum over rows, by the operation that autograd takes."""
    for shape in ((2, 3, 8), (5, 8)):
        tensors = [t.bfloat16().to(device) for t in (*torch.randn(2, *shape), torch.randn(8))]
        grad = torch.randn(shape, device=device).bfloat16()
        for frozen in range(4):
            found = []
            for add in (deferred_add, residual_add_reference):
                leaves = [t.clone().requires_grad_(i != frozen) for i, t in enumerate(tensors)]
                trained = [t for t in leaves if t.requires_grad]
                found.append(torch.autograd.grad(add(*leaves), trained, grad))
            for a, e in zip(*found, strict=True):
                same(a, e)


def test_lets_go_of_what_is_added(device, kernels):
    residual_, branch, _, weight, _ = inputs((6, 48), False, False, device)
    x = deferred_add(residual_.requires_grad_(), branch)
    held = [weakref.ref(t) for t in x.source.inputs]
    y = norm.rms_norm(x, weight, EPS, residual=True, y_scale=PredictedScale(E4M3))
    assert y[0].is_pending and all(ref() is None for ref in held)


def test_whoever_reads_first_makes_it(device, monkeypatch):
    """Reading before the norm and after it, in norms that take a tensor that exists, in any order."""
    launch = norm.op.launch_forward

    def launch_with_tensors(x, *args, **options):
        assert type(x) is torch.Tensor
        return launch(x, *args, **options)

    monkeypatch.setattr(norm.op, "launch_forward", launch_with_tensors)
    for module in (norm.op, deferred):
        monkeypatch.setattr(module, "uses_kernels", lambda x: True)
    residual_, branch, _, weight, _ = inputs((6, 48), False, False, device)
    residual_.requires_grad_()
    expected = residual_add_reference(residual_, branch)
    plain = norm.rms_norm(expected, weight, EPS)
    scale = PredictedScale(E4M3)
    for read_before, options in ((False, {"y_scale": scale}), (True, {"y_scale": scale}), (False, {})):
        x = deferred_add(residual_, branch)
        if read_before:
            same(x * 1, expected)
        y = norm.rms_norm(x, weight, EPS, **options)
        assert rel_rms(y, plain) < KERNEL_RMS
        # once more: what is made stays
        assert rel_rms(norm.rms_norm(x, weight, EPS, **options), plain) < KERNEL_RMS
        same(x * 1, expected)
    x = deferred_add(residual_, branch)
    with torch.no_grad():
        y, handed_on = norm.rms_norm(x, weight, EPS, residual=True, y_scale=scale)
    assert type(y) is torch.Tensor and handed_on is x and not x.is_pending
    assert rel_rms(y, plain) < KERNEL_RMS


@pytest.mark.parametrize("read_before", [False, True])
def test_a_sum_that_changes_is_refused(read_before, device, kernels, monkeypatch):
    """The norm's output, as long as it does not exist either, is made from the sum."""
    monkeypatch.setattr(residual, "residual_add_reference", residual_add_reference)
    residual_, branch, _, weight, _ = inputs((6, 48), False, False, device)
    x = deferred_add(residual_.requires_grad_(), branch)
    if read_before:
        x.sum()
    y, handed_on = norm.rms_norm(x, weight, EPS, residual=True, y_scale=PredictedScale(E4M3))
    handed_on += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum()


def test_views_of_a_sum_are_made_together(device, kernels):
    """Hooks between the addition and the norm hand on another tensor object."""
    residual_, branch, _, weight, _ = inputs((6, 48), False, False, device)
    x = deferred_add(residual_.requires_grad_(), branch)
    alias = x.view_as(x)
    assert is_deferred_sum(alias)
    norm.rms_norm(alias, weight, EPS, y_scale=PredictedScale(E4M3))
    assert not x.is_pending
    same(x * 1, residual_add_reference(residual_, branch))


def test_what_may_be_deferred(device, monkeypatch):
    monkeypatch.setattr(residual, "WAITS_FROM", 32)
    x = torch.randn(4, 8, device=device).bfloat16()
    trained, bias = x.clone().requires_grad_(), torch.nn.Parameter(x[0].clone())
    assert may_defer_add(trained, x) and may_defer_add(x, trained, x[0]) and may_defer_add(x, x, bias)
    assert not may_defer_add(x, x, x[0])
    assert not may_defer_add(trained.float(), x) and not may_defer_add(trained, x, x[0].float())
    assert not may_defer_add(trained, x[0])
    assert not may_defer_add(trained, x, x) and not may_defer_add(trained, x, bias[:1])
    assert not may_defer_add(deferred_add(trained, x), x)
    with torch.no_grad():
        assert not may_defer_add(trained, x)
    monkeypatch.setattr(residual, "uses_kernels", lambda x: True)
    assert may_defer_add(trained, x) and not may_defer_add(trained[1:], x[1:])
    monkeypatch.setattr(residual, "uses_kernels", lambda x: False)
    assert may_defer_add(trained[1:], x[1:])

    def add(a, b):
        return deferred_add(a, b) if may_defer_add(a, b) else a + b

    assert isinstance(add(trained, x), Deferred)
    assert type(torch.compile(add, backend="aot_eager", fullgraph=True)(trained, x)) is torch.Tensor
