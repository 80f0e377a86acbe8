"""Activations, plain and gated (Shazeer, arXiv 2002.05202, section 2), that save their input in 8 bits, in 1
x G groups.

y = a(x), or a(gate) * up where x = gate | up. Neither a(gate) nor y is saved: backward recomputes them. a is
one of

- silu: x s(x), s(x) = 1 / (1 + exp(-x)); gated it is SwiGLU;
- gelu: x (1 + erf(x / sqrt(2))) / 2; gated it is GEGLU;
- gelu_tanh: x (1 + tanh(u)) / 2 = x s(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3), which approximates gelu;
- quick_gelu: x s(1.702 x), the older approximation of gelu;
- relu: max(x, 0);
- squared_relu: max(x, 0)^2 (So et al., arXiv 2109.08668).
"""

from collections.abc import Sequence

import torch
import triton.language as tl

from coat_kernels.fp8 import Fp8Format
from coat_kernels.groups.reference import (
    GROUP_SIZE,
    Grouped,
    dequantize_groups_reference,
    quantize_groups_reference,
)
from coat_kernels.tensorwise.quantize import Quantized, quantize_tensor_reference
from coat_kernels.tensorwise.scale import row_maxima

KINDS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu")
SQRT_HALF = tl.constexpr(0.7071067811865476)
# the density of the standard normal distribution at 0
NORMAL = tl.constexpr(0.3989422804014327)
TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
CUBE = tl.constexpr(0.044715)
QUICK = tl.constexpr(1.702)
# for larger magnitudes tanh(u) is +-1 in FP32, and the cube would overflow
FLAT = tl.constexpr(16.0)


def value_and_slope_reference(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """a(x) and a'(x)."""
    if kind == "silu":
        s = x.sigmoid()
        return x * s, s + x * s * (1 - s)
    if kind == "gelu":
        below = 0.5 + 0.5 * torch.erf(x * SQRT_HALF.value)
        return x * below, below + x * NORMAL.value * torch.exp(-0.5 * x * x)
    if kind == "gelu_tanh":
        s = torch.sigmoid(TWO_SQRT_2_OVER_PI.value * (x + CUBE.value * x * x * x))
        near = x.clamp(-FLAT.value, FLAT.value)
        return x * s, s + s * (1 - s) * TWO_SQRT_2_OVER_PI.value * (near + 3 * CUBE.value * near**3)
    if kind == "quick_gelu":
        s = torch.sigmoid(QUICK.value * x)
        return x * s, s + x * s * (1 - s) * QUICK.value
    positive = torch.where(x < 0, 0, x)
    if kind == "relu":
        # NaN stays NaN
        return positive, torch.where(x > 0, 1.0, 0 * positive)
    return positive * positive, 2 * positive


def _parts(x: torch.Tensor, gated: bool) -> tuple[torch.Tensor, ...]:
    return x.chunk(2, dim=1) if gated else (x,)


def quantize_parts(parts: Sequence[torch.Tensor], saved_format: str) -> Grouped:
    """Gate and up, or one part, side by side, each in groups of its own."""
    saved = [quantize_groups_reference(part, GROUP_SIZE, saved_format) for part in parts]
    codes, exponent = (torch.cat(tensors, 1) for tensors in zip(*(q.tensors for q in saved), strict=True))
    return Grouped(codes, exponent, saved[0].format)


def dequantize_parts(q: Grouped, gated: bool) -> list[torch.Tensor]:
    """What `quantize_parts` took, FP32."""
    parts = zip(_parts(q.codes, gated), _parts(q.exponent, gated), strict=True)
    return [dequantize_groups_reference(Grouped(*part, q.format), GROUP_SIZE) for part in parts]


def activation_forward_reference(x, kind: str, gated: bool, saved_format: str | None):
    """x [rows, f or 2 f] -> (y [rows, f] in x's dtype, maxima of y, x in `saved_format`, or None). The
    groups of gate come before the groups of up."""
    parts = _parts(x, gated)
    y, _ = value_and_slope_reference(parts[0].float(), kind)
    if gated:
        y = y * parts[1].float()
    y = y.to(x.dtype)
    if not saved_format:
        return y, row_maxima(y), None
    return y, row_maxima(y), quantize_parts(parts, saved_format)


def activation_backward_reference(grad_y, q: Grouped, kind: str, gated: bool):
    """grad_y [rows, f] -> (grad of x in grad_y's dtype, its maxima)."""
    parts = dequantize_parts(q, gated)
    value, slope = value_and_slope_reference(parts[0], kind)
    grad = grad_y.float()
    if gated:
        grad_x = torch.cat((grad * slope * parts[1], grad * value), dim=1)
    else:
        grad_x = grad * slope
    grad_x = grad_x.to(grad_y.dtype)
    return grad_x, row_maxima(grad_x)


def activation_columns_reference(q: Grouped, amax, kind: str, gated: bool, fmt: Fp8Format) -> Quantized:
    """y, recomputed from the saved input, as column-major FP8 codes with the scale of the amax `amax`."""
    parts = dequantize_parts(q, gated)
    y, _ = value_and_slope_reference(parts[0], kind)
    if gated:
        y = y * parts[1]
    return quantize_tensor_reference(y, amax, fmt, rows=False, columns=True)
