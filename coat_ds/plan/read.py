"""Models and their sizes, read from a file or from the Hub. Nothing is allocated."""

import dataclasses
import textwrap
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.utils import _device

from coat_ds.config import read_object
from coat_ds.plan.errors import PlanError
from coat_ds.plan.from_transformers import from_module
from coat_ds.plan.layout import Layout
from coat_ds.plan.sizes import Sizes, from_shape


def meta_model(config: Mapping) -> torch.nn.Module:
    """The model of a Hugging Face config, on the meta device, in BF16: of the class that its `architectures`
    name, or a causal language model.

    Raises PlanError where transformers is missing or does not know it.
    """
    try:
        import transformers
    except ImportError as error:
        raise PlanError(
            "model: transformers, which builds it, is not installed. pip install transformers"
        ) from error
    fields = dict(config)
    try:
        made = transformers.AutoConfig.for_model(fields.pop("model_type", ""), **fields)
        kind = next(
            (k for name in made.architectures or () if (k := getattr(transformers, name, None))), None
        )
        # torch keeps the list of constructors that it made when it first needed one. If DeepSpeed's zero.Init
        # had exchanged them then, the list lacks torch's own, and the model would take its memory
        _device._device_constructors.cache_clear()
        with torch.device("meta"):
            model = kind(made) if kind else transformers.AutoModelForCausalLM.from_config(made)
    # whatever the classes of a foreign config raise
    except Exception as error:
        why = textwrap.shorten(str(error) or type(error).__name__, 200, placeholder=" ...")
        fix = "Correct model_type, or what it names"
        if "auto_map" in config:
            why = "its code is not part of transformers: auto_map"
            fix = "Build it in Python on the meta device, and call coat_ds.plan.from_module"
        raise PlanError(f"model: transformers cannot build it ({why}). {fix}.") from error
    # buffers that torch's constructors did not make, too
    return model.to("meta", torch.bfloat16)


def as_megatrons(sizes: Sizes, layout: Layout) -> Sizes:
    """The same model with layers of Megatron. Raises PlanError for parallel sizes that do not divide experts
    or heads, and for tensor parallelism of experts and stages of different layers."""
    count = sizes.experts.count if sizes.experts else 1
    if count % layout.expert:
        raise PlanError(f"--expert: {layout.expert} does not divide the {count} experts. Change it.")
    if sizes.heads % layout.tensor:
        raise PlanError(f"--tensor: {layout.tensor} does not divide the {sizes.heads} heads. Change it.")
    if sizes.experts and layout.tensor > 1:
        raise PlanError("--tensor: not planned with Megatron's experts. Drop it, or give --expert.")
    if sizes.experts and layout.pipeline > 1 and sizes.experts.layers < sizes.layers:
        raise PlanError("--pipeline: planned with experts in all layers or in none. Drop it.")
    return dataclasses.replace(sizes, maker="megatron", counted=True)


def from_values(values: dict, vocabulary: int | None = None) -> Sizes:
    """The sizes of the model of a config.json, which transformers builds on the meta device, or of a file of
    configs/model_*.json, which names no vocabulary."""
    if "num_layers" in values and "num_query_groups" in values:
        return from_shape(values, vocabulary)
    if "model_type" not in values:
        raise PlanError("model_type: found none. Give a config.json of Hugging Face or a file of configs/.")
    return from_module(meta_model(values if vocabulary is None else values | {"vocab_size": vocabulary}))


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
