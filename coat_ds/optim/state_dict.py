"""Moments in state dicts: what is written for them, and how they are restored."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch

from coat_ds.optim.moment import Moment
from coat_ds.optim.options import BOTH_FP32, LAYOUT, MOMENTS, STOCK_SWITCHES, FormatNames, check_options
from coat_ds.optim.pieces import Layout
from coat_ds.optim.shards import is_distributed, laid_out_like, local, shard_of
from coat_ds.optim.stored_moment import StoredMoment
from coat_ds.optim.streaming import is_streaming
from coat_kernels.codecs import Storage

METADATA_VERSION = 2
# the kernels' dither counts no further
MOST_STEPS = 2**31 - 1
# what a parameter group of another Adam may ask for, and no step of CoatAdamW does
REFUSED = {"amsgrad": True, "bias_correction": False, "adam_w_mode": False}


def take_states(packed: dict[str, Any], layout: str) -> dict[str, Any]:
    """The state dict of `torch.optim.Optimizer` with moments in the given layout, "stock" or "compressed".

    Under `"coat"` stand the scales and exponents of moments that are given as FP32 values.
    """
    state: dict[Any, dict[str, Any]] = {}
    stored: dict[Any, dict[str, Any]] = {}
    for index, entry in packed["state"].items():
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
                state[index][name] = torch.tensor(float(value), dtype=torch.float32)
            elif name == "remainder" and is_distributed(value):
                # neither NCCL nor gloo carries int16 from rank to rank
                state[index][name] = value.to(torch.int32)
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


def check_loaded(state_dict: dict[str, Any], groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
    """Raises ValueError for a state dict that an optimizer of these groups and defaults cannot load."""
    _check_layout(state_dict)
    for i, group in enumerate(state_dict["param_groups"]):
        kept = {k: v for k, v in group.items() if k not in LAYOUT and k not in STOCK_SWITCHES}
        try:
            check_options({**defaults, **kept})
        except ValueError as error:
            raise ValueError(f"load_state_dict: parameter group {i}: {error}") from None
    check_groups(state_dict["param_groups"])
    _check_states(state_dict, groups)


def _check_layout(state_dict: dict[str, Any]) -> None:
    """Raises ValueError for what is no optimizer's state dict."""
    states, groups = state_dict.get("state"), state_dict.get("param_groups")
    if not isinstance(states, dict) or not all(isinstance(entry, dict) for entry in states.values()):
        raise ValueError(
            f"load_state_dict: expected a dict of states under 'state', found {_said(states)}. Load what "
            "state_dict() of an optimizer gave."
        )
    if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
        raise ValueError(
            f"load_state_dict: expected a list of parameter groups under 'param_groups', found "
            f"{_said(groups)}. Load what state_dict() of an optimizer gave."
        )
    for i, group in enumerate(groups):
        if not isinstance(group.get("params"), list):
            raise ValueError(
                f"load_state_dict: parameter group {i} has no list of parameters under 'params', but "
                f"{_said(group.get('params'))}. Load what state_dict() of an optimizer gave."
            )
        if "step" in group:
            _check_step(group["step"], f"parameter group {i}")


def is_remainder(value: Any) -> bool:
    """Whether it is one still: other optimizers cast it as they cast moments, and step without it."""
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int16, torch.int32)


def _said(value: Any) -> str:
    return f"a {type(value).__name__}: {str(value)[:60]}"


def _check_step(step: Any, of_what: str) -> None:
    is_number = isinstance(step, int | float) or (isinstance(step, torch.Tensor) and step.numel() == 1)
    if not is_number or not (0 <= float(step) <= MOST_STEPS and float(step).is_integer()):
        raise ValueError(
            f"load_state_dict: the step of {of_what} is {_said(step)}. Expected a whole number from 0 to "
            f"{MOST_STEPS}."
        )


def check_groups(groups: list[dict[str, Any]]) -> None:
    """Raises ValueError for groups of an optimizer that makes other steps than AdamW."""
    for i, group in enumerate(groups):
        refused = [k for k, value in REFUSED.items() if k in group and bool(group[k]) == value]
        if group.get("weight_decay") and not group.get("decoupled_weight_decay", True):
            refused.append("decoupled_weight_decay")
        for key in refused:
            raise ValueError(
                f"load_state_dict: parameter group {i} has {key}={group[key]!r}, which CoatAdamW does not "
                "support: its next step would not be the saved optimizer's. Go on with that one, or set the "
                f"key to {not group[key]} to change it."
            )


def steps_of(group: dict[str, Any], states: dict[Any, dict[str, Any]]) -> dict[Any, int]:
    """The steps of each parameter of a saved group.

    FusedAdam takes those of a parameter group to be equal, and counts them in the state of one parameter; in
    other versions, and in NVIDIA's, in the group.
    """
    steps = {index: int(states.get(index, {}).get("step", 0)) for index in group["params"]}
    if "step" not in group:
        return steps
    return dict.fromkeys(steps, max(int(group["step"]), *steps.values(), 0))


def _check_states(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Raises ValueError for a state that does not fit its parameter, before anything is changed."""
    saved = state_dict["param_groups"]
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in groups]:
        return  # torch's own message is the one that users know
    indices = ((index, "step" in g) for g in saved for index in g["params"])
    params = chain.from_iterable(g["params"] for g in groups)
    for (index, is_counted), p in zip(indices, params, strict=True):
        entry = state_dict["state"].get(index)
        if not entry:
            continue
        if "max_exp_avg_sq" in entry:
            raise ValueError(
                "load_state_dict: the state is amsgrad's, which CoatAdamW does not support. Go "
                "on with AdamW, or load a checkpoint without it."
            )
        missing = [k for k in (*MOMENTS, *(() if is_counted else ("step",))) if k not in entry]
        if missing:
            raise ValueError(
                f"load_state_dict: the state of parameter {index} has no {', '.join(missing)}, but "
                f"{', '.join(entry)}. Load the state dict of CoatAdamW or torch.optim.AdamW."
            )
        if "step" in entry:
            _check_step(entry["step"], f"parameter {index}")
        for name in (*MOMENTS, *(("remainder",) if is_remainder(entry.get("remainder")) else ())):
            value = entry[name]
            is_tensor = isinstance(value, torch.Tensor)
            if not is_tensor or value.layout is not torch.strided or value.dtype.is_complex:
                found = f"{value.dtype}, {value.layout}" if is_tensor else _said(value)
                raise ValueError(
                    f"load_state_dict: {name} of parameter {index} is {found}. Expected a dense tensor."
                )
            if value.shape != p.shape:
                raise ValueError(
                    f"load_state_dict: {name} of parameter {index} is {tuple(value.shape)}, the "
                    f"parameter {tuple(p.shape)}. Load a checkpoint of the same model and the same layout."
                )
