"""The dense transformer layer as two fused blocks around attention, one autograd function each.

    qkv_block         norm, qkv projection, rotary positions
    attention_block   the same and attention, made again in backward: it keeps the norm's input alone
    mlp_block         output projection, residual addition, norm, fc1, activation, fc2, residual addition

Each is a flat sequence of launches, forward and backward. What passes between two of them is a local
variable: activations that only an FP8 product reads exist as FP8 codes alone. Kept for backward are the
norms' inputs, the activation's input and what attention keeps of its output, each once and in 8 bits; the
rest is made again.

The arithmetic is that of the same operations one by one (`norm`, `linear`, `rope`, `activation`,
`residual`), to the bit. The blocks want every parameter to be trained; what else they do not do, such as
dropout between the operations, is for those.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from coat_kernels.activation import activation_backward_operands, activation_columns, activation_operands
from coat_kernels.autograd import once_differentiable
from coat_kernels.deferred import fp8_operands
from coat_kernels.groups import Grouped
from coat_kernels.linear import (
    LinearOptions,
    gathered_columns,
    multiply,
    multiply_backward,
    quantized_grad,
)
from coat_kernels.norm import norm_columns, norm_gradients, norm_operands
from coat_kernels.origin import Origin, with_maxima
from coat_kernels.parallel import all_reduce
from coat_kernels.residual import Addends
from coat_kernels.rope import rotate_qkv_backward_operands, rotate_qkv_forward
from coat_kernels.tensorwise import Quantized, transpose_codes
from coat_kernels.together import columns_together, rows_together
from coat_kernels.weights import WeightCache


@dataclass(frozen=True, slots=True)
class NormOptions:
    """How a norm computes; fields as the arguments of `rms_norm`."""

    eps: float
    layer_norm: bool
    zero_centered: bool
    group_size: int
    saved_format: str

    @property
    def arithmetic(self) -> tuple[float, bool, bool, int]:
        return self.eps, self.layer_norm, self.zero_centered, self.group_size


@dataclass(frozen=True, slots=True)
class ActivationOptions:
    """How an activation computes; fields as the arguments of `activation`."""

    kind: str
    gated: bool
    group_size: int
    saved_format: str

    @property
    def arithmetic(self) -> tuple[str, bool, int]:
        return self.kind, self.gated, self.group_size


# the same object for the same values: layers ask in each forward
norm_options = functools.lru_cache(NormOptions)
activation_options = functools.lru_cache(ActivationOptions)


def _norm_backward(grad_y, grad_residual, kept, weight, bias, norm: NormOptions, needs_x: bool):
    """The gradients of x, with its maxima noted, of the weight, and of the bias, or None, from those of y
    [rows, h] and of the residual [s, b, h]."""
    residual = grad_residual.reshape(grad_y.shape).contiguous()
    codes, exponent, rstd = kept
    options = norm.layer_norm, norm.zero_centered, norm.group_size
    grad_x, maxima, grad_weight, grad_bias = norm_gradients(
        grad_y, residual, Grouped(codes, exponent), rstd, weight, bias, options, needs_x
    )
    if needs_x:
        grad_x = with_maxima(grad_x.view(grad_residual.shape), maxima)
    return grad_x, grad_weight, grad_bias


def _qkv_forward(x, norm_weight, norm_bias, weight, bias, cos, sin, norm, linear, *heads):
    """(q, k, v), and what is kept for backward."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y, largest_y, kept, rstd = norm_operands(
        rows, norm_weight, norm_bias, norm.arithmetic, norm.saved_format, linear.x_scale, linear.input_group
    )
    w, largest_w = linear.cache.forward(weight, linear.formats.forward)
    mixed = multiply(y.rows, y.scale, w, bias, x.dtype, linear)
    qkv = rotate_qkv_forward.eager(mixed.view(-1, x.shape[1], mixed.shape[1]), cos, sin, *heads)
    return qkv, (norm_weight, norm_bias, weight, bias, cos, sin, *kept, rstd, largest_y, largest_w)


