"""Activations: formulas against autograd, kernels against references, and the saved bytes."""

import pytest
import torch
import torch.nn.functional as F

from coat_kernels import activation as act
from coat_kernels.autograd.origin import maxima_of, origin_of
from coat_kernels.fp8 import E4M3, E5M2
from coat_kernels.groups.reference import dequantize_groups_reference
from coat_kernels.tensorwise.quantize import quantize_tensor_reference
from tests.kernels.agreement import E4M3_RMS, ROUNDING, close, finite_max, grouped, same
from tests.kernels.inputs import SHAPES, hard, wide
from tests.util import rel_rms, saved_tensors

FORMATS = pytest.mark.parametrize("fmt", ROUNDING)
GATED = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
KIND = pytest.mark.parametrize("kind", act.KINDS)
PLAIN = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}


def plain(x, kind, gated):
    """The same activation with torch's operations, differentiable, in the precision of x."""
    if not gated:
        return PLAIN[kind](x)
    gate, up = x.chunk(2, dim=-1)
    return PLAIN[kind](gate) * up


@KIND
@GATED
@FORMATS
def test_activation_of_exact_codes_is_torchs_in_fp64(kind, gated, fmt):
    """For values that the codes hold exactly, output and gradient are right to FP32's rounding."""
    roots = torch.randint(-3, 4, (6, 96))
    # the largest magnitude of a group is not 1 or 4, whose roots are inexact in the scale of sqrt8
    roots[:, ::16] = 3
    x = (roots * roots.abs() / 4).requires_grad_()
    y = act.activation(x, act.ActivationOptions(kind, gated, fmt))
    exact = x.detach().double().requires_grad_()
    expected = plain(exact, kind, gated)
    grad = torch.randn(y.shape)
    # 2^-24 for each of some ten operations; 1 + erf and 1 - s(x) lose bits where they nearly vanish
    assert rel_rms(y, expected) < 1e-6
    (found,), (wanted,) = (
        torch.autograd.grad(*v) for v in ((y, [x], grad), (expected, [exact], grad.double()))
    )
    assert rel_rms(found, wanted) < 1e-6


@KIND
@GATED
@FORMATS
def test_activation_gradients_see_one_rounding_of_the_input(kind, gated, fmt, device):
    """Backward reads gate and up with one rounding each; slopes, whose own slope is at most 2 |x|, about
    double it."""
    x = torch.randn(40, 160).to(device, torch.bfloat16).requires_grad_()
    y = act.activation(x, act.ActivationOptions(kind, gated, fmt))
    grad = torch.randn(y.shape).to(device, torch.bfloat16)
    exact = x.detach().float().requires_grad_()
    expected = plain(exact, kind, gated)
    assert y.dtype == torch.bfloat16 and rel_rms(y, expected) < 2**-8
    (found,) = torch.autograd.grad(y, [x], grad)
    (wanted,) = torch.autograd.grad(expected, [exact], grad.float())
    assert found.dtype == torch.bfloat16 and rel_rms(found, wanted) < 2 * ROUNDING[fmt]


def check_kernels(x, grad, kind, gated, keep):
    expected = act.reference.activation_forward_reference(x, kind, gated, keep)
    actual = act.kernels.activation_forward_triton(x, kind, gated, keep)
    close(actual[0], expected[0])
    assert actual[1].amax() == finite_max(actual[0])
    assert grouped(actual[2], expected[2]) == 0
    bare = act.kernels.activation_forward_triton(x, kind, gated, None)
    same(bare[0], actual[0])
    assert bare[1].equal(actual[1]) and bare[2] is None
    kept = expected[2]
    reference = act.reference.activation_backward_reference(grad, kept, kind, gated)
    found = act.kernels.activation_backward_triton(grad, kept, kind, gated)
    close(found[0], reference[0])
    assert found[1].amax() == finite_max(found[0])
    amax = expected[1].amax(0, keepdim=True)
    fmt = E5M2 if gated else E4M3
    made = act.kernels.activation_columns_triton(kept, amax, kind, gated, fmt)
    wanted = act.reference.activation_columns_reference(kept, amax, kind, gated, fmt)
    assert made.rows is None and made.scale.equal(wanted.scale)
    # the last bit of FP32 decides on a tie between two codes
    close(made.columns.float(), wanted.columns.float())


@GATED
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_activation_kernels_agree_with_the_references(shape, gated, device, monkeypatch):
    # small tensors: the interpreter also computes masked elements, so tiles are not much larger than the
    # tensors
    for name, rows in (("FORWARD_ROWS", 32), ("BACKWARD_ROWS", 32), ("COLUMNS_M", 32)):
        monkeypatch.setattr(act.kernels, name, rows)
    for name in ("FORWARD_COLUMNS", "BACKWARD_COLUMNS", "COLUMNS_N"):
        monkeypatch.setattr(act.kernels, name, 128)
    rows, f = shape
    # two formulas for each shape, and each formula with shapes of every kind
    first = (SHAPES.index(shape) + gated) % 2
    for i, kind in list(enumerate(act.KINDS))[first::2]:
        dtype = (torch.bfloat16, torch.float32)[i % 2]
        x, grad = wide(rows, f * (1 + gated)).to(device, dtype), torch.randn(rows, f).to(device, dtype)
        check_kernels(x, grad, kind, gated, [*ROUNDING][i % len(ROUNDING)])


