"""The DeepSpeed JSON, with the changes that arguments make."""

import argparse
from pathlib import Path

from coat_ds.zero.deepspeed_config import DEFAULT_WEIGHT_DECAY, EXAMPLE, bf16_key, has_optimizer, names_ours
from coat_launch.errors import LaunchError
from coat_launch.json_file import read_object

# sections that are changed or read here
SECTIONS = ("optimizer", "scheduler", "zero_optimization", "checkpoint")
# values for "auto" in the optimizer's parameters, as in the files in configs/; Trainer fills them in by
# itself
AUTO = {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
AUTO_CLIPPING = 1.0
# keys by which a DeepSpeed scheduler sets the peak learning rate; without one, it uses the optimizer's
PEAKS = ("warmup_max_lr", "cycle_max_lr")


def read_deepspeed_config(args: argparse.Namespace) -> dict:
    """The DeepSpeed JSON with the changes of `--variant` and `--lr`, and with numbers in place of "auto"."""
    path = Path(args.deepspeed_config)
    try:
        config = read_object(path)
    except ValueError as error:
        raise LaunchError(f"--deepspeed-config {path}: {error}") from error
    for key in SECTIONS:
        if not isinstance(config.get(key, {}), dict):
            raise LaunchError(
                f"--deepspeed-config {path}: {key}: expected an object in braces, found {config[key]!r}"
            )
    params = config.get("optimizer", {}).get("params")
    if not isinstance(params, dict | None):
        raise LaunchError(
            f"--deepspeed-config {path}: optimizer.params: expected an object in braces, found {params!r}"
        )
    # DeepSpeed accepts "2" and 2.0 too, but a checkpoint's manifest with such a stage could not be read back
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if type(stage) is not int:
        raise LaunchError(
            f"--deepspeed-config {path}: zero_optimization.stage: expected a whole number, found {stage!r}. "
            "Write the number"
        )
    if not _enabled(config, bf16_key(config)):
        raise LaunchError(
            f'--deepspeed-config {path}: expected "bf16": {{"enabled": true}}, the model is BF16'
        )
    if names_ours(config):
        # the key may stand without the block, and enables layers too
        config.setdefault("coat", {"enabled": True})
    if args.variant == "bf16":
        config["coat"] = {"enabled": False}
    elif args.variant == "coat" and not _enabled(config, "coat"):
        raise LaunchError(f'--deepspeed-config {path}: a COAT run needs "coat": {{"enabled": true}}')
    if args.lr is not None:
        optimizer = config.setdefault("optimizer", {"type": "AdamW"})
        optimizer["params"] = {**(params or {}), "lr": args.lr}
    _fill_in_auto(config)
    if not has_optimizer(config):
        raise LaunchError(
            f"--deepspeed-config {path}: optimizer: found none. Add {EXAMPLE}, or give --lr for AdamW"
        )
    return config


def _fill_in_auto(config: dict) -> None:
    if config.get("gradient_clipping") == "auto":
        config["gradient_clipping"] = AUTO_CLIPPING
    params = config.get("optimizer", {}).get("params") or {}
    params.update({key: value for key, value in AUTO.items() if params.get(key) == "auto"})


def check_schedule(config: dict, args: argparse.Namespace) -> None:
    """Raises LaunchError for arguments that the JSON's scheduler would override."""
    if "scheduler" not in config:
        return
    params = config["scheduler"].get("params") or {}
    given = {
        "--warmup-steps": args.warmup_given,
        "--lr": args.lr is not None and any(p in params for p in PEAKS),
    }
    for name in (name for name, is_given in given.items() if is_given):
        raise LaunchError(
            f"{name}: of no effect, for --deepspeed-config {args.deepspeed_config} has a scheduler that "
            "decides. Drop one of the two"
        )


def _enabled(config: dict, block: str) -> bool:
    return isinstance(config.get(block), dict) and config[block].get("enabled") is True


def set_batch_sizes(config: dict, args: argparse.Namespace, ranks: int) -> tuple[int, int]:
    """Writes micro and global batch size into the config, arguments before JSON; returns both."""

    def configured(key: str, default: int) -> int:
        value = config.get(key, "auto")
        if value != "auto" and (type(value) is not int or value < 1):
            raise LaunchError(
                f"{key}: expected a whole number above 0 in the DeepSpeed JSON, found {value!r}"
            )
        return default if value == "auto" else value

    steps, total = configured("gradient_accumulation_steps", 0), configured("train_batch_size", 0)
    total = args.global_batch_size or total
    # DeepSpeed's rule: two of the three determine the third
    micro = total // (ranks * steps) if steps and total % (ranks * steps) == 0 else 0
    micro = args.micro_batch_size or configured("train_micro_batch_size_per_gpu", micro or 4)
    product = micro * ranks * (steps or 1)
    changed = args.micro_batch_size or args.global_batch_size
    if total and steps and total != product and not changed:
        raise LaunchError(
            f"train_batch_size: found {total} in the DeepSpeed JSON, but train_micro_batch_size_per_gpu "
            f"{micro} times gradient_accumulation_steps {steps} times {ranks} data-parallel ranks is "
            f"{product}. Drop one of the three keys"
        )
    total = total or product
    if total % (micro * ranks):
        raise LaunchError(
            f"--global-batch-size: {total} is not a multiple of --micro-batch-size {micro} times {ranks} "
            "data-parallel ranks"
        )
    config.update(
        train_micro_batch_size_per_gpu=micro,
        train_batch_size=total,
        gradient_accumulation_steps=total // (micro * ranks),
    )
    return micro, total


def use_torch_adamw(config: dict) -> None:
    """Without COAT, AdamW is torch's fused one: DeepSpeed's keeps the same states and needs a compiler.

    The default of weight decay stays DeepSpeed's, as with COAT.
    """
    optimizer = config.get("optimizer", {})
    if str(optimizer.get("type")).lower() in ("adam", "adamw"):
        params = {"weight_decay": DEFAULT_WEIGHT_DECAY, **(optimizer.get("params") or {})}
        optimizer["params"] = {**params, "torch_adam": True, "fused": True}
