"""RMSNorm of heads with rotary positions: formulas against autograd, kernels against references, and the
saved bytes."""

import pytest
import torch
import torch.nn.functional as F

from coat_kernels import head_norm as heads
from coat_kernels import norm
from coat_kernels.groups.reference import GROUP_SIZE, dequantize_groups_reference
from coat_kernels.head_norm import head_norm
from coat_kernels.norm import NormOptions
from coat_kernels.rope import rotate
from tests.kernels.agreement import KERNEL_RMS, ROUNDING, close, same
from tests.kernels.inputs import hard, wide
from tests.util import rel_rms, saved_tensors

EPS = 1e-6
OPTIONS = NormOptions(EPS)
# tokens, batch, heads, channels, rotated channels: all or none
SHAPES = [(1, 1, 1, 4, 4), (5, 2, 3, 16, 16), (7, 3, 4, 20, 20), (9, 1, 5, 66, 66), (3, 2, 2, 7, 0)]
FORMATS = pytest.mark.parametrize("fmt", ROUNDING)


def tables(s: int, r: int, device="cpu"):
    """Cosines and sines; partner channels have different values, so that a wrong channel is noticed."""
    angles = 10 * torch.rand(s, r, device=device)
    return angles.cos(), angles.sin()


def plain(x, weight, cos, sin, zero_centered=False):
    """The same with torch's operations, differentiable, in the precision of the inputs."""
    y = F.rms_norm(x, x.shape[-1:], weight + 1 if zero_centered else weight, EPS)
    if cos.shape[1] == 0:
        return y
    first, second = y.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return y * cos[:, None, None].to(x.dtype) + turned * sin[:, None, None].to(x.dtype)


@FORMATS
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("r", [32, 0], ids=["turns", "stays"])
def test_head_norm_of_exact_codes_is_torchs_in_fp64(r, zero_centered, fmt):
    """For values that the codes hold exactly, output and gradients are right to FP32's rounding."""
    roots = torch.randint(-3, 4, (5, 2, 3, 32))
    roots[..., ::16] = 3
    x = (roots * roots.abs()).float().requires_grad_()
    weight, grad = torch.randn(32, requires_grad=True), torch.randn(x.shape)
    cos, sin = tables(5, r)
    y = head_norm(x, weight, cos, sin, NormOptions(EPS, False, zero_centered, fmt))
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = plain(*exact, cos, sin, zero_centered)
    assert y.dtype == torch.float32 and rel_rms(y, expected) < 1e-6
    found = torch.autograd.grad(y, [x, weight], grad)
    wanted = torch.autograd.grad(expected, exact, grad.double())
    for a, e in zip(found, wanted, strict=True):
        # sums of at most 32 terms, each rounded a few times to 2^-24
        assert rel_rms(a, e) < 2e-6


@FORMATS
def test_head_norm_gradients_see_one_rounding_of_the_input(fmt, device):
    """Backward reads x with one rounding of its format; the error enters a product of two terms."""
    x = torch.randn(20, 2, 4, 64, device=device).bfloat16().requires_grad_()
    weight = (1 + 0.1 * torch.randn(64, device=device)).bfloat16().requires_grad_()
    cos, sin = tables(20, 64, device)
    grad = torch.randn_like(x)
    y = head_norm(x, weight, cos, sin, NormOptions(EPS, saved_format=fmt))
    exact = [t.detach().float().requires_grad_() for t in (x, weight)]
    expected = plain(*exact, cos, sin)
    assert y.dtype == torch.bfloat16 and rel_rms(y, expected) < 2**-8
    found = torch.autograd.grad(y, [x, weight], grad)
    wanted = torch.autograd.grad(expected, exact, grad.float())
    for a, e in zip(found, wanted, strict=True):
        assert a.dtype == torch.bfloat16 and rel_rms(a, e) < 2 * ROUNDING[fmt]


def check_kernels(x, grad, weight, cos, sin, zero_centered=False, keep="sqrt8"):
    inputs = x, weight, cos, sin, EPS, zero_centered, keep
    expected, q, rstd = heads.reference.head_norm_forward_reference(*inputs)
    actual, found_q, found_rstd = heads.kernels.head_norm_forward_triton(*inputs)
    close(actual, expected)
    close(found_rstd, rstd)
    same(*(dequantize_groups_reference(t, GROUP_SIZE) for t in (found_q, q)))
    arguments = grad, q, rstd, weight, cos, sin, zero_centered
    for a, e in zip(
        heads.kernels.head_norm_backward_triton(*arguments),
        heads.reference.head_norm_backward_reference(*arguments),
        strict=True,
    ):
        close(a, e)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_head_norm_kernels_agree_with_the_references(shape, device):
    *shape, r = shape
    cos, sin = tables(shape[0], r, device)
    x, grad = wide(*shape).to(device), torch.randn(shape, device=device)
    weight = torch.randn(shape[-1], device=device)
    check_kernels(x, grad, weight, cos, sin, True, "e4m3")
    check_kernels(x.bfloat16(), grad.bfloat16(), weight, cos, sin)
    # heads before tokens, and channels not adjacent, like the gradients from attention
    grad = torch.randn(shape[1], shape[2], shape[0], shape[3], device=device).bfloat16()
    check_kernels(x.bfloat16(), grad.permute(2, 0, 1, 3), weight.bfloat16(), cos, sin, True)
    check_kernels(x.bfloat16(), grad.mT.contiguous().mT.permute(2, 0, 1, 3), weight, cos, sin)


