"""The sizes of a model, read from a file or from the Hub."""

import dataclasses
import json
from pathlib import Path

from coat_ds.plan.errors import PlanError
from coat_ds.plan.from_transformers import from_module
from coat_ds.plan.meta_model import build
from coat_ds.plan.sizes import Sizes, from_shape


def as_megatrons(sizes: Sizes) -> Sizes:
    """The same model with layers of Megatron. Raises PlanError for a model with experts."""
    if sizes.experts is not None:
        raise PlanError("--megatron: Megatron's experts are not planned. Drop it for a plan under DeepSpeed.")
    return dataclasses.replace(sizes, maker="megatron", counted=True)


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
