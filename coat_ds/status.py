"""What COAT does in an engine: `engine.coat`, of which the log speaks."""

from dataclasses import dataclass
from typing import Any

import torch

from coat_ds.config import CoatConfig, CoatConfigError
from coat_ds.layer_units import LayerUnits
from coat_ds.model_layers import Layers
from coat_ds.shards import local
from coat_ds.state import Moment


@dataclass(frozen=True, slots=True)
class Status:
    """What an engine has of COAT. `str()` of it is the line that rank 0 logs."""

    config: CoatConfig
    """The block."""

    layers: Layers
    """How many layers of this rank's model compute in FP8 and keep 8 bits, which do not, and why."""

    units: LayerUnits
    """The layers that ZeRO-3 gathers whole."""

    optimizer: torch.optim.Optimizer | None
    """The CoatAdamW inside of DeepSpeed's wrappers; None if the block leaves the optimizer to DeepSpeed."""

    @property
    def states(self) -> dict[str, Any] | None:
        """`state_bytes` of the optimizer as it is now; None if the block leaves it to DeepSpeed."""
        return None if self.optimizer is None else state_bytes(self.optimizer)

    def __str__(self) -> str:
        parts = []
        if self.optimizer is not None:
            held = self.states
            by_codec = ", ".join(f"{size:,} in {name}" for name, size in sorted(held["by_codec"].items()))
            parts.append(f"AdamW states {held['bytes_per_parameter']:.3f} bytes per parameter ({by_codec})")
        if self.config.activations.enabled or self.layers.made:
            parts.append(self.layers.summary())
        if gathered := self.units.summary():
            parts.append(gathered)
        return f"COAT: {'; '.join(parts) or 'nothing enabled'}"


def idle_layers(coat: CoatConfig, layers: Layers) -> str | None:
    """A line if the block is to have linear layers compute in FP8, and none does; None if all is well.

    Raises CoatConfigError in its place if the block says `"require": true`.
    """
    made, linears = layers.count("linear")
    if made or not linears or not coat.activations.enabled:
        return None
    line = f"coat.activations.enabled: found True, but {layers.summary()}."
    if coat.require:
        raise CoatConfigError(
            f'{line} "require": true makes this an error: set it to false, or "activations" to false.'
        )
    return f'{line} Set "activations" to false if that is meant; "require": true makes it an error.'


def state_bytes(optimizer) -> dict[str, Any]:
    """What the states of an optimizer hold on this rank.

    optimizer: a torch optimizer, the wrapper that DeepSpeed puts around one, or a DeepSpeed engine.
    Returns `bytes`, `parameters` (elements that have a state; ZeRO's padding included),
    `bytes_per_parameter`, and `by_codec`: bytes by codec name, where plain tensors are named by dtype.
    """
    optimizer = _base_optimizer(optimizer)
    by_codec: dict[str, int] = {}
    parameters = 0
    for p, state in optimizer.state.items():
        parameters += local(p).numel()
        for value in state.values():
            value = local(value)
            if isinstance(value, Moment):
                held = [(piece.codec.name, piece.storage.nbytes) for piece in value.pieces]
            elif isinstance(value, torch.Tensor):
                held = [(str(value.dtype).removeprefix("torch."), value.nbytes)]
            else:
                continue
            for name, size in held:
                by_codec[name] = by_codec.get(name, 0) + size
    total = sum(by_codec.values())
    return {
        "bytes": total,
        "parameters": parameters,
        "bytes_per_parameter": total / parameters if parameters else 0.0,
        "by_codec": by_codec,
    }


def _base_optimizer(optimizer) -> torch.optim.Optimizer:
    optimizer = getattr(optimizer, "basic_optimizer", optimizer)
    while not isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"state_bytes: expected a torch optimizer, DeepSpeed's wrapper of one, or an engine; found "
            f"{type(optimizer).__name__}."
        )
    return optimizer
