"""What stands beside the `"coat"` block in a DeepSpeed config, as far as the block relies on it."""

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch

from coat_ds.config import KEEP_FP32, CoatConfigError
from coat_ds.optimizer import keeps_fp32
from coat_ds.switch import misplaced_block

EXAMPLE = '{"type": "AdamW", "params": {"lr": 1e-3}}'
NUMBERS = ("lr", "eps", "weight_decay")


def check_place(host: Mapping[str, Any]) -> None:
    """Raises CoatConfigError for a block where nobody looks for it."""
    key = misplaced_block(host)
    if key is not None:
        raise CoatConfigError(
            f'{key}: found a block there, which would be ignored. Write "coat", in small letters, beside '
            '"optimizer", not in it.'
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


def idle_patterns(patterns: Iterable[str], names: Mapping[torch.Tensor, str]) -> list[str]:
    """Patterns of `keep_fp32` that match no name, but for those of the default."""
    return [
        pattern
        for pattern in patterns
        if pattern not in KEEP_FP32 and not any(keeps_fp32((pattern,), names[p], p) for p in names)
    ]
