"""The experts of an MoE layer as autograd functions.

The input is quantized once for each token, and its codes are gathered in the order of the experts. The gate
multiplies by the router's weights before the second GEMM: out = sum_k down_k(w_k a_k), so that their gradient
is the gradient of w_k a_k times a_k, and the output is not needed in backward.

For backward the layer saves the gate's input in groups of 8 bits, and its own input. Two cases differ in the
input. Tokens (`grouped_experts`) are saved in BF16, because the router, which reads the same norm output,
saves them anyway. Rows that are already in the experts' order (`permuted_experts`) are saved as the FP8 codes
that the first GEMM read. Stock layers save the input, the gate's input and its output in BF16, for each
expert of a token.

Gradients are E4M3, like all other operands. The GEMM with a weight sums over a row of the gradient, which
therefore has a scale of its own: tokens with small gradients keep their precision. The GEMMs of the weights'
gradients sum over rows, and have one scale.
"""

import torch

from coat_kernels.activation import KINDS
from coat_kernels.autograd import observers
from coat_kernels.autograd.derivatives import once_differentiable
from coat_kernels.device import require_fp8
from coat_kernels.experts.gates import (
    GateInputs,
    KernelGate,
    Needs,
    TorchGate,
    gather_columns,
    quantize_each_row,
)
from coat_kernels.experts.matmul import Scaled, grouped_matmul, grouped_wgrad
from coat_kernels.experts.order import Rows, sort_by_expert
from coat_kernels.fp8 import ALIGNMENT, E4M3
from coat_kernels.tensorwise.operands import fp8_operands
from coat_kernels.tensorwise.predicted import PredictedScale
from coat_kernels.weights import WeightCache


class ExpertsState:
    """What a layer of experts keeps from one call to the next: FP8 copies of the weights, and the last scales
    of the input and of the gate's output. It belongs to the caller.

    weight_cache: as `keep` of `WeightCache`. fast: GEMMs accumulate with fewer bits on Hopper; the errors are
    the same, and without it many small experts are slower than in BF16.
    """

    def __init__(self, weight_cache: str = "none", fast: bool = True):
        self.gate_up, self.down = WeightCache(weight_cache), WeightCache(weight_cache)
        self.x_scale, self.a_scale = PredictedScale(E4M3), PredictedScale(E4M3)
        self.fast = fast


