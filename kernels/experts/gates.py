"""What stands between the two GEMMs of an expert: the activation, times the router's weight.

In forward a gate returns its output as FP8 codes, and saves its input in groups of 8 bits. In backward it
recomputes the output, and returns the operands of all GEMMs that follow.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from coat_kernels.device import uses_kernels
from coat_kernels.experts.gate_kernels import gate_grad_triton, gate_output_triton, launch_gate_forward
from coat_kernels.experts.kernels import gather_columns_triton, quantize_each_row_triton
from coat_kernels.experts.matmul import Scaled
from coat_kernels.experts.order import PaddedRows, Rows
from coat_kernels.experts.reference import (
    gate_forward_reference,
    gate_grad_reference,
    gate_output_reference,
    gather_columns_reference,
    quantize_each_row_reference,
    weights_grad_reference,
)
from coat_kernels.fp8 import E4M3
from coat_kernels.groups import (
    DEFAULT_FORMAT,
    GROUP_FORMATS,
    GROUP_SIZE,
    Grouped,
    dequantize_groups,
    empty_grouped,
    quantize_groups,
)
from coat_kernels.tensorwise.operands import fp8_operands
from coat_kernels.tensorwise.predicted import PredictedScale, quantize_predicted, write_reference
from coat_kernels.tensorwise.quantize import Quantized
from coat_kernels.tensorwise.scale import compute_amax


class GateGrads(NamedTuple):
    """The results of a gate's backward; None where one is not needed."""

    weights: torch.Tensor | None = None
    """Gradient of the router's weights, [t, k]."""
    output: Scaled | None = None
    """The recomputed output, transposed: [f, p]."""
    rows: Scaled | None = None
    """Gradient of the input, [n, 2 f], with a scale for each row."""
    columns: Scaled | None = None
    """Gradient of the input, transposed: [2 f, p]."""


class Needs(NamedTuple):
    """Which fields of `GateGrads` are needed."""

    weights: bool
    output: bool
    rows: bool
    columns: bool


class GateInputs(NamedTuple):
    """What a gate's backward reads: the gradient of its weighted output, [n, f]; the router's weights,
    [t, k]; what its forward saved; the amax of its output; and what is added to the gradient of the weights,
    FP32 [t, k], or None."""

    of_output: torch.Tensor
    weights: torch.Tensor
    saved: tuple[torch.Tensor, ...]
    amax: torch.Tensor
    dots: torch.Tensor | None


