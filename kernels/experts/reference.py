"""Experts in plain PyTorch: without rounding, and the work of each kernel."""

from collections.abc import Callable

import torch

from coat_kernels.activation.reference import value_and_slope_reference
from coat_kernels.fp8 import E4M3
from coat_kernels.groups.reference import Grouped, dequantize_groups_reference
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


def quantize_each_row_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [n, m] as E4M3 codes with a scale for each row: the codes, and the scales, FP32 [n]."""
    scale = tensor_scale_reference(row_maxima(x), E4M3)
    return to_tensor_codes_reference(x, scale[:, None], E4M3), scale


def gather_columns_reference(codes: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The rows `source` [p] of FP8 codes [n, m], transposed: [m, p]. Row n is zero."""
    padded = torch.cat((codes, codes.new_zeros(1, codes.shape[1])))
    return padded[source].t().contiguous()


def sum_to_tokens_reference(rows: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """The sums of the rows `back` [t, k] of `rows` [n, h]: [t, h], summed in FP32."""
    return rows[back].sum(1, dtype=torch.float32).to(rows.dtype)


def _saved(q: Grouped, gated: bool, group_size: int) -> list[torch.Tensor]:
    """gate and up, FP32 [n, f] each; without a gate, the input and 1."""
    parts = (q.codes.chunk(2, 1), q.exponent.chunk(2, 1)) if gated else ((q.codes,), (q.exponent,))
    found = [dequantize_groups_reference(Grouped(*p, q.format), group_size) for p in zip(*parts, strict=True)]
    return found if gated else [*found, torch.ones_like(found[0])]


def gate_output_reference(grad_a, q: Grouped, weights, source, largest, kind: str, gated: bool, group_size):
    """What the backward of a gate finds first, from the gradient `grad_a` [n, f] of its weighted output.

    q: the saved input. weights: the router's, [n]. source: as in `gather_columns_reference`. largest: the
    amax of the weighted output in forward.

    Returns the recomputed weighted output, transposed, E4M3 [f, p], and its scale; the gradient of `weights`,
    FP32 [n]; the amax of each row of the gradient of the gate's input, FP32 [n].
    """
    gate, up = _saved(q, gated, group_size)
    value, _ = value_and_slope_reference(gate, kind)
    codes = quantize_tensor_reference(value * up * weights[:, None].float(), largest, E4M3)
    grad = _gate_grad(grad_a, q, weights, kind, gated, group_size)
    columns = gather_columns_reference(codes.rows, source)
    return columns, codes.scale, (grad_a.float() * value * up).sum(1), row_maxima(grad)


def gate_grad_reference(grad_a, q: Grouped, weights, source, maxima, largest, kind, gated, group_size):
    """The gradient of a gate's input. maxima: the amax of each of its rows; largest: their largest. The other
    arguments are those of `gate_output_reference`.

    Returns E4M3 codes [n, 2 f] with a scale for each row, the scales [n], codes [2 f, p] with one scale, and
    that scale [1].
    """
    grad, scales = (
        _gate_grad(grad_a, q, weights, kind, gated, group_size),
        tensor_scale_reference(maxima, E4M3),
    )
    whole = quantize_tensor_reference(grad, largest, E4M3)
    rows = to_tensor_codes_reference(grad, scales[:, None], E4M3)
    return rows, scales, gather_columns_reference(whole.rows, source), whole.scale


def _gate_grad(grad_a, q: Grouped, weights, kind: str, gated: bool, group_size: int) -> torch.Tensor:
    gate, up = _saved(q, gated, group_size)
    value, slope = value_and_slope_reference(gate, kind)
    grad = grad_a.float() * weights[:, None].float()
    return torch.cat((grad * slope * up, grad * value), 1) if gated else grad * slope
