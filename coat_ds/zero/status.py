"""What COAT does in an engine: `engine.coat`, which is also logged."""

from dataclasses import dataclass
from typing import Any

import torch

from coat_ds.config import CoatConfig, CoatConfigError
from coat_ds.layers.inventory import Layers
from coat_ds.log import listed
from coat_ds.optim.accounting import state_bytes, states_line
from coat_ds.watch.watch import Watch
from coat_ds.zero.layer_units import LayerUnits

ON = 'on; "enabled": false in the coat block switches it off'


@dataclass(frozen=True, slots=True)
class Status:
    """What COAT does in one engine. Its `str()` is what rank 0 logs."""

    config: CoatConfig
    """The block."""

    layers: Layers
    """How many layers of this rank's model compute in FP8 and save 8 bits, and why others do not."""

    units: LayerUnits
    """The layers that ZeRO-3 gathers whole."""

    optimizer: torch.optim.Optimizer | None
    """The CoatAdamW inside DeepSpeed's wrapper; None if `coat.optimizer` is disabled."""

    watch: Watch | None
    """The Watch that takes readings; None if the engine is not watched."""

    @property
    def states(self) -> dict[str, Any] | None:
        """`state_bytes` of the optimizer now; None if `coat.optimizer` is disabled."""
        return None if self.optimizer is None else state_bytes(self.optimizer)

    def __str__(self) -> str:
        lines = []
        if self.optimizer is not None:
            lines.append(states_line(self.optimizer, self.states))
        if self.config.activations.enabled:
            lines += self.layers.lines()
        if gathered := self.units.summary():
            lines.append(gathered)
        if not lines:
            return "nothing enabled"
        return listed(ON, lines)


def idle_layers_warning(coat: CoatConfig, layers: Layers) -> str | None:
    """A warning if the block enables FP8 linear layers and no linear layer computes in FP8; otherwise None.

    With `"require": true` in the block it raises CoatConfigError instead.
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
