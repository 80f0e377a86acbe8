"""The state of one parameter of `CoatAdamW`: created, completed, and converted to another layout.

`optimizer` is always a `CoatAdamW`, and `group` the parameter group of `p`.
"""

import logging
from typing import Any

import torch

from coat_ds.log import log_rank_0
from coat_ds.optim.host_states import host_bytes
from coat_ds.optim.moment import Moment, pair_up
from coat_ds.optim.options import SECOND_FIRST, has_remainder
from coat_ds.optim.shards import is_distributed, laid_out_like, local, shard_of
from coat_ds.optim.step import is_on

CPU = torch.device("cpu")


def state_device(optimizer, p: torch.Tensor, group: dict[str, Any]) -> torch.device:
    """The device of the moments and of the remainder of `p`."""
    return CPU if decide_offload(optimizer, p, group) else p.device


def decide_offload(optimizer, p: torch.Tensor, group: dict[str, Any]) -> bool:
    """`CoatAdamW.is_offloaded`, also before the state exists: decides it for all trained parameters of this
    rank."""
    host, layouts = optimizer._host, optimizer.layouts
    if host is None or p in host.offloaded:
        return optimizer.is_offloaded(p)
    held = {x: own for i, own in enumerate(optimizer.param_groups) for x in layouts.held_in(i, own)}
    held[p] = group
    trained = (x for x in held if x is p or x.requires_grad or x in layouts.fragments)
    host.decide({x: host_bytes(x, held[x], layouts) for x in trained})
    if optimizer._offload != "cpu":
        stay, streamed = host.decided
        log_rank_0(
            f"CoatAdamW: offload: {stay:,} bytes of states stay on the GPU, {streamed:,} bytes stream from "
            "host memory",
            logging.INFO,
        )
    return optimizer.is_offloaded(p)


def prepare_state(
    optimizer, p: torch.Tensor, group: dict[str, Any], count_on_device: bool = False
) -> dict[str, Any]:
    """Creates missing parts of the state of `p`, encodes its plain moments, and returns the state."""
    state = optimizer.state[p]
    step, place = state.get("step", 0), p.device if group["capturable"] or count_on_device else CPU
    if not is_on(step, place):
        state["step"] = torch.tensor(float(step), dtype=torch.float32, device=place)
    for name in SECOND_FIRST:
        value = state.get(name)
        if value is None:
            # zeros are stored alike in every pair, and encoding them again takes long on a CPU
            state[name] = laid_out_like(p, _zeros(optimizer, p, group, name))
        elif not isinstance(local(value), Moment) or is_distributed(value) != is_distributed(p):
            # universal checkpoints put plain values here
            set_moment(optimizer, p, group, name, value)
    pair_up(state, p)
    if not has_remainder(p, group):
        # the parameter's dtype or bf16_params has changed
        state.pop("remainder", None)
    elif state.get("remainder") is None:
        # zero: the parameter's own value is the master
        device = state_device(optimizer, p, group)
        state["remainder"] = laid_out_like(p, torch.zeros(local(p).shape, dtype=torch.int16, device=device))
    if decide_offload(optimizer, p, group):
        optimizer._host.place(p, state)
    return state


def set_moment(optimizer, p: torch.Tensor, group: dict[str, Any], name: str, value: torch.Tensor) -> None:
    """Puts a moment of a state dict, or FP32 values, into the state of `p`. It restores original codes if
    the moment is stored in the layout of `p`, or if the values were decoded from codes."""
    value = shard_of(value, p)
    if isinstance(value, Moment):
        # a plain Moment, because `StoredMoment.to` returns a decoded tensor
        given: Any = Moment(value.pieces, value.shape, pair=value.pair)
        moment = given.to(state_device(optimizer, p, group), copy=True)
        exact = moment.piece_layout == optimizer.layouts.layout_of(p, group, name)
        moment = moment if exact else _zeros(optimizer, p, group, name).encode_(moment)
    else:
        moment = _zeros(optimizer, p, group, name)
        exact = moment.recover_(value, p.device)
    optimizer.count_loaded(exact)
    optimizer.state[p][name] = laid_out_like(p, moment)


def _zeros(optimizer, p: torch.Tensor, group: dict[str, Any], name: str) -> Moment:
    layout = optimizer.layouts.layout_of(p, group, name)
    second = local(optimizer.state[p]["exp_avg_sq"]) if name == "exp_avg" else None
    return Moment.zeros(local(p).shape, layout, state_device(optimizer, p, group)).relative_to(second)


def convert_layout(optimizer, p: torch.Tensor, group: dict[str, Any]) -> None:
    """Converts the moments of `p` to their present layout."""
    state, second = optimizer.state[p], None
    for name in SECOND_FIRST:
        layout, held = optimizer.layouts.layout_of(p, group, name), local(state[name])
        if held.piece_layout != layout:
            held = held.with_layout(layout, second=second)
            state[name] = laid_out_like(p, held)
        second = held
    prepare_state(optimizer, p, group)
