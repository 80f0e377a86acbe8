"""FP8 copies of the inputs that activation checkpointing keeps."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from coat_ds.checkpointing import compressed_checkpoints
from coat_kernels.autograd import checkpointing as saved
from coat_kernels.autograd.checkpointing import (
    CompressedTensor,
    compress,
    compressed_bytes,
    compressing_function,
    in_region,
    is_activation,
    is_compressing,
)
from coat_kernels.autograd.origin import origin_of
from coat_kernels.linear import fp8_linear
from coat_kernels.norm import NormOptions, normalize
from tests.util import rel_rms

ROWS, WIDTH = 64, 128
both = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])


def representable(shape, generator, device="cpu") -> torch.Tensor:
    """Values that E4M3 with a power-of-two scale holds exactly, whatever their group: 4 binades, 3 bits."""
    mantissa = torch.randint(8, 16, shape, generator=generator).float()
    power = torch.randint(-2, 2, shape, generator=generator)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return torch.ldexp(mantissa, power).mul(sign).to(device)


def block(device, dtype=torch.float32):
    torch.manual_seed(1)
    nn = torch.nn
    layers = nn.Linear(WIDTH, 96), nn.GELU(), nn.Dropout(0.3), nn.Linear(96, WIDTH)
    return nn.Sequential(*layers).to(device, dtype)


def gradients(net, x, reentrant, packs=False):
    """Output and gradients of input and weights of one checkpointed pass; compressed if `packs`."""
    x = x.clone().requires_grad_()
    net.zero_grad()
    torch.manual_seed(7)
    h = x * 1
    with compressed_checkpoints() if packs else contextlib.nullcontext():
        y = checkpoint(net, h, use_reentrant=reentrant)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in net.parameters())]


@pytest.mark.parametrize("dtype", saved.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4, 32, 64), (5, 7, 131), (4099,), (1, 4096)], ids=str)
def test_packed_has_one_rounding(device, shape, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(device, dtype)
    held = CompressedTensor(x)
    y = held.unpack()
    assert (y.shape, y.dtype, y.device, y.stride()) == (x.shape, x.dtype, x.device, x.stride())
    groups = -(-x.numel() // 128)
    assert held.nbytes == groups * 129 and held.plain_nbytes == x.nbytes
    # 2^-4 of the element, or half a subnormal step, 2^-10, of a scale that is at most 2^-7 of the largest:
    # a scale of 2^(p - 8) holds magnitudes up to 448 * 2^(p - 8), that is 1.75 * 2^p
    error, bound = (y - x).abs().float(), x.abs().float() * 2**-4
    assert (error <= torch.maximum(bound, x.abs().max().float() * 2**-17)).all()
    exact = representable(shape, generator, device).to(dtype)
    assert torch.equal(CompressedTensor(exact).unpack(), exact)


def test_packed_keeps_strides(device):
    x = torch.randn(32, 16, 24, device=device)
    for view in (x.transpose(0, 1), x.permute(2, 0, 1), x[:, ::2], x[3:, :, 1:], x[:, :1].expand(32, 16, 24)):
        y = CompressedTensor(view).unpack()
        dense = view.stride() == torch.empty_like(view).stride()
        assert y.stride() == (view.stride() if dense else view.contiguous().stride())
        assert rel_rms(y, view) < 2**-4


def test_packed_shows_what_is_not_finite(device):
    x = torch.ones(4096, device=device)
    x[5], x[700], x[3000] = float("nan"), float("inf"), -float("inf")
    y = CompressedTensor(x).unpack()
    assert torch.equal(y.isfinite(), x.isfinite())
    assert (y[y.isfinite()] == 1).all()


def test_is_activation():
    leaf = torch.randn(ROWS, WIDTH, requires_grad=True)
    assert is_activation(leaf * 1) and is_activation((leaf * 1).bfloat16())
    parameter = torch.nn.Parameter(torch.randn(ROWS, WIDTH))
    small = torch.randn(8, 8, requires_grad=True) * 1
    mask = torch.zeros(ROWS, WIDTH).masked_fill(torch.rand(ROWS, WIDTH) > 0.5, -torch.inf)
    for x in (
        leaf,
        parameter,
        parameter.t(),
        small,
        mask,
        torch.arange(9999),
        (leaf * 1).double(),
        None,
        3.0,
    ):
        assert not is_activation(x)


@both
def test_compressed_checkpoints_region_may_return_a_view(reentrant):
    """A view of a tensor that was computed without gradients. Converted layers return such views."""
    x = torch.randn(ROWS, WIDTH, requires_grad=True) * 1
    before = set(saved.alive_compressed())
    with compressed_checkpoints():
        for _ in range(3):
            x = checkpoint(lambda x: x.sin().view(WIDTH, ROWS), x, use_reentrant=reentrant)
    assert len(set(saved.alive_compressed()) - before) == 3
    x.sum().backward()


def test_compressed_checkpoints_keeps_one_copy_of_a_tensor():
    x = torch.randn(ROWS, WIDTH)
    first = compress(x)
    assert compress(x) is first
    x.add_(1)
    assert compress(x) is not first
    gone = weakref.ref(compress(x))
    gc.collect()
    assert gone() is None


@both
def test_compressed_checkpoints_of_exact_inputs_gives_the_same_gradients(device, reentrant):
    """Equal to the bit, with dropout: the random numbers are replayed."""
    x = representable((ROWS, WIDTH), torch.Generator().manual_seed(3), device).div(16)
    net = block(device)
    plain, compressed = gradients(net, x, reentrant), gradients(net, x, reentrant, packs=True)
    for a, b in zip(plain, compressed, strict=True):
        assert torch.equal(a, b)
    # dropout is active, and another seed gives other random numbers
    assert (plain[0] != net.eval()(x)).any()


@both
def test_compressed_checkpoints_gradients_have_one_rounding(device, reentrant):
    """For y = x W, the gradient of W is the sum over rows of outer products of x and the gradient of y. Each
    element of x is off by 2^-4 at most. For independent rows of mean zero the squares add up: 2^-4 relative
    RMS at most. The input's gradient does not depend on x at all."""
    torch.manual_seed(5)
    net = torch.nn.Linear(WIDTH, WIDTH, bias=False, device=device)
    x, upstream = torch.randn(ROWS, WIDTH, device=device), torch.randn(ROWS, WIDTH, device=device)

    def run():
        leaf = x.clone().requires_grad_()
        net.zero_grad()
        with compressed_checkpoints():
            y = checkpoint(net, leaf * 1, use_reentrant=reentrant)
        y.backward(upstream)
        return y.detach(), leaf.grad, net.weight.grad.clone()

    y, dx, dw = run()
    assert torch.equal(y, net(x)) and torch.equal(dx, upstream @ net.weight)
    # above zero, so the codes were used
    assert 2**-8 < rel_rms(dw, upstream.T @ x) < 2**-4


