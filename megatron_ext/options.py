"""The configuration of Megatron-LM's own scripts, which have no arguments for a plugin.

`megatron_ext.spec` reads the block of a DeepSpeed config in the JSON file that the variable `COAT_CONFIG`
names:

    {"coat": {"enabled": true, "activations": {"weight_cache": "fp8"}}}

Options of single linear layers are set in the file of Megatron's `--te-precision-config-file`:

    configs: {wide: {coat: {backward_format: e4m3}}, plain: {coat: {enabled: false}}}
    matchers:
      first: {type: glob, pattern: "*layers.0.*", config: plain, enabled: true}
      fc2: {type: glob, pattern: "*linear_fc2", config: wide, enabled: true}
"""

import dataclasses
import json
import operator
import os
import sys
from collections.abc import Mapping
from typing import Any

from coat_ds.config import ActivationsConfig, CoatConfig, CoatConfigError, read_object

VARIABLE = "COAT_CONFIG"
_DEFAULTS = CoatConfig(enabled=True)
# the keys of `coat.activations` that apply to a single linear layer
LAYER_KEYS = ("enabled", "backward_format", "weight_cache", "fast_accumulation")


def named_file() -> str | None:
    """The file that `COAT_CONFIG` names, as messages call it; None without the variable."""
    path = os.environ.get(VARIABLE)
    return None if path is None else f"{VARIABLE}={path}"


def megatron_lm() -> Any:
    """The global variables of Megatron-LM's scripts, if one of them runs."""
    found = sys.modules.get("megatron.training.global_vars")
    return found if found is not None and getattr(found, "_GLOBAL_ARGS", None) is not None else None


def coat_config() -> CoatConfig:
    """The block in the file that `COAT_CONFIG` names; the defaults, enabled, without the variable.

    Raises CoatConfigError, naming the file and the key, for a file that cannot be read and for unsupported
    values.
    """
    where = named_file()
    if where is None:
        return _DEFAULTS
    try:
        content = read_object(os.environ[VARIABLE])
    except CoatConfigError as error:
        raise CoatConfigError(f"{VARIABLE}={error}") from None
    if set(content) != {"coat"}:
        raise CoatConfigError(
            f'{where}: expected an object with the key "coat" alone, found '
            f"{', '.join(map(repr, content)) or 'no key'}. Megatron's arguments set the rest."
        )
    try:
        config = CoatConfig.from_dict(content["coat"])
    except CoatConfigError as error:
        raise CoatConfigError(f"{where}: {error}") from None
    for key, why in (
        ("enabled", "--spec switches COAT on"),
        ("optimizer.checkpoint_layout", "Megatron's checkpoints hold FP32 moments"),
        ("require", "DeepSpeed's engine alone counts layers"),
        ("zero3_layer_units", "ZeRO-3 is DeepSpeed's"),
    ):
        value, wanted = map(operator.attrgetter(key), (config, _DEFAULTS))
        if value != wanted:
            raise CoatConfigError(
                f"{where}: coat.{key}: expected {json.dumps(wanted)}, found {json.dumps(value)}: {why}. "
                f"Write {json.dumps(wanted)}."
            )
    return config


def check_unread() -> None:
    """Raises CoatConfigError if `COAT_CONFIG` names a file, for layers without settings of
    `megatron_ext.spec`."""
    if VARIABLE in os.environ:
        raise CoatConfigError(
            f"{named_file()}: expected layers of megatron_ext.spec, which applies the file; found layers of "
            f"megatron_ext.layer_specs. Take coat_layer_spec from megatron_ext.spec, or unset {VARIABLE}."
        )


def what_is_on(config: CoatConfig) -> str:
    """A line that lists the features and where their settings come from."""
    features = {
        "FP8 layers": config.activations.enabled,
        "8-bit optimizer states": config.optimizer.enabled,
        "FP8 inputs of recompute": config.fp8_activation_checkpointing,
    }
    listed = ", ".join(f"{name} {'on' if on else 'off'}" for name, on in features.items())
    return f"{listed} ({named_file() or f'defaults: {VARIABLE} is not set'})"


def layer_activations(quant_config: Any, base: ActivationsConfig) -> ActivationsConfig:
    """`base` with the options of one layer under "coat" in a file of `--te-precision-config-file`.

    quant_config: the argument of the layer's `finish_init`: `config`, a dict, and `config_key` and
        `match_input.module_path`, names; or None.
    Raises CoatConfigError, naming both, for a key or value that linear layers do not support.
    """
    if quant_config is None or "coat" not in quant_config.config:
        return base
    block = quant_config.config["coat"]
    layer = quant_config.match_input.module_path
    where = f"--te-precision-config-file: configs.{quant_config.config_key}.coat, for {layer}"
    unknown = [key for key in block if key not in LAYER_KEYS] if isinstance(block, Mapping) else [block]
    if unknown:
        raise CoatConfigError(
            f"{where}: found {unknown[0]!r}, expected an object with keys among {', '.join(LAYER_KEYS)}."
        )
    try:
        return dataclasses.replace(base, **block)
    except CoatConfigError as error:
        raise CoatConfigError(f"{where}: {error}") from None
