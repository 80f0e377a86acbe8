"""FP8 GEMMs for linear layers that transformers has split over ranks (`tp_plan`).

transformers replaces a layer's forward by a function that exchanges inputs, calls the layer's own forward,
and exchanges outputs. The layer's style and mesh are in the function's closure.
"""

import inspect
import sys
from typing import Any, NamedTuple

import torch

from coat_ds.config import ActivationsConfig
from coat_ds.layers.modules import dtensor
from coat_ds.layers.modules.converted_forward import DTYPES
from coat_ds.layers.modules.linear import Fp8Linear
from coat_ds.optim.shards import is_distributed
from coat_kernels.autograd.origin import origin_of


class Split(NamedTuple):
    """How transformers has split a layer: one of its `TensorParallelLayer`s, and over which ranks."""

    style: Any
    mesh: Any


def split_of(module: torch.nn.Module) -> Split | None:
    """How transformers has split `module`; None if it has not."""
    styles = sys.modules.get("transformers.distributed.tensor_parallel")
    forward = module.__dict__.get("forward")
    if styles is None or not inspect.isfunction(forward):
        return None
    found = inspect.getclosurevars(forward).nonlocals
    style, mesh = found.get("self"), found.get("mesh")
    return Split(style, mesh) if isinstance(style, styles.TensorParallelLayer) else None


def why_not(module: torch.nn.Module, split: Split) -> str | None:
    """Why a split layer keeps its forward; None if it can be converted."""
    styles = sys.modules["transformers.distributed.tensor_parallel"]
    if type(split.style) not in (styles.ColwiseParallel, styles.RowwiseParallel):
        return f"transformers' {type(split.style).__name__} keeps its forward"
    if not is_distributed(module.weight):
        return "its weight is no DTensor, though transformers has split it"
    return dtensor.unaligned(module.weight)


class TransformersTPLinear(Fp8Linear):
    """The forward of a linear layer that transformers has split by rows or columns."""

    def __init__(
        self, module: torch.nn.Module, activations: ActivationsConfig, split: Split, precise_wgrad: bool
    ):
        super().__init__(module, activations, precise_wgrad=precise_wgrad)
        self.split = split

    def compute(self, input: torch.Tensor) -> torch.Tensor:
        module, (style, mesh) = self.module, self.split
        # also raises for FP16
        self.check_tensor(input)
        if torch.compiler.is_compiling() or input.dtype not in DTYPES:
            return self.stock(input)
        (x,), _ = style.transform_inputs_pre_forward(module, (input,), {}, mesh)
        # without gradients transformers passes plain tensors, also for the weight
        with style.context_around_forward(module, mesh):
            if is_distributed(x):
                self.log_that_parts_are_not_cached()
                y = dtensor.linear(module, x, self.multiply)
            else:
                y = self.multiply(x, module.weight, module.bias, origin_of(x))
        return style.transform_output_post_forward(module, y, mesh)
