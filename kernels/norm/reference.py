"""RMSNorm (Zhang & Sennrich, arXiv 1910.07467, equation 4) and LayerNorm (Ba et al., arXiv 1607.06450,
equation 3) that save their input in 8 bits, in 1 x G groups.

y = c * rstd * w + b, rstd = 1 / sqrt(mean(c^2) + eps). c is x for RMSNorm and x - mean(x) for LayerNorm; with
zero-centered gamma the weight is w + 1. Forward uses c itself, backward the saved c. A large mean does not
reduce the precision of the saved c.
"""

import torch

from coat_kernels.fp8 import Fp8Format
from coat_kernels.groups.reference import (
    GROUP_SIZE,
    Grouped,
    dequantize_groups_reference,
    quantize_groups_reference,
)
from coat_kernels.tensorwise.quantize import Quantized, quantize_tensor_reference
from coat_kernels.tensorwise.scale import row_maxima


def _gamma(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def _affine(normed: torch.Tensor, weight, bias, zero_centered: bool) -> torch.Tensor:
    y = normed * _gamma(weight, zero_centered)
    return y if bias is None else y + bias.float()


def norm_forward_reference(
    x, weight, bias, eps: float, layer_norm: bool, zero_centered: bool, saved_format: str
):
    """x [rows, h] -> (y in x's dtype, maxima of y, the input in `saved_format`, rstd FP32 [rows])."""
    value = x.float()
    if layer_norm:
        value = value - value.mean(1, keepdim=True)
    rstd = torch.rsqrt(value.square().mean(1) + eps)
    y = _affine(value * rstd[:, None], weight, bias, zero_centered).to(x.dtype)
    return y, row_maxima(y), quantize_groups_reference(value, GROUP_SIZE, saved_format), rstd


def norm_backward_reference(
    grad_y,
    grad_residual,
    q: Grouped,
    rstd,
    weight,
    layer_norm: bool,
    zero_centered: bool,
    needs_x: bool = True,
    needs_weight: bool = True,
    needs_bias: bool = True,
    dtype: torch.dtype = torch.float32,
):
    """(grad_x in grad_y's dtype, its maxima, grad_weight, grad_bias, both [h] in `dtype`); None for what is
    not needed.

    grad_residual, [rows, h] or None, is added to grad_x before grad_x is rounded.
    """
    normed = dequantize_groups_reference(q, GROUP_SIZE) * rstd[:, None]
    grad = grad_y.float()
    scaled = grad * _gamma(weight, zero_centered)
    centered = scaled - normed * (scaled * normed).mean(1, keepdim=True)
    if layer_norm:
        centered = centered - scaled.mean(1, keepdim=True)
    grad_x = rstd[:, None] * centered
    if grad_residual is not None:
        grad_x = grad_x + grad_residual.float()
    grad_x = grad_x.to(grad_y.dtype)
    found = (grad_x, row_maxima(grad_x)) if needs_x else (None, None)
    grad_weight = (grad * normed).sum(0).to(dtype) if needs_weight else None
    return *found, grad_weight, grad.sum(0).to(dtype) if needs_bias else None


def norm_columns_reference(
    q: Grouped, rstd, weight, bias, amax, zero_centered: bool, fmt: Fp8Format
) -> Quantized:
    """y, recomputed from the saved input, as column-major FP8 codes with the scale of the amax `amax`."""
    normed = dequantize_groups_reference(q, GROUP_SIZE) * rstd[:, None]
    y = _affine(normed, weight, bias, zero_centered)
    return quantize_tensor_reference(y, amax, fmt, rows=False, columns=True)
