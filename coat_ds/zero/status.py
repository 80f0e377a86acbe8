"""What COAT does in an engine: `engine.coat`. The log shows it."""

from dataclasses import dataclass
from typing import Any

import torch

from coat_ds.config import CoatConfig, CoatConfigError
from coat_ds.layers.inventory import Layers
from coat_ds.optim.accounting import state_bytes
from coat_ds.optim.lines import states_line
from coat_ds.watch.watch import Watch
from coat_ds.zero.layer_units import LayerUnits


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

    watch: Watch | None
    """What measures it; None where nothing does."""

    @property
    def states(self) -> dict[str, Any] | None:
        """`state_bytes` of the optimizer as it is now; None if the block leaves it to DeepSpeed."""
        return None if self.optimizer is None else state_bytes(self.optimizer)

    def __str__(self) -> str:
        parts = []
        if self.optimizer is not None:
            parts.append(states_line(self.optimizer, self.states))
        if self.config.activations.enabled:
            parts.append(self.layers.summary())
        if gathered := self.units.summary():
            parts.append(gathered)
        return f"COAT: {'; '.join(parts) or 'nothing enabled'}"


def idle_layers(coat: CoatConfig, layers: Layers) -> str | None:
    """A line if the block is to have linear layers compute in FP8, and none does; None if all is well.

    Raises CoatConfigError in its place if the block says `"require": true`.
    """
    made, linears = layers.count("linear")
    if made or not (linears or coat.require) or not coat.activations.enabled:
        return None
    line = f"coat.activations.enabled: found True, but {layers.summary()}."
    if coat.require:
        raise CoatConfigError(
            f'{line} "require": true makes this an error: set it to false, or "activations" to false.'
        )
    return f'{line} Set "activations" to false if that is meant; "require": true makes it an error.'
