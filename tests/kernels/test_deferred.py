"""Deferred tensors: to everyone else they are the tensors that their producers would have written."""

import copy
import pickle
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from coat_kernels import deferred, linear
from coat_kernels.deferred import Deferred, fp8_operands
from coat_kernels.fp8 import E4M3, E5M2
from coat_kernels.linear import LinearFormats, fp8_linear
from coat_kernels.origin import maxima_of, origin_of, with_maxima
from coat_kernels.tensorwise import PredictedScale
from tests.kernels.producers import Seen, layer, same
from tests.util import rel_rms


@pytest.mark.pairwise
@pytest.mark.parametrize("weights", [(True, False), (False, True), (False, False)], ids=str)
def test_frozen_weights(producer, weights, kernels):
    for a, e in zip(layer(producer, True, weights), layer(producer, False, weights), strict=True):
        same(a, e)


def test_other_formats_take_the_plain_way(producer):
    # of outputs and gradients; no GPU multiplies E5M2 by E5M2
    for scales in producer.scales:
        producer.scales[scales] = PredictedScale(E4M3 if scales == "grad_scale" else E5M2)
    formats = LinearFormats(E4M3, E5M2)
    for a, e in zip(
        layer(producer, True, formats=formats), layer(producer, False, formats=formats), strict=True
    ):
        same(a, e)


def in_place(y):
    y.mul_(2)
    return y


def into_a_view(y):
    y[0].fill_(3)
    return y


USES = {
    "add": lambda y: y + 1,
    "twice": lambda y: (y * y).sum(),
    "clone": lambda y: y.clone(),
    "view": lambda y: y.flatten(0, 1)[1:3] * 2,
    "in place": in_place,
    "into a view": into_a_view,
    "out": lambda y: torch.add(y.detach(), 1, out=torch.zeros_like(y)),
    "float": lambda y: y.float(),
    "cpu": lambda y: y.to("cpu", non_blocking=True),
    "numpy": lambda y: torch.from_numpy(y.detach().float().cpu().numpy()),
    "dlpack": lambda y: torch.from_dlpack(y.detach()) * 1,
    "data": lambda y: y.data * 1,
    "list": lambda y: torch.tensor(y.tolist()),
    "deepcopy": lambda y: copy.deepcopy(y.detach()) * 1,
    "pickle": lambda y: pickle.loads(pickle.dumps(y.detach())),
    "stack": lambda y: torch.stack([y, y]),
    "maximum": lambda y: y.amax(),
}


@pytest.mark.parametrize("use", USES)
def test_is_the_plain_tensor_to_everyone_else(output, use):
    x, z = output.input(), output.input()
    y, plain = output(x), output(z, False) * 1
    assert isinstance(y, Deferred) and y.is_pending and y.grad_fn is not None
    assert (y.dtype, y.shape, y.device, y.stride()) == (
        plain.dtype,
        plain.shape,
        plain.device,
        plain.stride(),
    )
    results = USES[use](y), USES[use](plain)
    assert type(results[0]) is torch.Tensor or results[0] is y
    same(*results)
    same(y.detach() * 1, plain.detach() * 1)
    if results[1].requires_grad:
        for result in results:
            result.sum().backward()
        same(x.grad, z.grad)


def test_copies_have_memory_of_their_own(output):
    y = output(output.input()).detach()
    copy.deepcopy(y).zero_()
    same(y * 1, output(output.input(), False))


def of_another_shape(y):
    # which would be broadcast
    y.data = y.detach()[:1] * 1


REFUSED = {
    "data": (of_another_shape, RuntimeError, "data of a deferred tensor: expected"),
    "in-place view": (lambda y: y.detach().unsqueeze_(0), RuntimeError, "Clone it first"),
    "numpy": (lambda y: y.numpy(), RuntimeError, "requires grad"),
    "dlpack": (torch.from_dlpack, BufferError, "require gradient"),
}


@pytest.mark.parametrize("use", REFUSED)
def test_what_is_refused(output, use):
    """As plain tensors refuse it, or, without memory, could not do it."""
    function, error, said = REFUSED[use]
    with pytest.raises(error, match=said):
        function(output(output.input()))


def test_prints_as_the_plain_tensor(output):
    y = output(output.input())
    assert repr(y) == repr(output(output.input(), False).detach())


def test_views_stay_deferred(output):
    y = output(output.input())
    for other in (y.view(-1, y.shape[-1]), y.detach(), y.contiguous(), y.flatten(), y.view_as(y)):
        assert isinstance(other, Deferred) and other.is_pending
    y.add_(1)
    same(y.detach() * 1, y.flatten().view(y.shape).detach() * 1)


def test_an_output_in_two_products(output):
    """Its operands are made once, by rows and by columns."""
    weight = torch.randn(32, output(output.input()).shape[-1]).to(output.x)
    results = []
    for deferred_ in (True, False):
        y = output(output.input(), deferred_)
        results.append([fp8_linear(y, w.requires_grad_()) for w in (weight, 2 * weight)])
    for a, e in zip(*results, strict=True):
        same(a, e)


def test_notes_end_where_memory_was_handed_out(output):
    """Which may be written through."""
    y = with_maxima(output(output.input()), torch.ones(1))
    assert y.amax() is not None and maxima_of(y) is not None
    y.untyped_storage()
    assert maxima_of(y) is None


