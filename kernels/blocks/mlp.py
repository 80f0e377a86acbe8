"""The layer after attention in one autograd function: output projection, residual addition, norm, fc1,
activation, fc2 and residual addition."""

from typing import NamedTuple

import torch

from coat_kernels.activation.op import (
    ActivationOptions,
    activation_backward_operands,
    activation_columns,
    activation_operands,
)
from coat_kernels.autograd.derivatives import once_differentiable
from coat_kernels.autograd.origin import Origin
from coat_kernels.device import require_fp8, uses_kernels
from coat_kernels.fp8 import E4M3
from coat_kernels.linear.op import (
    LinearOptions,
    gathered_columns,
    multiply,
    multiply_backward,
    quantized_grad,
)
from coat_kernels.norm.op import NormOptions, norm_columns, norm_gradients, norm_operands
from coat_kernels.norm.residual import Addends
from coat_kernels.parallel import all_reduce
from coat_kernels.tensorwise.operands import fp8_operands
from coat_kernels.tensorwise.quantize import Quantized
from coat_kernels.tensorwise.together import columns_together, rows_together
from coat_kernels.weights import Weights


def _summed(z: torch.Tensor, linear: LinearOptions) -> torch.Tensor:
    """The output of a row-parallel GEMM, all-reduced over the ranks unless a reduce-scatter has summed it."""
    parallel = linear.parallel
    return all_reduce(z, parallel.group)() if parallel and not parallel.sequence else z


def _share_launch(weights: tuple[Weights, ...], linears: tuple[LinearOptions, ...]) -> bool:
    """Whether one launch quantizes the weights of all these GEMMs: on a GPU, if each has a single weight
    without a cached copy, and all have one dtype."""
    if not uses_kernels(weights[0][0]):
        return False
    for (weight, *others), linear in zip(weights, linears, strict=True):
        if (
            others
            or linear.cache.keep != "none"
            or not linear.cache.predicts
            or weight.dtype != weights[0][0].dtype
        ):
            return False
    return True


def _fp8_rows(
    o: torch.Tensor,
    columns: bool,
    weights: tuple[Weights, ...],
    linears: tuple[LinearOptions, ...],
    trains: bool,
) -> list[tuple[Quantized, torch.Tensor]]:
    """The row-major weights of the GEMMs, and `o`, the input of the first GEMM, row-major and, if `columns`,
    also column-major; each with its amax. They share one launch if possible."""
    scale, together = linears[0].x_scale, _share_launch(weights, linears)
    o_joins = together and not columns and type(o) is torch.Tensor and o.dtype == weights[0][0].dtype
    if together:
        xs = [w.contiguous() for (w,) in weights]
        predictions = [linear.cache.prediction() for linear in linears]
        if o_joins:
            xs, predictions = [*xs, o.reshape(-1, o.shape[-1]).contiguous()], [*predictions, scale]
        found = rows_together(xs, predictions, E4M3)
    else:
        pairs = zip(weights, linears, strict=True)
        found = [linear.cache.forward(w, trains) for w, linear in pairs]
    if not o_joins:
        found.append(fp8_operands(o, E4M3, columns=columns, predicted=scale))
    return found


def _fp8_columns(
    weights: tuple[Weights, ...], amaxes: tuple[torch.Tensor, ...], linears: tuple[LinearOptions, ...]
) -> list[Quantized]:
    """The column-major weights of the GEMMs, with the amaxes found by `_fp8_rows`."""
    if _share_launch(weights, linears):
        xs = [w.contiguous() for (w,) in weights]
        return columns_together(xs, amaxes, E4M3)
    return [linear.cache.columns(w, amax) for w, amax, linear in zip(weights, amaxes, linears, strict=True)]


class MlpOptions(NamedTuple):
    """The options of the block: everything except its tensors. Those of linear layers have both scales."""

    proj: LinearOptions
    norm: NormOptions
    fc1: LinearOptions
    activation: ActivationOptions
    fc2: LinearOptions


