"""The block's `activations` in the modules of Megatron's layers.

A spec passes them to its layers in its `params`: `megatron_ext.spec` passes those of the file of
`COAT_CONFIG`. A layer applies them to its modules once they are built, since Megatron builds the modules
inside a layer from its own config alone. `set_activations` changes them later, and so does DeepSpeed's engine
(`coat_ds.zero.model_layers`).
"""

import torch

from coat_ds.config import ActivationsConfig
from coat_ds.layers.inventory import Part


def set_activations(
    model: torch.nn.Module, activations: ActivationsConfig, source: str | None = "set_activations()"
) -> None:
    """Applies `activations` to the COAT layers of `model` from now on.

    source: what later messages name as the origin of the settings; None for defaults.
    Raises ValueError for values that a layer does not support.
    """
    for module in model.modules():
        if isinstance(module, Configurable):
            module.apply_activations(activations)
            module.activations_source = source


class Configurable:
    """A module with settings of the block. Mixed in before Megatron's class; its constructor ends with
    `apply_activations(ActivationsConfig())`, the defaults."""

    activations: ActivationsConfig
    # what messages name as the source of the settings; None for the defaults
    activations_source: str | None = None

    def apply_activations(self, activations: ActivationsConfig) -> None:
        """Applies `activations` from now on. Drops predicted scales."""
        self.activations = activations

    def coat_part(self) -> Part | None:
        """What the module does, for the log; None if its parts report it."""
        return None
