"""The block's `activations` in the modules of Megatron's layers.

A module begins with those of the file of `COAT_CONFIG`, or with the defaults. `set_activations` changes them
once the model is built, and so does DeepSpeed's engine (`coat_ds.zero.model_layers`).
"""

import torch

from coat_ds.config import ActivationsConfig
from coat_ds.layers.inventory import Part
from megatron_ext import options


def set_activations(model: torch.nn.Module, activations: ActivationsConfig) -> None:
    """Applies `activations` to the COAT layers of `model` from now on.

    Raises ValueError for values that a layer does not support.
    """
    for module in model.modules():
        if isinstance(module, TakesActivations):
            module.take_activations(activations)
            module.told_by = "set_activations()"


class TakesActivations:
    """A module that `set_activations` and `coat_ds.zero.model_layers` configure. Mixed in before Megatron's
    class, whose constructor runs before `begin`."""

    activations: ActivationsConfig
    # what messages name as the source of the settings; None for the defaults
    told_by: str | None

    def begin(self) -> None:
        """Applies the settings of the file of `COAT_CONFIG`, or the defaults."""
        self.take_activations(options.activations())
        self.told_by = options.named_file()

    def take_activations(self, activations: ActivationsConfig) -> None:
        """Applies `activations` from now on. Drops predicted scales."""
        self.activations = activations

    def coat_part(self) -> Part | None:
        """What the module does, for the log; None if its parts report it."""
        return None