class _MlpBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, o, residual, w_proj, b_proj, norm_weight, norm_bias, b_fc1, w_fc2, b_fc2, origin, call, *w_fc1
    ):
        """call: the options, and whether a backward may follow."""
        options, trains = call
        proj, norm, fc1, activation, fc2 = options
        h, dtype = residual.shape[-1], residual.dtype
        by_rows = residual.reshape(-1, h).contiguous()

        (rows_proj, amax_proj), (rows_fc1, amax_fc1), (rows_fc2, amax_fc2), (operands, amax_o) = _fp8_rows(
            o, origin is None, ((w_proj,), w_fc1, (w_fc2,)), (proj, fc1, fc2), trains
        )
        # the GEMM adds the bias, unless the outputs of several ranks must be summed first
        bias, late_bias = (b_proj, None) if proj.parallel is None else (None, b_proj)
        z = _summed(multiply(operands.rows, operands.scale, rows_proj, bias, dtype, proj), proj)
        del rows_proj

        # the norm's kernel computes the sum, so no other pass reads it
        x = torch.empty_like(by_rows)
        y, amax_y, saved_x, rstd = norm_operands(
            x,
            norm_weight,
            norm_bias,
            norm,
            fc1.x_scale,
            fc1.input_group,
            Addends(by_rows, z, late_bias),
        )
        del z
        u = multiply(y.rows, y.scale, rows_fc1, b_fc1, dtype, fc1)
        del y, rows_fc1
        p, amax_p, saved_u = activation_operands(u, activation, fc2.x_scale)
        del u
        bias, late_bias = (b_fc2, None) if fc2.parallel is None else (None, b_fc2)
        out = _summed(multiply(p.rows, p.scale, rows_fc2, bias, dtype, fc2), fc2)
        if late_bias is not None:
            out = out + late_bias

        ctx.options, ctx.shape, ctx.count = options, o.shape, len(w_fc1)
        if origin is None:
            ctx.columns_of_o, saved_o = None, (operands.columns, operands.scale)
        else:
            # The origin's tensors are saved, so autograd frees them after backward. Only the function is on
            # the node.
            ctx.columns_of_o, saved_o = origin.columns, (*origin.tensors, amax_o)
        ctx.save_for_backward(
            w_proj, b_proj, norm_weight, norm_bias, b_fc1, w_fc2, b_fc2,
            amax_proj, amax_y, amax_fc1, amax_p, amax_fc2,
            *saved_x.tensors, rstd, *saved_u.tensors, *w_fc1, *saved_o,
        )  # fmt: skip
        return x.view(residual.shape) + out.view(residual.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (w_proj, b_proj, norm_weight, norm_bias, b_fc1, w_fc2, b_fc2,
         amax_proj, amax_y, amax_fc1, amax_p, amax_fc2,
         codes_x, exponent_x, rstd, codes_u, exponent_u, *rest) = ctx.saved_tensors  # fmt: skip
        w_fc1, saved_o = tuple(rest[: ctx.count]), rest[ctx.count :]
        saved_x, saved_u = (codes_x, exponent_x, rstd), (codes_u, exponent_u)
        del rest
        proj, norm, fc1, activation, fc2 = ctx.options
        dtype, tokens = grad.dtype, codes_x.shape[0]

        # operands are in lists, so the GEMMs can free parts of them as soon as they are used
        weights = [fc2.cache.columns((w_fc2,), amax_fc2)]
        operands = [quantized_grad(grad, fc2, sums=b_fc2 is not None and fc2.parallel is None)]
        grad_b_fc2 = None if b_fc2 is None else _bias_grad(b_fc2, operands[0].sums, grad)
        columns = activation_columns(saved_u, amax_p, activation, E4M3)
        columns = gathered_columns(columns, tokens, fc2)
        grad_p, (grad_w_fc2,) = multiply_backward(
            operands.pop(), (w_fc2,), weights.pop(), columns, dtype, fc2
        )
        del columns

        sums = b_fc1 is not None
        operands = [activation_backward_operands(grad_p(), saved_u, activation, fc1.grad_scale, sums)]
        del grad_p
        # not quantized with fc2's weight: memory peaks before this line
        weights = _fp8_columns(((w_proj,), w_fc1), (amax_proj, amax_fc1), (proj, fc1))
        grad_b_fc1 = None if b_fc1 is None else operands[0].sums.to(b_fc1.dtype)
        columns = norm_columns(saved_x, norm_weight, norm_bias, amax_y, norm, E4M3)
        columns = gathered_columns(columns, tokens, fc1)
        grad_y, grads_w_fc1 = multiply_backward(operands.pop(), w_fc1, weights.pop(), columns, dtype, fc1)
        del columns
        bias_dtype, needs = (None, False) if norm_bias is None else (norm_bias.dtype, True)
        grad_x, grad_norm_weight, grad_norm_bias = norm_gradients(
            grad_y(), grad, grad.shape, saved_x, norm_weight, bias_dtype, norm, (True, True, needs)
        )
        del grad_y

        operands = [quantized_grad(grad_x, proj, sums=b_proj is not None and proj.parallel is None)]
        grad_b_proj = None if b_proj is None else _bias_grad(b_proj, operands[0].sums, grad_x)
        if ctx.columns_of_o is None:
            columns = Quantized(None, *saved_o)
        else:
            columns = ctx.columns_of_o(*saved_o, E4M3)
        columns = gathered_columns(columns, tokens, proj)
        grad_o, (grad_w_proj,) = multiply_backward(
            operands.pop(), (w_proj,), weights.pop(), columns, dtype, proj
        )
        return (
            grad_o().view(ctx.shape), grad_x, grad_w_proj, grad_b_proj, grad_norm_weight, grad_norm_bias,
            grad_b_fc1, grad_w_fc2, grad_b_fc2, None, None, *grads_w_fc1,
        )  # fmt: skip


def _bias_grad(bias: torch.Tensor, sums: torch.Tensor | None, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of a row-parallel layer's bias; from the column sums of the output's gradient if there are
    any."""
    return grad.sum_to_size(bias.shape) if sums is None else sums.to(bias.dtype)


def mlp_block(
    o: torch.Tensor,
    residual: torch.Tensor,
    w_proj: torch.Tensor,
    b_proj: torch.Tensor | None,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    w_fc1: torch.Tensor | Weights,
    b_fc1: torch.Tensor | None,
    w_fc2: torch.Tensor,
    b_fc2: torch.Tensor | None,
    options: MlpOptions,
    origin: Origin | None,
) -> torch.Tensor:
    """The layer from attention's output on: x = residual + proj(o); returns x + fc2(a(fc1(norm(x)))).

    Args:
        o: [s, b, n] or any [..., n] of as many tokens, attention's output; of the whole sequence under
            sequence parallelism.
        residual: [s, b, h], in the dtype of o.
        w_proj, w_fc1, w_fc2: [h, n], [f or 2 f, h], [h, f]: this rank's parts. w_fc1 may be several weights,
            as in `fp8_linear`. Biases have the length of the first dimension, or are None. If several ranks
            hold parts, the biases of proj and fc2 are added after the sum over the ranks.
        origin: how to recompute o; without it o is saved column-major in FP8.

    Returns [s, b, h] in the residual's dtype.
    """
    if o.is_cuda:
        require_fp8(o.device)
    return _MlpBlock.apply(
        o, residual, w_proj, b_proj, norm_weight, norm_bias, b_fc1, w_fc2, b_fc2,
        origin, (options, torch.is_grad_enabled()),
        *(w_fc1 if isinstance(w_fc1, tuple) else (w_fc1,)),
    )  # fmt: skip