class _Weight:
    """FP8 operands of a weight [e, m, k], which is stored as [e, k, m] if `transposed`."""

    def __init__(self, cache: WeightCache, weight: torch.Tensor, transposed: bool):
        self.cache = cache.of((weight,))
        self.weight, self.transposed = weight, transposed

    def forward(self, trains: bool) -> tuple[Scaled, torch.Tensor]:
        """The operand [e, m, k] of the forward GEMM, and the amax."""
        if self.transposed and (self.cache.keep == "none" or not trains):
            predicted = self.cache.prediction()
            q, amax = fp8_operands(self.weight, E4M3, rows=False, columns=True, predicted=predicted)
        else:
            q, amax = self.cache.forward((self.weight,), trains)
        return (self._by_columns(q) if self.transposed else self._by_rows(q), q.scale), amax

    def backward(self, amax: torch.Tensor) -> Scaled:
        """The operand [e, k, m] of the input's gradient."""
        if self.transposed:
            q = self.cache.rows((self.weight,), amax)
            return self._by_rows(q), q.scale
        q = self.cache.columns((self.weight,), amax)
        return self._by_columns(q), q.scale

    def _by_rows(self, q) -> torch.Tensor:
        return q.rows.view(self.weight.shape)

    def _by_columns(self, q) -> torch.Tensor:
        # the transposes of all experts lie side by side
        return q.columns.unflatten(1, self.weight.shape[:2]).transpose(0, 1)

    def grad(self, a: Scaled, b: Scaled, offs: torch.Tensor, fast: bool) -> torch.Tensor:
        """The gradient in the layout of the weight, from the transposed gradient [m, p] of the output and the
        transposed input [k, p]."""
        operands = (b, a) if self.transposed else (a, b)
        return grouped_wgrad(*operands, offs, fast).to(self.weight.dtype)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, weights, gate_up, down, gate_up_bias, down_bias, rows, gate, transposed, state, saves
    ):
        """saves: "x" or "codes", the form in which the input is saved for backward; None without backward."""
        x, weights, trains = x.contiguous(), weights.contiguous(), saves is not None
        first, second = _Weight(state.gate_up, gate_up, transposed), _Weight(state.down, down, transposed)
        (codes, _, scale, _), amax_x = fp8_operands(x, E4M3, predicted=state.x_scale)
        _observe("input", state.x_scale, codes)
        w_1, amax_1 = first.forward(trains)
        both = grouped_matmul((rows.gather(codes), scale), w_1, rows.offs, state.fast)
        del w_1
        a, amax_a, saved = gate.forward(both, weights, gate_up_bias, rows, state.a_scale, trains)
        _observe("input", state.a_scale, a.rows)
        del both
        w_2, amax_2 = second.forward(trains)
        y = grouped_matmul((a.rows, a.scale), w_2, rows.offs, state.fast)
        of_x = ()
        if trains and ctx.needs_input_grad[2]:
            of_x = (codes, scale) if saves == "codes" else (x, amax_x)
        ctx.save_for_backward(
            weights, gate_up, down, gate_up_bias, down_bias, *rows,
            amax_1, amax_2, amax_a, *saved, *of_x,
        )  # fmt: skip
        ctx.gate, ctx.transposed, ctx.state, ctx.saves = gate, transposed, state, saves
        return rows.to_tokens(y, weights, down_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        (weights, gate_up, down, gate_up_bias, down_bias, offs, order, inverse,
         amax_1, amax_2, amax_a, codes, exponent, *of_x) = ctx.saved_tensors  # fmt: skip
        (needs_x, needs_weights, needs_gate_up, needs_down, needs_bias, needs_down_bias,
         *_) = ctx.needs_input_grad  # fmt: skip
        rows = Rows(offs, order, inverse)
        state, fast = ctx.state, ctx.state.fast
        first = _Weight(state.gate_up, gate_up, ctx.transposed)
        second = _Weight(state.down, down, ctx.transposed)
        grad_y, padded = grad_y.contiguous(), rows.padded(weights.numel())
        grad_x = grad_gate_up = grad_down = grad_bias = grad_down_bias = None
        *grad_rows, amax_grad, dots = quantize_each_row(grad_y, rows, down_bias if needs_weights else None)
        _observe("gradient", state.a_scale, grad_rows[0])
        grad_a = grouped_matmul(grad_rows, second.backward(amax_2), rows.offs, fast)
        del grad_rows
        needs = Needs(needs_weights, needs_down, needs_x, needs_gate_up or needs_bias)
        given = GateInputs(grad_a, weights, (codes, exponent), amax_a, dots)
        found = ctx.gate.backward(given, rows, padded, needs)
        del grad_a, given
        if needs_down:
            columns = gather_columns(grad_y, padded.token, amax_grad)
            grad_down = second.grad(columns, found.output, padded.offs, fast)
            del columns
        if needs_down_bias:
            grad_down_bias = _down_bias_grad(grad_y, weights, rows).to(down_bias.dtype)
        found = found._replace(output=None)
        # before gate_up's gradient, the largest: the FP8 copy of gate_up is freed first
        if needs_x:
            _observe("gradient", state.x_scale, found.rows[0])
            of_rows = grouped_matmul(found.rows, first.backward(amax_1), rows.offs, fast)
            found = found._replace(rows=None)
            grad_x = rows.to_tokens(of_rows)
            del of_rows
        if needs_gate_up:
            if ctx.saves == "codes":
                columns = gather_columns(of_x[0], padded.token)[0], of_x[1]
            else:
                columns = gather_columns(of_x[0], padded.token, of_x[1])
            grad_gate_up = first.grad(found.columns, columns, padded.offs, fast)
            del columns
        if needs_bias:
            grad_bias = _sums(found.columns, padded.offs, fast).to(gate_up_bias.dtype)
        grad_weights = found.weights if needs_weights else None
        return grad_x, grad_weights, grad_gate_up, grad_down, grad_bias, grad_down_bias, *(None,) * 5


def _observe(role: str, scale: PredictedScale, codes: torch.Tensor) -> None:
    """Passes the codes of a projection's input or gradient to the observer. `scale` is that of its input."""
    if (observer := observers.current()) is not None:
        observer.codes(role, scale, codes)


def _sums(columns: Scaled, offs: torch.Tensor, fast: bool) -> torch.Tensor:
    """The sums of `columns` [m, p] over the places of each expert, [e, m], as GEMMs with ones."""
    codes, scale = columns
    ones = torch.ones(ALIGNMENT, codes.shape[1], device=codes.device).to(codes.dtype)
    return grouped_wgrad(columns, (ones, torch.ones_like(scale)), offs, fast)[..., 0]


def _down_bias_grad(grad_y: torch.Tensor, weights: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The sums of the tokens' gradients, each times its weight, over the rows of each expert, [e, h], as a
    GEMM with each token's weights of all experts."""
    expert = rows.experts(weights.numel())
    if rows.inverse is not None:
        expert = expert[rows.inverse.flatten()]
    of_all = grad_y.new_zeros(len(grad_y), len(rows.offs))
    of_all.scatter_(1, expert.view(weights.shape), weights.to(grad_y.dtype))
    return of_all.T @ grad_y


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
    gate: KernelGate | TorchGate,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    transposed: bool = False,
    state: ExpertsState | None = None,
) -> torch.Tensor:
    """sum_k w_k down_k(gate(gate_up_k(x))) over the experts k of each token.

    Args:
        x: [t, h], BF16.
        chosen: the experts of each token, int64 [t, k].
        weights: their weights, [t, k], FP32 or BF16.
        gate_up: [e, 2 f, h], BF16 or FP32; with a `KernelGate`, gate's rows come before up's.
        down: [e, h, f], BF16 or FP32.
        gate: computes [rows, f] from [rows, 2 f], and defines how its input is saved.
        gate_up_bias, down_bias: [e, 2 f] and [e, h], or None.
        transposed: gate_up is [e, h, 2 f] and down [e, f, h].
        state: what the caller keeps for the layer; nothing by default.

    Returns [t, h] in BF16. Backward saves 2 k f bytes per token, with their scales, and x. Gradients of
    weights and of `down` use the gate's result recomputed from the saved codes. Raises ValueError for an
    unknown kind, another dtype, and sizes that do not match or are not multiples of 16; RuntimeError on a GPU
    without FP8.
    """
    rows = sort_by_expert(chosen, len(gate_up))
    biases = gate_up_bias, down_bias
    return _experts(x, weights, gate_up, down, *biases, rows, chosen.shape, gate, transposed, state, "x")


def permuted_experts(
    rows: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate: KernelGate | TorchGate,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    state: ExpertsState | None = None,
) -> torch.Tensor:
    """w down_k(gate(gate_up_k(row))) for rows in the order of the experts k; each row has one expert.

    Args:
        rows: [n, h], BF16; n may be 0.
        tokens_per_expert: number of rows of each expert, int64 [e], on any device. Their sum must be n; it is
            not checked, because that would synchronize with the GPU.
        weights: [n], FP32 or BF16.
        gate_up, down, gate, gate_up_bias, down_bias, state: as in `grouped_experts`.

    Returns [n, h] in BF16. The reference is `experts_reference` for tokens with one expert each. Backward
    saves h + 2 f bytes per row, and scales; 2 f if gate_up is frozen. Raises as `grouped_experts` does.
    """
    offs = tokens_per_expert.cumsum(0, dtype=torch.int32).to(rows.device, non_blocking=True)
    parts, shape = (rows, weights[:, None], gate_up, down, gate_up_bias, down_bias), (len(rows), 1)
    return _experts(*parts, Rows(offs), shape, gate, False, state, "codes")


def _experts(
    x,
    weights,
    gate_up,
    down,
    gate_up_bias,
    down_bias,
    rows: Rows,
    shape,
    gate,
    transposed,
    state,
    saves: str,
) -> torch.Tensor:
    """What both functions share. shape: expected of the weights. saves: whether backward reads the input "x",
    or its "codes"."""
    require_fp8(x.device)
    if isinstance(gate, KernelGate) and gate.kind not in KINDS:
        raise ValueError(f"experts: expected one of {', '.join(KINDS)}; found {gate.kind!r}")
    if x.dtype != torch.bfloat16 or not {gate_up.dtype, down.dtype} <= {torch.bfloat16, torch.float32}:
        raise ValueError(
            f"experts: expected x in BF16 and weights in BF16 or FP32, found {x.dtype} and weights in "
            f"{gate_up.dtype}, {down.dtype}"
        )
    (t, h), (e, *of_down), count = x.shape, down.shape, len(rows.offs)
    f = of_down[0 if transposed else 1]
    sizes = [((1 + gate.gated) * f, h), (h, f)]
    expected = [(e, *(size[::-1] if transposed else size)) for size in sizes] + [tuple(shape)]
    found = [tuple(part.shape) for part in (gate_up, down, weights)]
    if found != expected or len(x) != shape[0] or count != e or h % ALIGNMENT or f % ALIGNMENT:
        up = "2 f" if gate.gated else "f"
        raise ValueError(
            f"experts: expected gate_up [e, {up}, h] and down [e, h, f], with h and f in multiples of "
            f"{ALIGNMENT}, and weights [t, k] for x {(t, h)} and {count} experts; found {found}"
        )
    inputs = x, weights, gate_up, down, gate_up_bias, down_bias
    if not t:
        return _NoRows.apply(*inputs)
    trains = torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in inputs)
    return _Experts.apply(*inputs, rows, gate, transposed, state or ExpertsState(), saves if trains else None)
