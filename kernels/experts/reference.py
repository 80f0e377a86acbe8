"""Experts in plain PyTorch: without rounding, and the work of each kernel. `rows` is an `order.Rows`, `gate`
a `gates.KernelGate`."""

from collections.abc import Callable

import torch

from coat_kernels.activation.reference import (
    dequantize_parts,
    quantize_parts,
    value_and_slope_reference,
)
from coat_kernels.fp8 import ALIGNMENT, E4M3
from coat_kernels.groups.reference import Grouped
from coat_kernels.tensorwise.quantize import quantize_tensor_reference, to_tensor_codes_reference
from coat_kernels.tensorwise.scale import row_maxima, tensor_scale_reference


def experts_reference(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate: Callable[[torch.Tensor], torch.Tensor],
    gate_up_bias: torch.Tensor | float = 0.0,
    down_bias: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    """`grouped_experts` expert by expert, differentiable, in the precision of `x`, without rounding. `gate`
    consists of torch operations."""
    y, count = torch.zeros_like(x), len(gate_up)
    first, second = (b if isinstance(b, torch.Tensor) else count * [b] for b in (gate_up_bias, down_bias))
    for expert in range(count):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        rows = gate(x[token] @ gate_up[expert].T + first[expert]) @ down[expert].T + second[expert]
        y = y.index_add(0, token, weights[token, place, None] * rows)
    return y


def order_reference(chosen: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fields of `Rows` for the experts `chosen` [t, k], out of `count`."""
    expert, order = chosen.flatten().sort(stable=True)
    experts = torch.arange(count, device=chosen.device)
    offs = torch.searchsorted(expert, experts, right=True, out_int32=True)
    place = torch.arange(len(order), dtype=torch.int32, device=chosen.device)
    inverse = torch.empty_like(place).index_copy_(0, order, place)
    return offs, order.int(), inverse.view(chosen.shape)


def padded_reference(rows, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fields of `PaddedRows` for `n` rows."""
    offs = rows.offs
    of_each = offs.diff(prepend=offs.new_zeros(1))
    padded = (of_each.clamp_min(1) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    padded_offs = padded.cumsum(0, dtype=torch.int32)
    place = torch.arange(max_padded_rows(n, len(offs)), dtype=torch.int32, device=offs.device)
    # places past the last expert's count as its own, and lie past its end
    expert = torch.searchsorted(padded_offs, place, right=True).clamp_max_(len(offs) - 1)
    row = place + (offs - of_each - padded_offs + padded)[expert]
    row = torch.where(row < offs[expert], row, n)
    if rows.order is None:
        return row, row, padded_offs
    token = rows.order // rows.k
    return row, torch.cat((token, token.new_full((1,), n // rows.k)))[row], padded_offs


def max_padded_rows(n: int, count: int) -> int:
    """The largest number of places of `n` rows of `count` experts: an expert without rows has 16, and any
    other at most 15 without a row."""
    return (n + ALIGNMENT * count) // ALIGNMENT * ALIGNMENT


def gather_rows_reference(codes: torch.Tensor, rows) -> torch.Tensor:
    """The codes [t, m] of the token of each row: [n, m]."""
    return codes[rows.order // rows.k]


def quantize_each_row_reference(
    x: torch.Tensor, rows, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`x` [t, m] as E4M3 codes with a scale for each row, in the order of `rows`: the codes [n, m], the
    scales, FP32 [n], the amax of x, FP32 [1], and the products of each token with the bias, of [e, m], of its
    experts, FP32 [t, k], or None without a bias."""
    maxima, token, dots = row_maxima(x), None, None
    scale = tensor_scale_reference(maxima, E4M3)
    codes = to_tensor_codes_reference(x, scale[:, None], E4M3)
    if rows.order is not None:
        token = rows.order // rows.k
        codes, scale = codes[token], scale[token]
    if bias is not None:
        of_rows = (x if token is None else x[token]).float()
        dots = (of_rows * bias[rows.experts(len(of_rows))].float()).sum(1)
        if rows.order is not None:
            dots = torch.empty_like(dots).index_copy_(0, rows.order.long(), dots)
        dots = dots.view(-1, rows.k)
    return codes, scale, maxima.amax().reshape(1), dots


def gather_columns_reference(
    x: torch.Tensor, source: torch.Tensor, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows `source` [p] of `x` [n, m], transposed, as FP8 codes [m, p]: of FP8 codes, or quantized with
    the scale of the amax `amax`, which is also returned. Row n is zero."""
    codes, scale = x, None
    if amax is not None:
        codes, _, scale, _ = quantize_tensor_reference(x, amax, E4M3)
    # not torch.cat, which refuses FP8 under autocast
    padded = codes.new_zeros(len(codes) + 1, codes.shape[1])
    padded[:-1] = codes
    return padded[source].t().contiguous(), scale


def sum_to_tokens_reference(rows_of, rows, weights, bias) -> torch.Tensor:
    """The sums of the rows [n, h] of each token, [t, h], summed in FP32, and of the bias of their experts
    times the weights [t, k], if there is a bias."""
    found = rows_of if rows.inverse is None else rows_of[rows.inverse.flatten()]
    found = found.view(-1, rows.k, found.shape[1]).float()
    if bias is not None:
        expert = rows.experts(len(rows_of))
        expert = (expert if rows.inverse is None else expert[rows.inverse.flatten()]).view(-1, rows.k)
        found = found + weights[..., None].float() * bias[expert].float()
    return found.sum(1).to(rows_of.dtype)


def gate_reference(x: torch.Tensor, up: torch.Tensor | None = None, *, gate) -> tuple[torch.Tensor, ...]:
    """The output of a gate of `x` and `up`, FP32, and its derivatives by both; without a gate, up is None."""
    near = x if gate.limit is None else x.clamp(max=gate.limit)
    value, slope = value_and_slope_reference(near, gate.kind)
    if gate.limit is not None:
        slope = torch.where(x > gate.limit, 0.0, slope)
    if up is None:
        return value, slope, value
    factor, of_up = up, value
    if gate.limit is not None:
        factor, of_up = up.clamp(-gate.limit, gate.limit), torch.where(up.abs() > gate.limit, 0.0, value)
    factor = factor + gate.offset
    return value * factor, slope * factor, of_up


def gate_forward_reference(
    both, weights, bias, rows, gate, trains: bool
) -> tuple[torch.Tensor, Grouped | None]:
    """The input [n, 2 f] of a gate -> its output times the weights [t, k], [n, f], and the saved input, gate
    before up, if `trains`. bias: [e, 2 f], added to the input, or None."""
    both, dtype = both.float(), both.dtype
    if bias is not None:
        both = both + bias.float()[rows.experts(len(both))]
    if not gate.gated:
        parts = both, None
    else:
        parts = (both[:, ::2], both[:, 1::2]) if gate.interleaved else both.chunk(2, 1)
    output, _, _ = gate_reference(*parts, gate=gate)
    a = (output * rows.of_rows(weights)[:, None].float()).to(dtype)
    if not trains:
        return a, None
    return a, quantize_parts(parts[: 1 + gate.gated], gate.saved_format)


def gate_output_reference(grad_a, q: Grouped, weights, rows, source, amax, dots, gate):
    """What the backward of a gate finds first, from the gradient `grad_a` [n, f] of its weighted output.

    q: the saved input. weights: the router's, [t, k]. source: as in `gather_columns_reference`. amax: the
    amax of the weighted output in forward. dots: added to the gradient of the weights, FP32 [t, k], or None.

    Returns the recomputed weighted output, transposed, E4M3 [f, p], and its scale; the gradient of `weights`,
    in their shape and dtype; the amax of each row of the gradient of the gate's input, FP32 [n]; and the
    largest of them, FP32 [1].
    """
    output, _, _ = gate_reference(*dequantize_parts(q, gate.gated), gate=gate)
    columns, scale = gather_columns_reference(output * rows.of_rows(weights)[:, None].float(), source, amax)
    maxima = row_maxima(_gate_grad(grad_a, q, weights, rows, gate))
    grad_weights = weights_grad_reference((grad_a.float() * output).sum(1), weights, rows, dots)
    return columns, scale, grad_weights, maxima, maxima.amax().reshape(1)


def weights_grad_reference(of_rows: torch.Tensor, weights: torch.Tensor, rows, dots) -> torch.Tensor:
    """The gradient of the weights [t, k] from that of each row's weight, FP32 [n]."""
    if rows.order is not None:
        of_rows = torch.empty_like(of_rows).index_copy_(0, rows.order.long(), of_rows)
    of_rows = of_rows.view(weights.shape)
    return (of_rows if dots is None else of_rows + dots).to(weights.dtype)


def gate_grad_reference(grad_a, q: Grouped, weights, rows, source, maxima, amax, gate):
    """The gradient of a gate's input. maxima: the amax of each of its rows; amax: of all. The other
    arguments are those of `gate_output_reference`.

    Returns E4M3 codes [n, 2 f] with a scale for each row, the scales [n], codes [2 f, p] with one scale, and
    that scale [1].
    """
    grad = _gate_grad(grad_a, q, weights, rows, gate)
    scales = tensor_scale_reference(maxima, E4M3)
    of_rows = to_tensor_codes_reference(grad, scales[:, None], E4M3)
    return of_rows, scales, *gather_columns_reference(grad, source, amax)


def _gate_grad(grad_a, q: Grouped, weights, rows, gate) -> torch.Tensor:
    _, by_gate, by_up = gate_reference(*dequantize_parts(q, gate.gated), gate=gate)
    grad = grad_a.float() * rows.of_rows(weights)[:, None].float()
    if not gate.gated:
        return grad * by_gate
    parts = grad * by_gate, grad * by_up
    return torch.stack(parts, 2).flatten(1) if gate.interleaved else torch.cat(parts, 1)
