"""The norms as autograd functions.

The output carries its origin and its maxima. With the origin, the next linear layer saves nothing. With the
maxima, quantizing needs no extra read to find the scale. The gradient carries its maxima, too.
"""

import functools
from typing import NamedTuple

import torch
import torch.distributed as dist

from coat_kernels.autograd.derivatives import once_differentiable, refuse_forward_mode
from coat_kernels.autograd.origin import Origin, with_maxima, with_origin
from coat_kernels.device import uses_kernels
from coat_kernels.fp8 import Fp8Format, fp8_format
from coat_kernels.groups.reference import DEFAULT_FORMAT, GROUP_FORMATS, GROUP_SIZE, Grouped, empty_grouped
from coat_kernels.norm.kernels import (
    backward_programs,
    empty_saved,
    forward_programs,
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
from coat_kernels.ops import compilable, without_none
from coat_kernels.tensorwise.predicted import PredictedScale, quantize_predicted, write_reference
from coat_kernels.tensorwise.quantize import Quantized
from coat_kernels.tensorwise.transpose import empty_columns


class NormOptions(NamedTuple):
    """How a norm computes and saves its input; fields are the arguments of `rms_norm`, in the order of
    `norm_forward`."""

    eps: float
    layer_norm: bool
    zero_centered: bool
    saved_format: str


def _forward_fake(x, weight, bias, eps, layer_norm, zero_centered, saved_format):
    rows, h = x.shape
    maxima = x.new_empty(forward_programs(rows, int(h)) if uses_kernels(x) else rows, dtype=torch.float32)
    q = empty_grouped(rows, h, GROUP_SIZE, saved_format, x.device)
    return torch.empty_like(x), maxima, *q.tensors, x.new_empty(rows, dtype=torch.float32)


@compilable(_forward_fake)
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


def _backward_fake(grad_y, grad_residual, codes, exponent, rstd, *rest):
    (rows, h), (*_, needs_x, needs_weight, needs_bias) = grad_y.shape, rest
    programs = backward_programs(rows, int(h)) if uses_kernels(grad_y) else rows
    return without_none(
        torch.empty_like(grad_y) if needs_x else None,
        rstd.new_empty(programs) if needs_x else None,
        rstd.new_empty(h) if needs_weight else None,
        rstd.new_empty(h) if needs_bias else None,
        like=grad_y,
    )


@compilable(_backward_fake)
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (grad_x, maxima, grad_weight, grad_bias), empty where not needed; gradients are contiguous."""
    saved = grad_y, grad_residual, Grouped(codes, exponent, GROUP_FORMATS[saved_format]), rstd, weight
    options = layer_norm, zero_centered
    needs = needs_x, needs_x, needs_weight, needs_bias
    if uses_kernels(grad_y):
        found = norm_backward_triton(*saved, *options, *needs[1:])
    else:
        found = norm_backward_reference(*saved, *options)
    return without_none(*(f if need else None for f, need in zip(found, needs, strict=True)), like=grad_y)


def norm_gradients(grad_y, grad_residual, saved, weight, bias, options: NormOptions, needs_x: bool = True):
    """The gradients of x, with its maxima noted, of the weight and of the bias, in their dtypes; None for an
    absent bias, and for x if it is not needed.

    Inputs: the gradients of y [rows, h] and of the residual [s, b, h], and the saved codes, exponent and
    rstd.
    """
    codes, exponent, rstd = saved
    q = Grouped(codes, exponent, GROUP_FORMATS[options.saved_format])
    inputs = grad_y, grad_residual.reshape(grad_y.shape).contiguous(), q, rstd, weight
    how = options.layer_norm, options.zero_centered
    if uses_kernels(grad_y):
        same = bias is None or bias.dtype == weight.dtype
        found = norm_backward_triton(*inputs, *how, needs_x, True, bias is not None, same)
    else:
        found = norm_backward_reference(*inputs, *how)
    grad_x, maxima, grad_weight, grad_bias = found
    grad_bias = None if bias is None else grad_bias.to(bias.dtype)
    grad_x = with_maxima(grad_x.view(grad_residual.shape), maxima) if needs_x else None
    return grad_x, grad_weight.to(weight.dtype), grad_bias


def _columns_fake(codes, exponent, rstd, weight, bias, largest, zero_centered, saved_format, fmt):
    return empty_columns(*codes.shape, fp8_format(fmt), codes.device), largest.new_empty(1)


@compilable(_columns_fake)
def norm_columns(
    codes: torch.Tensor,
    exponent: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    largest: torch.Tensor,
    zero_centered: bool,
    saved_format: str,
    fmt: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(column-major codes, scale) of y, recomputed."""
    make = norm_columns_triton if uses_kernels(codes) else norm_columns_reference
    q = Grouped(codes, exponent, GROUP_FORMATS[saved_format])
    made = make(q, rstd, weight, bias, largest, zero_centered, fp8_format(fmt))
    return made.columns, made.scale


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
        grad_residual, options = rest[-1], ctx.options
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        if grad_y is None:
            return grad_residual if needs_x else None, None, None, None, None
        weight, *saved = ctx.saved_tensors
        h = grad_y.shape[-1]
        grad_x, maxima, grad_weight, grad_bias = norm_backward(
            grad_y.reshape(-1, h).contiguous(),
            None if grad_residual is None else grad_residual.reshape(-1, h).contiguous(),
            *saved,
            weight,
            options.layer_norm,
            options.zero_centered,
            options.saved_format,
            needs_x,
            needs_weight,
            needs_bias,
        )
        return (
            with_maxima(grad_x.view(grad_y.shape), maxima) if needs_x else None,
            grad_weight.to(weight.dtype) if needs_weight else None,
            grad_bias.to(ctx.bias_dtype) if needs_bias else None,
            None,
            None,
        )


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

        def write(out, scales):
            # the first launch writes the sum, the second reads it
            summed = addends if scales.maxima is None else NO_ADDENDS
            how = {"out": out, "scales": scales, "addends": summed}
            return launch_forward(x, weight, bias, q, rstd, *arithmetic, **how)
    else:
        if addends is not NO_ADDENDS:
            x.copy_(residual_add_reference(*addends))
        y, _, q, rstd = norm_forward_reference(x, weight, bias, *options)
        write = functools.partial(write_reference, y, fmt=scale.fmt)
    return *quantize_predicted(write, scale, x.shape, x.device, group=group), q, rstd


def _norm(x, weight, bias, options: NormOptions, residual: bool):
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
    y, maxima, codes, exponent, rstd, handed_on = _Norm.apply(x, weight, bias, options, residual)
    parameters = weight.detach(), None if bias is None else bias.detach()
    guarded = ((parameters[0], weight._version),)
    if bias is not None:
        guarded = *guarded, (parameters[1], bias._version)

    def columns(codes, exponent, rstd, largest, fmt: Fp8Format) -> Quantized:
        for t, version in guarded:
            if t._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    "operation: a weight or bias of a norm, needed to recompute a linear layer's input, "
                    f"{t.dtype} {list(t.shape)}, is at version {t._version}; expected version {version}."
                )
        how = options.zero_centered, options.saved_format, fmt.name
        return Quantized(None, *norm_columns(codes, exponent, rstd, *parameters, largest, *how))

    y = with_maxima(with_origin(y, Origin((codes, exponent, rstd), columns, guarded)), maxima)
    return (y, handed_on) if residual else y


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
    saved_format: str = DEFAULT_FORMAT,
    residual: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over the last dimension. Saves x in groups of 16, and rstd in FP32.

    Args:
        x: [..., h], BF16 or FP32.
        weight: [h], BF16 or FP32.
        zero_centered: the weight is w + 1.
        saved_format: one of `coat_kernels.groups.GROUP_FORMATS`.
        residual: also return x, passed through this node in the same memory. The gradient of an operation
            that reads this x is added inside the norm's backward, which saves a pass.

    Returns y, in x's shape and dtype, with its maxima and, if something is trained, its origin; with
    `residual` (y, x). Raises ValueError if the weight and x have different widths.
    """
    options = NormOptions(eps, False, zero_centered, saved_format)
    return _norm(x, weight, None, options, residual)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    saved_format: str = DEFAULT_FORMAT,
    residual: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm over the last dimension. Saves x - mean(x); otherwise like `rms_norm`. bias: [h] or None."""
    options = NormOptions(eps, True, zero_centered, saved_format)
    return _norm(x, weight, bias, options, residual)
