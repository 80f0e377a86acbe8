"""RMSNorm and LayerNorm: formulas against autograd, kernels against references, and the saved bytes."""

import pytest
import torch
import torch.nn.functional as F

from coat_kernels import norm
from coat_kernels.autograd.origin import maxima_of, origin_of, with_maxima
from coat_kernels.fp8 import E4M3, E5M2
from coat_kernels.groups.reference import GROUP_SIZE, dequantize_groups_reference
from coat_kernels.linear import fp8_linear
from coat_kernels.norm import NormOptions
from coat_kernels.tensorwise import PredictedScale
from coat_kernels.tensorwise.operands import fp8_operands
from coat_kernels.tensorwise.quantize import quantize_tensor_reference
from tests.kernels.agreement import E4M3_RMS, KERNEL_RMS, ROUNDING, close, finite_max, same
from tests.kernels.inputs import EPS, LAYER_NORM, SHAPES, hard, wide
from tests.util import rel_rms, saved_tensors

FORMATS = pytest.mark.parametrize("fmt", ROUNDING)


def plain(x, weight, bias, layer_norm, zero_centered=False):
    """The same with torch's operations, differentiable, in the precision of the inputs."""
    gamma = weight + 1 if zero_centered else weight
    if layer_norm:
        return F.layer_norm(x, x.shape[-1:], gamma, bias, EPS)
    return F.rms_norm(x, x.shape[-1:], gamma, EPS)


def apply(x, weight, bias, layer_norm, **options):
    residual = options.pop("residual", False)
    options = NormOptions(EPS, layer_norm, **options)
    return norm.normalize(x, weight, bias if layer_norm else None, options, residual=residual)


def exactly_kept(x, layer_norm):
    """x whose centered values are exact in groups of either format, and these values: squares. The largest of
    each group is not 1 or 4, whose roots are inexact in the scale of sqrt8."""
    roots = torch.randint(-3, 4, x.shape)
    roots[:, ::GROUP_SIZE] = 3
    codes = (roots * roots.abs()).float()
    if not layer_norm:
        return codes, codes
    # rows sum to zero, so the mean is the constant that is added
    codes[:, 1::2] = -codes[:, 0 : codes.shape[1] - 1 : 2]
    return codes + 3.0, codes


@LAYER_NORM
@FORMATS
@pytest.mark.parametrize("zero_centered,residual", [(False, False), (True, True)])
def test_norm_of_exact_codes_is_torchs_in_fp64(layer_norm, fmt, zero_centered, residual):
    """For values that the codes hold exactly, output and gradients are right to FP32's rounding."""
    x, _ = exactly_kept(torch.empty(6, 48), layer_norm)
    weight, bias, grad = torch.randn(48), torch.randn(48) if layer_norm else None, torch.randn(6, 48)
    inputs = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    options = {"zero_centered": zero_centered, "residual": residual, "saved_format": fmt}
    y = apply(x, weight, bias, layer_norm, **options)
    expected = plain(*exact, *([] if layer_norm else [None]), layer_norm, zero_centered)
    if residual:
        y, handed_on = y
        assert handed_on.equal(x) and handed_on.data_ptr() == x.data_ptr()
        other = torch.randn(6, 48)
        y, expected = (y, handed_on), (expected, exact[0] * 1)
        grad = (grad, other)
    else:
        y, expected, grad = (y,), (expected,), (grad,)
    assert rel_rms(y[0], expected[0]) < 1e-6
    found = torch.autograd.grad(y, inputs, grad)
    wanted = torch.autograd.grad(expected, exact, [g.double() for g in grad])
    for a, e in zip(found, wanted, strict=True):
        # sums of at most 48 terms, each rounded a few times to 2^-24
        assert rel_rms(a, e) < 2e-6


