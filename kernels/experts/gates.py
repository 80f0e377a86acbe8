"""What stands between the two GEMMs of an expert: the activation, times the router's weight.

In forward a gate returns its output as FP8 codes, and saves its input in groups of 8 bits. In backward it
recomputes the output, and returns the operands of all GEMMs that follow.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from coat_kernels.activation.op import activation_operands
from coat_kernels.device import uses_kernels
from coat_kernels.experts.kernels import (
    gate_grad_triton,
    gate_output_triton,
    gather_columns_triton,
    quantize_each_row_triton,
)
from coat_kernels.experts.matmul import Scaled
from coat_kernels.experts.reference import (
    gate_grad_reference,
    gate_output_reference,
    gather_columns_reference,
    quantize_each_row_reference,
)
from coat_kernels.fp8 import E4M3
from coat_kernels.groups import DEFAULT_FORMAT, GROUP_FORMATS, Grouped, dequantize_groups, quantize_groups
from coat_kernels.tensorwise.operands import fp8_operands
from coat_kernels.tensorwise.predicted import PredictedScale
from coat_kernels.tensorwise.quantize import Quantized, quantize_tensor
from coat_kernels.tensorwise.scale import largest_of, largest_of_maxima


class GateGrads(NamedTuple):
    """The results of a gate's backward; None where one is not needed."""

    weights: torch.Tensor | None = None
    """Gradient of the router's weights, FP32 [n]."""
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


def quantize_each_row(x: torch.Tensor) -> Scaled:
    """`x` [n, m], contiguous, as E4M3 codes with a scale for each row; by the kernel on CUDA."""
    return (quantize_each_row_triton if uses_kernels(x) else quantize_each_row_reference)(x)


def gather_columns(codes: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The rows `source` of FP8 codes, transposed; by the kernel on CUDA."""
    return (gather_columns_triton if uses_kernels(codes) else gather_columns_reference)(codes, source)


class KernelGate(NamedTuple):
    """a(gate) * up, where both = gate | up, by the kernels; `kind` is the function a, one of
    `coat_kernels.activation.KINDS`.

    gated: if False, a(x) without up. Then read 2 f as f in the shapes below.
    """

    kind: str
    group_size: int = 16
    saved_format: str = DEFAULT_FORMAT
    gated: bool = True

    def forward(
        self, both: torch.Tensor, weights: torch.Tensor, scale: PredictedScale, trained: bool
    ) -> tuple[Quantized, torch.Tensor, tuple[torch.Tensor, ...]]:
        """both [n, 2 f] and the weight of each row [n] -> the codes of the output [n, f], its amax, and the
        saved codes and exponents, none unless `trained`."""
        keep = self.saved_format if trained else None
        options = self.kind, self.gated, self.group_size
        a, largest, kept = activation_operands(both, options, keep, scale, weights)
        return a, largest, kept.tensors if trained else ()

    def backward(self, grad_a, weights, kept, largest, source, needs: Needs) -> GateGrads:
        """From the gradient of the weighted output, [n, f], and what `forward` returned."""
        q = Grouped(*kept, GROUP_FORMATS[self.saved_format])
        options = self.kind, self.gated, self.group_size
        gradient = needs.rows or needs.columns
        if not uses_kernels(grad_a):
            columns, scale, grad_weights, maxima = gate_output_reference(
                grad_a, q, weights, source, largest, *options
            )
        else:
            columns, scale, grad_weights, maxima = gate_output_triton(
                grad_a, q, weights, source, largest, *options, needs.output, needs.weights, gradient
            )
        found = GateGrads(grad_weights, (columns, scale))
        if not gradient:
            return found
        arguments = grad_a, q, weights, source, maxima, largest_of_maxima(maxima), *options
        if not uses_kernels(grad_a):
            codes, scales, columns, scale = gate_grad_reference(*arguments)
        else:
            codes, scales, columns, scale = gate_grad_triton(*arguments, needs.rows, needs.columns)
        return found._replace(rows=(codes, scales), columns=(columns, scale))


class OwnGate(NamedTuple):
    """Like `KernelGate`, with the result computed by `function` in torch operations. gated: it halves the
    width."""

    function: Callable[[torch.Tensor], torch.Tensor]
    group_size: int = 16
    saved_format: str = DEFAULT_FORMAT
    gated: bool = True

    def forward(
        self, both: torch.Tensor, weights: torch.Tensor, scale: PredictedScale, trained: bool
    ) -> tuple[Quantized, torch.Tensor, tuple[torch.Tensor, ...]]:
        a = _times(self.function(both).to(both.dtype), weights)
        kept = quantize_groups(both, self.group_size, self.saved_format).tensors if trained else ()
        return *fp8_operands(a, E4M3, predicted=scale), kept

    def backward(self, grad_a, weights, kept, largest, source, needs: Needs) -> GateGrads:
        q = Grouped(*kept, GROUP_FORMATS[self.saved_format])
        both = dequantize_groups(q, self.group_size, torch.bfloat16).requires_grad_()
        with torch.enable_grad():
            a = self.function(both).to(both.dtype)
        grad_weights = output = rows = columns = None
        if needs.weights:
            grad_weights = (grad_a * a.detach()).sum(1, dtype=torch.float32)
        if needs.output:
            codes = quantize_tensor(_times(a.detach(), weights), largest, E4M3)
            output = gather_columns(codes.rows, source), codes.scale
            del codes
        if needs.rows or needs.columns:
            (grad,) = torch.autograd.grad(a, both, _times(grad_a, weights))
            del a, both
            if needs.rows:
                rows = quantize_each_row(grad)
            if needs.columns:
                codes = quantize_tensor(grad, largest_of(grad), E4M3)
                columns = gather_columns(codes.rows, source), codes.scale
        return GateGrads(grad_weights, output, rows, columns)


def _times(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`rows` [n, m], each times its weight [n], in the dtype of `rows`. FP32 weights create no FP32 copy."""
    return torch.mul(rows, weights[:, None], out=torch.empty_like(rows))
