"""The requirements of the `"coat"` block on the rest of a DeepSpeed config."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from coat_ds.config import (
    OFFLOADS,
    CoatConfig,
    CoatConfigError,
    OptimizerConfig,
    WatchConfig,
    did_you_mean,
)
from coat_ds.optim.options import RATES, check_numbers
from coat_ds.zero import convert_optimizer, recompute
from coat_ds.zero.block import OPTIMIZER_TYPE, enabled, flag, misplaced_block, section
from coat_kernels.device import capability, has_fp8_gemm

EXAMPLE = '{"type": "AdamW", "params": {"lr": 1e-3}}'
# the keys of the section that DeepSpeed reads; it ignores other keys
SECTION_KEYS = ("type", "params", "legacy_fusion")
# for each key of "optimizer": {"params": ...} the values that CoatAdamW supports; None: passed on
OPTIMIZER_PARAMS: dict[str, tuple | None] = {
    "lr": None,
    "betas": None,
    "eps": None,
    "weight_decay": None,
    "adam_w_mode": (True,),
    "amsgrad": (False,),
    "bias_correction": (True,),
    "set_grad_none": (True, False),
    # choices of implementation; "torch_adam" only changes the default of "weight_decay"
    "torch_adam": (True, False),
    "fused": (True, False),
    "foreach": (True, False),
}
# DeepSpeed's spellings of FP16, including the name of the torch.dtype
FP16_NAMES = ("float16", "fp16", "half")
IMPLEMENTATIONS = ("adam_w_mode", "torch_adam", "fused", "foreach")
_ANY_NUMBERS = {"lr": 0.0, "betas": (0.9, 0.95), "eps": 0.0, "weight_decay": 0.0}
# DeepSpeed's AdamW does not decay by default; torch's and CoatAdamW do
DEFAULT_WEIGHT_DECAY = 0.0


def checked_config(config: Mapping[str, Any], optimizer: Any) -> CoatConfig:
    """The CoatConfig of a DeepSpeed config; disabled if there is no block. An engine without an optimizer,
    such as one for TRL's reference model, has FP8 layers only, and is not watched.

    optimizer: the optimizer argument, or None.
    Raises CoatConfigError for an unsupported config.
    """
    coat = block_of(config)
    if names_ours(config) and not (coat.enabled and coat.optimizer.enabled):
        key = "coat.optimizer.enabled" if coat.enabled else "coat.enabled"
        raise CoatConfigError(
            f'{key}: found False with "optimizer": {{"type": "{OPTIMIZER_TYPE}"}}. Set it to true, '
            'or the type to "AdamW".'
        )
    if coat.enabled and optimizer is None and not has_optimizer(config):
        coat = replace(
            coat,
            optimizer=replace(coat.optimizer, enabled=False),
            watch=WatchConfig(every=0),
        )
    if coat.enabled and coat.optimizer.enabled:
        check_deepspeed_config(config)
        if coat.optimizer.offload not in OFFLOADS and offloads(config):
            _refuse(
                "coat.optimizer.offload",
                coat.optimizer.offload,
                "with zero_optimization.offload_optimizer all states are in host memory",
                "Drop one of the two",
            )
        if optimizer is None:
            optimizer_options(config)
        else:
            convert_optimizer.check(optimizer)
    if coat.enabled and coat.fp8_activation_checkpointing:
        recompute.check_config(config)
    return coat


def check_completed(config: Mapping[str, Any]) -> CoatConfig:
    """`checked_config` of a config that Trainer or Accelerate complete: they fill in "auto", and a script may
    pass the optimizer that the config does not name."""
    filled = without_auto(config)
    if not has_optimizer(filled):
        filled["optimizer"] = {"type": "AdamW"}
    return checked_config(filled, None)


def without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without the keys whose value is "auto"."""
    return {
        key: without_auto(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if not (isinstance(value, str) and value == "auto")
    }


def block_of(config: Mapping[str, Any]) -> CoatConfig:
    """The block of a DeepSpeed config, which may be left out if the optimizer's type is ours; disabled if
    there is no block. Raises CoatConfigError for an unsupported or misplaced block."""
    if (key := misplaced_block(config)) is not None:
        raise CoatConfigError(
            f'{key}: found a block there, which would be ignored. Write "coat", in small letters, at the top '
            'of the config, next to "optimizer", not in it.'
        )
    implied = names_ours(config) and "coat" not in config
    return CoatConfig.from_dict({"enabled": True} if implied else config.get("coat"))


def names_ours(config: Mapping[str, Any]) -> bool:
    """Whether the optimizer's type in the config is "CoatAdamW"."""
    return str(section(config, "optimizer").get("type")).lower() == OPTIMIZER_TYPE.lower()


def bf16_key(config: Mapping[str, Any]) -> str:
    """The name of the section on BF16: the present one, or DeepSpeed's old one if only that exists."""
    return "bfloat16" if config.get("bf16") is None and "bfloat16" in config else "bf16"


def is_16_bit(config: Mapping[str, Any]) -> bool:
    """Whether weights are in 16 bits. Trainer fills in "auto"."""
    return any(enabled(config, key, auto=True) for key in (bf16_key(config), "fp16"))


def fp32_warning(config: Mapping[str, Any], coat: CoatConfig) -> str | None:
    """A warning if layers would be converted in a model of FP32 weights without autocast."""
    if not coat.activations.enabled or is_16_bit(config) or enabled(config, "torch_autocast"):
        return None
    return (
        "bf16.enabled: found false, or no such key: FP32 weights, their gradients and what no layer saves in "
        "8 bits stay in FP32. Set it to true, unless the script runs the model under autocast."
    )


def stage_of(config: Mapping[str, Any]) -> int:
    """The stage of ZeRO; `true` in place of the section is DeepSpeed's old spelling of stage 1."""
    if config.get("zero_optimization") is True:
        return 1
    stage = section(config, "zero_optimization").get("stage", 0)
    try:
        return int(float(stage))
    except (TypeError, ValueError):
        # "auto", which means DeepSpeed's default, or a value that DeepSpeed refuses
        return 0


def offloads(config: Mapping[str, Any]) -> bool:
    """Whether states are on the CPU, by the present key or by DeepSpeed's old one."""
    zero = section(config, "zero_optimization")
    return section(zero, "offload_optimizer").get("device") == "cpu" or flag(zero.get("cpu_offload"))


def _refuse(key: str, found: Any, why: str, remedy: str = "Drop the key"):
    raise CoatConfigError(f"{key}: found {found!r}; {why}. {remedy} or set coat.optimizer.enabled to false.")


def check_deepspeed_config(config: Mapping[str, Any]) -> None:
    """Raises CoatConfigError if DeepSpeed would run CoatAdamW in a way that is not known to be correct."""
    _check_zero(section(config, "zero_optimization"))
    _check_precision(config)
    if section(config, "optimizer").get("legacy_fusion") and not stage_of(config):
        _refuse(
            "optimizer.legacy_fusion", True, "DeepSpeed passes gradients that way to apex's FusedAdam alone"
        )


def _check_zero(zero: Mapping[str, Any]) -> None:
    offload = section(zero, "offload_optimizer")
    device, ratio = offload.get("device", "none"), offload.get("ratio", 1.0)
    if device not in ("none", "cpu", "auto"):
        _refuse(
            "zero_optimization.offload_optimizer.device",
            device,
            "CoatAdamW's states, a quarter of stock AdamW's, can be offloaded to the CPU only",
            'Use "cpu"',
        )
    if device == "cpu" and ratio not in (1.0, "auto"):
        _refuse(
            "zero_optimization.offload_optimizer.ratio", ratio, "DeepSpeedCPUAdam alone can step in parts"
        )
    if flag(offload.get("super_offload")):
        _refuse("zero_optimization.offload_optimizer.super_offload", True, "its steps are DeepSpeedCPUAdam's")
    if zero.get("zenflow"):
        _refuse("zero_optimization.zenflow", zero["zenflow"], "CoatAdamW does not work with it")
    # stage 0 has no partitions, and DeepSpeed does not read the key there
    if flag(zero.get("elastic_checkpoint")) and zero.get("stage") not in (None, 0, "0", "auto"):
        _refuse(
            "zero_optimization.elastic_checkpoint",
            True,
            "DeepSpeed reads such checkpoints at the same size only, and not those of AdamW",
            "Use universal checkpoints",
        )


def _check_precision(config: Mapping[str, Any]) -> None:
    key = bf16_key(config)
    bf16, fp16 = section(config, key), section(config, "fp16")
    if flag(bf16.get("bf16_master_weights_and_grads")):
        if not flag(bf16.get("bf16_optimizer_states")):
            _refuse(
                f"{key}.bf16_master_weights_and_grads",
                True,
                f"without {key}.bf16_optimizer_states DeepSpeed takes DeepSpeedCPUAdam only",
                f"Set {key}.bf16_optimizer_states to true too",
            )
        if offloads(config):
            _refuse(
                f"{key}.bf16_master_weights_and_grads",
                True,
                "with zero_optimization.offload_optimizer DeepSpeed takes DeepSpeedCPUAdam only",
                "Drop one of the two",
            )
    if flag(fp16.get("fp16_master_weights_and_grads")):
        _refuse("fp16.fp16_master_weights_and_grads", True, "DeepSpeed takes DeepSpeedCPUAdam only with it")
    if enabled(config, "amp"):
        _refuse("amp.enabled", True, "apex would cast CoatAdamW's states", 'Use "bf16": {"enabled": true}')
    autocast = section(config, "torch_autocast")
    # not a pydantic field: any non-empty string switches it on
    if autocast.get("enabled") and str(autocast.get("dtype")).removeprefix("torch.") in FP16_NAMES:
        _refuse(
            "torch_autocast.dtype",
            autocast["dtype"],
            "DeepSpeed advances its loss scaler once for each parameter group",
            'Use "bfloat16", or "fp16": {"enabled": true},',
        )


def has_optimizer(config: Mapping[str, Any]) -> bool:
    """Whether the config names an optimizer. DeepSpeed reads `{"type": null}` as no optimizer."""
    return config.get("optimizer") not in (None, {"type": None})


def optimizer_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor's arguments from the `"optimizer"` section."""
    found = config.get("optimizer")
    if not isinstance(found, Mapping):
        raise CoatConfigError(
            f"optimizer: expected an object such as {EXAMPLE}, found {found!r}. Use braces."
        )
    params = found.get("params") or {}
    if not isinstance(params, Mapping):
        raise CoatConfigError(
            f'optimizer.params: expected an object such as {{"lr": 1e-3}}, found {params!r}. Use braces.'
        )
    kind = found.get("type")
    if str(kind).lower() not in ("adam", "adamw", OPTIMIZER_TYPE.lower()):
        raise CoatConfigError(
            f'optimizer.type: expected "AdamW" or "Adam", found {kind!r}. Use one of them or set '
            "coat.optimizer.enabled to false."
        )
    for name in found:
        if name not in SECTION_KEYS:
            known = ", ".join(SECTION_KEYS)
            raise CoatConfigError(
                f"optimizer.{name}: unknown key (value {found[name]!r}). Known keys: {known}."
                + (did_you_mean(name, SECTION_KEYS) or " Drop it.")
            )
    for name, value in params.items():
        if name not in OPTIMIZER_PARAMS:
            why = f"CoatAdamW has no such option. Known: {', '.join(OPTIMIZER_PARAMS)}. Drop it."
            if name in OptimizerConfig.__dataclass_fields__:
                why = "it is a key of coat.optimizer. Write it there."
            raise CoatConfigError(f"optimizer.params.{name}: found {value!r}, but {why}")
        accepted = OPTIMIZER_PARAMS[name]
        if accepted is not None and value not in accepted:
            raise CoatConfigError(
                f"optimizer.params.{name}: CoatAdamW needs {accepted[0]!r}, found {value!r}. Drop it or set "
                "coat.optimizer.enabled to false."
            )
    passed = {name: value for name, value in params.items() if OPTIMIZER_PARAMS[name] is None}
    default = {} if params.get("torch_adam") else {"weight_decay": DEFAULT_WEIGHT_DECAY}
    check_numbers(_ANY_NUMBERS | passed, "optimizer.params.")
    for name in RATES:
        if not passed.get(name, 0) >= 0:
            raise CoatConfigError(
                f"optimizer.params.{name}: expected 0 or more, found {passed[name]!r}. Correct it."
            )
    if "betas" in passed:
        # torch refuses integers, such as 0
        passed["betas"] = tuple(map(float, passed["betas"]))
    return {**default, **passed}


def why_no_conversion(config: Mapping[str, Any], device: torch.device | None = None) -> str | None:
    """Why no model can be converted under this config on `device`, or on any device without one; None if
    models can be converted."""
    if enabled(config, "fp16"):
        return "fp16.enabled is true, and converted layers compute in BF16 or FP32"
    if device is not None and device.type == "cuda" and not has_fp8_gemm(device):
        found = ".".join(map(str, capability(device)))
        return f"this GPU has compute capability {found}, and FP8 GEMMs need 8.9"
    return None
