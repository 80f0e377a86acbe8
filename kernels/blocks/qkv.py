"""The layer before attention in one autograd function: norm, qkv projection and rotary positions, with or
without attention."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from coat_kernels.autograd.derivatives import once_differentiable
from coat_kernels.device import require_fp8
from coat_kernels.linear.op import LinearOptions, gathered_columns, multiply, multiply_backward
from coat_kernels.norm.op import NormOptions, norm_columns, norm_gradients, norm_operands
from coat_kernels.rope.op import rotate_qkv_backward_operands, rotate_qkv_forward
from coat_kernels.tensorwise.transpose import transpose_codes
from coat_kernels.weights import Weights

# groups, d and apart
Heads = tuple[int, int, bool]


class _Saved(NamedTuple):
    """The tensors that are saved for backward."""

    norm_weight: torch.Tensor
    norm_bias: torch.Tensor | None
    bias: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    codes: torch.Tensor
    exponent: torch.Tensor
    rstd: torch.Tensor
    largest_y: torch.Tensor
    largest_w: torch.Tensor
    weights: Weights

    def normed(self, norm: NormOptions, linear: LinearOptions) -> tuple[torch.Tensor, torch.Tensor]:
        """`normed_again` of these tensors."""
        saved = self.codes, self.exponent, self.rstd, self.norm_weight, self.norm_bias, self.largest_y
        return normed_again(*saved, norm, linear)


# number of saved tensors before the weights
_BEFORE = len(_Saved._fields) - 1


def normed_again(
    codes, exponent, rstd, weight, bias, largest, norm: NormOptions, linear: LinearOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm's output, which is the input of `linear`, recomputed column-major, and its scale."""
    how = norm.zero_centered, norm.saved_format, linear.formats.forward.name
    return norm_columns.eager(codes, exponent, rstd, weight, bias, largest, *how)


def _qkv_forward(
    x, norm_weight, norm_bias, bias, cos, sin, weights: Weights, norm: NormOptions, linear: LinearOptions,
    heads: Heads, may_train: bool,
):  # fmt: skip
    """(q, k, v), and the tensors of `_Saved`. may_train: a backward may follow, so a
    cached copy of the weights may be used."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y, largest_y, saved, rstd = norm_operands(
        rows, norm_weight, norm_bias, norm, linear.x_scale, linear.input_group
    )
    w, largest_w = linear.cache.forward(weights, linear.formats.forward, may_train)
    mixed = multiply(y.rows, y.scale, w, bias, x.dtype, linear)
    qkv = rotate_qkv_forward.eager(mixed.view(-1, x.shape[1], mixed.shape[1]), cos, sin, *heads)
    parameters = norm_weight, norm_bias, bias, cos, sin
    return qkv, (*parameters, *saved.tensors, rstd, largest_y, largest_w, *weights)


def _qkv_again(columns, scale, saved: _Saved, batch: int, dtype, linear: LinearOptions, heads: Heads):
    """(q, k, v), recomputed from the column-major output of the norm."""
    tokens, h = saved.codes.shape
    rows = transpose_codes(columns)[:tokens, :h]
    w = linear.cache.rows(saved.weights, saved.largest_w, linear.formats.forward)
    mixed = multiply(rows, scale, w, saved.bias, dtype, linear)
    return rotate_qkv_forward.eager(mixed.view(-1, batch, mixed.shape[1]), saved.cos, saved.sin, *heads)


def _qkv_backward(
    dq, dk, dv, grad_residual, columns, saved: _Saved, norm: NormOptions, linear: LinearOptions, heads: Heads,
    needs_x: bool,
):  # fmt: skip
    """The gradients of x, of both parameters of the norm and of the bias, and those of the weights.
    `columns`: the norm's output and its scale, from `normed_again`."""
    weights, bias, (_, _, apart) = saved.weights, saved.bias, heads
    # in a list, so the GEMMs can free parts of it as soon as they are used
    grad = [
        rotate_qkv_backward_operands(
            dq, dk, dv, saved.cos, saved.sin, linear.grad_scale, bias is not None, apart
        )
    ]
    grad_bias = None if bias is None else grad[0].sums.to(bias.dtype)
    columns = gathered_columns(*columns, saved.codes.shape[0], linear)
    w = [linear.cache.columns(weights, saved.largest_w, linear.formats.forward)]
    grad_y, grads = multiply_backward(grad.pop(), weights, w.pop(), columns, grad_residual.dtype, linear)
    grad_x, grad_norm_weight, grad_norm_bias = norm_gradients(
        grad_y(),
        grad_residual,
        (saved.codes, saved.exponent, saved.rstd),
        saved.norm_weight,
        saved.norm_bias,
        norm,
        needs_x,
    )
    return (grad_x, grad_norm_weight, grad_norm_bias, grad_bias), grads


