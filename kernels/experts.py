"""Experts of an MoE layer: all experts in one grouped BF16 GEMM per projection, saved in 8 bits.

For backward the layer saves the activation's input, in groups of 8 bits, and its own input. Two cases differ
in the input. Tokens (`grouped_experts`) are saved in BF16, because the router, which reads the same norm
output, saves them anyway; backward permutes them again. Rows that are already in the experts' order
(`permuted_experts`) are saved in groups of 8 bits, because no other layer saves them. Backward recomputes the
activation's output. The output of the experts is not needed: the router's weights are applied before the
second GEMM, out = sum_k down_k(w_k a_k), where their gradient is the gradient of w_k a_k times a_k. Stock
layers save all of these in BF16, for each expert of a token.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from coat_kernels.activation import KINDS
from coat_kernels.activation.op import activation_backward, activation_forward
from coat_kernels.autograd.derivatives import once_differentiable
from coat_kernels.device import capability
from coat_kernels.groups import DEFAULT_FORMAT, GROUP_FORMATS, Grouped, dequantize_groups, quantize_groups
from coat_kernels.ops import nothing


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


def _order(chosen: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions in `chosen`, flattened, ordered by expert, and the end of each expert in that order,
    int32 [count].

    Does not synchronize with the GPU.
    """
    by_expert, order = chosen.flatten().sort(stable=True)
    experts = torch.arange(count, device=chosen.device)
    return order, torch.searchsorted(by_expert, experts, right=True, out_int32=True)


