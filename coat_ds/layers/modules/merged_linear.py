"""Merges linear layers that read the same input into one GEMM."""

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from coat_ds.config import ActivationsConfig
from coat_ds.layers.modules.formats import formats
from coat_ds.layers.modules.linear import is_fused
from coat_ds.layers.modules.replaced import is_plain, replaced
from coat_kernels.linear import LinearOptions, MergedCache, merged
from coat_kernels.tensorwise import PredictedScale


def is_hooked(module: nn.Module) -> bool:
    """Whether `module` has a hook, such as ZeRO-3's when it gathers weights module by module."""
    own = module.__dict__
    forward, backward = own["_forward_hooks"] or own["_forward_pre_hooks"], own["_backward_hooks"]
    return bool(forward or backward or own["_backward_pre_hooks"])


def may_merge(linears: tuple[nn.Module, ...]) -> bool:
    """Whether these layers can be one GEMM: they have convert's forwards, no hooks, the same dtype, all or
    none have biases, and all or none are frozen."""
    first = linears[0]
    if torch.compiler.is_compiling() or _has_any_global_hook():
        return False
    for linear in linears:
        forward = replaced(linear)
        if not is_fused(forward) or is_hooked(linear):
            return False
        if (
            not is_plain(linear.weight)
            or linear.weight.dtype != first.weight.dtype
            or linear.weight.requires_grad != first.weight.requires_grad
            or (linear.bias is None) != (first.bias is None)
        ):
            return False
    return True


class MergedLinear:
    """The state of a merged GEMM: the predicted scales of its operands and the cache of its weights."""

    def __init__(self, activations: ActivationsConfig, cancels: bool = False):
        self.formats = formats(activations, cancels)
        self.cache = MergedCache(activations.weight_cache)
        self.x_scale = PredictedScale(self.formats.forward)
        self.grad_scale = PredictedScale(self.formats.backward)

    def options(self, linears: tuple[nn.Module, ...]) -> LinearOptions:
        """The options of the GEMM with the merged parameters of `joined`."""
        weights = tuple(linear.weight for linear in linears)
        return LinearOptions(
            self.formats, self.cache.of(weights), x_scale=self.x_scale, grad_scale=self.grad_scale
        )


def parameters_of(
    linears: tuple[nn.Module, ...],
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor | None, ...]]:
    """The weights and the biases of the layers."""
    return tuple(linear.weight for linear in linears), tuple(linear.bias for linear in linears)


def joined(
    weights: tuple[torch.Tensor, ...], biases: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight and the bias of the merged GEMM."""
    if len(weights) == 1:
        return weights[0], biases[0]
    return merged(weights), None if biases[0] is None else torch.cat(biases)