@pytest.mark.parametrize("layer_norm,bias", [(False, False), (True, False), (True, True)])
@FORMATS
def test_norm_gradients_see_one_rounding_of_the_input(layer_norm, bias, fmt, device):
    """Backward reads the centered input with one rounding of its format; the error enters a product of two
    terms. A large mean adds no error in LayerNorm, since only the deviation is saved."""
    x = torch.randn(40, 80) + (30 if layer_norm else 0)
    parameters = [1 + 0.1 * torch.randn(80), torch.randn(80)][: 1 + bias]
    inputs = [t.to(device, torch.bfloat16).requires_grad_() for t in (x, *parameters)]
    exact = [t.detach().float().requires_grad_() for t in inputs]
    grad = torch.randn(40, 80, device=device, dtype=torch.bfloat16)
    y = apply(*inputs, *([] if bias else [None]), layer_norm, saved_format=fmt)
    expected = plain(*exact, *([] if bias else [None]), layer_norm)
    assert y.dtype == torch.bfloat16 and rel_rms(y, expected) < 2**-8
    found = torch.autograd.grad(y, inputs, grad)
    wanted = torch.autograd.grad(expected, exact, grad.float())
    for a, e in zip(found, wanted, strict=True):
        assert a.dtype == torch.bfloat16 and rel_rms(a, e) < 2 * ROUNDING[fmt]


def check_kernels(x, grad, grad_residual, weight, bias, layer_norm, zero_centered, keep):
    options = layer_norm, zero_centered
    expected = norm.reference.norm_forward_reference(x, weight, bias, EPS, *options, keep)
    actual = norm.kernels.norm_forward_triton(x, weight, bias, EPS, *options, keep)
    close(actual[0], expected[0])
    assert actual[1].amax() == finite_max(actual[0])
    close(actual[3], expected[3])
    # a mean summed in another order moves deviations by 2^-24 of the row's largest value, and few of them to
    # another code
    values = [dequantize_groups_reference(q, GROUP_SIZE) for q in (actual[2], expected[2])]
    close(*values) if layer_norm else same(*values)
    kept = expected[2], expected[3], weight
    reference = norm.reference.norm_backward_reference(grad, grad_residual, *kept, *options)
    found = norm.kernels.norm_backward_triton(grad, grad_residual, *kept, *options)
    for i in (0, 2, 3):
        close(found[i], reference[i])
    assert found[1].amax() == finite_max(found[0])
    amax = expected[1].amax(0, keepdim=True)
    fmt = E5M2 if keep == "e4m3" else E4M3
    made = norm.kernels.norm_columns_triton(*kept, bias, amax, zero_centered, fmt)
    wanted = norm.reference.norm_columns_reference(*kept, bias, amax, zero_centered, fmt)
    assert made.rows is None and made.scale.equal(wanted.scale)
    # the last bit of FP32 decides on a tie between two codes
    close(made.columns.float(), wanted.columns.float())


@LAYER_NORM
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_kernels_agree_with_the_references(shape, layer_norm, device):
    x, grad, grad_residual = (t.to(device) for t in (wide(*shape), torch.randn(shape), wide(*shape)))
    weight, bias = torch.randn(2, shape[1], device=device)
    # with and without a residual, either dtype of weights and of the rest
    check_kernels(x, grad, None, weight, bias.bfloat16() if layer_norm else None, layer_norm, True, "e4m3")
    x, grad, grad_residual = (t.bfloat16() for t in (x, grad, grad_residual))
    check_kernels(x, grad, grad_residual, weight, bias if layer_norm else None, layer_norm, False, "sqrt8")
    check_kernels(x, grad, None, weight.bfloat16(), None, layer_norm, True, "sqrt8")


@LAYER_NORM
@pytest.mark.parametrize("case", hard(64))
def test_norm_kernels_agree_on_hard_inputs(case, layer_norm, device):
    """The rest of the tensor is ordinary: an error in one row does not spread to other rows."""
    x, grad = torch.randn(2, 4, 64, device=device)
    x[1] = hard(64)[case].to(device)
    grad[2] = hard(64)[case].to(device)
    weight, bias = torch.randn(2, 64, device=device)
    with torch.no_grad():
        bias = bias if layer_norm else None
        check_kernels(x.bfloat16(), grad.bfloat16(), None, weight, bias, layer_norm, False, "sqrt8")