@pytest.mark.parametrize(
    "kind,gated",
    [
        ("silu", True),
        ("gelu", False),
        ("gelu_tanh", True),
        ("quick_gelu", False),
        ("relu", False),
        ("squared_relu", False),
    ],
)
@pytest.mark.parametrize("case", hard(64))
def test_activation_kernels_agree_on_hard_inputs(case, kind, gated, device):
    x, grad = torch.randn(2, 4, 64, device=device)
    x[1] = hard(64)[case].to(device)
    grad[2] = hard(64)[case].to(device)
    check_kernels(x.bfloat16(), grad[:, : 64 // (1 + gated)].contiguous().bfloat16(), kind, gated, "sqrt8")


@GATED
def test_activation_kernels_with_full_and_partial_tiles(gated, device, monkeypatch):
    """Programs without masks, and a tensor of several tiles with partial ones at its ends."""
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(act.kernels, f"{name}_ROWS", 4)
        monkeypatch.setattr(act.kernels, f"{name}_COLUMNS", 32)
    monkeypatch.setattr(act.kernels, "COLUMNS_M", 16)
    monkeypatch.setattr(act.kernels, "COLUMNS_N", 32)
    for rows, f in ((16, 64), (17, 72)):
        x, grad = torch.randn(rows, (1 + gated) * f, device=device), torch.randn(rows, f, device=device)
        check_kernels(x, grad, "silu", gated, "sqrt8")


@KIND
def test_activation_slopes_of_large_inputs_are_finite(kind):
    """Where the curve is flat or straight, no term overflows into NaN; a NaN of the input is passed on."""
    x = torch.tensor([3e38, 1e30, 1e13, 200.0, -200.0, -1e13, -1e30, -3e38, torch.nan])
    value, slope = act.value_and_slope_reference(x, kind)
    assert value[-1].isnan() and slope[-1].isnan() and (value[4:-1] == 0).all() and (slope[4:-1] == 0).all()
    if kind == "squared_relu":
        same(value[:4], x[:4] ** 2)
        same(slope[:4], 2 * x[:4])
    else:
        assert value[:4].equal(x[:4]) and (slope[:4] == 1).all()


@KIND
@GATED
def test_activation_columns_are_the_output_quantized_and_transposed(kind, gated, device):
    # many elements, since a few largest ones dominate the error of a product of squares
    x = torch.randn(37, 960, device=device).requires_grad_()
    y = act.activation(x, act.ActivationOptions(kind, gated))
    f = y.shape[1]
    origin, amax = origin_of(y), maxima_of(y).amax(0, keepdim=True)
    assert amax == y.abs().amax()
    rows, columns, scale, _ = origin.columns(*origin.tensors, amax, E4M3)
    expected = quantize_tensor_reference(y.detach(), amax, E4M3, columns=True)
    assert rows is None and scale.equal(expected.scale) and columns.shape == (f, 48)
    assert (columns.float()[:, 37:] == 0).all()
    # one rounding of the result and one each of gate and up; a slope of y relative to y is 2 at most
    assert rel_rms(columns.float()[:, :37].t() * scale, y) < 6**0.5 * E4M3_RMS


@GATED
def test_activation_saves_codes_and_exponents_alone(gated, device):
    x = torch.randn(8, 64, device=device, dtype=torch.bfloat16).requires_grad_()
    with saved_tensors() as kept:
        y = act.activation(x, act.ActivationOptions("gelu", gated))
        assert sum(t.nbytes for t in kept) == 8 * 64 + 8 * 4
        kept.clear()
        with torch.no_grad():
            bare = act.activation(x, act.ActivationOptions("gelu", gated))
        frozen = act.activation(x.detach(), act.ActivationOptions("gelu", gated))
    assert not kept and bare.equal(y) and frozen.equal(y)
    assert origin_of(bare) is None and origin_of(frozen) is None and origin_of(y) is not None
    assert all(maxima_of(t) is not None for t in (y, bare, frozen))


def test_activation_gate_and_up_share_no_group(device):
    x = torch.full((2, 40), 1e-3, device=device)
    x[:, :20] = 100.0
    _, _, q = act.kernels.activation_forward_triton(x, "silu", True, "sqrt8")
    assert q.exponent.shape == (2, 4)
    halves = zip(q.codes.chunk(2, 1), q.exponent.chunk(2, 1), x.chunk(2, 1), strict=True)
    for codes, exponent, part in halves:
        kept = dequantize_groups_reference(type(q)(codes, exponent, q.format), 16)
        assert rel_rms(kept, part) < 2**-4


@GATED
def test_activation_operators_pass_opcheck(gated, device):
    x = torch.randn(3, 80, device=device)
    options = "gelu_tanh", gated
    for keep in (None, "sqrt8"):
        torch.library.opcheck(act.op.activation_forward.op, (x, *options, keep))
    y, _, *kept = act.op.activation_forward(x, *options, "e4m3")
    torch.library.opcheck(act.op.activation_backward.op, (y, *kept, *options, "e4m3"))
