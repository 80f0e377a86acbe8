"""The norms as autograd functions.

The output carries its origin and its maxima. With the origin, the next linear layer saves nothing. With the
maxima, quantizing needs no extra read to find the scale. The gradient carries its maxima, too.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from coat_kernels.autograd.derivatives import once_differentiable, refuse_forward_mode
from coat_kernels.autograd.origin import Origin, with_maxima, with_origin
from coat_kernels.device import uses_kernels
from coat_kernels.fp8 import Fp8Format
from coat_kernels.groups.reference import DEFAULT_FORMAT, GROUP_FORMATS, GROUP_SIZE, Grouped, empty_grouped
from coat_kernels.norm.kernels import (
    empty_saved,
    launch_forward,
    norm_backward_triton,
    norm_columns_triton,
    norm_forward_triton,
)
from coat_kernels.norm.reference import (
    norm_backward_reference,
    norm_columns_reference,
    norm_forward_reference,
)
from coat_kernels.norm.residual import NO_ADDENDS, Addends, residual_add_reference
from coat_kernels.ops import compilable
from coat_kernels.tensorwise.predicted import PredictedScale, quantize_predicted, write_reference
from coat_kernels.tensorwise.quantize import Quantized


class NormOptions(NamedTuple):
    """How a norm computes and saves its input, in the order of `norm_forward`.

    zero_centered: the weight is w + 1. saved_format: one of `coat_kernels.groups.GROUP_FORMATS`.
    """

    eps: float
    layer_norm: bool = False
    zero_centered: bool = False
    saved_format: str = DEFAULT_FORMAT


def _forward_fake(x, weight, bias, eps, layer_norm, zero_centered, saved_format):
    q = empty_grouped(*x.shape, GROUP_SIZE, saved_format, x.device)
    return torch.empty_like(x), None, *q.tensors, x.new_empty(x.shape[0], dtype=torch.float32)


@compilable(_forward_fake, unread=1)
def norm_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    layer_norm: bool,
    zero_centered: bool,
    saved_format: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (y, maxima, codes, exponent, rstd) for a contiguous x.

    codes, exponent and rstd are also computed if nothing is trained, so y has the same bits. A kernel that
    stores bytes has more elements of a row per thread, so it sums them in another order.
    """
    forward = norm_forward_triton if uses_kernels(x) else norm_forward_reference
    y, maxima, q, rstd = forward(x, weight, bias, eps, layer_norm, zero_centered, saved_format)
    return y, maxima, *q.tensors, rstd


def _backward_fake(grad_y, grad_residual, codes, exponent, rstd, weight, *options):
    *_, needs_x, needs_weight, needs_bias, dtype = options
    return (
        torch.empty_like(grad_y) if needs_x else None,
        None,
        weight.new_empty(weight.shape, dtype=dtype) if needs_weight else None,
        weight.new_empty(weight.shape, dtype=dtype) if needs_bias else None,
    )


@compilable(_backward_fake, unread=1)
def norm_backward(
    grad_y: torch.Tensor,
    grad_residual: torch.Tensor | None,
    codes: torch.Tensor,
    exponent: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    layer_norm: bool,
    zero_centered: bool,
    saved_format: str,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (grad_x, maxima, grad_weight, grad_bias), the last two in `dtype`; None where not needed.
    Gradients are contiguous."""
    saved = grad_y, grad_residual, Grouped(codes, exponent, GROUP_FORMATS[saved_format]), rstd, weight
    how = layer_norm, zero_centered, needs_x, needs_weight, needs_bias, dtype
    return (norm_backward_triton if uses_kernels(grad_y) else norm_backward_reference)(*saved, *how)


def norm_gradients(
    grad_y: torch.Tensor,
    grad_residual: torch.Tensor | None,
    shape: torch.Size,
    saved: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias_dtype: torch.dtype | None,
    options: NormOptions,
    needs: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x, of this `shape`, with its maxima noted, of the weight and of the bias, in their
    dtypes; None where not needed.

    grad_y, grad_residual: the gradients of y, contiguous [rows, h], and of the residual, [..., h]. saved:
    codes, exponent and rstd. bias_dtype: None without a bias.
    """
    # the kernel rounds both sums to one dtype
    dtype = weight.dtype if bias_dtype in (None, weight.dtype) else torch.float32
    grad_x, maxima, grad_weight, grad_bias = norm_backward(
        grad_y,
        None if grad_residual is None else grad_residual.reshape(grad_y.shape).contiguous(),
        *saved,
        weight,
        *options[1:],
        *needs,
        dtype,
    )
    needs_x, needs_weight, needs_bias = needs
    return (
        with_maxima(grad_x.view(shape), maxima) if needs_x else None,
        grad_weight.to(weight.dtype) if needs_weight else None,
        grad_bias.to(bias_dtype) if needs_bias else None,
    )


def norm_columns(
    saved: Sequence[torch.Tensor], weight, bias, amax, options: NormOptions, fmt: Fp8Format
) -> Quantized:
    """y, recomputed from the codes, exponent and rstd that are `saved`, column-major in `fmt`."""
    codes, exponent, rstd = saved
    q = Grouped(codes, exponent, GROUP_FORMATS[options.saved_format])
    make = norm_columns_triton if uses_kernels(codes) else norm_columns_reference
    return make(q, rstd, weight, bias, amax, options.zero_centered, fmt)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, options, residual):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, maxima, *saved = norm_forward(rows, weight, bias, *options)
        # detach(): autograd forbids in-place operations on a view that a function returns
        y = y.view(x.shape).detach()
        ctx.mark_non_differentiable(*saved, maxima)
        ctx.options = options
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(weight, *saved)
        ctx.set_materialize_grads(False)
        # detach(): autograd forbids in-place additions to a returned view. Keep it last: torch 2.11 miscounts
        # non-differentiable outputs after a None.
        return y, maxima, *saved, x.detach() if residual else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, *rest):
        *_, grad_residual = rest
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        if grad_y is None:
            return grad_residual if needs_x else None, None, None, None, None
        weight, *saved = ctx.saved_tensors
        grads = grad_y.reshape(-1, grad_y.shape[-1]).contiguous(), grad_residual, grad_y.shape
        how = weight, ctx.bias_dtype, ctx.options, (needs_x, needs_weight, needs_bias)
        return *norm_gradients(*grads, saved, *how), None, None