@LAYER_NORM
def test_norm_kernels_with_many_tiles_and_programs(layer_norm, device, monkeypatch):
    """Backward programs process several tiles of rows each; the last tile is partial."""
    monkeypatch.setattr(norm.kernels, "PROGRAMS", 3)
    monkeypatch.setattr(norm.kernels, "BACKWARD_TILE", 256)
    x, grad, grad_residual = torch.randn(3, 29, 128, device=device)
    weight, bias = torch.randn(2, 128, device=device)
    check_kernels(x, grad, grad_residual, weight, bias, layer_norm, False, "sqrt8")


@LAYER_NORM
def test_norm_columns_are_the_output_quantized_and_transposed(layer_norm, device):
    x, weight, bias = torch.randn(37, 48, device=device), *torch.randn(2, 48, device=device)
    y = apply(x.requires_grad_(), weight, bias, layer_norm)
    origin, amax = origin_of(y), maxima_of(y).amax(0, keepdim=True)
    rows, columns, scale, _ = origin.columns(*origin.tensors, amax, E4M3)
    expected = quantize_tensor_reference(y.detach(), amax, E4M3, columns=True)
    assert rows is None and scale.equal(expected.scale) and columns.shape == (48, 48)
    assert (columns.float()[:, 37:] == 0).all()
    # both are rounded with the scale of the columns; one of them was rounded in groups before
    assert rel_rms(columns.float() * scale, expected.columns.float() * scale) < 2 * E4M3_RMS
    assert rel_rms(columns.float()[:, :37].t() * scale, y) < 2 * E4M3_RMS


@LAYER_NORM
def test_norm_saves_nothing_that_backward_does_not_need(layer_norm, device):
    def kept(x, weight, bias):
        with saved_tensors() as tensors:
            y = apply(x, weight, bias, layer_norm)
        assert maxima_of(y) is not None
        return y, sum(t.nbytes for t in tensors)

    x = torch.randn(8, 64, device=device, dtype=torch.bfloat16)
    weight, bias = torch.ones(64, device=device), torch.zeros(64, device=device)
    y, size = kept(x, weight, bias)
    assert size == 0 and not y.requires_grad and origin_of(y) is None
    # codes, exponents, rstd and the weight
    y, size = kept(x.requires_grad_(), weight, bias)
    assert size == 8 * 64 + 8 * 4 + 8 * 4 + 64 * 4 and origin_of(y) is not None
    with torch.no_grad():
        y, size = kept(x, weight, bias)
    assert size == 0 and origin_of(y) is None
    (grad_x,) = torch.autograd.grad(apply(x, weight, bias, layer_norm).sum(), [x])
    assert grad_x.isfinite().all()


@LAYER_NORM
def test_norm_computes_only_the_gradients_that_are_needed(layer_norm, device):
    x, weight, bias = torch.randn(8, 64, device=device), torch.ones(64, device=device), None
    if layer_norm:
        bias = torch.zeros(64, device=device)
    grad = torch.randn(8, 64, device=device)
    _, _, q, rstd = norm.kernels.norm_forward_triton(x, weight, bias, EPS, layer_norm, False, "sqrt8")
    options = layer_norm, False
    for needs in ((True, False, False), (False, True, False), (False, False, True), (False, True, True)):
        found = norm.kernels.norm_backward_triton(grad, None, q, rstd, weight, *options, *needs)
        assert [f is not None for f in found] == [needs[0], *needs]
        expected = norm.reference.norm_backward_reference(grad, None, q, rstd, weight, *options)
        for f, e in zip(found[2:], expected[2:], strict=True):
            assert f is None or rel_rms(f, e) < KERNEL_RMS
    # through autograd: a frozen input below trained parameters
    y = apply(x, weight.requires_grad_(), bias, layer_norm)
    (grad_weight,) = torch.autograd.grad(y, [weight], grad)
    assert rel_rms(grad_weight, expected[2]) < KERNEL_RMS


