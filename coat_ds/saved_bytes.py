"""Counts the bytes saved for backward: the storages that autograd saves."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from coat_ds.optim.shards import local


class SavedStorages:
    """The storages that autograd saves within `counting`. Each storage counts once, with all its bytes.

    is_left_out: returns True for the address of a storage that is not counted, such as a weight's.
    """

    def __init__(self, is_left_out: Callable[[int], bool]):
        self._is_left_out = is_left_out
        # references, so that no address is reused, except those of storages that Megatron's recompute empties
        self._kept: dict[int, torch.UntypedStorage] = {}

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self._kept.values())

    def counting(self) -> AbstractContextManager:
        """A context for a forward pass or a part of a forward pass."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        storage = local(x).untyped_storage()
        address = storage.data_ptr()
        kept = self._kept.get(address)
        if (kept is None or kept.data_ptr() != address) and not self._is_left_out(address):
            self._kept[address] = storage
        # A leaf is returned itself, since ZeRO-3 fills and empties the parameter object. Any other tensor is
        # detached: one that its own grad_fn saves would be in a reference cycle, which is never freed
        return x if x.is_leaf else x.detach()