def _to_rows(x: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    """`x` [t, ...] gathered at `places`, which puts it in the experts' order; `x` if `places` is None."""
    return x.contiguous() if places is None else x[places]


def _to_tokens(rows: torch.Tensor, order: torch.Tensor | None, tokens: int) -> torch.Tensor:
    """The sum of `rows` [t k, h], which are in the experts' order, over each token's experts: [t, h]."""
    if order is None:
        return rows
    back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
    return rows[back].view(tokens, -1, rows.shape[1]).sum(1)


def _loses_groups(device: torch.device) -> bool:
    """Whether grouped_mm leaves the result of an expert without rows unwritten: Blackwell, PyTorch
    #172439."""
    return device.type == "cuda" and capability(device) >= (10, 0)


def _over_rows(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The GEMMs of each expert, summed over its rows of `a` [m, rows] and `b` [rows, l]: [e, m, l]."""
    product = F.grouped_mm(a, b, offs=ends)
    if _loses_groups(a.device):
        empty = ends.diff(prepend=ends.new_zeros(1)) == 0
        product.masked_fill_(empty[:, None, None], 0)
    return product


class KernelGate(NamedTuple):
    """a(gate) * up, where both = gate | up, by the kernels; `kind` is the function a, one of
    `coat_kernels.activation.KINDS`.

    gated: if False, a(x) without up. Then read 2 f as f in the shapes below.
    """

    kind: str
    group_size: int = 16
    saved_format: str = DEFAULT_FORMAT
    gated: bool = True

    def forward(self, both: torch.Tensor, trained: bool) -> tuple[torch.Tensor, ...]:
        """both [rows, 2 f] -> the gate's result [rows, f], and the saved codes and exponents, empty unless
        `trained`."""
        keep = self.saved_format if trained else None
        a, _, codes, exponent = activation_forward(both, self.kind, self.gated, self.group_size, keep)
        return a, codes, exponent

    def again(self, codes: torch.Tensor, exponent: torch.Tensor) -> tuple[torch.Tensor, Callable]:
        """The recomputed result [rows, f] in BF16, and a function from its gradient to that of `both`."""
        options = self.kind, self.gated, self.group_size
        q = Grouped(codes, exponent, GROUP_FORMATS[self.saved_format])
        both = dequantize_groups(q, self.group_size, torch.bfloat16)
        a = activation_forward(both, *options, None)[0]
        return a, lambda grad: activation_backward(grad, codes, exponent, *options, self.saved_format)[0]


class OwnGate(NamedTuple):
    """Like `KernelGate`, with the result computed by `function` in torch operations. gated: it halves the
    width."""

    function: Callable[[torch.Tensor], torch.Tensor]
    group_size: int = 16
    saved_format: str = DEFAULT_FORMAT
    gated: bool = True

    def forward(self, both: torch.Tensor, trained: bool) -> tuple[torch.Tensor, ...]:
        kept = 2 * (nothing(both),)
        if trained:
            kept = quantize_groups(both, self.group_size, self.saved_format).tensors
        return self.function(both).to(both.dtype), *kept

    def again(self, codes: torch.Tensor, exponent: torch.Tensor) -> tuple[torch.Tensor, Callable]:
        q = Grouped(codes, exponent, GROUP_FORMATS[self.saved_format])
        both = dequantize_groups(q, self.group_size, torch.bfloat16).requires_grad_()
        with torch.enable_grad():
            a = self.function(both).to(both.dtype)
        return a.detach(), lambda grad: torch.autograd.grad(a, both, grad)[0]


def _times(rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`rows` [n, m], each times its weight [n, 1], in the dtype of `rows`. FP32 weights create no FP32
    copy."""
    return torch.mul(rows, w, out=torch.empty_like(rows))


class _GroupedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, gate_up, down, bias, order, ends, gate, trained):
        token = None if order is None else order // weights.shape[1]
        both = F.grouped_mm(_to_rows(x, token), gate_up.transpose(1, 2), offs=ends)
        if bias is not None:
            both += bias
        a, *kept = gate.forward(both, trained)
        del both
        a = _times(a, _to_rows(weights.reshape(-1, 1), order))
        y = _to_tokens(F.grouped_mm(a, down.transpose(1, 2), offs=ends), order, len(x))
        if order is not None:
            kept += x, order
        elif trained and ctx.needs_input_grad[2]:
            kept += quantize_groups(x, gate.group_size, gate.saved_format).tensors
        ctx.save_for_backward(weights, gate_up, down, ends, *kept)
        ctx.gate, ctx.permutes = gate, order is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        weights, gate_up, down, ends, *kept = ctx.saved_tensors
        kept, of_x = kept[:2], kept[2:]
        needs_x, needs_weights, needs_gate_up, needs_down, needs_bias = ctx.needs_input_grad[:5]
        order = of_x[1] if ctx.permutes else None
        token = None if order is None else order // weights.shape[1]
        w = _to_rows(weights.reshape(-1, 1), order)
        grad_rows = _to_rows(grad_y, token)
        grad_a = F.grouped_mm(grad_rows, down, offs=ends)
        grad_x = grad_weights = grad_gate_up = grad_down = grad_both = None
        a, through = ctx.gate.again(*kept)
        if needs_weights:
            grad_weights = (grad_a * a).sum(1, dtype=torch.float32)
            if order is not None:
                grad_weights = torch.empty_like(grad_weights).index_copy_(0, order, grad_weights)
            grad_weights = grad_weights.view_as(weights).to(weights.dtype)
        if needs_down:
            grad_down = _over_rows(grad_rows.T, _times(a, w), ends)
        del a, grad_rows
        if needs_x or needs_gate_up or needs_bias:
            grad_both = through(_times(grad_a, w))
            del grad_a
            if needs_gate_up:
                if order is None:
                    q = Grouped(*of_x, GROUP_FORMATS[ctx.gate.saved_format])
                    rows = dequantize_groups(q, ctx.gate.group_size, grad_both.dtype)
                else:
                    rows = of_x[0][token]
                grad_gate_up = _over_rows(grad_both.T, rows, ends)
                del rows
            if needs_x:
                grad_x = _to_tokens(F.grouped_mm(grad_both, gate_up, offs=ends), order, len(grad_y))
        grad_bias = grad_both if needs_bias else None
        return grad_x, grad_weights, grad_gate_up, grad_down, grad_bias, None, None, None, None


class _NoRows(torch.autograd.Function):
    """The experts' result for zero rows. Gradients are zero, not None, and no kernel runs."""

    @staticmethod
    def forward(ctx, x, *parts):
        ctx.save_for_backward(x, *parts)
        return torch.zeros_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.zeros_like(t) if needs else None for t, needs in needed)


