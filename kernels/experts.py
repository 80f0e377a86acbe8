"""Gated experts, of which each token takes a few: all in one grouped BF16 product each way, saved in 8 bits.

For backward the layer keeps what is in front of the activation, in groups of 8 bits, and its input, which the
router behind the same norm keeps anyway. The input is brought into the experts' order again, the activation's
output is computed again, and the output of the experts is not needed: the router's weights are applied in
front of the second product, out = sum_k down_k(w_k a_k), where their gradient is that of w_k a_k times a_k.
Stock layers keep all of these in BF16, for each expert that a token takes.
"""

import torch
import torch.nn.functional as F

from coat_kernels.activation import KINDS
from coat_kernels.activation.op import activation_backward, activation_forward
from coat_kernels.activation.reference import value_and_slope_reference
from coat_kernels.autograd import once_differentiable
from coat_kernels.groups import DEFAULT_FORMAT, Grouped, dequantize_groups


def experts_reference(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    kind: str,
) -> torch.Tensor:
    """`grouped_experts` expert by expert, differentiable, in the precision of `x`; nothing is rounded."""
    y = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ gate_up[expert].T).chunk(2, dim=1)
        a = value_and_slope_reference(gate, kind)[0] * up
        y = y.index_add(0, token, weights[token, place, None] * (a @ down[expert].T))
    return y


def _order(chosen: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The places in `chosen`, flat, by expert, and where in that order each expert ends, int32 [count].

    Nothing waits for the GPU.
    """
    by_expert, order = chosen.flatten().sort(stable=True)
    experts = torch.arange(count, device=chosen.device)
    return order, torch.searchsorted(by_expert, experts, right=True, out_int32=True)


def _to_tokens(rows: torch.Tensor, order: torch.Tensor, tokens: int) -> torch.Tensor:
    """The sums over each token's experts of `rows` [t k, h], which are in the experts' order: [t, h]."""
    back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
    return rows[back].view(tokens, -1, rows.shape[1]).sum(1)


class _GroupedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, gate_up, down, chosen, options, keep):
        order, ends = _order(chosen, len(gate_up))
        both = F.grouped_mm(x[order // chosen.shape[1]], gate_up.transpose(1, 2), offs=ends)
        a, _, codes, exponent = activation_forward(both, *options, keep)
        del both
        a.mul_(weights.flatten()[order, None])
        y = _to_tokens(F.grouped_mm(a, down.transpose(1, 2), offs=ends), order, len(x))
        ctx.save_for_backward(x, weights, gate_up, down, order, ends, codes, exponent)
        ctx.options = options
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        x, weights, gate_up, down, order, ends, codes, exponent = ctx.saved_tensors
        kind, gated, group_size = ctx.options
        needs_x, needs_weights, needs_gate_up, needs_down = ctx.needs_input_grad[:4]
        token, w = order // weights.shape[1], weights.flatten()[order, None]
        grad_rows = grad_y[token]
        grad_a = F.grouped_mm(grad_rows, down, offs=ends)
        grad_x = grad_weights = grad_gate_up = grad_down = None
        if needs_weights or needs_down:
            both = dequantize_groups(Grouped(codes, exponent), group_size, x.dtype)
            a = activation_forward(both, kind, gated, group_size, None)[0]
            del both
            if needs_weights:
                of_rows = (grad_a * a).sum(1, dtype=torch.float32)
                grad_weights = torch.empty_like(of_rows).index_copy_(0, order, of_rows)
                grad_weights = grad_weights.view_as(weights).to(weights.dtype)
            if needs_down:
                grad_down = F.grouped_mm(grad_rows.T, a.mul_(w), offs=ends)
            del a
        del grad_rows
        if needs_x or needs_gate_up:
            grad_both, _ = activation_backward(grad_a.mul_(w), codes, exponent, *ctx.options)
            if needs_gate_up:
                grad_gate_up = F.grouped_mm(grad_both.T, x[token], offs=ends)
            if needs_x:
                grad_x = _to_tokens(F.grouped_mm(grad_both, gate_up, offs=ends), order, len(x))
        return grad_x, grad_weights, grad_gate_up, grad_down, None, None, None


def grouped_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    kind: str,
    *,
    group_size: int = 16,
    saved_format: str = DEFAULT_FORMAT,
) -> torch.Tensor:
    """sum_k w_k down_k(a(gate_k(x)) * up_k(x)) over the experts k that each token takes.

    Args:
        x: [t, h], BF16.
        chosen: the experts of each token, int64 [t, k].
        weights: their weights, [t, k], FP32 or BF16.
        gate_up: [e, 2 f, h], BF16; gate's rows before up's.
        down: [e, h, f], BF16.
        kind: a, one of `coat_kernels.activation.KINDS`.
        group_size, saved_format: of what is saved in front of the activation; as in `activation`.

    Returns [t, h] in BF16. Backward saves 2 k f bytes a token, with their scales, and x. Gradients of weights
    and of `down` are of an activation computed from these. Raises ValueError for an unknown kind, for another
    dtype, for sizes that do not belong together, and where f is not whole groups.
    """
    if kind not in KINDS:
        raise ValueError(f"grouped_experts: expected one of {', '.join(KINDS)}; found {kind!r}")
    if {x.dtype, gate_up.dtype, down.dtype} != {torch.bfloat16}:
        raise ValueError(
            f"grouped_experts: expected BF16, found {x.dtype} and weights in {gate_up.dtype}, {down.dtype}"
        )
    (e, both, h), (t, k) = gate_up.shape, chosen.shape
    f = both // 2
    expected = [(e, 2 * f, h), (e, h, f), (t, h), (t, k)]
    found = [tuple(part.shape) for part in (gate_up, down, x, weights)]
    if found != expected or f % group_size:
        raise ValueError(
            "grouped_experts: expected gate_up [e, 2 f, h], down [e, h, f], x [t, h] and weights [t, k], "
            f"with f in groups of {group_size}; found {found} with chosen {(t, k)}"
        )
    trained = torch.is_grad_enabled() and any(p.requires_grad for p in (x, weights, gate_up, down))
    keep = saved_format if trained else None
    return _GroupedExperts.apply(x, weights, gate_up, down, chosen, (kind, True, group_size), keep)