class _QkvBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, bias, cos, sin, options, *weights):
        qkv, saved = _qkv_forward(x, norm_weight, norm_bias, bias, cos, sin, weights, *options)
        *ctx.options, _ = options
        ctx.save_for_backward(*saved)
        # detach(): autograd forbids in-place additions to a view that a function returns
        return *qkv, x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv, grad_residual):
        tensors, (norm, linear, _) = ctx.saved_tensors, ctx.options
        saved = _Saved(*tensors[:_BEFORE], tensors[_BEFORE:])
        columns = saved.normed(norm, linear)
        needs_x = ctx.needs_input_grad[0]
        found, grads = _qkv_backward(dq, dk, dv, grad_residual, columns, saved, *ctx.options, needs_x)
        return *found, None, None, None, *grads


class _AttentionBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, bias, cos, sin, options, attend, count, *tensors):
        """tensors: `count` weights, then the tensors that `attend` takes after q, k and v."""
        weights, beside = tensors[:count], tensors[count:]
        qkv, saved = _qkv_forward(x, norm_weight, norm_bias, bias, cos, sin, weights, *options)
        (*ctx.options, _), ctx.attend, ctx.batch, ctx.end = options, attend, x.shape[1], _BEFORE + count
        ctx.save_for_backward(*saved, *beside)
        return attend(*qkv, *beside), x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o, grad_residual):
        tensors, (norm, linear, heads) = ctx.saved_tensors, ctx.options
        saved, beside = _Saved(*tensors[:_BEFORE], tensors[_BEFORE : ctx.end]), tensors[ctx.end :]
        columns = saved.normed(norm, linear)
        qkv = _qkv_again(*columns, saved, ctx.batch, grad_o.dtype, linear, heads)
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
        found, grads = _qkv_backward(*grads, grad_residual, columns, saved, *ctx.options, needs_x)
        return *found, *(None,) * 5, *grads, *of_beside


def qkv_block(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    weight: torch.Tensor | Weights,
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
        x: [s, b, h], BF16 or FP32.
        norm_weight, norm_bias: [h]; the bias is None for RMSNorm and may be None for LayerNorm.
        weight, bias: of the fused projection, [groups * (m + 2) * d, h] and [groups * (m + 2) * d] or None.
            The weight may be several, as in `fp8_linear`.
        cos, sin: as in `rotate_qkv`.
        linear: options with both scales given.
        groups, d: number of key-value groups on this rank, and of channels per head.
        apart: in the projection's output all queries come first, then all keys, then all values.

    Returns q [s, b, groups * m, d], k and v [s, b, groups, d], under sequence parallelism of the whole
    sequence. The gradient of the returned x is added inside the norm's backward.
    """
    if x.is_cuda:
        require_fp8(x.device)
    options = norm, linear, (groups, d, apart), torch.is_grad_enabled()
    weights = weight if isinstance(weight, tuple) else (weight,)
    return _QkvBlock.apply(x, norm_weight, norm_bias, bias, cos, sin, options, *weights)


def attention_block(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    weight: torch.Tensor | Weights,
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
    options = norm, linear, (groups, d, apart), torch.is_grad_enabled()
    weights = weight if isinstance(weight, tuple) else (weight,)
    inputs = x, norm_weight, norm_bias, bias, cos, sin
    return _AttentionBlock.apply(*inputs, options, attend, len(weights), *weights, *beside)
