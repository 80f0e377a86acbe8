"""The forward of a converted linear layer, x W^T + b with FP8 GEMMs, and linear layers that read the same
input as one GEMM."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from coat_ds.config import ActivationsConfig
from coat_ds.layers.modules import dtensor
from coat_ds.layers.modules.attention import attended_origin
from coat_ds.layers.modules.converted_forward import (
    ConvertedForward,
    can_be_read,
    converted_forward,
    is_plain,
)
from coat_ds.layers.modules.hooks import forget_if_pre_hooked, is_hooked
from coat_ds.log import log_once
from coat_ds.optim.shards import is_distributed
from coat_kernels.autograd.origin import Origin, origin_of
from coat_kernels.fp8 import fp8_format
from coat_kernels.linear import LinearFormats, LinearState, fp8_linear
from coat_kernels.weights import Weights


class Gemm(LinearState):
    """What a GEMM keeps between steps, by the block's settings.

    precise_wgrad: large terms cancel in the weight's gradient, as in attention's projections.
    """

    def __init__(self, activations: ActivationsConfig, precise_wgrad: bool = False):
        fast = activations.fast_accumulation
        formats = LinearFormats(
            fp8_format(activations.backward_format),
            fast_forward=fast != "none",
            fast_input_grad=fast == "all",
            fast_weight_grad=fast == "all" and not precise_wgrad,
        )
        super().__init__(formats, activations.weight_cache)

    def multiply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | Weights,
        bias: torch.Tensor | None,
        origin: Origin | None,
    ) -> torch.Tensor:
        """x W^T + b. origin: how to recompute x in backward."""
        return fp8_linear(x, weight, bias, self.options(weight), origin=origin or attended_origin(x))


class Fp8Linear(ConvertedForward, Gemm):
    """The forward of torch's Linear or, with `transposed` weights [k, n], of transformers' Conv1D."""

    def __init__(
        self,
        module: nn.Module,
        activations: ActivationsConfig,
        transposed: bool = False,
        precise_wgrad: bool = False,
    ):
        super().__init__(module, activations)
        Gemm.__init__(self, activations, precise_wgrad)
        self.transposed = transposed

    def shown(self) -> str:
        return f"coat=fp8 e4m3/{self.formats.backward.name}"

    def compute(self, input: torch.Tensor) -> torch.Tensor:
        module, weight = self.module, self.module.weight
        if input.device != weight.device:
            raise RuntimeError(
                f"a converted linear layer on {weight.device} got an input on {input.device}. "
                "torch.nn.DataParallel cannot copy converted models to other devices: use "
                "DistributedDataParallel, one process for each GPU."
            )
        if not (self.check_tensor(input) and can_be_read(weight)):
            if is_distributed(weight):
                return self._of_parts(input)
            self.check_tensor(weight)
            return self.stock(input)
        forget_if_pre_hooked(module, input)
        return self.multiply(input, weight.t() if self.transposed else weight, module.bias, origin_of(input))

    def _of_parts(self, input: torch.Tensor) -> torch.Tensor:
        """`compute` under torch's tensor parallelism, where the weights are DTensors."""
        if torch.compiler.is_compiling():
            reason = "torch.compile traces them"
        elif self.transposed:
            reason = "transformers' Conv1D is not split"
        else:
            reason = dtensor.why_not(input, self.module.weight)
        if reason is not None:
            log_once(
                f"weights of linear layers are DTensors, as under torch's tensor parallelism, but {reason}. "
                "These layers multiply as before they were converted, not in FP8."
            )
            return self.stock(input)
        self.log_that_parts_are_not_cached()
        return dtensor.linear(self.module, input, self.multiply)

    def log_that_parts_are_not_cached(self) -> None:
        """Warns if a cache is set: each forward takes a new local tensor from the DTensor."""
        if self.cache.keep != "none":
            log_once(
                f"coat.activations.weight_cache: found {self.cache.keep!r}, of no effect on weights that are "
                "DTensors, as under tensor parallelism. Drop the key."
            )


def can_fuse(forward: object) -> bool:
    """Whether a fused block or a merged GEMM may replace `forward`."""
    return type(forward) is Fp8Linear and not forward.transposed


def may_merge(linears: tuple[nn.Module, ...]) -> bool:
    """Whether these layers can be one GEMM: they have convert's forwards, no hooks, the same dtype, all or
    none have biases, and all or none are frozen."""
    first = linears[0]
    if torch.compiler.is_compiling() or _has_any_global_hook():
        return False
    for linear in linears:
        forward = converted_forward(linear)
        if not can_fuse(forward) or is_hooked(linear):
            return False
        if (
            not is_plain(linear.weight)
            or linear.weight.dtype != first.weight.dtype
            or linear.weight.requires_grad != first.weight.requires_grad
            or (linear.bias is None) != (first.bias is None)
        ):
            return False
    return True


def parameters_of(linears: tuple[nn.Module, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The weights and the biases of the layers."""
    return [linear.weight for linear in linears], [linear.bias for linear in linears]


def joined(
    parameters: Sequence[torch.Tensor | None],
) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
    """The weight of the merged GEMM of the layers with these weights, or its bias."""
    first = parameters[0]
    if first is None or len(parameters) == 1:
        return first
    return tuple(parameters) if first.ndim == 2 else torch.cat(parameters)
