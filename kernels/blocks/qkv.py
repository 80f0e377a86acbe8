"""The layer before attention in one autograd function: norm, qkv projection and rotary positions, with or
without attention."""

from collections.abc import Callable

import torch

from coat_kernels.autograd.derivatives import once_differentiable
from coat_kernels.autograd.origin import with_maxima
from coat_kernels.blocks.options import NormOptions
from coat_kernels.device import require_fp8
from coat_kernels.groups.reference import GROUP_FORMATS, Grouped
from coat_kernels.linear.op import LinearOptions, gathered_columns, multiply, multiply_backward
from coat_kernels.norm.op import norm_columns, norm_gradients, norm_operands
from coat_kernels.rope.op import rotate_qkv_backward_operands, rotate_qkv_forward
from coat_kernels.tensorwise.transpose import transpose_codes


def _norm_backward(grad_y, grad_residual, kept, weight, bias, norm: NormOptions, needs_x: bool):
    """The gradients of x, with its maxima noted, of the weight, and of the bias or None. Inputs: the
    gradients of y [rows, h] and of the residual [s, b, h]."""
    residual = grad_residual.reshape(grad_y.shape).contiguous()
    codes, exponent, rstd = kept
    options = norm.layer_norm, norm.zero_centered, norm.group_size
    q = Grouped(codes, exponent, GROUP_FORMATS[norm.saved_format])
    grad_x, maxima, grad_weight, grad_bias = norm_gradients(
        grad_y, residual, q, rstd, weight, bias, options, needs_x
    )
    if needs_x:
        grad_x = with_maxima(grad_x.view(grad_residual.shape), maxima)
    return grad_x, grad_weight, grad_bias


def _qkv_forward(x, norm_weight, norm_bias, weight, bias, cos, sin, trains, norm, linear, *heads):
    """(q, k, v), and the tensors saved for backward."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y, largest_y, kept, rstd = norm_operands(
        rows, norm_weight, norm_bias, norm.arithmetic, norm.saved_format, linear.x_scale, linear.input_group
    )
    w, largest_w = linear.cache.forward(weight, linear.formats.forward, trains)
    mixed = multiply(y.rows, y.scale, w, bias, x.dtype, linear)
    qkv = rotate_qkv_forward.eager(mixed.view(-1, x.shape[1], mixed.shape[1]), cos, sin, *heads)
    return qkv, (norm_weight, norm_bias, weight, bias, cos, sin, *kept.tensors, rstd, largest_y, largest_w)


def _normed_again(saved, norm: NormOptions, linear: LinearOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm's output, which is the input of `linear`, recomputed column-major, and its scale."""
    norm_weight, norm_bias, *_, codes, exponent, rstd, largest_y, _ = saved
    return norm_columns.eager(
        codes, exponent, rstd, norm_weight, norm_bias, largest_y, norm.zero_centered, norm.group_size,
        norm.saved_format, linear.formats.forward.name,
    )  # fmt: skip


def _qkv_again(columns, scale, saved, batch: int, dtype, linear: LinearOptions, *heads):
    """(q, k, v), recomputed from the column-major output of the norm."""
    _, _, weight, bias, cos, sin, codes, *_, largest_w = saved
    tokens, h = codes.shape
    rows = transpose_codes(columns)[:tokens, :h]
    w = linear.cache.rows(weight, largest_w, linear.formats.forward)
    mixed = multiply(rows, scale, w, bias, dtype, linear)
    return rotate_qkv_forward.eager(mixed.view(-1, batch, mixed.shape[1]), cos, sin, *heads)


def _qkv_backward(dq, dk, dv, grad_residual, columns, saved, norm, linear, apart: bool, needs_x: bool):
    """The gradients of x, of both parameters of the norm, of weight and of bias. `columns`: the norm's output
    and its scale, from `_normed_again`."""
    norm_weight, norm_bias, weight, bias, cos, sin, *kept, _, largest_w = saved
    # in a list, so the GEMMs can free parts of it as soon as they are used
    grad = [rotate_qkv_backward_operands(dq, dk, dv, cos, sin, linear.grad_scale, bias is not None, apart)]
    grad_bias = None if bias is None else grad[0].sums.to(bias.dtype)
    columns = gathered_columns(*columns, kept[0].shape[0], linear)
    w = [linear.cache.columns(weight, largest_w, linear.formats.forward)]
    grad_y, grad_weight = multiply_backward(grad.pop(), weight, w.pop(), columns, grad_residual.dtype, linear)
    grad_x, grad_norm_weight, grad_norm_bias = _norm_backward(
        grad_y(), grad_residual, kept, norm_weight, norm_bias, norm, needs_x
    )
    return grad_x, grad_norm_weight, grad_norm_bias, grad_weight, grad_bias


