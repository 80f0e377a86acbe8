"""Counts the bytes that decoder layers save for backward, and those of their cached weights."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from coat_ds.saved_bytes import SavedStorages


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


def cached_weight_bytes(model: torch.nn.Module) -> int:
    """Bytes that COAT's linears hold now in FP8 copies of weights, by `weight_cache`; 0 for other layers."""
    return sum(getattr(module, "cached_bytes", 0) for module in model.modules())
