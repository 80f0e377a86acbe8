"""The activations as autograd functions.

The output carries its origin and its maxima. With the origin, the next projection saves nothing. With the
maxima, quantizing needs no extra read to find the scale. The gradient carries its maxima, too.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from coat_kernels.activation.kernels import (
    activation_backward_triton,
    activation_columns_triton,
    activation_forward_triton,
    launch_backward,
    launch_forward,
)
from coat_kernels.activation.reference import (
    KINDS,
    activation_backward_reference,
    activation_columns_reference,
    activation_forward_reference,
)
from coat_kernels.autograd.derivatives import once_differentiable, refuse_forward_mode
from coat_kernels.autograd.origin import Origin, with_maxima, with_origin
from coat_kernels.device import uses_kernels
from coat_kernels.fp8 import Fp8Format
from coat_kernels.groups.reference import DEFAULT_FORMAT, GROUP_FORMATS, GROUP_SIZE, Grouped, empty_grouped
from coat_kernels.ops import compilable
from coat_kernels.tensorwise.predicted import PredictedScale, quantize_predicted, write_reference
from coat_kernels.tensorwise.quantize import Quantized


class ActivationOptions(NamedTuple):
    """How an activation computes and saves its input.

    kind: the function a, one of `KINDS`. gated: a(gate) * up. saved_format: one of
    `coat_kernels.groups.GROUP_FORMATS`.
    """

    kind: str
    gated: bool
    saved_format: str = DEFAULT_FORMAT


def _forward_fake(x, kind, gated, saved_format):
    rows, f = x.shape[0], x.shape[1] // (1 + gated)
    saved = None, None
    if saved_format:
        saved = empty_grouped(rows, f, GROUP_SIZE, saved_format, x.device, 1 + gated).tensors
    return x.new_empty(rows, f), None, *saved


@compilable(_forward_fake, unread=1)
def activation_forward(
    x: torch.Tensor, kind: str, gated: bool, saved_format: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, maxima, codes, exponent) of a contiguous x; without `saved_format` the last two are None."""
    forward = activation_forward_triton if uses_kernels(x) else activation_forward_reference
    y, maxima, q = forward(x, kind, gated, saved_format)
    return y, maxima, *(q.tensors if saved_format else (None, None))


@compilable(lambda grad_y, codes, *_: (grad_y.new_empty(codes.shape), None), unread=1)
def activation_backward(
    grad_y: torch.Tensor,
    codes: torch.Tensor,
    exponent: torch.Tensor,
    kind: str,
    gated: bool,
    saved_format: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(grad of x, its maxima) of a contiguous grad_y."""
    backward = activation_backward_triton if uses_kernels(grad_y) else activation_backward_reference
    q = Grouped(codes, exponent, GROUP_FORMATS[saved_format])
    return backward(grad_y, q, kind, gated)


def activation_columns(
    saved: Sequence[torch.Tensor], amax: torch.Tensor, options: ActivationOptions, fmt: Fp8Format
) -> Quantized:
    """y, recomputed from the codes and the exponent that are `saved`, column-major in `fmt`."""
    q = Grouped(*saved, GROUP_FORMATS[options.saved_format])
    make = activation_columns_triton if uses_kernels(q.codes) else activation_columns_reference
    return make(q, amax, options.kind, options.gated, fmt)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, options):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        shape = *x.shape[:-1], x.shape[-1] // (1 + options.gated)
        y, maxima, *saved = activation_forward(rows, *options)
        # detach(): autograd forbids in-place operations on a view that a function returns
        y = y.view(shape).detach()
        ctx.mark_non_differentiable(*saved, maxima)
        ctx.options, ctx.shape = options, x.shape
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return y, maxima, *saved

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, *_):
        if grad_y is None:
            return None, None
        grads = grad_y.reshape(-1, grad_y.shape[-1]).contiguous()
        grad_x, maxima = activation_backward(grads, *ctx.saved_tensors, *ctx.options)
        return with_maxima(grad_x.view(ctx.shape), maxima), None


def activation_operands(
    x: torch.Tensor, options: ActivationOptions, scale: PredictedScale
) -> tuple[Quantized, torch.Tensor, Grouped]:
    """Returns the activation's output as row-major FP8 codes only, quantized at once: (operands, the amax,
    the saved input).

    x: [rows, f or 2 f], contiguous.
    """
    kind, gated, saved_format = options
    rows, f = x.shape[0], x.shape[1] // (1 + gated)
    if uses_kernels(x):
        saved = empty_grouped(rows, f, GROUP_SIZE, saved_format, x.device, 1 + gated)
        write = functools.partial(launch_forward, x, saved, kind, gated)
    else:
        y, _, saved = activation_forward_reference(x, *options)
        write = functools.partial(write_reference, y, fmt=scale.fmt)
    return *quantize_predicted(write, scale, (rows, f), x.device), saved


def activation_backward_operands(
    grad_y: torch.Tensor,
    saved: Sequence[torch.Tensor],
    options: ActivationOptions,
    scale: PredictedScale,
    sums: bool,
) -> Quantized:
    """Returns the gradient of the activation's input as row-major and column-major FP8 codes only, with its
    column sums if `sums`.

    grad_y: [rows, f], contiguous. saved: the codes and the exponent of the input.
    """
    q = Grouped(*saved, GROUP_FORMATS[options.saved_format])
    if uses_kernels(grad_y):
        write = functools.partial(launch_backward, grad_y, q, options.kind, options.gated)
    else:
        grad_x, _ = activation_backward_reference(grad_y, q, options.kind, options.gated)
        write = functools.partial(write_reference, grad_x, fmt=scale.fmt)
    return quantize_predicted(
        write, scale, q.codes.shape, grad_y.device, columns=True, sums=sums, returns_amax=False
    )[0]


def activation(x: torch.Tensor, options: ActivationOptions) -> torch.Tensor:
    """a(x) of `x` [..., f], BF16 or FP32; if gated, a(gate) * up of `x` [..., 2 f], where gate comes before
    up. Saves x for backward in groups of 16.

    Returns [..., f] in x's dtype, with its maxima and, if x requires a gradient, its origin. Raises
    ValueError for an unknown kind, and if gate and up differ in size.
    """
    kind, gated, _ = options
    if kind not in KINDS:
        raise ValueError(f"activation: expected one of {', '.join(KINDS)}; found {kind!r}")
    if gated and x.shape[-1] % 2:
        raise ValueError(f"activation: expected gate and up side by side, found {x.shape[-1]} columns")
    refuse_forward_mode(x)
    if not (torch.is_grad_enabled() and x.requires_grad):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, maxima, *_ = activation_forward(rows, kind, gated, None)
        return with_maxima(y.view(*x.shape[:-1], y.shape[1]), maxima)
    y, maxima, codes, exponent = _Activation.apply(x, options)

    def columns(codes, exponent, amax, fmt: Fp8Format) -> Quantized:
        return activation_columns((codes, exponent), amax, options, fmt)

    return with_maxima(with_origin(y, Origin((codes, exponent), columns)), maxima)
