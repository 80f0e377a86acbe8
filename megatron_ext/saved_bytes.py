"""Counts the bytes saved for backward: the storages that autograd saves. Megatron is not imported."""

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """The bytes that `layers` layers kept of one forward over `tokens` tokens (batch times sequence)."""

    total: int
    layers: int
    tokens: int

    @property
    def per_token_and_layer(self) -> float:
        return self.total / (self.tokens * self.layers)


def saved_bytes(model: torch.nn.Module | Iterable[torch.nn.Module], run: Callable[[], object]) -> SavedBytes:
    """Counts the bytes that the decoder layers save for backward during `run()`, one forward.

    `model` is a GPTModel or the layers themselves, each called with hidden states [s, b, h]. A storage counts
    once and whole, however many layers or views keep it: tables and masks shared by all layers count once.
    Parameters and buffers do not count. Only tensors that pass through autograd's `save_for_backward` count.
    Raises ValueError if `run` calls none of the layers.
    """
    layers = list(
        model.get_submodule("decoder.layers").children() if isinstance(model, torch.nn.Module) else model
    )
    existing = {
        tensor.untyped_storage().data_ptr()
        for module in ([model] if isinstance(model, torch.nn.Module) else layers)
        for tensor in (*module.parameters(), *module.buffers())
    }
    saved = SavedStorages(existing.__contains__)
    tokens: list[int] = []
    hooks = contextlib.ExitStack()

    def enter(module, args, kwargs):
        hidden_states = args[0] if args else kwargs["hidden_states"]
        tokens.append(hidden_states.shape[0] * hidden_states.shape[1])
        hooks.enter_context(saved.counting())

    def leave(module, args, output):
        hooks.close()

    handles = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(leave) for layer in layers]
    try:
        run()
    finally:
        # of a layer that has raised an error
        hooks.close()
        for handle in handles:
            handle.remove()
    if not tokens:
        raise ValueError(
            "saved_bytes: run() called none of the layers; hand over a forward of this very model"
        )
    return SavedBytes(saved.nbytes, len(layers), tokens[0])
