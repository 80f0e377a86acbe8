"""The formats and bytes of stored moments, and log lines about them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from coat_ds.log import log_once
from coat_ds.optim.moment import Moment
from coat_ds.optim.options import MOMENTS, has_remainder, rounds_stochastically
from coat_ds.optim.shards import local
from coat_kernels.codecs import Codec


def layout_table(tensors: Iterable[tuple[str, Sequence[int], Codec, Codec]]) -> str:
    """A text table of (name, shape, codec of exp_avg, codec of exp_avg_sq). Rows that differ only
    in the numbers in the name are merged and counted.
    """
    rows: dict[tuple, list[int]] = {}
    for name, shape, *codecs in tensors:
        numel = torch.Size(shape).numel()
        size = sum(codec.zeros(numel, device="meta").nbytes for codec in codecs)
        kind = ".".join("*" if part.isdigit() else part for part in name.split("."))
        row = rows.setdefault((kind, tuple(shape), *(codec.name for codec in codecs)), [0, 0])
        row[0], row[1] = row[0] + 1, row[1] + size
    lines = [f"{'tensors':>7}  {'bytes':>15}  {'exp_avg':<18} {'exp_avg_sq':<18} shape, name"]
    for (kind, shape, m, v), (count, size) in rows.items():
        lines.append(f"{count:>7}  {size:>15,}  {m:<18} {v:<18} {list(shape)} {kind}".rstrip())
    return "\n".join(lines)


def state_bytes(optimizer) -> dict[str, Any]:
    """The bytes of an optimizer's states on this rank.

    optimizer: a torch optimizer, the wrapper that DeepSpeed puts around one, or a DeepSpeed engine.

    Returns `bytes`, without step counts, `parameters` (elements that have a state; ZeRO's padding included),
    `bytes_per_parameter`, and `by_codec`: bytes by codec name, where plain tensors are named by dtype.
    """
    states = {p: x for p, x in _base_optimizer(optimizer).state.items() if isinstance(p, torch.Tensor)}
    values = (local(x) for state in states.values() for name, x in state.items() if name != "step")
    held = (item for value in values for item in _held(value))
    return _summed(held, sum(local(p).numel() for p in states))


def _held(value: Any) -> list[tuple[str, int]]:
    if isinstance(value, Moment):
        return [(piece.codec.name, piece.storage.nbytes) for piece in value.pieces]
    if isinstance(value, torch.Tensor):
        return [(str(value.dtype).removeprefix("torch."), value.nbytes)]
    return []


def planned_bytes(optimizer) -> dict[str, Any]:
    """What `state_bytes` will return for a CoatAdamW without flat partitions, once each parameter has a
    state. For a DTensor it counts all shards.
    """
    held, pairs = [], [(p, group) for group in optimizer.param_groups for p in group["params"]]
    for p, group in pairs:
        held += [("int16", 2 * p.numel())] if has_remainder(p, group) else []
        for name in MOMENTS:
            ((_, codec),) = optimizer.layouts.layout_of(p, group, name)
            held.append((codec.name, codec.zeros(p.numel(), device="meta").nbytes))
    return _summed(held, sum(p.numel() for p, _ in pairs))


def _summed(held: Iterable[tuple[str, int]], parameters: int) -> dict[str, Any]:
    by_codec: Counter[str] = Counter()
    for name, size in held:
        by_codec[name] += size
    total = by_codec.total()
    return {
        "bytes": total,
        "parameters": parameters,
        "bytes_per_parameter": total / parameters if parameters else 0.0,
        "by_codec": dict(by_codec),
    }


def _base_optimizer(optimizer) -> torch.optim.Optimizer:
    optimizer = getattr(optimizer, "basic_optimizer", optimizer)
    while not isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"state_bytes: expected a torch optimizer, DeepSpeed's wrapper of one, or an engine; found "
            f"{type(optimizer).__name__}."
        )
    return optimizer


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


def warn_if_frozen(groups: Sequence[dict[str, Any]]) -> None:
    """Logs a warning, once, if an optimizer has parameters and all were frozen after its construction."""
    held = [p for group in groups for p in group["params"]]
    if held and not any(p.requires_grad for p in held):
        log_once(
            f"CoatAdamW.step: expected a parameter that is trained, found {len(held)} that are frozen "
            "(requires_grad=False): this step and later steps do nothing. Make the optimizer after the call "
            "that freezes them, such as PEFT's get_peft_model, which TRL calls for its peft_config."
        )


def decay_line(optimizer, key: str) -> str | None:
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
