"""How the block's `activations` reach the layers: by a note on Megatron's config.

It stands on the function of the field `init_method`. All copies of a config have its fields, also those of
`dataclasses.replace`, which drops whatever is no field.
"""

import functools
from typing import Any

from coat_ds.config import ActivationsConfig
from coat_ds.layers.inventory import Part
from megatron_ext import options


def set_activations(config, activations: ActivationsConfig, by: str | None = "set_activations()") -> None:
    """Notes `activations` on Megatron's TransformerConfig, before the model is built from it.

    Copies of the config have the note, by `copy`, `dataclasses.replace` or otherwise, unless they are given
    another `init_method`: call this for such a one.
    by: who chose them, for messages; None if they are the defaults that nobody asked for.
    """
    # of this config alone, as others may share the function; as Megatron's own it is a partial, which pickles
    init: Any = functools.partial(config.init_method)
    init.coat_activations, init.coat_activations_by = activations, by
    config.init_method = init


def activations_of(config) -> ActivationsConfig:
    """What was noted on Megatron's config; else, as with `--spec` alone, what `COAT_CONFIG` says."""
    if not hasattr(config.init_method, "coat_activations"):
        set_activations(config, options.activations(), options.named_file())
    return config.init_method.coat_activations


class TakesActivations:
    """A module that `coat_ds.zero.model_layers` finds, asks and tells. Mixed in before Megatron's class."""

    activations: ActivationsConfig
    told_by: str | None

    def begin_with(self, config) -> None:
        """Takes what was noted on Megatron's config."""
        self.take_activations(activations_of(config))
        self.told_by = config.init_method.coat_activations_by

    def take_activations(self, activations: ActivationsConfig) -> None:
        """Does from now on what `activations` say. Predicted scales are forgotten."""
        self.activations = activations

    def coat_part(self) -> Part | None:
        """What the module does, for the log; None if its parts say it."""
        return None