class _QkvBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, weight, bias, cos, sin, options):
        qkv, saved = _qkv_forward(x, norm_weight, norm_bias, weight, bias, cos, sin, *options)
        ctx.options = options[1:]
        ctx.save_for_backward(*saved)
        # detach(): autograd forbids in-place additions to a view that a function returns
        return *qkv, x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv, grad_residual):
        saved, (norm, linear, _, _, apart) = ctx.saved_tensors, ctx.options
        columns = _normed_again(saved, norm, linear)
        needs_x = ctx.needs_input_grad[0]
        found = _qkv_backward(dq, dk, dv, grad_residual, columns, saved, norm, linear, apart, needs_x)
        return *found, None, None, None


class _AttentionBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, weight, bias, cos, sin, options, attend, *beside):
        qkv, saved = _qkv_forward(x, norm_weight, norm_bias, weight, bias, cos, sin, *options)
        ctx.options, ctx.attend = options[1:], attend
        ctx.batch, ctx.beside = x.shape[1], len(beside)
        ctx.save_for_backward(*beside, *saved)
        return attend(*qkv, *beside), x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o, grad_residual):
        tensors, (norm, linear, *heads) = ctx.saved_tensors, ctx.options
        beside, saved = tensors[: ctx.beside], tensors[ctx.beside :]
        columns = _normed_again(saved, norm, linear)
        qkv = _qkv_again(*columns, saved, ctx.batch, grad_o.dtype, linear, *heads)
        with torch.enable_grad():
            qkv = tuple(t.requires_grad_() for t in qkv)
            # Separate leaves. With the original parameters, a parameter's hook would run here and again after
            # this function, and a parameter that appears twice would get its full gradient twice.
            beside = [t.detach().requires_grad_() if t.requires_grad else t for t in beside]
            trained = [t for t in beside if t.requires_grad]
            o = ctx.attend(*qkv, *beside)
            grads = list(torch.autograd.grad(o, (*qkv, *trained), grad_o))
        del qkv, o
        of_beside = [grads.pop(3) if t.requires_grad else None for t in beside]
        needs_x = ctx.needs_input_grad[0]
        found = _qkv_backward(*grads, grad_residual, columns, saved, norm, linear, heads[-1], needs_x)
        return *found, None, None, None, None, *of_beside


def qkv_block(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    norm: NormOptions,
    linear: LinearOptions,
    groups: int,
    d: int,
    apart: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns queries, keys and values of `x`, and `x` itself, which the residual addition must read in place
    of its input.

    Args:
        x: [s, b, h], BF16 or FP32, with a gradient.
        norm_weight, norm_bias: [h]; the bias is None for RMSNorm and may be None for LayerNorm.
        weight, bias: of the fused projection, [groups * (m + 2) * d, h] and [groups * (m + 2) * d] or None.
        cos, sin: as in `rotate_qkv`.
        linear: options with both scales given.
        groups, d: number of key-value groups on this rank, and of channels per head.
        apart: in the projection's output all queries come first, then all keys, then all values.

    Returns q [s, b, groups * m, d], k and v [s, b, groups, d], under sequence parallelism of the whole
    sequence. The gradient of the returned x is added inside the norm's backward.
    """
    if x.is_cuda:
        require_fp8(x.device)
    # a cached copy is for training only
    trains = linear.cache.keep == "none" or torch.is_grad_enabled()
    options = trains, norm, linear, groups, d, apart
    return _QkvBlock.apply(x, norm_weight, norm_bias, weight, bias, cos, sin, options)


def attention_block(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    norm: NormOptions,
    linear: LinearOptions,
    groups: int,
    d: int,
    apart: bool = False,
    attend: Callable[..., torch.Tensor],
    beside: tuple[torch.Tensor, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """`qkv_block` and attention in one function. It saves no queries, keys, values and attention output.

    Backward recomputes queries, keys and values from the saved x, by one more GEMM, and runs attention again.
    attend(q, k, v, *beside) is attention. It must return the same result each time, so it cannot have
    dropout. `beside` are saved tensors: constants that attention reads, such as a mask, and parameters of its
    own.

    Returns attention's output, and x, which the residual addition must read in place of its input.
    """
    if x.is_cuda:
        require_fp8(x.device)
    options = torch.is_grad_enabled(), norm, linear, groups, d, apart
    return _AttentionBlock.apply(x, norm_weight, norm_bias, weight, bias, cos, sin, options, attend, *beside)
