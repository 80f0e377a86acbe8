"""The DeepSpeed JSON of a choice: the user's own, with as few changes as it takes."""

import copy
from collections.abc import Mapping
from typing import Any

from coat_ds.config import CoatConfigError
from coat_ds.plan.layout import Layout
from coat_ds.plan.systems import BF16_MASTERS, System
from coat_ds.zero.block import enabled
from coat_ds.zero.deepspeed_config import (
    bf16_key,
    check_completed,
    names_ours,
    offloads,
    stage_of,
)

MICRO_BATCH, ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
# what Trainer fills in
OF_TRAINER = dict.fromkeys((MICRO_BATCH, ACCUMULATION, "train_batch_size", "gradient_clipping"), "auto")
# keys of the user's block that stay
KEPT = ("require", "watch")
# DeepSpeed builds no optimizer without a section
OF_DEEPSPEED = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}}}


def is_trainers(config: Mapping[str, Any]) -> bool:
    """Whether Trainer or Accelerate fill in values of the config: one is "auto"."""
    return any(v == "auto" or isinstance(v, Mapping) and is_trainers(v) for v in config.values())


def deepspeed_json(system: System, layout: Layout, base: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with what `system` and `layout` change; "auto" stays where it is."""
    config, block, trainer = copy.deepcopy(dict(base)), system.block(), is_trainers(base)
    if "coat" not in block and names_ours(config):
        # the name implies the block
        config["optimizer"] = {**config["optimizer"], "type": "AdamW"}
    # what says nothing of memory or speed
    kept = {name: value for name, value in (config.pop("coat", None) or {}).items() if name in KEPT}
    if "coat" in block:
        block["coat"] = kept | block["coat"]
    key, bf16 = bf16_key(config), block.pop("bf16")
    if config.get(key) is not None or not trainer:
        section = dict(config.get(key) or {})
        if enabled({"bf16": section}, "bf16", auto=True):
            bf16.pop("enabled")
        config[key] = {k: v for k, v in section.items() if k not in BF16_MASTERS} | bf16
    else:
        config[key] = bf16 | {"enabled": "auto"}
    if enabled(config, "fp16"):
        # DeepSpeed takes BF16 or FP16, not both
        del config["fp16"]
    changed: dict[str, Any] = {}
    if stage_of(config) != layout.stage:
        changed["stage"] = layout.stage
    if system.offload and not offloads(config):
        changed["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if changed:
        # `true` is DeepSpeed's old name of stage 1
        given = config.get("zero_optimization")
        config["zero_optimization"] = ({"stage": 1} if given is True else given or {}) | changed
    for name, value in ((MICRO_BATCH, layout.micro_batch), (ACCUMULATION, layout.accumulation)):
        # from Trainer's own arguments where the JSON has no number
        if config.get(name) != "auto" and not (trainer and name not in config):
            config[name] = value
    total = layout.micro_batch * layout.accumulation * layout.data
    if config.get("train_batch_size", "auto") not in ("auto", total):
        del config["train_batch_size"]
    return config | block


def why_refused(config: Mapping[str, Any]) -> str | None:
    """Why COAT refuses a DeepSpeed config; None if it does not."""
    try:
        check_completed(config)
    except CoatConfigError as error:
        return str(error)
    return None