def norm_operands(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: NormOptions,
    scale: PredictedScale,
    group: dist.ProcessGroup | None = None,
    addends: Addends = NO_ADDENDS,
) -> tuple[Quantized, torch.Tensor, Grouped, torch.Tensor]:
    """Returns the norm's output as row-major FP8 codes only, quantized at once: (operands, the amax over the
    ranks of `group`, the saved input, rstd).

    x: [rows, h], contiguous. If it is the sum of `addends`, the sum is written to its memory.
    """
    if uses_kernels(x):
        *arithmetic, saved_format = options
        q, rstd = empty_saved(x, saved_format)
        write = functools.partial(launch_forward, x, weight, bias, q, rstd, *arithmetic, addends)
    else:
        if addends is not NO_ADDENDS:
            x.copy_(residual_add_reference(*addends))
        y, _, q, rstd = norm_forward_reference(x, weight, bias, *options)
        write = functools.partial(write_reference, y, fmt=scale.fmt)
    return *quantize_predicted(write, scale, x.shape, x.device, group=group), q, rstd


def normalize(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: NormOptions,
    *,
    residual: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm or LayerNorm over the last dimension. RMSNorm saves x, and LayerNorm x - mean(x), in groups of
    16; both save rstd in FP32.

    Args:
        x: [..., h], BF16 or FP32.
        weight, bias: [h], BF16 or FP32. The bias is None for RMSNorm and may be None for LayerNorm.
        residual: also return x, passed through this node in the same memory. The gradient of an operation
            that reads this x is added inside the norm's backward, which saves a pass.

    Returns y, in x's shape and dtype, with its maxima and, if something is trained, its origin; with
    `residual` (y, x). Raises ValueError if the weight or the bias and x have different widths.
    """
    width = x.shape[-1:]
    if weight.shape != width or (bias is not None and bias.shape != width):
        found = "" if bias is None else f", the bias {list(bias.shape)}"
        raise ValueError(
            f"norm: x has shape {list(x.shape)} and the weight {list(weight.shape)}{found}; expected one "
            "element of weight and bias for each column of x"
        )
    inputs = (x, weight) if bias is None else (x, weight, bias)
    refuse_forward_mode(*inputs)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in inputs)):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, maxima, *_ = norm_forward(rows, weight, bias, *options)
        y = with_maxima(y.view(x.shape), maxima)
        return (y, x) if residual else y
    y, maxima, codes, exponent, rstd, passthrough = _Norm.apply(x, weight, bias, options, residual)
    parameters = weight.detach(), None if bias is None else bias.detach()
    guarded = ((parameters[0], weight._version),)
    if bias is not None:
        guarded = *guarded, (parameters[1], bias._version)

    def columns(codes, exponent, rstd, amax, fmt: Fp8Format) -> Quantized:
        for t, version in guarded:
            if t._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    "operation: a weight or bias of a norm, needed to recompute a linear layer's input, "
                    f"{t.dtype} {list(t.shape)}, is at version {t._version}; expected version {version}."
                )
        return norm_columns((codes, exponent, rstd), *parameters, amax, options, fmt)

    y = with_maxima(with_origin(y, Origin((codes, exponent, rstd), columns, guarded)), maxima)
    return (y, passthrough) if residual else y
