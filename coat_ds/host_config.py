"""What stands beside the `"coat"` block in a DeepSpeed config, as far as the block relies on it."""

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch

from coat_ds.config import KEEP_FP32, ActivationsConfig, CoatConfigError, did_you_mean
from coat_ds.optimizer import CoatAdamW, keeps_fp32, rounds_stochastically
from coat_ds.switch import misplaced_block
from coat_kernels.codecs import get_codec
from coat_kernels.device import capability, has_fp8_gemm

EXAMPLE = '{"type": "AdamW", "params": {"lr": 1e-3}}'
NUMBERS = ("lr", "eps", "weight_decay")


def check_place(host: Mapping[str, Any]) -> None:
    """Raises CoatConfigError for a block where nobody looks for it."""
    key = misplaced_block(host)
    if key is not None:
        raise CoatConfigError(
            f'{key}: found a block there, which would be ignored. Write "coat", in small letters, at the top '
            'of the config, beside "optimizer", not in it.'
        )


def optimizer_section(host: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `"optimizer"` section. Raises CoatConfigError for one of another form than DeepSpeed's."""
    section = host.get("optimizer")
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise CoatConfigError(
            f"optimizer: expected an object such as {EXAMPLE}, found {section!r}. Use braces."
        )
    params = section.get("params")
    if params is None:
        return section
    if not isinstance(params, Mapping):
        raise CoatConfigError(
            f'optimizer.params: expected an object such as {{"lr": 1e-3}}, found {params!r}. Use braces.'
        )
    for name in NUMBERS:
        if name in params:
            _check_number(f"optimizer.params.{name}", params[name])
    if "betas" in params:
        betas = params["betas"]
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            raise CoatConfigError(
                f"optimizer.params.betas: expected two numbers such as [0.9, 0.95], found {betas!r}. Correct "
                "them or drop the key."
            )
        for beta in betas:
            _check_number("optimizer.params.betas", beta)
    return section


def _check_number(key: str, value: Any) -> None:
    if isinstance(value, Real | torch.Tensor) and not isinstance(value, bool):
        return
    if value == "auto":
        way_out = 'Only Hugging Face\'s Trainer fills in "auto"; write a number.'
    elif isinstance(value, str):
        way_out = "Leave the quotes out."
    else:
        way_out = "Write a number or drop the key."
    raise CoatConfigError(f"{key}: expected a number, found {value!r}. {way_out}")


def no_conversion(
    host: Mapping[str, Any], activations: ActivationsConfig, device: torch.device
) -> str | None:
    """Why no model can be converted under this config on this device; None if one can."""
    fp16 = host.get("fp16")
    if isinstance(fp16, Mapping) and fp16.get("enabled"):
        return "fp16.enabled is true, and converted layers compute in BF16 or FP32"
    if device.type == "cuda" and not activations.emulate and not has_fp8_gemm(device):
        found = ".".join(map(str, capability(device)))
        return f"this GPU has compute capability {found}, and FP8 products need 8.9"
    return None


def idle_patterns(patterns: Iterable[str], names: Mapping[torch.Tensor, str]) -> list[str]:
    """A line for each pattern of `keep_fp32` that matches no name, but for those of the default."""
    return [
        f"coat.optimizer.keep_fp32: {pattern!r} matches no parameter of this model: everything keeps the "
        f"format it would have without it.{_nearest_name(pattern, names.values())} Correct it or drop it."
        for pattern in patterns
        if pattern not in KEEP_FP32 and not any(keeps_fp32((pattern,), names[p], p) for p in names)
    ]


def _nearest_name(pattern: str, names: Iterable[str]) -> str:
    """The part of a parameter's name that a mistyped pattern likely means, as a question; or nothing."""
    parts = {part for name in names for part in name.split(".") if not part.isdigit()}
    return did_you_mean(pattern.replace("*", "").replace("?", "").strip("."), sorted(parts))


def stalling(optimizer: CoatAdamW) -> str | None:
    """A line if second moments of a parameter group cannot decay; None if all can.

    A moment decays by 1 - beta2 of itself in a step. Where that is less than half the distance of two codes,
    rounding to nearest undoes it, and the moment stays as large as it ever was.
    """
    for group in optimizer.param_groups:
        name, beta2 = group["exp_avg_sq_format"], float(group["betas"][1])
        codec = get_codec(name)
        # half the distance of two numbers, of themselves: up to 2^-8 in BF16, at least 1/64 in 8 bits
        half = {torch.float32: 0.0, torch.bfloat16: 2**-8}.get(codec.dtype, 1 / 64)
        if 1 - beta2 >= half or rounds_stochastically(group, codec):
            continue
        if all(optimizer.keeps(p, group, getattr(p, "ds_numel", p.numel())) for p in group["params"]):
            continue
        way_out = '"exp_avg_sq_rounding": "stochastic"' if codec.fine else '"exp_avg_sq_format": "log8"'
        return (
            f"coat.optimizer.exp_avg_sq_format: found {name!r} beside beta2 {beta2:g}, above "
            f"{1 - half:.6g}. Rounded to nearest, such a second moment never decays. Set {way_out} in "
            "coat.optimizer, or beta2 to 0.95 (optimizer.params.betas; adam_beta2 of Hugging Face's Trainer)."
        )
    return None
