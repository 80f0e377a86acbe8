"""Linear layers that read the same tensor save it once. Example: q, k and v without a norm before them."""

import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from coat_kernels.autograd.origin import maxima_of
from coat_kernels.linear import fp8_linear, op
from coat_kernels.linear.reference import scaled_matmul_reference
from tests.util import rel_rms

CODES = torch.float8_e4m3fn
# tokens, channels and outputs
SIZES = 7, 16, 64, 32


@pytest.fixture
def inputs(device):
    """The tensor that the input is computed from, three weights, and the gradient of the three outputs,
    joined."""
    torch.manual_seed(0)
    *tokens, k, n = SIZES
    made = torch.randn(*tokens, k), *torch.randn(3, n, k)
    leaf, *weights = (t.to(device, torch.bfloat16).requires_grad_() for t in made)
    return leaf, weights, torch.randn(*tokens, 3 * n, device=device).bfloat16()


def outputs(x, weights, copies=False):
    # the last layer gets a view, as with tensor parallelism
    read = [x.clone() for _ in weights] if copies else [x, x, x.view_as(x)]
    return torch.cat([fp8_linear(t, w) for t, w in zip(read, weights, strict=True)], -1)


def gradients(inputs, forward):
    leaf, weights, upstream = inputs
    for p in (leaf, *weights):
        p.grad = None
    y = forward(leaf * 1)
    y.backward(upstream)
    return [y.detach(), leaf.grad, *(w.grad for w in weights)]


def check(found, wanted):
    """The same bits, except in the input's gradient: its three terms are added in another order."""
    for i, (a, e) in enumerate(zip(found, wanted, strict=True)):
        assert rel_rms(a, e) < 2**-7 if i == 1 else torch.equal(a, e)


def codes_alive() -> int:
    """Elements of FP8 tensors, each counted once."""
    held = {}
    for t in gc.get_objects():
        if type(t) is torch.Tensor and t.dtype is CODES:
            held[t.data_ptr()] = t.numel()
    return sum(held.values())


def test_shared_input_has_the_codes_outputs_and_gradients_of_linears_alone(inputs):
    _, weights, _ = inputs
    kept = []
    for copies in (True, False):
        before = codes_alive()
        y = outputs(inputs[0] * 1, weights, copies)
        kept.append(codes_alive() - before)
        del y
        assert codes_alive() == before
    assert kept[0] == 3 * kept[1] == 3 * 112 * 64
    alone = gradients(inputs, lambda x: outputs(x, weights, copies=True))
    check(gradients(inputs, lambda x: outputs(x, weights)), alone)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
def test_shared_input_of_checkpoints_is_recomputed_and_not_kept(inputs, reentrant):
    """A note on a region's input, which checkpointing keeps, would keep the codes until backward."""
    _, weights, _ = inputs
    before = codes_alive()
    kept = []

    def forward(x):
        y = checkpoint(outputs, x, weights, use_reentrant=reentrant)
        kept.append(codes_alive() - before)
        return y

    found = gradients(inputs, forward)
    assert kept == [0]
    check(found, gradients(inputs, lambda x: outputs(x, weights)))


def by_reference(a, b, scale_a, scale_b, bias, dtype, fast):
    return scaled_matmul_reference(a, b, scale_a, scale_b, dtype)


@pytest.mark.parametrize("what", ["change", "leaf"])
def test_shared_input_of_other_linears_is_saved_alone(inputs, what):
    """A tensor changed between the reads, and a leaf, into which CUDA graphs write."""
    leaf, (weight, other, _), _ = inputs
    x = leaf if what == "leaf" else leaf * 1
    first = fp8_linear(x, weight)
    if what == "change":
        with torch.no_grad():
            x.mul_(-3)
    assert maxima_of(x) is None
    y, alone = fp8_linear(x, other), fp8_linear(x.clone(), other)
    for a, e in zip(*(torch.autograd.grad(t, other, torch.ones_like(t)) for t in (y, alone)), strict=True):
        assert torch.equal(a, e)
    assert first.requires_grad


def test_shared_input_is_not_a_view_of_other_values(device):
    """Views of the same shape: a transposed matrix, and a part that ends elsewhere."""
    whole = torch.randn(33, 32, device=device).bfloat16().requires_grad_() * 1
    weight, other = (torch.randn(16, 32, device=device).bfloat16().requires_grad_() for _ in range(2))
    x, later = whole[:32], whole[1:]
    for one, view in ((x.clone(), lambda t: t.t()), (whole, lambda t: t[:32]), (x, lambda _: later)):
        first = fp8_linear(one, weight)
        y, alone = fp8_linear(view(one), other), fp8_linear(view(one).clone(), other)
        found, wanted = (torch.autograd.grad(t, other, torch.ones_like(t))[0] for t in (y, alone))
        assert torch.equal(found, wanted) and first.requires_grad


def test_shared_input_without_gradients_has_no_columns(inputs, monkeypatch):
    leaf, weights, _ = inputs
    asked = []

    def counted(*args, columns, **kwargs):
        asked.append(columns)
        return operands(*args, columns=columns, **kwargs)

    operands = op.fp8_operands
    monkeypatch.setattr(op, "fp8_operands", counted)
    with torch.no_grad():
        outputs(leaf * 1, weights)
    assert asked == [False] * 3
    outputs(leaf * 1, weights)
    assert asked[3:] == [True, False, False]
