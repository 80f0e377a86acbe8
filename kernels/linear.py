"""A linear layer whose three matrix products run in FP8 and which keeps its input in FP8.

Forward operands are E4M3, gradients E5M2, each with one just-in-time scale per tensor (COAT, section 5).
FP8 products want both operands contiguous along the dimension that is summed, so an operand is written
in the layout of its product: the input also transposed for the weight gradient, and kept only so.
"""

from dataclasses import dataclass

import torch

from coat_kernels.fp8 import E4M3, E5M2, Fp8Format, require_fp8
from coat_kernels.origin import Origin
from coat_kernels.tensorwise import ALIGNMENT, largest_magnitude, quantize_tensor


@dataclass(frozen=True, slots=True)
class LinearFormats:
    """FP8 formats of the forward operands (input, weight) and of the output's gradient."""

    forward: Fp8Format = E4M3
    backward: Fp8Format = E5M2


def scaled_matmul_reference(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`a` [m, k] times `b` [n, k] transposed, both FP8, accumulated in FP32, rounded once to `dtype`."""
    return ((a.float() @ b.float().t()) * (scale_a * scale_b)).to(dtype)


def scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    dtype: torch.dtype,
    fast: bool = False,
) -> torch.Tensor:
    """`scaled_matmul_reference`, on CUDA by cuBLASLt. `fast` keeps fewer bits while accumulating."""
    if not a.is_cuda:
        return scaled_matmul_reference(a, b, scale_a, scale_b, dtype)
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, formats: LinearFormats, origin: Origin | None, trains_weight: bool):
        inputs = x.reshape(-1, x.shape[-1]).contiguous()
        keep = trains_weight and origin is None
        fmt = formats.forward
        largest_w = largest_magnitude(weight)
        quantized_w = quantize_tensor(weight, largest_w, fmt)
        largest_x = largest_magnitude(inputs, origin.maxima if origin else None)
        quantized_x = quantize_tensor(inputs, largest_x, fmt, columns=keep)
        y = scaled_matmul(
            quantized_x.rows, quantized_w.rows, quantized_x.scale, quantized_w.scale, x.dtype, fast=True
        )
        if bias is not None:
            y += bias
        ctx.formats, ctx.shape, ctx.dtype = formats, x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.rebuild = None
        kept: tuple[torch.Tensor, ...] = ()
        if keep:
            kept = (quantized_x.columns, quantized_x.scale)
        elif trains_weight:
            ctx.rebuild, kept = origin.rebuild, origin.tensors
        ctx.save_for_backward(weight, largest_w, *kept)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad_y):
        weight, largest_w, *kept = ctx.saved_tensors
        formats = ctx.formats
        grads = grad_y.reshape(-1, grad_y.shape[-1]).contiguous()
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_w = grad_bias = None
        if needs_x or needs_w:
            grad = quantize_tensor(grads, largest_magnitude(grads), formats.backward, needs_x, needs_w)
        if needs_x:
            _, columns, scale = quantize_tensor(weight, largest_w, formats.forward, rows=False, columns=True)
            columns = columns[:, : weight.shape[0]]
            grad_x = scaled_matmul(grad.rows, columns, grad.scale, scale, ctx.dtype).view(ctx.shape)
        if needs_w:
            if ctx.rebuild is None:
                columns, scale = kept
            else:
                inputs = ctx.rebuild(*kept).reshape(-1, ctx.shape[-1]).contiguous()
                largest = largest_magnitude(inputs)
                _, columns, scale = quantize_tensor(
                    inputs, largest, formats.forward, rows=False, columns=True
                )
            grad_w = scaled_matmul(grad.columns, columns, grad.scale, scale, weight.dtype)
        if needs_bias:
            grad_bias = grads.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_x, grad_w, grad_bias, None, None, None


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    formats: LinearFormats | None = None,
    origin: Origin | None = None,
) -> torch.Tensor:
    """x W^T + b with FP8 matrix products.

    Args:
        x: [..., K], BF16 or FP32.
        weight: [N, K]; kept by reference for backward, not copied.
        bias: [N] or None, added in the type of the result.
        formats: the FP8 formats; E4M3 forward and E5M2 backward by default.
        origin: how to rebuild x in backward; without it x is kept as FP8 and one FP32 scale.

    Returns [..., N] in the dtype of x. Raises ValueError on CUDA if K or N is not a multiple of 16, and
    RuntimeError on a GPU without FP8.
    """
    require_fp8(x.device)
    out_features, in_features = weight.shape
    if x.is_cuda and (out_features % ALIGNMENT or in_features % ALIGNMENT):
        raise ValueError(
            f"FP8 matrix products need sizes that are multiples of {ALIGNMENT}, found a weight of "
            f"{out_features} x {in_features}. Change the layer's sizes or keep it in BF16."
        )
    trains_weight = torch.is_grad_enabled() and weight.requires_grad
    return _Fp8Linear.apply(x, weight, bias, formats or LinearFormats(), origin, trains_weight)
