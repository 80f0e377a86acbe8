"""Rotary positions against complex multiplication and autograd, and the kernels against the reference."""

import pytest
import torch

from coat_kernels import rope
from coat_kernels.autograd.origin import maxima_of
from coat_kernels.fp8 import E5M2
from coat_kernels.tensorwise import PredictedScale, quantize_tensor
from tests.util import rel_rms

# tokens, batch, groups, queries in a group, channels, rotated channels: all or none
SHAPES = [
    (1, 1, 1, 1, 4, 4),
    (5, 2, 3, 1, 16, 16),
    (7, 3, 2, 4, 20, 20),
    (4, 1, 5, 3, 6, 6),
    (3, 2, 2, 2, 8, 0),
]


def inputs(shape, device, dtype=torch.float32):
    s, b, groups, m, d, r = shape
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(s, b, groups * (m + 2) * d, generator=generator).to(dtype)
    angles = 10 * torch.rand(s, r // 2, generator=generator)
    angles = torch.cat((angles, angles), -1)
    return mixed.to(device), angles.cos().to(device), angles.sin().to(device), groups, d


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope_is_a_complex_product(shape, device):
    mixed, cos, sin, groups, d = inputs(shape, device)
    m, half = shape[3], shape[5] // 2
    q, k, v = rope.rotate_qkv(mixed, cos, sin, groups, d)
    heads = mixed.unflatten(2, (groups, m + 2, d))
    turn = torch.complex(cos[:, :half], sin[:, :half])[:, None, None]
    for part, source in ((q, heads[..., :m, :].flatten(2, 3)), (k, heads[..., m, :])):
        turned = torch.complex(source[..., :half], source[..., half : 2 * half]) * turn
        expected = torch.cat((turned.real, turned.imag, source[..., 2 * half :]), -1)
        # two products and a sum in FP32
        assert rel_rms(part, expected) < 2**-22
    assert v.equal(heads[..., m + 1, :])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope_gradient_is_autograds(shape, device):
    mixed, *rest = inputs(shape, device)
    mixed.requires_grad_()
    results = rope.rotate_qkv(mixed, *rest), rope.reference.rotate_qkv_reference(mixed, *rest)
    # not contiguous, like the tensors from attention
    grads = [torch.randn_like(t.transpose(0, 2)).transpose(0, 2) for t in results[0]]
    actual, expected = (torch.autograd.grad(result, mixed, grads)[0] for result in results)
    assert rel_rms(actual, expected) < 2**-22


def test_rope_takes_views(kernels, device):
    """Inputs with tokens in another order, and gradients with channels that are not adjacent."""
    mixed, *rest = inputs(SHAPES[1], device)
    found = []
    for x, stacked in ((mixed, False), (mixed.transpose(0, 1).contiguous().transpose(0, 1), True)):
        x.requires_grad_()
        qkv = rope.rotate_qkv(x, *rest)
        grads = [t.detach().mT.contiguous().mT if stacked else t.detach() for t in qkv]
        codes = rope.op.rotate_qkv_backward_operands(*grads, *rest[:2], PredictedScale(E5M2), sums=True)
        found.append((*qkv, *torch.autograd.grad(qkv, x, grads), codes.rows.float(), codes.sums))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("part, half", [(0, 0), (1, 1), (2, 0)], ids=["q", "k", "v"])
def test_rope_finds_the_largest_magnitude_wherever_it_is(part, half, kernels, device):
    """The scale covers all three tensors. Each of the three gradients has its own strides."""
    mixed, cos, sin, groups, d = inputs((3, 2, 2, 2, 8, 8), device, torch.bfloat16)
    # no rotation: the largest element stays in its place
    cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    grads = [t.contiguous() for t in rope.reference.rotate_qkv_reference(mixed, cos, sin, groups, d)]
    grads[part][-1, -1, -1, half * d // 2 + 1] = 99.0
    grads[1] = torch.stack(2 * [grads[1]], 1)[:, 0]
    grads[2] = torch.stack(3 * [grads[2]], 2)[:, :, 0]
    found = rope.op.rotate_qkv_backward_operands(*grads, cos, sin, PredictedScale(E5M2), sums=True)
    whole = rope.reference.rotate_qkv_backward_reference(*grads, cos, sin)[0].flatten(0, 1)
    expected = quantize_tensor(whole, whole.abs().amax().float()[None], E5M2, True, True, True)
    # the tiles of this test end before the padding of columns
    found, expected = (t._replace(columns=t.columns[:, : len(whole)]) for t in (found, expected))
    for a, e in zip(found, expected, strict=True):
        assert torch.equal(a.float(), e.float())


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope_kernels_equal_the_reference(shape, dtype, device):
    mixed, cos, sin, groups, d = inputs(shape, device, dtype)
    mixed.view(-1)[:2] = torch.tensor([torch.nan, torch.inf])
    # the compiler may fuse a multiplication with the addition: FP32's last bit, and BF16's on a tie
    tolerance = 2**-22 if dtype == torch.float32 else 2**-7
    actual = rope.kernels.rotate_qkv_triton(mixed, cos, sin, groups, d)
    expected = rope.reference.rotate_qkv_reference(mixed, cos, sin, groups, d)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance, equal_nan=True)
    grads = [t.nan_to_num(2.0, 3.0).transpose(0, 2).contiguous().transpose(0, 2) for t in expected]
    grads[0][-1, -1, -1, -1] = torch.inf
    a, a_maxima = rope.kernels.rotate_qkv_backward_triton(*grads, cos, sin)
    e, e_maxima = rope.reference.rotate_qkv_backward_reference(*grads, cos, sin)
    torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(a_maxima.amax(), e_maxima.amax(), rtol=tolerance, atol=0)


def test_rope_backward_hands_its_maxima_on(device):
    mixed, *rest = inputs(SHAPES[1], device)
    seen = {}

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen["maxima"], seen["grad"] = maxima_of(grad), grad
            return grad

    mixed.requires_grad_()
    q, k, v = rope.rotate_qkv(Watch.apply(mixed), *rest)
    (q.sum() + 2 * k.sum() + 3 * v.sum()).backward()
    assert seen["maxima"].amax() == seen["grad"].abs().amax()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope_takes_heads_that_lie_apart(shape, device):
    """The same bits as with contiguous groups, for groups in another order."""
    mixed, cos, sin, groups, d = inputs(shape, device, torch.bfloat16)
    s, b, m = *mixed.shape[:2], shape[3]
    heads = torch.arange(groups * (m + 2), device=device).view(groups, m + 2)
    order = torch.cat((heads[:, :m].flatten(), heads[:, m], heads[:, m + 1]))

    def stacked(x):
        return x.view(s, b, -1, d)[:, :, order].flatten(2)

    for forward in (rope.reference.rotate_qkv_reference, rope.kernels.rotate_qkv_triton):
        expected = forward(mixed, cos, sin, groups, d)
        found = forward(stacked(mixed), cos, sin, groups, d, True)
        assert all(a.equal(e) for a, e in zip(found, expected, strict=True))
    grads = [torch.randn_like(t.transpose(0, 2)).transpose(0, 2) for t in expected]
    backward = rope.reference.rotate_qkv_backward_reference
    assert backward(*grads, cos, sin, True)[0].equal(stacked(backward(*grads, cos, sin)[0]))
    scale = PredictedScale(E5M2)
    grads.extend((cos, sin))
    rows, columns, _, sums = rope.op.rotate_qkv_backward_operands(*grads, scale, sums=True)
    found = rope.op.rotate_qkv_backward_operands(*grads, scale, sums=True, stacked=True)
    assert found.rows.float().equal(stacked(rows.float()).flatten(0, 1))
    tokens = columns.shape[1]
    assert found.columns.float().equal(columns.float().view(-1, d, tokens)[order].flatten(0, 1))
    assert found.sums.equal(sums.view(-1, d)[order].flatten())
