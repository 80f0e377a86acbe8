"""Routers choose the same experts where a region is recomputed from rounded inputs."""

import functools

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from coat_ds.checkpointing import compressed_checkpoints
from coat_kernels.autograd.checkpointing import compress
from coat_kernels.autograd.router_choices import Choices
from tests.kernels.mixture import CHOOSE, TOKENS, WIDTH, Mixture

reentrant = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])


def _gradients(net, leaf, y, upstream):
    net.zero_grad()
    leaf.grad = None
    y.backward(upstream)
    return [leaf.grad, *(p.grad.clone() for p in net.parameters())]


@reentrant
@pytest.mark.parametrize("choose", CHOOSE)
def test_router_choices_gives_gradients_of_rounded_inputs_with_the_first_choices(device, reentrant, choose):
    """Equal to the bit. Rounding alone would route some tokens to other experts."""
    net = Mixture(device, CHOOSE[choose])
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(2)).to(device)
    upstream = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(3)).to(device)
    leaf = x.clone().requires_grad_()
    h = leaf * 1
    with compressed_checkpoints():
        y = checkpoint(net, h, use_reentrant=reentrant)
    assert torch.equal(y, net(x))
    first = net.taken[0]
    rounded = compress(h).unpack().detach().requires_grad_()
    found = _gradients(net, leaf, y, upstream)
    assert torch.equal(net.taken[-1], first)
    net(rounded)
    assert not torch.equal(net.taken[-1], first)
    expected = _gradients(net, rounded, net(rounded, first), upstream)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_router_choices_after_indices_changed_in_place(device):
    """Backward adds its gradient at the positions that the forward pass has read."""
    x, read = torch.randn(TOKENS, WIDTH, device=device, requires_grad=True), []

    def next_to_the_largest(x):
        chosen = x.topk(2).indices, x.argmax(-1, keepdim=True)
        indices = torch.cat([indices.add_(1).remainder_(WIDTH) for indices in chosen], -1)
        read.append(indices)
        return x.gather(-1, indices)

    with compressed_checkpoints():
        checkpoint(next_to_the_largest, x * 1, use_reentrant=False).sum().backward()
    assert torch.equal(*read)
    expected = torch.zeros_like(x).scatter_add_(-1, read[0], torch.ones_like(read[0], dtype=x.dtype))
    assert torch.equal(x.grad, expected)


@reentrant
def test_router_choices_of_regions_that_do_not_choose_by_these(device, reentrant):
    """A compiled part computes the same in both passes, and `out` gets the same values as without the
    context."""
    x = torch.randn(TOKENS, WIDTH, device=device, requires_grad=True)
    compiled = torch.compile(
        lambda x: x * x.sigmoid().topk(2).values.sum(-1, keepdim=True), backend="aot_eager"
    )

    def region(x):
        out = torch.empty(0, device=device), torch.empty(0, device=device, dtype=torch.int64)
        torch.topk(x.detach(), 2, out=out)
        assert torch.equal(out[1], x.detach().topk(2).indices) or seen
        seen.append(out)
        return compiled(x) + out[0].sum()

    seen = []
    with compressed_checkpoints():
        y = checkpoint(region, x * 1, use_reentrant=reentrant)
    y.sum().backward()
    assert len(seen) == 2 and x.grad.isfinite().all()


def test_router_choices_under_selective_checkpointing(device):
    def policy(context, op, *args, **kwargs):
        saved = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    net = Mixture(device, CHOOSE["topk"])
    leaf = torch.randn(TOKENS, WIDTH, device=device, requires_grad=True)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    with compressed_checkpoints():
        y = checkpoint(net, leaf * 1, use_reentrant=False, context_fn=contexts)
    y.sum().backward()
    assert torch.equal(net.taken[-1], net.taken[0])


@reentrant
def test_router_choices_in_two_backward_passes_with_an_error_between(device, reentrant):
    """A failed forward leaves no recorded choices for the next forward."""
    net = Mixture(device, CHOOSE["topk"])
    leaf = torch.randn(TOKENS, WIDTH, device=device, requires_grad=True)

    def failing(x):
        net(x)
        raise MemoryError

    with compressed_checkpoints():
        with pytest.raises(MemoryError):
            checkpoint(failing, leaf * 1, use_reentrant=reentrant)
        y = checkpoint(net, leaf * 1, use_reentrant=reentrant)
    y.sum().backward(retain_graph=True)
    first = [p.grad.clone() for p in net.parameters()]
    y.sum().backward()
    for parameter, gradient in zip(net.parameters(), first, strict=True):
        assert torch.equal(parameter.grad, 2 * gradient)
    assert all(torch.equal(taken, net.taken[-1]) for taken in net.taken[1:])


def test_router_choices_leaves_values_and_gradients_to_topk(device):
    x = torch.randn(5, 7, device=device, requires_grad=True)
    for arguments in ({"k": 3}, {"k": 2, "dim": 0}, {"k": 2, "largest": False}):
        plain = torch.topk(x, **arguments)
        with Choices():
            found = torch.topk(x, **arguments)
        assert torch.equal(found.values, plain.values) and torch.equal(found.indices, plain.indices)
        upstream = torch.randn_like(plain.values)
        one, other = (torch.autograd.grad(y.values, x, upstream)[0] for y in (plain, found))
        assert torch.equal(one, other)
