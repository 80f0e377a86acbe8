"""The DeepSpeed JSON, with the changes that arguments make."""

import argparse

from coat_ds.config import read_object
from coat_ds.zero.deepspeed_config import DEFAULT_WEIGHT_DECAY, EXAMPLE, bf16_key, has_optimizer, names_ours
from coat_launch.errors import LaunchError

# values for "auto" in the optimizer's parameters, as in the files in configs/; Trainer fills them in by
# itself
AUTO = {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
AUTO_CLIPPING = 1.0


def read_deepspeed_config(args: argparse.Namespace) -> dict:
    """The DeepSpeed JSON with the changes of `--variant` and `--lr`, and with numbers in place of "auto"."""
    config = read_object(args.deepspeed_config)
    try:
        _check(config)
        if names_ours(config):
            # the key may stand without the block, and enables layers too
            config.setdefault("coat", {"enabled": True})
        if args.variant == "bf16":
            config["coat"] = {"enabled": False}
        elif args.variant == "coat" and not _enabled(config, "coat"):
            raise ValueError('coat: a COAT run needs "coat": {"enabled": true}')
        if "scheduler" in config and (args.lr, args.warmup_steps) != (None, None):
            raise ValueError("scheduler: it decides the learning rate. Drop it, or --lr and --warmup-steps")
        if args.lr is not None:
            optimizer = config.setdefault("optimizer", {"type": "AdamW"})
            optimizer["params"] = {**(optimizer.get("params") or {}), "lr": args.lr}
        if not has_optimizer(config):
            raise ValueError(f"optimizer: found none. Add {EXAMPLE}, or give --lr for AdamW")
    except ValueError as error:
        raise LaunchError(f"--deepspeed-config {args.deepspeed_config}: {error}") from error
    if config.get("gradient_clipping") == "auto":
        config["gradient_clipping"] = AUTO_CLIPPING
    params = config["optimizer"].get("params") or {}
    params.update({key: value for key, value in AUTO.items() if params.get(key) == "auto"})
    return config


def _check(config: dict) -> None:
    """Raises ValueError for what is changed or read here, and is not as it has to be."""
    for key in ("optimizer", "scheduler", "zero_optimization"):
        if not isinstance(config.get(key, {}), dict):
            raise ValueError(f"{key}: expected an object in braces, found {config[key]!r}")
    params = config.get("optimizer", {}).get("params")
    if not isinstance(params, dict | None):
        raise ValueError(f"optimizer.params: expected an object in braces, found {params!r}")
    # DeepSpeed accepts "2" and 2.0 too, but a checkpoint's manifest with such a stage could not be read back
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if type(stage) is not int:
        raise ValueError(f"zero_optimization.stage: expected a whole number, found {stage!r}")
    if not _enabled(config, bf16_key(config)):
        raise ValueError('expected "bf16": {"enabled": true}, the model is BF16')


def _enabled(config: dict, block: str) -> bool:
    return isinstance(config.get(block), dict) and config[block].get("enabled") is True


def set_batch_sizes(config: dict, args: argparse.Namespace, ranks: int) -> tuple[int, int]:
    """Writes micro and global batch size into the config, arguments before JSON; returns both.

    As in DeepSpeed, two of the JSON's three keys determine the third.
    """
    keys = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
    given = {key: None if config.get(key) == "auto" else config.get(key) for key in keys}
    for key, value in given.items():
        if value is not None and (type(value) is not int or value < 1):
            raise LaunchError(
                f"{key}: expected a whole number above 0 in the DeepSpeed JSON, found {value!r}"
            )
    micro, total, passes = given.values()
    total = args.global_batch_size or total
    divides = total and passes and total % (ranks * passes) == 0
    micro = args.micro_batch_size or micro or (total // (ranks * passes) if divides else 4)
    if total and (args.micro_batch_size or args.global_batch_size):
        passes = None
    total = total or micro * ranks * (passes or 1)
    passes = passes or total // (micro * ranks)
    if micro * ranks * passes != total:
        raise LaunchError(
            f"--global-batch-size or train_batch_size: {total} is not the micro-batch {micro} times {ranks} "
            f"data-parallel ranks times {passes} passes (gradient_accumulation_steps). Change one of them"
        )
    config.update(zip(keys, (micro, total, passes), strict=True))
    return micro, total


def use_torch_adamw(config: dict) -> None:
    """Without COAT, AdamW is torch's fused one: DeepSpeed's keeps the same states and needs a compiler.

    The default of weight decay stays DeepSpeed's, as with COAT.
    """
    optimizer = config.get("optimizer", {})
    if str(optimizer.get("type")).lower() in ("adam", "adamw"):
        params = {"weight_decay": DEFAULT_WEIGHT_DECAY, **(optimizer.get("params") or {})}
        optimizer["params"] = {**params, "torch_adam": True, "fused": True}