def quantize_each_row(
    x: torch.Tensor, rows: Rows, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`x` [t, m], contiguous, as E4M3 codes of `rows` with a scale for each row, the amax, and the products
    with a bias; by the kernel on CUDA."""
    return (quantize_each_row_triton if uses_kernels(x) else quantize_each_row_reference)(x, rows, bias)


def gather_columns(
    x: torch.Tensor, source: torch.Tensor, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows `source` of FP8 codes, or of values with the amax `amax`, as transposed codes, and their
    scale; by the kernel on CUDA."""
    return (gather_columns_triton if uses_kernels(x) else gather_columns_reference)(x, source, amax)


class KernelGate(NamedTuple):
    """a(gate) * (up + offset), where both = gate | up, by the kernels; `kind` is the function a, one of
    `coat_kernels.activation.KINDS`.

    gated: if False, a(x) without up. Then read 2 f as f in the shapes below. limit: gate is at most `limit`,
    and up lies within +-limit, or None. interleaved: the columns of both are gate's and up's in turns.
    GPT-OSS's gate is `KernelGate("quick_gelu", limit=7.0, offset=1.0, interleaved=True)`.
    """

    kind: str
    saved_format: str = DEFAULT_FORMAT
    gated: bool = True
    limit: float | None = None
    offset: float = 0.0
    interleaved: bool = False

    def forward(
        self, both: torch.Tensor, weights, bias, rows: Rows, scale: PredictedScale, trains: bool
    ) -> tuple[Quantized, torch.Tensor, tuple[torch.Tensor, ...]]:
        """both [n, 2 f], the weights [t, k], and the bias [e, 2 f] of both or None -> the codes of the
        weighted output [n, f], its amax, and the saved codes and exponents, none unless `trains`."""
        n, f = both.shape[0], both.shape[1] // (1 + self.gated)
        if uses_kernels(both):
            saved = None
            if trains:
                parts = 1 + self.gated
                saved = empty_grouped(n, f, GROUP_SIZE, self.saved_format, both.device, parts)

            def write(out, scales):
                return launch_gate_forward(both, weights, bias, rows, self, saved, out, scales)
        else:
            a, saved = gate_forward_reference(both, weights, bias, rows, self, trains)
            write = functools.partial(write_reference, a, fmt=scale.fmt)
        found = quantize_predicted(write, scale, (n, f), both.device)
        return *found, saved.tensors if trains else ()

    def backward(self, given: GateInputs, rows: Rows, padded: PaddedRows, needs: Needs) -> GateGrads:
        """From what `forward` returned. Results that are not needed may be there."""
        grad_a, source = given.of_output, padded.row
        q = Grouped(*given.saved, GROUP_FORMATS[self.saved_format])
        kernels, needs_grad = uses_kernels(grad_a), needs.rows or needs.columns
        inputs = grad_a, q, given.weights, rows, source
        needed = (needs.output, needs.weights or needs_grad) if kernels else ()
        output_of = gate_output_triton if kernels else gate_output_reference
        *output, grad_weights, maxima, amax = output_of(*inputs, given.amax, given.dots, self, *needed)
        found = GateGrads(grad_weights, tuple(output))
        if not needs_grad:
            return found
        needed = (needs.rows, needs.columns) if kernels else ()
        grad_of = gate_grad_triton if kernels else gate_grad_reference
        *by_rows, columns, scale = grad_of(*inputs, maxima, amax, self, *needed)
        return found._replace(rows=tuple(by_rows), columns=(columns, scale))


class TorchGate(NamedTuple):
    """Like `KernelGate`, with the result computed by `function` in torch operations. gated: it halves the
    width."""

    function: Callable[[torch.Tensor], torch.Tensor]
    saved_format: str = DEFAULT_FORMAT
    gated: bool = True

    def forward(
        self, both: torch.Tensor, weights, bias, rows: Rows, scale: PredictedScale, trains: bool
    ) -> tuple[Quantized, torch.Tensor, tuple[torch.Tensor, ...]]:
        if bias is not None:
            both += bias.to(both.dtype)[rows.experts(len(both))]
        a = _times(self.function(both).to(both.dtype), rows.of_rows(weights))
        saved = quantize_groups(both, GROUP_SIZE, self.saved_format).tensors if trains else ()
        return *fp8_operands(a, E4M3, predicted=scale), saved

    def backward(self, given: GateInputs, rows: Rows, padded: PaddedRows, needs: Needs) -> GateGrads:
        q, weights = Grouped(*given.saved, GROUP_FORMATS[self.saved_format]), rows.of_rows(given.weights)
        both = dequantize_groups(q, GROUP_SIZE, torch.bfloat16).requires_grad_()
        with torch.enable_grad():
            a = self.function(both).to(both.dtype)
        grad_weights = output = by_rows = columns = None
        if needs.weights:
            of_rows = (given.of_output * a.detach()).sum(1, dtype=torch.float32)
            grad_weights = weights_grad_reference(of_rows, given.weights, rows, given.dots)
        if needs.output:
            output = gather_columns(_times(a.detach(), weights), padded.row, given.amax)
        if needs.rows or needs.columns:
            (grad,) = torch.autograd.grad(a, both, _times(given.of_output, weights))
            del a, both
            if needs.rows:
                by_rows = quantize_each_row(grad, Rows(rows.offs))[:2]
            if needs.columns:
                columns = gather_columns(grad, padded.row, compute_amax(grad))
        return GateGrads(grad_weights, output, by_rows, columns)


def _times(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`rows` [n, m], each times its weight [n], in the dtype of `rows`. FP32 weights create no FP32 copy."""
    return torch.mul(rows, weights[:, None], out=torch.empty_like(rows))
