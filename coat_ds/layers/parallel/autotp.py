"""FP8 GEMMs for the linear layers by which DeepSpeed's AutoTP replaces torch's.

Each rank holds a part of the weight as a plain tensor. DeepSpeed's own functions exchange inputs, outputs and
their gradients between ranks; only the GEMM between the exchanges is replaced.
"""

import sys
from typing import Any

import torch

from coat_ds.layers.modules.converted_forward import can_be_read
from coat_ds.layers.modules.hooks import forget_if_pre_hooked
from coat_ds.layers.modules.linear import Fp8Linear
from coat_kernels.autograd.origin import origin_of


def _deepspeed() -> Any:
    """DeepSpeed's module of AutoTP's layers; None if it is not imported, since no such layer exists then."""
    return sys.modules.get("deepspeed.module_inject.layers")


def is_autotp(module: torch.nn.Module) -> bool:
    """Whether `module` is AutoTP's linear layer: x W^T + b with a rank's part of W, by rows or columns."""
    layers = _deepspeed()
    forward = type(module).forward
    return layers is not None and forward in (layers.LinearLayer.forward, layers.LinearAllreduce.forward)


def why_not(module: torch.nn.Module) -> str | None:
    """Why a layer of AutoTP keeps its forward; None if it can be converted."""
    if getattr(module, "gather_output", False):
        return "AutoTP gathers its output"
    if type(module).tp_overlap_comm:
        return "tensor_parallel.tp_overlap_comm multiplies by itself"
    return None


class AutoTPLinear(Fp8Linear):
    """The forward of AutoTP's linear layer."""

    def compute(self, input: torch.Tensor) -> torch.Tensor:
        module, layers = self.module, _deepspeed()
        if (
            torch.compiler.is_compiling()
            or getattr(module, "defer_collectives_to_compiler", False)
            or not (self.check_tensor(input) and can_be_read(module.weight))
        ):
            return self.stock(input)
        forget_if_pre_hooked(module, input)
        origin, group = origin_of(input), module.mp_group
        if isinstance(module, layers.LinearLayer):
            # the gradient of the input is summed over ranks
            x = input if group is None else layers.ColumnParallel.apply(group, input)
            return self.multiply(x, module.weight, module.bias, origin)
        y = self.multiply(input, module.weight, None, origin)
        y = layers.RowParallel.apply(group, y, not module.is_training_mode())
        return y if module.bias is None else y + module.bias