def test_an_output_that_is_multiplied_in_rows_of_another_width(output):
    results = []
    for deferred_ in (True, False):
        y = output(output.input(), deferred_)
        weight = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).to(output.x)
        results.append(fp8_linear(y.view(-1, 16), weight))
    same(*results)


@pytest.mark.parametrize("reads", [False, True])
def test_hooks_get_the_gradient(producer, reads):
    """Also after the product has taken its operands."""
    seen, plain = Seen(), Seen()

    def between(y):
        seen.keep(y)
        if reads:
            y.register_hook(lambda grad: None if grad.isfinite().all() else grad)
            y.register_hook(lambda grad: grad * 1)
        return y

    found, expected = layer(producer, True, between=between), layer(producer, False, between=plain.keep)
    assert isinstance(seen.grad, Deferred) == ("grad_scale" in producer.scales)
    same(seen.grad * 1, plain.grad)
    for a, e in zip(found, expected, strict=True):
        same(a, e)


def test_hooks_may_keep_a_view_of_the_gradient(producer):
    """Which is another tensor, made of the same."""
    views = []

    def between(y):
        y.register_hook(lambda grad: views.append(grad.detach()))
        return y

    for deferred_ in (True, False):
        layer(producer, deferred_, between=between)
    found, expected = views
    same(found * 1, expected)


def test_gradients_that_are_asked_for(producer):
    """Autograd adds gradients up, keeps those it is asked to, and hands them out."""
    kept = {}
    for name, deferred_ in (("deferred", True), ("plain", False)):
        torch.manual_seed(1)
        x = producer.input()
        weight = torch.randn(x.shape[-1], x.shape[-1]).mul(0.2).to(x).requires_grad_()
        once = fp8_linear(x, weight)
        twice = fp8_linear(x, weight)
        once.retain_grad()
        y = producer(once, deferred_).sum() + (producer(twice, deferred_) * producer(twice, deferred_)).sum()
        grads = torch.autograd.grad(y, [x, weight, twice], retain_graph=True)
        y.backward()
        kept[name] = (*grads, once.grad, x.grad, weight.grad)
    for a, e in zip(kept["deferred"], kept["plain"], strict=True):
        same(a * 1, e)


def test_memory_is_let_go(producer, monkeypatch):
    """The output's source dies with the output, the gradient's with the product that takes it."""
    sources = []
    init = deferred.Source.__init__

    def watch(self, inputs, *rest, **options):
        sources.append(weakref.ref(inputs[0]))
        init(self, inputs, *rest, **options)

    taken = []
    product = linear.op.scaled_matmul

    def matmul(*args):
        taken.append([ref() is None for ref in sources])
        return product(*args)

    deferred.holders_in_backward(producer.x.device)
    monkeypatch.setattr(deferred.Source, "__init__", watch)
    monkeypatch.setattr(linear.op, "scaled_matmul", matmul)
    layer(producer, True)
    assert len(sources) == len(producer.scales) and all(ref() is None for ref in sources)
    # the last two products are those of the first layer's backward
    if "grad_scale" in producer.scales:
        assert all(gone[-1] for gone in taken[-2:])


def test_what_has_been_written_holds_no_input(output):
    y = output(output.input()).detach()
    read = weakref.ref(y.source.inputs[0])
    assert read() is not None
    assert y.isfinite().all()
    assert read() is None


def test_an_input_that_changes_is_refused(output):
    x = output.input()
    y1 = x * 1
    y = output(y1)
    with torch.no_grad():
        y1.mul_(2)
    for use in (lambda: y + 1, lambda: fp8_operands(y, E4M3)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            use()


def test_a_gradient_that_was_taken_says_so(output):
    def forget(y):
        # autograd hands this hook what it holds itself: it does not count as a holder
        y.register_hook(lambda grad: seen.append(weakref.ref(grad)))
        return y

    seen = []
    layer(output, True, between=forget)
    assert seen[0]() is None
    source = output(output.input()).source
    source.release()
    with pytest.raises(RuntimeError, match="retain_grad"):
        source.value()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(producer, reentrant):
    results = []
    for deferred_ in (True, False):
        torch.manual_seed(1)
        x = producer.input()
        n = producer(x.detach(), False).shape[-1]
        weights = [torch.randn(s).mul(0.2).to(x).requires_grad_() for s in ((x.shape[-1],) * 2, (32, n))]

        def block(x, w1, w2, deferred_=deferred_):
            y = producer(fp8_linear(x, w1), deferred_)
            return fp8_linear(y, w2, origin=origin_of(y))

        y = checkpoint(block, x, *weights, use_reentrant=reentrant)
        y.sum().backward()
        results.append([y.detach(), x.grad, *(w.grad for w in weights)])
    for a, e in zip(*results, strict=True):
        same(a, e)


def test_compiled_models_defer_nothing(output):
    x = output.input()
    y = torch.compile(output, backend="aot_eager", fullgraph=True)(x)
    assert type(y) is torch.Tensor
    # another kernel, which may fuse other products and sums: BF16's last bit on a tie
    assert rel_rms(y, output(x, False)) < 1e-3


def test_evaluation_defers_nothing(output):
    with torch.no_grad():
        y = output(output.input())
    assert type(y) is torch.Tensor
