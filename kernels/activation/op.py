"""The activations as autograd functions.

The output carries its origin and its maxima. With the origin, the next projection saves nothing. With the
maxima, quantizing needs no extra read to find the scale. The gradient carries its maxima, too.
"""

import functools

import torch

from coat_kernels.activation import kernels
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
from coat_kernels.fp8 import Fp8Format, fp8_format
from coat_kernels.groups.reference import DEFAULT_FORMAT, GROUP_FORMATS, GROUP_SIZE, Grouped, empty_grouped
from coat_kernels.ops import compilable, without_none
from coat_kernels.prepared import cdiv
from coat_kernels.tensorwise.predicted import PredictedScale, quantize_predicted, write_reference
from coat_kernels.tensorwise.quantize import Quantized
from coat_kernels.tensorwise.transpose import empty_columns


def _maxima_fake(y: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    tiles = cdiv(y.shape[0], rows) * cdiv(y.shape[1], columns)
    return y.new_empty(tiles if uses_kernels(y) else y.shape[0], dtype=torch.float32)


def _forward_fake(x, kind, gated, saved_format):
    rows, f = x.shape[0], x.shape[1] // (1 + gated)
    y = x.new_empty(rows, f)
    maxima = _maxima_fake(y, kernels.FORWARD_ROWS, kernels.FORWARD_COLUMNS)
    if not saved_format:
        return without_none(y, maxima, None, None, like=x)
    return y, maxima, *empty_grouped(rows, f, GROUP_SIZE, saved_format, x.device, 1 + gated).tensors


@compilable(_forward_fake)
def activation_forward(
    x: torch.Tensor, kind: str, gated: bool, saved_format: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, maxima, codes, exponent) of a contiguous x; without `saved_format` the last two are empty."""
    forward = activation_forward_triton if uses_kernels(x) else activation_forward_reference
    y, maxima, q = forward(x, kind, gated, saved_format)
    return without_none(y, maxima, *(q.tensors if saved_format else (None, None)), like=x)


def _backward_fake(grad_y, codes, exponent, kind, gated, saved_format):
    maxima = _maxima_fake(grad_y, kernels.BACKWARD_ROWS, kernels.BACKWARD_COLUMNS)
    return grad_y.new_empty(codes.shape), maxima


@compilable(_backward_fake)
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


def _columns_fake(codes, exponent, largest, kind, gated, saved_format, fmt):
    rows, f = codes.shape[0], codes.shape[1] // (1 + gated)
    return empty_columns(rows, f, fp8_format(fmt), codes.device), largest.new_empty(1)


@compilable(_columns_fake)
def activation_columns(
    codes: torch.Tensor,
    exponent: torch.Tensor,
    largest: torch.Tensor,
    kind: str,
    gated: bool,
    saved_format: str,
    fmt: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(column-major codes, scale) of y, recomputed."""
    make = activation_columns_triton if uses_kernels(codes) else activation_columns_reference
    q = Grouped(codes, exponent, GROUP_FORMATS[saved_format])
    made = make(q, largest, kind, gated, fp8_format(fmt))
    return made.columns, made.scale


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kind, gated, saved_format):
        rows, options = x.reshape(-1, x.shape[-1]).contiguous(), (kind, gated, saved_format)
        shape = *x.shape[:-1], x.shape[-1] // (1 + gated)
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
            return (None,) * 4
        grads = grad_y.reshape(-1, grad_y.shape[-1]).contiguous()
        grad_x, maxima = activation_backward(grads, *ctx.saved_tensors, *ctx.options)
        return with_maxima(grad_x.view(ctx.shape), maxima), *(None,) * 3


def activation_operands(
    x: torch.Tensor,
    options: tuple[str, bool],
    saved_format: str | None,
    scale: PredictedScale,
) -> tuple[Quantized, torch.Tensor, Grouped | None]:
    """Returns the activation's output as row-major FP8 codes only, quantized at once: (operands, the amax,
    the saved input, None if `saved_format` is None).

    x: [rows, f or 2 f], contiguous.
    options: kind, gated.
    """
    rows, f = x.shape[0], x.shape[1] // (1 + options[1])
    if uses_kernels(x):
        saved = (
            empty_grouped(rows, f, GROUP_SIZE, saved_format, x.device, 1 + options[1])
            if saved_format
            else None
        )

        def write(out, scales):
            return launch_forward(x, saved, *options, out=out, scales=scales)
    else:
        y, _, saved = activation_forward_reference(x, *options, saved_format)
        write = functools.partial(write_reference, y, fmt=scale.fmt)
    return *quantize_predicted(write, scale, (rows, f), x.device), saved


def activation_backward_operands(
    grad_y: torch.Tensor, q: Grouped, options: tuple[str, bool], scale: PredictedScale, sums: bool
) -> Quantized:
    """Returns the gradient of the activation's input as row-major and column-major FP8 codes only, with its
    column sums if `sums`.

    grad_y: [rows, f], contiguous.
    q: the saved input.
    options: kind, gated.
    """
    if uses_kernels(grad_y):

        def write(out, scales):
            return launch_backward(grad_y, q, *options, out=out, scales=scales)
    else:
        grad_x, _ = activation_backward_reference(grad_y, q, *options)
        write = functools.partial(write_reference, grad_x, fmt=scale.fmt)
    how = {"columns": True, "sums": sums, "finds_largest": False}
    return quantize_predicted(write, scale, q.codes.shape, grad_y.device, **how)[0]


def activation(
    x: torch.Tensor,
    kind: str,
    *,
    gated: bool,
    saved_format: str = DEFAULT_FORMAT,
) -> torch.Tensor:
    """a(x) of `x` [..., f]; if `gated`, a(gate) * up of `x` [..., 2 f], where gate comes before up.

    Args:
        x: BF16 or FP32. Saved for backward in groups of 16.
        kind: the function a, one of `KINDS`.
        saved_format: one of `coat_kernels.groups.GROUP_FORMATS`.

    Returns [..., f] in x's dtype, with its maxima and, if x requires a gradient, its origin. Raises
    ValueError for an unknown kind, and if gate and up differ in size.
    """
    if kind not in KINDS:
        raise ValueError(f"activation: expected one of {', '.join(KINDS)}; found {kind!r}")
    if gated and x.shape[-1] % 2:
        raise ValueError(f"activation: expected gate and up side by side, found {x.shape[-1]} columns")
    refuse_forward_mode(x)
    if not (torch.is_grad_enabled() and x.requires_grad):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, maxima, *_ = activation_forward(rows, kind, gated, None)
        return with_maxima(y.view(*x.shape[:-1], y.shape[1]), maxima)
    y, maxima, codes, exponent = _Activation.apply(x, kind, gated, saved_format)

    def columns(codes, exponent, largest, fmt: Fp8Format) -> Quantized:
        made = activation_columns(codes, exponent, largest, kind, gated, saved_format, fmt.name)
        return Quantized(None, *made)

    return with_maxima(with_origin(y, Origin((codes, exponent), columns)), maxima)
