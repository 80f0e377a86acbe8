"""Deferred tensors: to everyone else they are the tensors that their producers would have written."""

import copy
import functools
import pickle
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from coat_kernels import activation as act
from coat_kernels import deferred, linear, norm, rope, tensorwise
from coat_kernels.deferred import Deferred, fp8_operands
from coat_kernels.fp8 import E4M3, E5M2
from coat_kernels.linear import LinearFormats, fp8_linear
from coat_kernels.norm import residual
from coat_kernels.origin import origin_of, with_maxima
from coat_kernels.tensorwise import PredictedScale
from tests.kernels.inputs import check_sums, hard
from tests.util import rel_rms


@pytest.fixture
def kernels(takes_kernels, monkeypatch):
    """With the references, and with the kernels, of which programs take several tiles that end anywhere."""
    if takes_kernels:
        for module in (
            act.op,
            deferred,
            norm.op,
            rope.op,
            tensorwise.scale,
            tensorwise.quantize,
            tensorwise.transpose,
        ):
            monkeypatch.setattr(module, "uses_kernels", lambda x: True)
        for tile in ("FORWARD", "BACKWARD", "OPERANDS"):
            monkeypatch.setattr(act.kernels, f"{tile}_ROWS", 16)
            monkeypatch.setattr(act.kernels, f"{tile}_COLUMNS", 32)
        monkeypatch.setattr(act.kernels, "SUMMED_ROWS", 32)
        monkeypatch.setattr(norm.kernels, "FORWARD_TILE", 1024)
        monkeypatch.setattr(rope.kernels, "OPERANDS_TOKENS", 16)
        monkeypatch.setattr(rope.kernels, "OPERANDS_HEADS", 4)
        monkeypatch.setattr(tensorwise.scale, "CORRECTING_PROGRAMS", 3)


class Activation:
    """Takes the place of a module with an activation: what it defers, and the same without."""

    def __init__(self, device, shape=(3, 7), f=48, gated=True):
        self.gated = gated
        self.x = torch.randn(*shape, (1 + gated) * f, device=device, dtype=torch.bfloat16)
        self.scales = {"y_scale": PredictedScale(E4M3), "grad_scale": PredictedScale(E5M2)}

    def input(self):
        return self.x.clone().requires_grad_()

    def __call__(self, x, deferred=True):
        return act.activation(x, "silu", gated=self.gated, **(self.scales if deferred else {}))


class Norm:
    """The same for a norm, which defers its output alone."""

    def __init__(self, device, shape=(3, 7), h=48):
        self.x = torch.randn(*shape, h, device=device, dtype=torch.bfloat16)
        parameters = torch.randn(2, h, device=device)
        self.weight, self.bias = parameters[0], parameters[1]
        self.scales = {"y_scale": PredictedScale(E4M3)}

    def input(self):
        return self.x.clone().requires_grad_()

    def __call__(self, x, deferred=True):
        return norm.layer_norm(x, self.weight, self.bias, 1e-5, **(self.scales if deferred else {}))