def _normed_again(saved, norm: NormOptions, linear: LinearOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of the norm in front of `linear` by columns, from what is kept, and its scale."""
    norm_weight, norm_bias, *_, codes, exponent, rstd, largest_y, _ = saved
    return norm_columns.eager(
        codes, exponent, rstd, norm_weight, norm_bias, largest_y, norm.zero_centered, norm.group_size,
        linear.formats.forward.name,
    )  # fmt: skip


def _qkv_again(columns, scale, saved, batch: int, dtype, linear: LinearOptions, *heads):
    """(q, k, v) again, from the norm's output by columns."""
    _, _, weight, bias, cos, sin, codes, *_, largest_w = saved
    tokens, h = codes.shape
    rows = transpose_codes(columns)[:tokens, :h]
    w = linear.cache.rows(weight, largest_w, linear.formats.forward)
    mixed = multiply(rows, scale, w, bias, dtype, linear)
    return rotate_qkv_forward.eager(mixed.view(-1, batch, mixed.shape[1]), cos, sin, *heads)


def _qkv_backward(dq, dk, dv, grad_residual, columns, saved, norm, linear, apart: bool, needs_x: bool):
    """The gradients of x, both parameters of the norm, weight and bias; `columns` and their scale as
    `_normed_again` gives them."""
    norm_weight, norm_bias, weight, bias, cos, sin, *kept, _, largest_w = saved
    # in a list, to leave it to the products, which free parts of it on the way
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
        ctx.options = options
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
    def forward(ctx, x, norm_weight, norm_bias, weight, bias, cos, sin, options, attend):
        qkv, saved = _qkv_forward(x, norm_weight, norm_bias, weight, bias, cos, sin, *options)
        ctx.options, ctx.attend = options, attend
        ctx.batch = x.shape[1]
        ctx.save_for_backward(*saved)
        return attend(*qkv), x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o, grad_residual):
        saved, (norm, linear, *heads) = ctx.saved_tensors, ctx.options
        columns = _normed_again(saved, norm, linear)
        qkv = _qkv_again(*columns, saved, ctx.batch, grad_o.dtype, linear, *heads)
        with torch.enable_grad():
            qkv = tuple(t.requires_grad_() for t in qkv)
            grads = torch.autograd.grad(ctx.attend(*qkv), qkv, grad_o)
        del qkv
        needs_x = ctx.needs_input_grad[0]
        found = _qkv_backward(*grads, grad_residual, columns, saved, norm, linear, heads[-1], needs_x)
        return *found, None, None, None, None


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
    """Queries, keys and values of `x`, and `x` itself, to be read in its place by the residual addition.

    Args:
        x: [s, b, h], BF16 or FP32, with a gradient.
        norm_weight, norm_bias: [h]; the bias is None for RMSNorm and may be for LayerNorm.
        weight, bias: of the fused projection, [groups * (m + 2) * d, h] and [groups * (m + 2) * d] or None.
        cos, sin: as of `rotate_qkv`.
        linear: with both scales given.
        groups, d: key-value groups on this rank, and channels of a head.
        apart: in the projection's output all queries come first, then all keys, then all values.

    Returns q [s, b, groups * m, d], k and v [s, b, groups, d], under sequence parallelism of the whole
    sequence. What reads the returned x has its gradient added inside the norm's backward.
    """
    options = norm, linear, groups, d, apart
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
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`qkv_block` and attention in one, which keeps nothing of queries, keys, values and attention's output.

    Backward makes queries, keys and values again from what is kept of x, by one more product, and runs
    attention again. attend(q, k, v) is attention; it has to give the same each time: no dropout.

    Returns attention's output and x, to be read in its place by the residual addition.
    """
    options = norm, linear, groups, d, apart
    return _AttentionBlock.apply(x, norm_weight, norm_bias, weight, bias, cos, sin, options, attend)


def _summed(z: torch.Tensor, linear: LinearOptions) -> torch.Tensor:
    """A row-parallel product summed over the ranks, where that is not done by a reduce-scatter."""
    parallel = linear.parallel
    return all_reduce(z, parallel.group)() if parallel and not parallel.sequence else z


def _go_together(weights: tuple[torch.Tensor, ...], linears: tuple[LinearOptions, ...]) -> bool:
    """Whether one launch may quantize the weights: each is one tensor, nothing is kept of it, and they are of
    one kind."""
    for weight, linear in zip(weights, linears, strict=True):
        if (
            type(linear.cache) is not WeightCache
            or linear.cache.keep != "none"
            or not linear.cache.predicts
            or linear.formats.forward.dtype != linears[0].formats.forward.dtype
            or weight.dtype != weights[0].dtype
        ):
            return False
    return True


def _by_rows(
    o: torch.Tensor, columns: bool, weights: tuple[torch.Tensor, ...], linears: tuple[LinearOptions, ...]
) -> list[tuple[Quantized, torch.Tensor]]:
    """The `weights` by rows and `o`, the input of the first, by rows and if asked for by `columns`, each with
    its largest magnitude; in one launch as far as it may be."""
    fmt, scale = linears[0].formats.forward, linears[0].x_scale
    together = _go_together(weights, linears)
    joins = together and not columns and type(o) is torch.Tensor and o.dtype == weights[0].dtype
    if together:
        xs = [weight.contiguous() for weight in weights]
        predictions = [linear.cache.prediction(fmt) for linear in linears]
        if joins:
            xs.append(o.reshape(-1, o.shape[-1]).contiguous())
            predictions.append(scale)
        found = rows_together(xs, predictions, fmt)
    else:
        pairs = zip(weights, linears, strict=True)
        found = [linear.cache.forward(weight, linear.formats.forward) for weight, linear in pairs]
    if not joins:
        found.append(fp8_operands(o, fmt, columns=columns, predicted=scale))
    return found


def _by_columns(
    weights: tuple[torch.Tensor, ...], largest: tuple[torch.Tensor, ...], linears: tuple[LinearOptions, ...]
) -> list[Quantized]:
    """The `weights` by columns, with the magnitudes that `_by_rows` found."""
    if _go_together(weights, linears):
        xs = [weight.contiguous() for weight in weights]
        return columns_together(xs, largest, linears[0].formats.forward)
    return [
        linear.cache.columns(weight, most, linear.formats.forward)
        for weight, most, linear in zip(weights, largest, linears, strict=True)
    ]


class _MlpBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, o, residual, w_proj, b_proj, norm_weight, norm_bias, w_fc1, b_fc1, w_fc2, b_fc2, origin, options
    ):
        proj, norm, fc1, activation, fc2 = options
        h, dtype = residual.shape[-1], residual.dtype
        by_rows = residual.reshape(-1, h).contiguous()

        (rows_proj, largest_proj), (rows_fc1, largest_fc1), (rows_fc2, largest_fc2), (operands, largest_o) = (
            _by_rows(o, origin is None, (w_proj, w_fc1, w_fc2), (proj, fc1, fc2))
        )
        # a bias is part of the product, unless products of several ranks are summed first
        bias, late_bias = (b_proj, None) if proj.parallel is None else (None, b_proj)
        z = _summed(multiply(operands.rows, operands.scale, rows_proj, bias, dtype, proj), proj)
        del rows_proj

        # the norm's kernel makes the sum, and reads it no second time
        x = torch.empty_like(by_rows)
        y, largest_y, kept_x, rstd = norm_operands(
            x,
            norm_weight,
            norm_bias,
            norm.arithmetic,
            norm.saved_format,
            fc1.x_scale,
            fc1.input_group,
            Addends(by_rows, z, late_bias),
        )
        del z
        u = multiply(y.rows, y.scale, rows_fc1, b_fc1, dtype, fc1)
        del y, rows_fc1
        p, largest_p, kept_u = activation_operands(
            u, activation.arithmetic, activation.saved_format, fc2.x_scale
        )
        del u
        bias, late_bias = (b_fc2, None) if fc2.parallel is None else (None, b_fc2)
        out = _summed(multiply(p.rows, p.scale, rows_fc2, bias, dtype, fc2), fc2)
        if late_bias is not None:
            out = out + late_bias

        ctx.options, ctx.shape = options, o.shape
        if origin is None:
            ctx.columns_of_o, kept_o = None, (operands.columns, operands.scale)
        else:
            # its tensors are saved, which lets go of them behind backward, and not held by the node
            ctx.columns_of_o, kept_o = origin.columns, (*origin.tensors, largest_o)
        ctx.save_for_backward(
            w_proj, b_proj, norm_weight, norm_bias, w_fc1, b_fc1, w_fc2, b_fc2,
            largest_proj, largest_y, largest_fc1, largest_p, largest_fc2, *kept_x, rstd, *kept_u, *kept_o,
        )  # fmt: skip
        return x.view(residual.shape) + out.view(residual.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (w_proj, b_proj, norm_weight, norm_bias, w_fc1, b_fc1, w_fc2, b_fc2,
         largest_proj, largest_y, largest_fc1, largest_p, largest_fc2, *kept) = ctx.saved_tensors  # fmt: skip
        kept_x, kept_u, kept_o = kept[:3], kept[3:5], kept[5:]
        del kept
        proj, norm, fc1, activation, fc2 = ctx.options
        dtype, tokens, arithmetic = grad.dtype, kept_x[0].shape[0], activation.arithmetic

        # operands are in lists, to leave them to the products, which free parts of them on the way
        weights = _by_columns(
            (w_proj, w_fc1, w_fc2), (largest_proj, largest_fc1, largest_fc2), (proj, fc1, fc2)
        )
        operands = [quantized_grad(grad, fc2, sums=b_fc2 is not None and fc2.parallel is None)]
        grad_b_fc2 = _bias_grad(b_fc2, operands[0].sums, grad)
        columns = activation_columns.eager(*kept_u, largest_p, *arithmetic, fc2.formats.forward.name)
        columns = gathered_columns(*columns, tokens, fc2)
        grad_p, grad_w_fc2 = multiply_backward(operands.pop(), w_fc2, weights.pop(), columns, dtype, fc2)
        del columns

        operands = [
            activation_backward_operands(
                grad_p(), Grouped(*kept_u), arithmetic, fc1.grad_scale, b_fc1 is not None
            )
        ]
        del grad_p
        grad_b_fc1 = None if b_fc1 is None else operands[0].sums.to(b_fc1.dtype)
        columns = norm_columns.eager(
            *kept_x,
            norm_weight,
            norm_bias,
            largest_y,
            norm.zero_centered,
            norm.group_size,
            fc1.formats.forward.name,
        )
        columns = gathered_columns(*columns, tokens, fc1)
        grad_y, grad_w_fc1 = multiply_backward(operands.pop(), w_fc1, weights.pop(), columns, dtype, fc1)
        del columns
        grad_x, grad_norm_weight, grad_norm_bias = _norm_backward(
            grad_y(), grad, kept_x, norm_weight, norm_bias, norm, True
        )
        del grad_y

        operands = [quantized_grad(grad_x, proj, sums=b_proj is not None and proj.parallel is None)]
        grad_b_proj = _bias_grad(b_proj, operands[0].sums, grad_x)
        columns = kept_o
        if ctx.columns_of_o is not None:
            columns = ctx.columns_of_o(*kept_o, proj.formats.forward)[1:3]
        columns = gathered_columns(*columns, tokens, proj)
        grad_o, grad_w_proj = multiply_backward(operands.pop(), w_proj, weights.pop(), columns, dtype, proj)
        return (
            grad_o().view(ctx.shape), grad_x, grad_w_proj, grad_b_proj, grad_norm_weight, grad_norm_bias,
            grad_w_fc1, grad_b_fc1, grad_w_fc2, grad_b_fc2, None, None,
        )  # fmt: skip


def _bias_grad(
    bias: torch.Tensor | None, sums: torch.Tensor | None, grad: torch.Tensor
) -> torch.Tensor | None:
    """Of the bias of a row-parallel product, from the sums of the gradient's columns if there are any."""
    if bias is None:
        return None
    return grad.sum_to_size(bias.shape) if sums is None else sums.to(bias.dtype)


