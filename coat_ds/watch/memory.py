"""Bytes that this rank holds, by role."""

from collections.abc import Iterable

import torch

from coat_ds.layers.modules.replaced import attributes_of
from coat_ds.optim.accounting import state_bytes
from coat_ds.optim.optimizer import CoatAdamW
from coat_kernels.weights import WeightCache


def held_bytes(
    model: torch.nn.Module, optimizers: Iterable[CoatAdamW], masters: Iterable[torch.Tensor]
) -> dict[str, int]:
    """`weights`: parameters, under ZeRO-3 this rank's shares and those that are whole now, and buffers;
    `masters`, except masters that are the weights themselves; `states`: the optimizers'; `fp8_copies`: kept
    quantized weights."""
    own = list(model.parameters())
    # ZeRO-3 keeps its shares, and small parameters whole on every rank; other parameters are empty
    weights = [*own, *(p.ds_tensor for p in own if hasattr(p, "ds_tensor")), *model.buffers()]
    counted: set[int] = set()
    roles = {"weights": _bytes(weights, counted), "masters": _bytes(masters, counted)}
    roles["states"] = sum(state_bytes(optimizer)["bytes"] for optimizer in optimizers)
    roles["fp8_copies"] = sum(cache.nbytes for cache in _caches(model))
    return roles


def _bytes(tensors: Iterable[torch.Tensor], counted: set[int]) -> int:
    """Bytes of the tensors' elements; tensors that share an address count once."""
    total = 0
    for t in tensors:
        t = t.to_local() if hasattr(t, "to_local") else t
        if t.data_ptr() not in counted:
            counted.add(t.data_ptr())
            total += t.nbytes
    return total


def _caches(model: torch.nn.Module) -> set[WeightCache]:
    found = set()
    for module in model.modules():
        for _, value in attributes_of(module):
            value = getattr(value, "cache", value)
            if isinstance(value, WeightCache):
                found.add(value)
    return found
