"""Moments in state dicts: what is written for them, and how they are restored."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from coat_ds.optim.moment import Moment
from coat_ds.optim.options import BOTH_FP32, MOMENTS, FormatNames
from coat_ds.optim.pieces import Layout
from coat_ds.optim.shards import is_distributed, laid_out_like, local, shard_of
from coat_ds.optim.stored_moment import StoredMoment
from coat_ds.optim.streaming import is_streaming
from coat_kernels.codecs import Storage

METADATA_VERSION = 2


def take_states(packed: dict[str, Any], layout: str) -> dict[str, Any]:
    """The state dict of `torch.optim.Optimizer` with moments in the given layout, "stock" or "compressed".

    Under `"coat"` stand the scales and exponents of moments that are given as FP32 values.
    """
    state: dict[Any, dict[str, Any]] = {}
    stored: dict[Any, dict[str, Any]] = {}
    indices = {index for group in packed["param_groups"] for index in group["params"]}
    for index, entry in packed["state"].items():
        if index not in indices:
            # a note of the caller's, not the state of a parameter
            state[index] = entry
            continue
        state[index] = dict(entry)
        stored[index] = {}
        for name, value in entry.items():
            moment = local(value)
            if isinstance(moment, Moment):
                state[index][name] = _given(value, moment, layout)
                if layout == "stock":
                    stored[index][name] = {
                        "group_size": moment.group_size,
                        "pieces": [
                            (piece.begin, piece.codec.name, *(t.cpu() for t in piece.storage[1:]))
                            for piece in moment.pieces
                        ],
                    }
            elif name == "step":
                state[index][name] = torch.tensor(float(value), dtype=torch.float32, device="cpu")
            elif name == "remainder":
                # the same bits: neither NCCL nor gloo carries int16 from rank to rank
                state[index][name] = laid_out_like(value, local(value).view(torch.float16))
    return {**packed, "state": state, "coat": {"version": METADATA_VERSION, "moments": stored}}


def _given(value: torch.Tensor, moment: Moment, layout: str) -> torch.Tensor:
    if is_distributed(value):
        # where it is: ranks cannot gather over NCCL what is on the CPU
        return laid_out_like(value, moment.decode())
    if layout == "compressed":
        return StoredMoment(moment.pieces, moment.group_size, moment.shape, pair=moment.pair)
    # torch.save decodes it when it writes it
    return moment.detach() if is_streaming() else moment.decode("cpu")


def restored(
    loaded: dict[str, Any],
    index: Any,
    name: str,
    layout: Layout,
    group_size: int,
    param: torch.Tensor,
    second: Moment | None = None,
) -> tuple[Moment, bool]:
    """What this rank holds of a moment of a state dict, `param`'s, with the scales and exponents that it was
    saved with, if they are its own, or else those that are recovered from its values.

    second: the second moment, restored already, if this is a first one, which may be relative to it.
    Returns also whether it is the saved one to the bit.
    """
    device = param.device
    value = shard_of(loaded["state"][index][name], param)
    if isinstance(value, Moment):
        # the optimizer's own is cast as torch does it, and written in the layout that is asked for
        value = Moment(value.pieces, value.group_size, value.shape, pair=value.pair)
        held: Any = value.to(device, copy=True)
        same = (held.arrangement, held.group_size) == (layout, group_size)
        return (held, True) if same else (held.rearranged(layout, group_size, second), False)
    moment = Moment.zeros(value.shape, layout, group_size, device).beside(second)
    return moment, moment.recover_(value, _likes(moment, loaded.get("coat", {}), index, name))


def _likes(moment: Moment, coat: Any, index: Any, name: str) -> Iterator[Storage | None]:
    """The saved scales and exponents of each piece, None where there are none that fit."""
    group_size, pieces = _described(coat, index, name)
    saved = {}
    if group_size == moment.group_size:
        saved = {(begin, codec): (scale, exponent) for begin, codec, scale, exponent in pieces}
    for piece in moment.pieces:
        tensors = saved.get((piece.begin, piece.codec.name), ())
        kinds, wanted = ([(t.shape, t.dtype) for t in ts] for ts in (tensors, piece.storage[1:]))
        if kinds == wanted and any(t.numel() for t in tensors):
            yield Storage(piece.storage.codes, *tensors)
        else:
            yield None


Described = tuple[int, str, torch.Tensor, torch.Tensor]


def _described(coat: Any, index: Any, name: str) -> tuple[int, list[Described]]:
    """Group size, and first element, codec, scales and exponents of each piece, of a moment that is given as
    FP32 values; 0 and none if nothing is said, or nothing that can be understood.
    """
    stored = coat if isinstance(coat, dict) and coat.get("version") == METADATA_VERSION else None
    for key in ("moments", index, name):
        stored = stored.get(key) if isinstance(stored, dict) else None
    found: list[Described] = []
    match stored:
        case {"group_size": int(size), "pieces": [*pieces]}:
            for piece in pieces:
                match piece:
                    case (int(begin), str(codec), torch.Tensor() as scale, torch.Tensor() as exponent):
                        found.append((begin, codec, scale, exponent))
            return size, found
    return 0, found


def stored_formats(
    loaded: dict[str, Any], index: Any, p: torch.Tensor, said: FormatNames, exact: bool
) -> FormatNames | None:
    """In which formats the moments of parameter `index` of a state dict, now those of `p`, were stored; None
    if nothing there says it, and they were restored to the bit.

    said: what their parameter group says
    exact: whether they were restored to the bit
    """
    if (formats := _formats_at(loaded, index)) is not None:
        return formats
    # AdamW hands on options of groups that it knows nothing of, and moments that are FP32. Those who cut
    # parameters drop what stands beside the values, and keep the options
    if "coat" in loaded or is_distributed(p) or getattr(p, "_fsdp_flattened", False):
        return said
    return None if exact else BOTH_FP32


def _formats_at(loaded: dict[str, Any], index: Any) -> FormatNames | None:
    """As they are stored there, or as stands beside their values; None if neither is said."""
    formats = []
    for name in MOMENTS:
        value = local(loaded["state"][index][name])
        if isinstance(value, Moment):
            formats.append(format_of(value))
        elif pieces := _described(loaded.get("coat"), index, name)[1]:
            formats.append(_joined(codec for _, codec, *_ in pieces))
        else:
            return None
    return tuple(formats)


def format_of(moment: Moment) -> str:
    """How a moment is stored, by the codec's name. What keeps FP32 in a flat partition is not counted."""
    return _joined(piece.codec.name for piece in moment.pieces)


def _joined(codecs: Iterable[str]) -> str:
    return " and ".join(sorted(set(codecs) - {"fp32"})) or "fp32"
