"""Checks a DeepSpeed config as DeepSpeed does when it builds an engine."""

import json
import logging
from collections.abc import Mapping
from typing import Any

from coat_ds.doctor.finding import OK, PROBLEM, UNKNOWN, Finding
from coat_ds.plan.deepspeed_json import without_auto
from coat_ds.zero.block import section

NAME = "DeepSpeed JSON"
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def check(config: Mapping[str, Any], gpus: int) -> Finding:
    """Whether DeepSpeed's own class accepts the config on `gpus` GPUs, as when an engine is built, without a
    launcher. Keys whose value is "auto" are left out, since Trainer fills them in.
    """
    before = logging.root.manager.disable
    # DeepSpeed logs to standard output, where `--json` prints
    logging.disable()
    try:
        import deepspeed

        error = _refusal(config, gpus)
        if error is None:
            return Finding(NAME, OK, f"accepted by DeepSpeed {deepspeed.__version__}")
        # each of these keys alone causes the error: without it the config is accepted
        keys = [
            key for key in config if _refusal({k: v for k, v in config.items() if k != key}, gpus) is None
        ]
    except ImportError:
        return Finding(NAME, UNKNOWN, "DeepSpeed, which checks it, is not installed here")
    finally:
        logging.disable(before)
    said = " ".join(str(error).split())[:300] or type(error).__name__
    where = (
        f"{' or '.join(keys)}: found {json.dumps([config[k] for k in keys])[1:-1][:100]}; " if keys else ""
    )
    text = f"{where}DeepSpeed {deepspeed.__version__} refuses the config: {said.rstrip('.')}. Correct it"
    return Finding(NAME, PROBLEM, text)


def _refusal(config: Mapping[str, Any], gpus: int) -> Exception | None:
    """What DeepSpeed raises for `config`; None if it accepts it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    class Config(DeepSpeedConfig):
        def _initialize_params(self, values):
            # DeepSpeed reads the world size from the launcher
            self.world_size = _data_parallel_size(values, gpus)
            super()._initialize_params(values)

    filled = without_auto(config)
    left = [key for key in BATCH_KEYS if config.get(key) == "auto"]
    if left and not any(key in filled for key in BATCH_KEYS[:2]):
        filled["train_micro_batch_size_per_gpu"] = 1
    try:
        Config(filled)
    # the parts of DeepSpeed's config raise many types of exceptions
    except Exception as error:
        return error
    return None


def _data_parallel_size(config: Mapping[str, Any], gpus: int) -> int:
    """The number of replicas on `gpus` GPUs; if `gpus` is 1, the number that the three batch sizes imply."""
    sizes = [config.get(key) for key in BATCH_KEYS]
    if gpus == 1 and all(type(size) is int and size > 0 for size in sizes):
        return max(1, sizes[0] // (sizes[1] * sizes[2]))
    parts = [section(config, "tensor_parallel").get("autotp_size"), config.get("sequence_parallel_size")]
    for size in parts:
        gpus = gpus // size if type(size) is int and 0 < size <= gpus else gpus
    return gpus
