"""The formats in which moments are stored, and their bytes."""

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
    optimizer = _base_optimizer(optimizer)
    by_codec: dict[str, int] = {}
    parameters = 0
    for p, state in optimizer.state.items():
        if not isinstance(p, torch.Tensor):
            continue
        parameters += local(p).numel()
        for name, value in state.items():
            value = None if name == "step" else local(value)
            if isinstance(value, Moment):
                held = [(piece.codec.name, piece.storage.nbytes) for piece in value.pieces]
            elif isinstance(value, torch.Tensor):
                held = [(str(value.dtype).removeprefix("torch."), value.nbytes)]
            else:
                continue
            for kind, size in held:
                by_codec[kind] = by_codec.get(kind, 0) + size
    return _summed(by_codec, parameters)


def _summed(by_codec: dict[str, int], parameters: int) -> dict[str, Any]:
    total = sum(by_codec.values())
    return {
        "bytes": total,
        "parameters": parameters,
        "bytes_per_parameter": total / parameters if parameters else 0.0,
        "by_codec": by_codec,
    }


def planned_bytes(optimizer) -> dict[str, Any]:
    """What `state_bytes` will return for a CoatAdamW without flat partitions, once each parameter has a
    state. For a DTensor it counts all shards.
    """
    by_codec: dict[str, int] = {}
    parameters = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            parameters += p.numel()
            held = [("int16", 2 * p.numel())] if has_remainder(p, group) else []
            for name in MOMENTS:
                (codec,) = optimizer.codecs_of(p, group, name)
                held.append((codec.name, codec.zeros(p.numel(), device="meta").nbytes))
            for name, size in held:
                by_codec[name] = by_codec.get(name, 0) + size
    return _summed(by_codec, parameters)


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
