"""The formats in which moments are stored, and their bytes."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from coat_ds.optim.moment import Moment
from coat_ds.optim.options import MOMENTS, has_remainder
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