@pytest.mark.parametrize("case", hard(64))
def test_head_norm_kernels_agree_on_hard_inputs(case, device):
    """The rest of the tensor is ordinary: an error in one row does not spread to other rows."""
    x, grad = torch.randn(2, 4, 1, 2, 64, device=device).bfloat16()
    x[1, 0, 1] = hard(64)[case].to(x)
    grad[2, 0, 0] = hard(64)[case].to(x)
    check_kernels(x, grad, torch.randn(64, device=device), *tables(4, 64, device))


def test_head_norm_kernels_with_many_tiles_and_programs(device, monkeypatch):
    """Backward programs process several tiles of rows each; the last tile is partial."""
    monkeypatch.setattr(heads.kernels, "PROGRAMS", 3)
    monkeypatch.setattr(heads.kernels, "BACKWARD_TILE", 256)
    monkeypatch.setattr(heads.kernels, "FORWARD_TILE", 256)
    for s in (29, 32):
        x, grad = torch.randn(2, s, 1, 3 if s == 29 else 4, 128, device=device)
        check_kernels(x, grad, torch.randn(128, device=device), *tables(s, 128, device))


def test_head_norm_without_rotation_is_rms_norm(device):
    x, grad = torch.randn(2, 6, 2, 3, 48, device=device).bfloat16()
    weight, (cos, sin) = torch.randn(48, device=device), tables(6, 0, device)
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, rows = head_norm(found, weight, cos, sin, OPTIONS), norm.normalize(expected, weight, None, OPTIONS)
    assert y.equal(rows)
    y.backward(grad)
    rows.backward(grad)
    # the norm's own backward is another kernel, which may fuse other products and sums
    assert rel_rms(found.grad, expected.grad) < KERNEL_RMS


def test_head_norm_saves_nothing_that_backward_does_not_need(device):
    def kept(x, weight):
        with saved_tensors() as tensors:
            y = head_norm(x, weight, cos, sin, OPTIONS)
        return y, sum(t.nbytes for t in tensors)

    cos, sin = tables(8, 64, device)
    x, weight = torch.randn(8, 2, 3, 64, device=device).bfloat16(), torch.ones(64, device=device)
    y, size = kept(x, weight)
    assert size == 0 and not y.requires_grad
    # codes, exponents, rstd, the weight and the tables, which all layers share
    trained = x.clone().requires_grad_()
    assert kept(trained, weight)[1] == 48 * (64 + 4 + 4) + 64 * 4 + 2 * 8 * 64 * 4
    with torch.no_grad():
        assert kept(trained, weight)[1] == 0
    # a frozen input below a trained weight
    weight.requires_grad_()
    y, size = kept(x, weight)
    assert size > 0
    assert torch.autograd.grad(y.float().sum(), weight)[0].isfinite().all()
    # values computed from x do not change when x changes
    before = kept(trained, weight)[0]
    with torch.no_grad():
        expected = rotate(F.rms_norm(x.float(), (64,), weight, EPS), cos, sin).bfloat16()
        trained.mul_(3)
    assert rel_rms(before, expected) < KERNEL_RMS
    assert torch.autograd.grad(before.float().sum(), weight)[0].isfinite().all()


def test_head_norm_of_a_view(device):
    x = torch.randn(2, 6, 3, 32, device=device).transpose(0, 1).requires_grad_()
    weight, (cos, sin) = torch.ones(32, device=device), tables(6, 32, device)
    y = head_norm(x, weight, cos, sin, OPTIONS)
    copy = x.detach().contiguous().requires_grad_()
    expected = head_norm(copy, weight, cos, sin, OPTIONS)
    grad = torch.randn_like(expected)
    assert y.equal(expected)
    assert torch.autograd.grad(y, x, grad)[0].equal(torch.autograd.grad(expected, copy, grad)[0])


def test_head_norm_of_an_empty_batch(device):
    x = torch.empty(4, 0, 2, 16, device=device).requires_grad_()
    weight = torch.ones(16, device=device).requires_grad_()
    y = head_norm(x, weight, *tables(4, 16, device), OPTIONS)
    grads = torch.autograd.grad(y.sum(), [x, weight])
    assert y.shape == x.shape == grads[0].shape and grads[1].equal(torch.zeros_like(weight))


@pytest.mark.parametrize(
    ("shape", "width", "table", "words"),
    [
        ((5, 1, 2, 8), 8, (4, 8), r"sines of shape \[5, 8\].*found \[4, 8\]"),
        ((5, 1, 2, 8), 8, (5, 1, 8), r"found \[5, 1, 8\]"),
        ((5, 1, 2, 7), 7, (5, 7), "an even number of channels"),
        ((5, 1, 2, 8), 16, (5, 8), r"the weight \[16\]; expected \[s, b, heads, d\]"),
        ((5, 2, 8), 8, (5, 8), r"x has shape \[5, 2, 8\]"),
    ],
)
def test_head_norm_refuses_wrong_shapes(shape, width, table, words):
    with pytest.raises(ValueError, match=words):
        head_norm(torch.ones(shape), torch.ones(width), torch.ones(table), torch.ones(table), OPTIONS)
    with pytest.raises(ValueError, match=r"found \[5, 8\] and \[5, 6\]"):
        head_norm(torch.ones(5, 1, 2, 8), torch.ones(8), torch.ones(5, 8), torch.ones(5, 6), OPTIONS)
