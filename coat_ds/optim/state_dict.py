"""Moments in state dicts: how they are written and restored."""

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

    The key `"coat"` marks a state dict of this optimizer. Without it the formats in the parameter groups may
    be wrong: an AdamW that resumes from such a state dict keeps these options, with FP32 moments of its own.
    """
    state: dict[Any, dict[str, Any]] = {}
    indices = {index for group in packed["param_groups"] for index in group["params"]}
    for index, entry in packed["state"].items():
        if index not in indices:
            # a note of the caller, not the state of a parameter
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
                # the same bits as FP16: neither NCCL nor gloo sends int16
                state[index][name] = laid_out_like(value, local(value).view(torch.float16))
    return {**packed, "state": state, "coat": {"version": 3}}


def _given(value: torch.Tensor, moment: Moment, layout: str) -> torch.Tensor:
    if is_distributed(value):
        # on its device: NCCL cannot gather CPU tensors
        return laid_out_like(value, moment.decode())
    if layout == "compressed":
        return StoredMoment(moment.pieces, moment.shape, pair=moment.pair)
    # when streaming, torch.save decodes the moment as it writes it
    return moment.detach() if is_streaming() else moment.decode("cpu")


def restored(
    loaded: dict[str, Any],
    index: Any,
    name: str,
    layout: Layout,
    param: torch.Tensor,
    device: torch.device,
    second: Moment | None = None,
) -> tuple[Moment, bool]:
    """This rank's part of the moment `name` of `param` in a state dict, in its original codes if its values
    were decoded from codes.

    device: where the moment belongs.
    second: the second moment, already restored, if this is a first moment, which may be relative to it.
    Also returns whether the moment is bit-exact.
    """
    value = shard_of(loaded["state"][index][name], param)
    if isinstance(value, Moment):
        # a plain Moment, because `GivenMoment.to` returns a decoded tensor; then converted to `layout`
        value = Moment(value.pieces, value.shape, pair=value.pair)
        held: Any = value.to(device, copy=True)
        same = held.arrangement == layout
        return (held, True) if same else (held.rearranged(layout, second), False)
    moment = Moment.zeros(value.shape, layout, device).beside(second)
    return moment, moment.recover_(value, param.device)


def stored_formats(
    loaded: dict[str, Any], index: Any, p: torch.Tensor, said: FormatNames, exact: bool
) -> FormatNames | None:
    """The formats in which the moments of `p`, parameter `index` of a state dict, were stored; None if they
    cannot be told from the state dict and the moments were restored bit-exactly.

    said: the formats that their parameter group names
    exact: whether they were restored bit-exactly
    """
    held = [local(loaded["state"][index][name]) for name in MOMENTS]
    if all(isinstance(value, Moment) for value in held):
        return tuple(map(format_of, held))
    # AdamW saves unknown options of its groups unchanged, with FP32 moments. Frameworks that shard parameters
    # drop the key "coat" and keep the options
    if "coat" in loaded or is_distributed(p) or getattr(p, "_fsdp_flattened", False):
        return said
    return None if exact else BOTH_FP32


def format_of(moment: Moment) -> str:
    """The name of a moment's codec. Pieces of a flat partition that keep FP32 are not counted."""
    names = {piece.codec.name for piece in moment.pieces}
    return " and ".join(sorted(names - {"fp32"})) or "fp32"