@both
def test_compressed_checkpoints_keeps_the_promised_bytes(reentrant):
    """A chain of checkpointed layers keeps one byte and 1/128 byte per element of a layer's input."""
    net = block("cpu", torch.bfloat16)
    kept = []
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with compressed_checkpoints():
        h = x * 1
        for _ in range(4):
            h = checkpoint(net, h, use_reentrant=reentrant)
            kept.append(weakref.ref(h))
    gc.collect()
    # only the variable `h` holds an output of a layer
    assert [r() is None for r in kept] == [True, True, True, False]
    assert compressed_bytes() == (4 * ROWS * WIDTH * 129 // 128, 4 * ROWS * WIDTH * 2)
    h.sum().backward()
    del h
    gc.collect()
    assert compressed_bytes() == (0, 0)


@both
@pytest.mark.parametrize("rows", [ROWS, 8], ids=["packed", "small"])
def test_compressed_checkpoints_lets_an_input_go_that_is_changed_later(reentrant, rows):
    """After the change its own graph refers to the region that saved it: a reference cycle if the region kept
    it."""
    x = torch.randn(rows, WIDTH, requires_grad=True) * 1
    with compressed_checkpoints():
        y = checkpoint(torch.exp, x, use_reentrant=reentrant)
    x.add_(y)
    held = StorageWeakRef(x.untyped_storage())
    del x, y
    gc.collect()
    assert held.expired()


@both
def test_compressed_checkpoints_holds_no_leaf_that_a_region_reads(reentrant):
    """As with a parameter that ZeRO-3 releases after forward and gathers again in backward."""
    values = torch.randn(WIDTH, 8)
    x, weight = torch.randn(ROWS, WIDTH, requires_grad=True), torch.nn.Parameter(values.clone())
    with compressed_checkpoints():
        y = checkpoint(torch.matmul, x * 1, weight, use_reentrant=reentrant)
    held = StorageWeakRef(weight.untyped_storage())
    weight.data = torch.empty(0)
    assert held.expired()
    weight.data = values
    y.sum().backward()
    assert weight.grad.shape == values.shape and x.grad.isfinite().all()


def kept_of_a_region(reentrant) -> int:
    """Bytes in FP8 that one checkpointed region keeps."""
    h = torch.randn(ROWS, WIDTH, requires_grad=True) * 1
    y = checkpoint(torch.exp, h, use_reentrant=reentrant)
    found = compressed_bytes()[0]
    y.sum().backward()
    return found


@both
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_compressed_checkpoints_changes_nothing_outside(reentrant, error):
    """The context ends with any exception, and does not change what other contexts save."""

    def fail(x):
        raise error("on purpose")

    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    # while the exception is held, the frames of the region are alive
    with pytest.raises(error, match="on purpose") as held:  # noqa: SIM117
        with compressed_checkpoints(), compressed_checkpoints():
            checkpoint(fail, x * 1, use_reentrant=reentrant)
    assert not is_compressing() and not in_region.get()
    with compressed_checkpoints():
        assert is_compressing()
    del held
    assert kept_of_a_region(reentrant) == 0
    with compressed_checkpoints():
        assert kept_of_a_region(reentrant) == ROWS * WIDTH * 129 // 128
    with compressed_checkpoints():
        y = (x * 1).exp()
    y.sum().backward()
    assert torch.equal(x.grad, x.exp())


@both
@pytest.mark.parametrize("inner", [True, False], ids=["reentrant-in-it", "hooks-in-it"])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_compressed_checkpoints_of_masks_and_nested_regions(reentrant, inner, backward_inside):
    """A mask with infinities is kept unchanged, and so are all tensors in a recomputed region, also if the
    recompute runs within the context."""
    net = block("cpu").eval()
    mask = torch.zeros(ROWS, WIDTH)
    mask[:, WIDTH // 2 :] = -torch.inf
    x = representable((ROWS, WIDTH), torch.Generator().manual_seed(3)).div(16)

    def run(compress):
        leaf = x.clone().requires_grad_()

        def inside(h, mask):
            return (h + mask).softmax(-1)

        def outside(h, mask):
            return checkpoint(inside, net(h) * 1, mask, use_reentrant=inner)

        with contextlib.ExitStack() as stack:
            if compress:
                stack.enter_context(compressed_checkpoints())
            y = checkpoint(outside, leaf * 1, mask, use_reentrant=reentrant)
            if compress and not backward_inside:
                stack.close()
            y.square().sum().backward()
        return leaf.grad

    a, b = run(False), run(True)
    assert a.isfinite().all() and a.any() and torch.equal(a, b)


def test_compressed_checkpoints_leaves_inputs_of_a_function_that_always_packs():
    """For functions that always pack, such as Megatron's. The outer region recomputes what the inner region
    reads."""
    net, plain = block("cpu").eval(), torch.utils.checkpoint.CheckpointFunction
    x = representable((ROWS, WIDTH), torch.Generator().manual_seed(3)).div(16)
    found = []
    for function in (plain, compressing_function(plain, always=True)):
        leaf = x.clone().requires_grad_()
        y = function.apply(lambda h, f=function: f.apply(torch.exp, False, net(h) * 1), False, leaf * 1)
        y.square().sum().backward()
        found.append(leaf.grad)
    assert found[0].any() and found[0].equal(found[1])


@both
@pytest.mark.parametrize("changed", ["activation", "alias", "view", "leaf", "mask"])
def test_compressed_checkpoints_refuses_what_changes_before_backward(reentrant, changed):
    """The error is the same as without compression, for a compressed tensor and for an unchanged one, also if
    only an alias is left."""

    def run(compress):
        leaf = torch.randn(ROWS, WIDTH, requires_grad=True)
        mask = torch.ones(ROWS, WIDTH)
        h = leaf * 1
        inputs = {"activation": h, "alias": h.detach(), "view": h[3], "leaf": leaf, "mask": mask}
        with compressed_checkpoints() if compress else contextlib.nullcontext():
            args = (h, leaf * 1 if changed != "leaf" else leaf, mask)
            y = checkpoint(lambda h, other, mask: (h * other * mask).exp(), *args, use_reentrant=reentrant)
        del h, args
        with torch.no_grad():
            inputs[changed].mul_(2)
        y.sum().backward()

    for compressed in (False, True):
        with pytest.raises(RuntimeError, match="modified by an inplace operation.*expected version 0"):
            run(compressed)


@pytest.mark.parametrize("tokens", [ROWS, 8], ids=["packed", "small"])
def test_compressed_checkpoints_region_behind_a_norm(device, tokens):
    """Notes on the norm's output describe how to recompute it. The tensor that the region is recomputed from
    has no notes."""
    generator = torch.Generator().manual_seed(3)
    made = torch.randn(tokens, WIDTH, generator=generator), torch.randn(WIDTH, WIDTH, generator=generator)
    found = []

    def region(h, w):
        return fp8_linear(h, w, origin=origin_of(h)).sin()

    for reentrant in (True, False):
        x, w = (t.to(device, torch.bfloat16).requires_grad_() for t in made)
        weight = torch.ones(WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
        with compressed_checkpoints():
            h = normalize(x, weight, None, NormOptions(1e-6))
            y = checkpoint(region, h, w, use_reentrant=reentrant)
        y.sum().backward()
        found.append((x.grad, w.grad, weight.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