def mlp_block(
    o: torch.Tensor,
    residual: torch.Tensor,
    w_proj: torch.Tensor,
    b_proj: torch.Tensor | None,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    w_fc1: torch.Tensor,
    b_fc1: torch.Tensor | None,
    w_fc2: torch.Tensor,
    b_fc2: torch.Tensor | None,
    *,
    origin: Origin | None,
    proj: LinearOptions,
    norm: NormOptions,
    fc1: LinearOptions,
    activation: ActivationOptions,
    fc2: LinearOptions,
) -> torch.Tensor:
    """The layer from attention's output on: x = residual + proj(o); x + fc2(a(fc1(norm(x)))).

    Args:
        o: [s, b, n], attention's output; of the whole sequence under sequence parallelism.
        residual: [s, b, h], of the dtype of o.
        w_proj, w_fc1, w_fc2: [h, n], [f or 2 f, h], [h, f]: this rank's parts; biases as long as the first
            dimension, or None. Where several ranks hold parts, biases of proj and fc2 are added behind the
            sum over the ranks.
        origin: how to make o again; without it o is kept by columns in FP8.
        proj, fc1, fc2: with both scales given.

    Returns [s, b, h] in the residual's dtype.
    """
    return _MlpBlock.apply(
        o, residual, w_proj, b_proj, norm_weight, norm_bias, w_fc1, b_fc1, w_fc2, b_fc2,
        origin, (proj, norm, fc1, activation, fc2),
    )  # fmt: skip