@LAYER_NORM
def test_norm_residual_gradients_are_added(layer_norm, device):
    x = torch.randn(8, 64, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = torch.ones(64, device=device).requires_grad_()
    grad, other = torch.randn(2, 8, 64, device=device).bfloat16()
    y, handed_on = apply(x, weight, None, layer_norm, residual=True)
    (alone,) = torch.autograd.grad(y, [x], grad, retain_graph=True)
    (passed,) = torch.autograd.grad(handed_on, [x], other, retain_graph=True)
    both = torch.autograd.grad((y, handed_on), [x, weight], (grad, other))[0]
    assert passed.equal(other)
    # one is rounded before the sum, the other after
    assert rel_rms(both, alone.float() + other.float()) < 2**-8
    with torch.no_grad():
        y, handed_on = apply(x, weight, None, layer_norm, residual=True)
    assert handed_on is x
    y, handed_on = apply(x, weight, None, layer_norm, residual=True)
    handed_on += 1
    assert origin_of(y) is not None, "what is kept is a copy of its own"


class Look(torch.autograd.Function):
    """Passes its input on and records the maxima noted on its gradient."""

    seen: list = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Look.seen.append((grad.clone(), maxima_of(grad)))
        return grad


def test_norm_notes_maxima_on_its_gradient(device):
    Look.seen.clear()
    x = torch.randn(2, 5, 64, device=device, dtype=torch.bfloat16).requires_grad_()
    y = norm.normalize(Look.apply(x), torch.ones(64, device=device), None, NormOptions(EPS))
    y.backward(torch.randn_like(y))
    ((grad, maxima),) = Look.seen
    assert maxima.amax() == grad.float().abs().amax()
    assert maxima_of(with_maxima(grad, maxima)) is maxima and maxima_of(grad.add_(1)) is None


@LAYER_NORM
@pytest.mark.parametrize("changed", ["weight", "bias"])
def test_norm_origin_is_dropped_after_a_parameter_changed(layer_norm, changed, device):
    """The linear layer that reads the norm's output saves its own input, and its weight's gradient is that of
    the forward values."""
    parameters = {name: torch.ones(64, device=device, requires_grad=True) for name in ("weight", "bias")}
    x = torch.randn(16, 64, device=device, requires_grad=True)
    y, w = apply(x, *parameters.values(), layer_norm), torch.randn(32, 64, device=device, requires_grad=True)
    used = changed == "weight" or layer_norm
    with torch.no_grad():
        parameters[changed].mul_(2)
    assert (origin_of(y) is None) == used
    (found,) = torch.autograd.grad(fp8_linear(y, w, origin=origin_of(y)).sum(), w)
    (expected,) = torch.autograd.grad(fp8_linear(y.detach(), w).sum(), w)
    assert rel_rms(found, expected) < 0.1


@LAYER_NORM
def test_norm_operators_pass_opcheck(layer_norm, device):
    x, weight, bias = torch.randn(3, 40, device=device), *torch.randn(2, 40, device=device)
    options = layer_norm, False
    for keep in ROUNDING:
        torch.library.opcheck(norm.op.norm_forward.op, (x, weight, bias, EPS, *options, keep))
    _, _, *kept = norm.op.norm_forward(x, weight, bias, EPS, *options, "e4m3")
    for needs in ((True, True, True), (False, True, False)):
        arguments = x, None, *kept, weight, *options, "e4m3", *needs, torch.float32
        torch.library.opcheck(norm.op.norm_backward.op, arguments)


@LAYER_NORM
@pytest.mark.parametrize("h", [96, 128, 576])
def test_norm_output_has_the_same_bits_trained_frozen_and_quantized(layer_norm, h, device):
    """With trained and with frozen weights, and quantized by the norm itself."""
    weight, bias = (torch.randn(h, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    x = torch.randn(2048, h, device=device, dtype=torch.bfloat16)
    y = apply(x, weight, bias, layer_norm)
    with torch.no_grad():
        assert apply(x, weight, bias, layer_norm).equal(y)
    parameters = weight.detach(), bias.detach() if layer_norm else None
    options = NormOptions(EPS, layer_norm, False, "sqrt8")
    codes = norm.op.norm_operands(x, *parameters, options, PredictedScale(E4M3))[0]
    assert codes.rows.float().equal(fp8_operands(y, E4M3)[0].rows.float())
