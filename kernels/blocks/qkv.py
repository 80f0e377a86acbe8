"""The layer before attention in one autograd function: norm, qkv projection and rotary positions, with or
without attention."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from coat_kernels.autograd.derivatives import once_differentiable
from coat_kernels.device import require_fp8
from coat_kernels.fp8 import E4M3
from coat_kernels.linear.op import LinearOptions, gathered_columns, multiply, multiply_backward
from coat_kernels.norm.op import NormOptions, norm_columns, norm_gradients, norm_operands
from coat_kernels.rope.op import rotate_qkv_backward_operands, rotate_qkv_forward
from coat_kernels.tensorwise.quantize import Quantized
from coat_kernels.tensorwise.transpose import transpose_codes
from coat_kernels.weights import Weights


class QkvOptions(NamedTuple):
    """The options of the block: everything except its tensors and its attention."""

    norm: NormOptions
    linear: LinearOptions
    """With both scales given."""
    kv_groups: int
    """Number of key-value groups on this rank."""
    d: int
    """Channels of a head."""
    stacked: bool = False
    """In the projection's output all queries come first, then all keys, then all values."""


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
    amax_y: torch.Tensor
    amax_w: torch.Tensor
    weights: Weights

    def normed(self, options: QkvOptions) -> Quantized:
        """The norm's output, which is the projection's input, recomputed column-major."""
        saved = self.codes, self.exponent, self.rstd
        return norm_columns(saved, self.norm_weight, self.norm_bias, self.amax_y, options.norm, E4M3)


# number of saved tensors before the weights
_FIXED = len(_Saved._fields) - 1


def _qkv_forward(
    x, norm_weight, norm_bias, bias, cos, sin, weights: Weights, options: QkvOptions, trains: bool
):
    """(q, k, v), and the tensors of `_Saved`. trains: as in `WeightCache.forward`."""
    linear, rows = options.linear, x.reshape(-1, x.shape[-1]).contiguous()
    y, amax_y, saved, rstd = norm_operands(
        rows, norm_weight, norm_bias, options.norm, linear.x_scale, linear.input_group
    )
    w, amax_w = linear.cache.forward(weights, trains)
    mixed = multiply(y.rows, y.scale, w, bias, x.dtype, linear)
    mixed = mixed.view(-1, x.shape[1], mixed.shape[1])
    qkv = rotate_qkv_forward(mixed, cos, sin, options.kv_groups, options.d, options.stacked)
    parameters = norm_weight, norm_bias, bias, cos, sin
    return qkv, (*parameters, *saved.tensors, rstd, amax_y, amax_w, *weights)


def _recompute_qkv(y: Quantized, saved: _Saved, batch: int, dtype, options: QkvOptions):
    """(q, k, v), recomputed from the column-major output of the norm."""
    linear, (tokens, h) = options.linear, saved.codes.shape
    rows = transpose_codes(y.columns)[:tokens, :h]
    w = linear.cache.rows(saved.weights, saved.amax_w)
    mixed = multiply(rows, y.scale, w, saved.bias, dtype, linear)
    mixed = mixed.view(-1, batch, mixed.shape[1])
    return rotate_qkv_forward(mixed, saved.cos, saved.sin, options.kv_groups, options.d, options.stacked)


