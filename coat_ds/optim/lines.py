"""Log lines: how states are stored, and which second moments stall."""

from collections.abc import Mapping
from typing import Any

import torch

from coat_ds.optim.options import rounds_stochastically
from coat_kernels.codecs import Codec


def states_line(optimizer, held: Mapping[str, Any]) -> str:
    """Bytes by codec, and how second moments are rounded.

    held: what `state_bytes` or `planned_bytes` returns.
    """
    by_codec = ", ".join(f"{size:,} in {name}" for name, size in sorted(held["by_codec"].items()))
    line = f"AdamW states {held['bytes_per_parameter']:.3f} bytes per parameter instead of 8 ({by_codec})"
    found = {
        rounds_stochastically(group, codec)
        for i, group in enumerate(optimizer.param_groups)
        for codec in _compressed(optimizer, i)
    }
    if not found:
        return line
    how = " or ".join("stochastically" if stochastic else "to nearest" for stochastic in sorted(found))
    return f"{line}, exp_avg_sq rounded {how}{', by group' if len(found) > 1 else ''}"


def frozen_line(count: int) -> str:
    """The warning for an optimizer whose `count` parameters were all frozen after its construction."""
    return (
        f"CoatAdamW.step: expected a parameter that is trained, found {count} that are frozen "
        "(requires_grad=False): this step and later steps do nothing. Make the optimizer after the call that "
        "freezes them, such as PEFT's get_peft_model, which TRL calls for its peft_config."
    )


def stalling(optimizer, key: str) -> str | None:
    """A line if second moments of a parameter group cannot decay; None if all can.

    A step decays a moment by the fraction 1 - beta2. If that is less than half the distance between two
    codes, rounding to nearest undoes the decay, and the moment falls only with the scale of its group.
    key: the start of the line, before the name of the option.
    """
    for i, group in enumerate(optimizer.param_groups):
        beta2 = float(group["betas"][1])
        for codec in _compressed(optimizer, i):
            # relative half distance between two codes: up to 2^-8 in BF16, at least 1/64 in 8 bits
            half = 2**-8 if codec.dtype == torch.bfloat16 else 1 / 64
            if 1 - beta2 >= half or rounds_stochastically(group, codec):
                continue
            return (
                f"{key}exp_avg_sq_format: found {codec.name!r} with beta2 {beta2:g}, above "
                f"{1 - half:.6g}. Rounding to nearest then undoes the decay: second moments decay only with "
                "the largest of their group, if at all. Set exp_avg_sq_format to 'log8', or beta2 to 0.95 "
                "(betas; optimizer.params.betas of DeepSpeed's JSON; adam_beta2 of Hugging Face's Trainer; "
                "--adam-beta2 of Megatron)."
            )
    return None


def _compressed(optimizer, group_index: int) -> list[Codec]:
    """The codecs that store second moments of a parameter group in less than FP32."""
    group = optimizer.param_groups[group_index]
    codecs = {
        codec.name: codec
        for p in optimizer.layouts.held_in(group_index, group)
        for _, codec in optimizer.layouts.layout_of(p, group, "exp_avg_sq")
    }
    return [codec for codec in codecs.values() if codec.dtype != torch.float32]
