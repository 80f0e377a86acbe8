"""Passes the block's `activations` to the layers: as a note on Megatron's config.

The note is stored on the function in the field `init_method`. All copies of a config have its fields, also
those of `dataclasses.replace`, which drops attributes that are not fields.
"""

import functools
from typing import Any

from coat_ds.config import ActivationsConfig
from coat_ds.layers.inventory import Part
from megatron_ext import options


def set_activations(config, activations: ActivationsConfig, by: str | None = "set_activations()") -> None:
    """Notes `activations` on Megatron's TransformerConfig, before the model is built from it.

    Copies of the config keep the note, by `copy`, `dataclasses.replace` or otherwise, unless they get another
    `init_method`: call this function for such a copy.
    by: the origin of the settings, for messages; None if they are the defaults.
    """
    # for this config alone: other configs may share the function. As Megatron's own it is a partial, which
    # pickles
    init: Any = functools.partial(config.init_method)
    init.coat_activations, init.coat_activations_by = activations, by
    config.init_method = init


def activations_of(config) -> ActivationsConfig:
    """The note on Megatron's config; without one, as with `--spec` alone, the settings of `COAT_CONFIG`."""
    if not hasattr(config.init_method, "coat_activations"):
        set_activations(config, options.activations(), options.named_file())
    return config.init_method.coat_activations


class TakesActivations:
    """A module that `coat_ds.zero.model_layers` finds, queries and configures. Mixed in before Megatron's
    class."""

    activations: ActivationsConfig
    told_by: str | None

    def begin_with(self, config) -> None:
        """Applies the note on Megatron's config."""
        self.take_activations(activations_of(config))
        self.told_by = config.init_method.coat_activations_by

    def take_activations(self, activations: ActivationsConfig) -> None:
        """Applies `activations` from now on. Drops predicted scales."""
        self.activations = activations

    def coat_part(self) -> Part | None:
        """What the module does, for the log; None if its parts report it."""
        return None
