"""Linear layers that multiply rounded operands, by GEMMs in the model's dtype."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

# the operands of the three GEMMs, as `Rounding` gets their names
FORWARD = "x", "weight"
BACKWARD = "dgrad grad", "dgrad weight", "wgrad grad", "wgrad x"

Rounding = Callable[[str, str, torch.Tensor], torch.Tensor]
"""(name of the layer, name of the operand, the operand as a matrix) -> what is multiplied in its place."""


class _RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, rounded):
        ctx.save_for_backward(x, weight)
        ctx.rounded = rounded
        rows = rounded("x", x.flatten(0, -2))
        return F.linear(rows, rounded("weight", weight)).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_x = ctx.rounded("dgrad grad", rows) @ ctx.rounded("dgrad weight", weight)
        grad_weight = ctx.rounded("wgrad grad", rows).T @ ctx.rounded("wgrad x", x.flatten(0, -2))
        return grad_x.view_as(x), grad_weight, None


def linear_layers(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """The linear layers of a model of transformers, without the one that computes logits, by their names."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and name != "lm_head"
    }


def round_operands(model: torch.nn.Module, rounding: Rounding) -> None:
    """Rounds the operands of the linear layers, which have no biases, from now on."""
    for name, layer in linear_layers(model).items():
        rounded = functools.partial(rounding, name)
        layer.forward = lambda x, w=layer.weight, r=rounded: _RoundedLinear.apply(x, w, r)