class Rotation:
    """The same for rotary positions, which defer their input's gradient alone."""

    # tokens, batch, groups, queries in a group, channels, rotated channels
    def __init__(self, device, shape=(7, 3, 2, 2, 16, 16)):
        s, b, groups, m, d, r = shape
        self.x = torch.randn(s, b, groups * (m + 2) * d, device=device, dtype=torch.bfloat16)
        angles = torch.rand(s, r // 2, device=device).repeat(1, 2)
        self.rest = angles.cos(), angles.sin(), groups, d
        self.scales = {"grad_scale": PredictedScale(E5M2)}

    def input(self):
        return self.x.clone().requires_grad_()

    def __call__(self, x, deferred=True):
        parts = rope.rotate_qkv(x, *self.rest, **(self.scales if deferred else {}))
        # gradients as attention leaves them: not contiguous
        return torch.cat([part.transpose(0, 1).flatten(2) for part in parts], -1).transpose(0, 1)


class Addition:
    """The same for a residual addition, of which no product predicts a scale."""

    def __init__(self, device, shape=(3, 7), h=48):
        self.x, self.branch = torch.randn(2, *shape, h, device=device, dtype=torch.bfloat16)
        self.scales = {"y_scale": None}

    def input(self):
        return self.x.clone().requires_grad_()

    def __call__(self, x, deferred=True):
        defers = deferred and residual.may_defer_add(x, self.branch)
        return (residual.deferred_add if defers else residual.residual_add_reference)(x, self.branch)


PRODUCERS = {"activation": Activation, "norm": Norm, "rotation": Rotation}


@pytest.fixture(params=PRODUCERS)
def producer(request, device):
    return PRODUCERS[request.param](device)


@pytest.fixture(params=["activation", "norm", "addition"])
def output(request, device, monkeypatch):
    """A producer that defers its output."""
    monkeypatch.setattr(residual, "WAITS_FROM", 0)
    return (PRODUCERS | {"addition": Addition})[request.param](device)


def same(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def layer(producer, deferred, weights=(True, True), between=lambda t: t, formats=None):
    """Linear, producer, linear, as in a layer: the output and all gradients."""
    torch.manual_seed(1)
    x = producer.input()
    n = producer(x.detach(), False).shape[-1]
    device, size = x.device, x.shape[-1]
    w1, w2 = (
        torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(0.2).requires_grad_(trains)
        for shape, trains in zip(((size, size), (32, n)), weights, strict=True)
    )
    y1 = between(fp8_linear(x, w1, formats=formats))
    y = producer(y1, deferred)
    assert isinstance(y, Deferred) == (deferred and "y_scale" in producer.scales)
    y2 = fp8_linear(y, w2, origin=origin_of(y), formats=formats)
    inputs = [t for t in (x, w1, w2) if t.requires_grad]
    grad = torch.randn(y2.shape, device=device).to(y2)
    return y2, *torch.autograd.grad(y2, inputs, grad)


def test_results_never_depend_on_the_prediction(producer, kernels):
    expected = layer(producer, False)
    # a right one is what the run before has left; in the interpreter each costs 15 s, and the rest of
    # PREDICTIONS is left to a test of plain tensors
    for predicted in PREDICTIONS if producer.x.is_cuda else (2.0**-40, "right", torch.nan):
        if predicted != "right":
            for scale in producer.scales.values():
                scale.on(producer.x.device).fill_(predicted)
        for a, e in zip(layer(producer, True), expected, strict=True):
            same(a, e)


PREDICTIONS = (2.0**-40, "right", 2.0**40, torch.nan, 0.0, torch.inf)
LAYOUTS = pytest.mark.parametrize("layouts", [(True, False), (False, True), (True, True)], ids=str)


@pytest.fixture
def small_tiles(monkeypatch):
    """Quantizing kernels have several tiles, which end anywhere."""
    for module in (tensorwise.scale, tensorwise.quantize):
        monkeypatch.setattr(module, "BLOCK", 64)
    for module in (tensorwise.transpose, tensorwise.quantize):
        monkeypatch.setattr(module, "COLUMNS_TILE", (32, 16))
    monkeypatch.setattr(tensorwise.quantize, "BOTH_TILE", (16, 32))


@LAYOUTS
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_of_a_plain_tensor_never_depend_on_the_prediction(
    dtype, fmt, layouts, kernels, small_tiles, device
):
    scale = PredictedScale(fmt)
    broken = torch.stack([*hard(40).values()])
    for x in (torch.randn(3, 7, 40), broken):
        x = x.to(device, dtype)
        flat = x.flatten(0, -2)
        largest = tensorwise.largest_magnitude(flat)
        expected = tensorwise.quantize_tensor_reference(flat, largest, fmt, *layouts, sums=True)
        for i, predicted in enumerate(PREDICTIONS):
            if predicted != "right":
                scale.on(device).fill_(predicted)
            out, found = fp8_operands(x, fmt, *layouts, sums=i % 3 == 0, predicted=scale)
            assert found.equal(largest)
            for a, e in zip(out[:3], expected[:3], strict=True):
                assert a is e is None or not same(a, e)
            assert scale.on(device).equal(expected.scale) or deferred.uses_kernels is not kernels
            if i % 3 == 0:
                check_sums(out.sums, flat)


@LAYOUTS
def test_a_right_prediction_leaves_the_codes_alone(layouts, small_tiles, device):
    """What the first launch has written is seen to be there behind the second one."""
    x = torch.randn(50, 40, device=device)
    scale = PredictedScale(E4M3)
    for written in (True, False):
        write = functools.partial(tensorwise.launch_quantize, x)
        attempt = deferred.Attempt(write, scale, 50, 40, device, *layouts)
        codes = next(t for t in attempt.out if t is not None).view(torch.uint8)
        kept = codes.clone()
        codes.zero_()
        attempt.finish(None)
        assert codes.any() == written
        assert written or kept.any()


def test_maxima_that_are_known_save_the_prediction(small_tiles, device, monkeypatch):
    """Few are read by the launch that quantizes, of many the largest is found first."""
    for module in (deferred, tensorwise.scale, tensorwise.quantize, tensorwise.transpose):
        monkeypatch.setattr(module, "uses_kernels", lambda x: True)
    monkeypatch.setattr(deferred, "Attempt", None)
    reduced = []
    largest_triton = tensorwise.largest_triton
    monkeypatch.setattr(
        tensorwise.scale, "largest_triton", lambda maxima: reduced.append(maxima) or largest_triton(maxima)
    )
    scale = PredictedScale(E5M2)
    x = torch.randn(50, 40, device=device)
    for few in (50, 49):
        monkeypatch.setattr(deferred, "FEW_MAXIMA", few)
        maxima = tensorwise.row_maxima(x)
        out, largest = fp8_operands(with_maxima(x, maxima), E5M2, columns=True, predicted=scale)
        assert len(reduced) == (few < len(maxima))
        assert largest.equal(maxima.amax(0, keepdim=True))
        for a, e in zip(
            out, tensorwise.quantize_tensor_reference(x, largest, E5M2, columns=True), strict=True
        ):
            assert a is e is None or not same(a, e)


@pytest.mark.parametrize("name", PRODUCERS)
def test_a_right_prediction_writes_once(name, monkeypatch):
    # the reference is counted, so on a CPU
    producer = PRODUCERS[name](torch.device("cpu"))
    layer(producer, True)
    written = []
    codes = tensorwise.predicted.to_tensor_codes_reference
    monkeypatch.setattr(
        tensorwise.predicted,
        "to_tensor_codes_reference",
        lambda x, *rest: written.append(x) or codes(x, *rest),
    )
    layer(producer, True)
    assert len(written) == len(producer.scales)
    next(iter(producer.scales.values())).on(producer.x.device).fill_(1e-3)
    layer(producer, True)
    assert len(written) == 2 * len(producer.scales) + 1


@pytest.mark.parametrize("weights", [(True, False), (False, True), (False, False)], ids=str)
def test_frozen_weights(producer, weights, kernels):
    for a, e in zip(layer(producer, True, weights), layer(producer, False, weights), strict=True):
        same(a, e)


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


class Seen:
    def __init__(self):
        self.grad = None

    def keep(self, y):
        y.register_hook(self._hook)
        return y

    def _hook(self, grad):
        self.grad = grad


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


def test_predictions_are_not_copied():
    scale = PredictedScale(E4M3)
    scale.on(torch.device("cpu")).fill_(3)
    for other in (copy.deepcopy(scale), pickle.loads(pickle.dumps(scale))):
        assert other.fmt == E4M3
        assert other.on(torch.device("cpu")) == 1
