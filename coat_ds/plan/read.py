"""The sizes of a model, read from whatever describes it."""

import dataclasses
import json
from pathlib import Path

from coat_ds.plan.errors import PlanError
from coat_ds.plan.from_megatron import read as read_megatron
from coat_ds.plan.from_transformers import read as read_transformers
from coat_ds.plan.meta_model import build
from coat_ds.plan.sizes import Sizes, from_shape


def from_module(model) -> Sizes:
    """The sizes of a model of transformers or megatron-core, built on any device, the meta device included.

    All parameters count: those of other parts are `other_parameters`. Raises PlanError for a model with
    layers that cannot be planned.
    """
    config = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        try:
            sizes = read_transformers(model)
        # whatever configs without such sizes raise
        except (AttributeError, RuntimeError) as error:
            raise PlanError(f"{type(model).__name__}: its sizes could not be read ({error}).") from error
    elif hasattr(config, "num_layers"):
        sizes = read_megatron(model)
    else:
        raise PlanError(
            f"{type(model).__name__}: expected a model of transformers or megatron-core, which has its sizes "
            'in "config". Hand over a Sizes instead.'
        )
    numel = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    return dataclasses.replace(sizes, other_parameters=max(0, numel - sizes.parameters))


def from_values(values: dict, vocabulary: int | None = None) -> Sizes:
    """The sizes of the model of a config.json, which transformers builds on the meta device, or of a file of
    configs/model_*.json, which names no vocabulary."""
    if "num_layers" in values and "num_query_groups" in values:
        return from_shape(values, vocabulary)
    if "model_type" not in values:
        raise PlanError("model_type: found none. Give a config.json of Hugging Face or a file of configs/.")
    return from_module(build(values if vocabulary is None else values | {"vocab_size": vocabulary}))


def model_object(path: str) -> dict:
    """The JSON object of a model's file, of the config.json in a folder, or of a model on the Hub."""
    if Path(path).is_dir():
        return read_object(str(Path(path) / "config.json"))
    if not Path(path).exists() and path.count("/") == 1 and not path.endswith(".json"):
        from transformers.utils import cached_file

        try:
            path = cached_file(path, "config.json")
        except OSError as error:
            raise PlanError(f"{path}: neither a file nor a model on the Hub ({error}).") from None
    return read_object(path)


def read_object(path: str) -> dict:
    """The JSON object in a file. Raises PlanError for whatever else is there."""
    try:
        value = json.loads(Path(path).read_bytes())
    # of too many brackets in brackets
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else f"not a JSON file ({error})"
        raise PlanError(f"{path}: {why}. Give a JSON file that can be read.") from None
    if not isinstance(value, dict):
        raise PlanError(f"{path}: expected a JSON object, found {type(value).__name__}. Use braces.")
    return value
