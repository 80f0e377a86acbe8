"""Moments in state dicts: what is written for them, and how they are restored."""

from typing import Any

import torch

from coat_ds.optim.moment import Moment
from coat_ds.optim.options import BOTH_FP32, MOMENTS, FormatNames
from coat_ds.optim.pieces import Layout
from coat_ds.optim.shards import is_distributed, laid_out_like, local, shard_of
from coat_ds.optim.stored_moment import StoredMoment
from coat_ds.optim.streaming import is_streaming


def take_states(packed: dict[str, Any], layout: str) -> dict[str, Any]:
    """The state dict of `torch.optim.Optimizer` with moments in the given layout, "stock" or "compressed".

    `"coat"` says that this optimizer wrote it: AdamW, which goes on from it, keeps the parameter groups'
    options, and so what they say of the formats of its own FP32 moments.
    """
    state: dict[Any, dict[str, Any]] = {}
    indices = {index for group in packed["param_groups"] for index in group["params"]}
    for index, entry in packed["state"].items():
        if index not in indices:
            # a note of the caller's, not the state of a parameter
            state[index] = entry
            continue
        state[index] = dict(entry)
        for name, value in entry.items():
            moment = local(value)
            if isinstance(moment, Moment):
                state[index][name] = _given(value, moment, layout)
            elif name == "step":
                state[index][name] = torch.tensor(float(value), dtype=torch.float32, device="cpu")
            elif name == "remainder":
                # the same bits: neither NCCL nor gloo carries int16 from rank to rank
                state[index][name] = laid_out_like(value, local(value).view(torch.float16))
    return {**packed, "state": state, "coat": {"version": 3}}


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
    """What this rank holds of a moment of a state dict, `param`'s, in the codes that its values were decoded
    from, if they were.

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
    return moment, moment.recover_(value)


def stored_formats(
    loaded: dict[str, Any], index: Any, p: torch.Tensor, said: FormatNames, exact: bool
) -> FormatNames | None:
    """In which formats the moments of parameter `index` of a state dict, now those of `p`, were stored; None
    if nothing there says it, and they were restored to the bit.

    said: what their parameter group says
    exact: whether they were restored to the bit
    """
    held = [local(loaded["state"][index][name]) for name in MOMENTS]
    if all(isinstance(value, Moment) for value in held):
        return tuple(map(format_of, held))
    # AdamW hands on options of groups that it knows nothing of, and moments that are FP32. Those who cut
    # parameters drop what stands beside the values, and keep the options
    if "coat" in loaded or is_distributed(p) or getattr(p, "_fsdp_flattened", False):
        return said
    return None if exact else BOTH_FP32


def format_of(moment: Moment) -> str:
    """How a moment is stored, by the codec's name. What keeps FP32 in a flat partition is not counted."""
    names = {piece.codec.name for piece in moment.pieces}
    return " and ".join(sorted(names - {"fp32"})) or "fp32"