def grouped_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate: KernelGate | OwnGate,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """sum_k w_k down_k(gate(gate_up_k(x))) over the experts k of each token.

    Args:
        x: [t, h], BF16.
        chosen: the experts of each token, int64 [t, k].
        weights: their weights, [t, k], FP32 or BF16.
        gate_up: [e, 2 f, h], BF16, any strides; with a `KernelGate`, gate's rows come before up's.
        down: [e, h, f], BF16, any strides.
        gate: computes [rows, f] from [rows, 2 f], and defines how its input is saved.
        gate_up_bias, down_bias: [e, 2 f] and [e, h], or None.

    Returns [t, h] in BF16. Backward saves 2 k f bytes per token, with their scales, and x. Gradients of
    weights and of `down` use the gate's result recomputed from the saved codes. Raises ValueError for an
    unknown kind, another dtype, sizes that do not match, or an f that is not a multiple of the group size.
    """
    order, ends = _order(chosen, len(gate_up))
    return _experts(x, chosen, weights, gate_up, down, gate, order, ends, gate_up_bias, down_bias)


def permuted_experts(
    rows: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate: KernelGate | OwnGate,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """w down_k(gate(gate_up_k(row))) for rows in the order of the experts k; each row has one expert.

    Args:
        rows: [n, h], BF16; n may be 0.
        tokens_per_expert: number of rows of each expert, int64 [e], on any device. Their sum must be n; it is
            not checked, because that would synchronize with the GPU.
        weights: [n], FP32 or BF16.
        gate_up, down, gate, gate_up_bias, down_bias: as in `grouped_experts`.

    Returns [n, h] in BF16. The reference is `experts_reference` for tokens with one expert each. Backward
    saves h + 2 f bytes per row, with their scales; 2 f if gate_up is frozen. Raises ValueError as
    `grouped_experts` does.
    """
    ends = tokens_per_expert.cumsum(0).to(rows.device, torch.int32, non_blocking=True)
    expert = None
    if gate_up_bias is not None or down_bias is not None:
        places = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        expert = torch.searchsorted(ends, places, right=True)[:, None]
    return _experts(rows, expert, weights[:, None], gate_up, down, gate, None, ends, gate_up_bias, down_bias)


def _experts(x, chosen, weights, gate_up, down, gate, order, ends, gate_up_bias, down_bias) -> torch.Tensor:
    """Common part of both functions. Without an order, x holds rows; `chosen` [t, k] is used only for
    biases."""
    if isinstance(gate, KernelGate) and gate.kind not in KINDS:
        raise ValueError(f"experts: expected one of {', '.join(KINDS)}; found {gate.kind!r}")
    if {x.dtype, gate_up.dtype, down.dtype} != {torch.bfloat16}:
        raise ValueError(
            f"experts: expected BF16, found {x.dtype} and weights in {gate_up.dtype}, {down.dtype}"
        )
    (t, h), (e, _, f) = x.shape, down.shape
    expected = [(e, (1 + gate.gated) * f, h), (e, h, f), (t, 1 if order is None else chosen.shape[1])]
    found = [tuple(part.shape) for part in (gate_up, down, weights)]
    if found != expected or len(ends) != e or f % gate.group_size:
        up = "2 f" if gate.gated else "f"
        raise ValueError(
            f"experts: expected gate_up [e, {up}, h] and down [e, h, f], with f in groups of "
            f"{gate.group_size}, and weights [t, k] for x {(t, h)} and {len(ends)} experts; found {found}"
        )
    if not t:
        return _NoRows.apply(x, weights, gate_up, down, gate_up_bias, down_bias)
    bias = None if gate_up_bias is None else gate_up_bias.to(x.dtype)[_to_rows(chosen.flatten(), order)]
    inputs = x, weights, gate_up, down, bias
    trained = torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in inputs)
    y = _GroupedExperts.apply(*inputs, order, ends, gate, trained)
    if down_bias is None:
        return y
    # sum_k w_k b_k as a GEMM with each token's weights of all experts
    of_all = torch.zeros(t, e, dtype=x.dtype, device=x.device).scatter(1, chosen, weights.to(x.dtype))
    return torch.addmm(y, of_all, down_bias.to(x.dtype))