def _attention_backward(
    attend: Callable, qkv: Sequence[torch.Tensor], extra: Sequence[torch.Tensor], grad_o: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The gradients of q, k and v, and of `extra`, by running attention again."""
    with torch.enable_grad():
        qkv = tuple(t.requires_grad_() for t in qkv)
        # Separate leaves. With the original parameters, a parameter's hook would run here and again after
        # this function, and a parameter that appears twice would get its full gradient twice.
        extra = [t.detach().requires_grad_() if t.requires_grad else t for t in extra]
        trained = [t for t in extra if t.requires_grad]
        grads = list(torch.autograd.grad(attend(*qkv, *extra), (*qkv, *trained), grad_o))
    return grads[:3], [grads.pop(3) if t.requires_grad else None for t in extra]


def _qkv_backward(dq, dk, dv, grad_residual, y: Quantized, saved: _Saved, options: QkvOptions, needs_x: bool):
    """The gradients of x, of both parameters of the norm and of the bias, and those of the weights. y: the
    norm's output, column-major."""
    weights, bias, linear = saved.weights, saved.bias, options.linear
    # in a list, so the GEMMs can free parts of it as soon as they are used
    grad = [
        rotate_qkv_backward_operands(
            dq, dk, dv, saved.cos, saved.sin, linear.grad_scale, bias is not None, options.stacked
        )
    ]
    grad_bias = None if bias is None else grad[0].sums.to(bias.dtype)
    columns = gathered_columns(y, saved.codes.shape[0], linear)
    w = [linear.cache.columns(weights, saved.amax_w)]
    grad_y, grads = multiply_backward(grad.pop(), weights, w.pop(), columns, grad_residual.dtype, linear)
    norm_bias, codes = saved.norm_bias, (saved.codes, saved.exponent, saved.rstd)
    bias_dtype, needs_bias = (None, False) if norm_bias is None else (norm_bias.dtype, True)
    how = saved.norm_weight, bias_dtype, options.norm, (needs_x, True, needs_bias)
    found = norm_gradients(grad_y(), grad_residual, grad_residual.shape, codes, *how)
    return (*found, grad_bias), grads


class _QkvBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, bias, cos, sin, call, *tensors):
        """call: the options, whether a backward may follow, attention, and the number of weights. tensors:
        the weights, then the tensors that attention takes after q, k and v."""
        options, trains, attend, count = call
        weights, extra = tensors[:count], tensors[count:]
        qkv, saved = _qkv_forward(x, norm_weight, norm_bias, bias, cos, sin, weights, options, trains)
        ctx.options, ctx.attend, ctx.batch, ctx.end = options, attend, x.shape[1], _FIXED + count
        ctx.save_for_backward(*saved, *extra)
        # detach(): autograd forbids in-place additions to a view that a function returns
        return *(qkv if attend is None else (attend(*qkv, *extra),)), x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        *grads, grad_residual = grads
        tensors, options, of_extra = ctx.saved_tensors, ctx.options, ()
        saved, extra = _Saved(*tensors[:_FIXED], tensors[_FIXED : ctx.end]), tensors[ctx.end :]
        y = saved.normed(options)
        if ctx.attend is not None:
            recomputed = _recompute_qkv(y, saved, ctx.batch, grads[0].dtype, options)
            grads, of_extra = _attention_backward(ctx.attend, recomputed, extra, *grads)
            del recomputed
        needs_x = ctx.needs_input_grad[0]
        found, of_weights = _qkv_backward(*grads, grad_residual, y, saved, options, needs_x)
        return *found, *(None,) * 3, *of_weights, *of_extra


def qkv_block(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    weight: torch.Tensor | Weights,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    options: QkvOptions,
    attend: Callable[..., torch.Tensor] | None = None,
    extra: tuple[torch.Tensor, ...] = (),
) -> tuple[torch.Tensor, ...]:
    """Returns queries, keys and values of `x`, or attention's output, and `x` itself, which the residual
    addition must read in place of its input.

    Args:
        x: [s, b, h], BF16 or FP32.
        norm_weight, norm_bias: [h]; the bias is None for RMSNorm and may be None for LayerNorm.
        weight, bias: of the fused projection, [kv_groups * (m + 2) * d, h] and [kv_groups * (m + 2) * d] or
            None. The weight may be several, as in `fp8_linear`.
        cos, sin: as in `rotate_qkv`.
        attend: attend(q, k, v, *extra) is attention, part of the block. Backward recomputes queries, keys
            and values from the saved x, by one more GEMM, and runs attention again. So it must return the
            same result each time, and cannot have dropout. The block then saves no queries, keys, values and
            attention output.
        extra: saved tensors: constants that attention reads, such as a mask, and parameters of its own.

    Returns (q, k, v, x) with q [s, b, kv_groups * m, d], k and v [s, b, kv_groups, d], under sequence
    parallelism of the whole sequence; or, with `attend`, (attention's output, x). The gradient of the
    returned x is added inside the norm's backward.
    """
    if x.is_cuda:
        require_fp8(x.device)
    weights = weight if isinstance(weight, tuple) else (weight,)
    tensors = x, norm_weight, norm_bias, bias, cos, sin
    call = options, torch.is_grad_enabled(), attend, len(weights)
    return _QkvBlock.apply(*tensors, call, *weights, *extra)
