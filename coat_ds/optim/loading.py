"""`CoatAdamW.load_state_dict`: which state dicts it refuses, and how it loads the others.

`optimizer` is always a `CoatAdamW`. It has no type here because its module imports this one.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch

from coat_ds.log import say
from coat_ds.optim.lines import conversions_line
from coat_ds.optim.options import (
    FORMATS,
    LAYOUT,
    MOMENTS,
    SECOND_FIRST,
    STOCK_SWITCHES,
    FormatNames,
    check_names,
    check_numbers,
    formats_of,
    has_remainder,
)
from coat_ds.optim.pair import pair_up
from coat_ds.optim.shards import laid_out_like, local, shard_of
from coat_ds.optim.state_dict import format_of, restored, stored_formats

# the kernels' dither counts steps up to this number
MOST_STEPS = 2**31 - 1
# options of other Adams' parameter groups that CoatAdamW does not support
REFUSED = {"amsgrad": True, "bias_correction": False, "adam_w_mode": False, "correct_bias": False}
# options of optimizers with AdamW's states but another update: LAMB, AdamP, Yogi and similar ones
FOREIGN = (
    *("grad_averaging", "trust_clip", "always_adapt", "max_coeff", "min_coeff", "pre_norm", "trust_ratio"),
    *("wd_ratio", "delta", "initial_accumulator", "rectify", "degenerated_to_sgd", "clamp_value"),
)


@contextlib.contextmanager
def loading_states(optimizer) -> Iterator[None]:
    """A context in which torch's `load_state_dict` loads the parameter groups and runs all hooks, while the
    states are loaded here. torch would cast moments to the parameters' dtype and hold all of them in FP32 at
    once.

    Raises ValueError, before anything is changed, for a state dict that `optimizer` cannot load.
    """
    own = optimizer.layout_options()
    loaded: dict[str, Any] = {}

    def keep_states(_, incoming):
        optimizer._check_options()
        check_loaded(incoming, optimizer.param_groups, optimizer.defaults)
        loaded.update(incoming)
        return {**incoming, "state": {}}

    def load_states(_):
        optimizer.restore_layout_options(own)
        # states are re-created with the options that the groups have now
        optimizer._checked_groups = ()
        optimizer._check_changes()
        say_conversions(optimizer, _load_states(optimizer, loaded))

    hooks = (
        optimizer.register_load_state_dict_pre_hook(keep_states),
        optimizer.register_load_state_dict_post_hook(load_states, prepend=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _load_states(optimizer, loaded: dict[str, Any]) -> dict[torch.Tensor, FormatNames]:
    """Loads the state of every parameter that has one in a state dict. Returns the formats in which the
    moments were stored, except for parameters whose formats `stored_formats` cannot tell."""
    stored = {}
    for group, saved in zip(optimizer.param_groups, loaded["param_groups"], strict=True):
        steps, of_group = _steps_of(saved, loaded["state"]), formats_of(saved)
        for p, index in zip(group["params"], saved["params"], strict=True):
            if entry := loaded["state"].get(index):
                optimizer.state[p] = {**entry, "step": torch.tensor(float(steps[index]), dtype=torch.float32)}
                said = optimizer._layouts.unless_kept(p, group, of_group)
                formats = optimizer._load_state(p, group, loaded, index, said)
                if formats is not None:
                    stored[p] = formats
    known = {index for saved in loaded["param_groups"] for index in saved["params"]}
    optimizer.state |= {key: note for key, note in loaded["state"].items() if key not in known}
    return stored


def load_state(
    optimizer,
    p: torch.Tensor,
    group: dict[str, Any],
    loaded: dict[str, Any],
    index: int,
    said: FormatNames,
) -> FormatNames | None:
    """Replaces the tensors in the state of `p`, taken from the loaded entry `index`, by the optimizer's own.

    said: the formats of its moments that the parameter group in `loaded` names.
    Returns the formats in which the moments were stored, as `stored_formats` does.
    """
    state, device = optimizer.state[p], optimizer.state_device(p, group)
    remainder = state.pop("remainder", None)
    if _is_remainder(remainder) and has_remainder(p, group):
        held = shard_of(remainder, p).view(torch.int16)
        state["remainder"] = laid_out_like(p, held.to(device, copy=True))
    moment, all_exact = None, True
    for name in SECOND_FIRST:
        layout = optimizer._layouts.layout_of(p, group, name)
        moment, exact = restored(loaded, index, name, layout, p, device, moment)
        state[name] = laid_out_like(p, moment)
        optimizer._count_arrival(exact)
        all_exact = all_exact and exact
    pair_up(state, p)
    if optimizer.offloads:
        optimizer._ready_state(p, group)
    return stored_formats(loaded, index, p, said, all_exact)


def say_conversions(optimizer, stored: Mapping[torch.Tensor, FormatNames]) -> None:
    """Logs how many tensors have moments that were `stored` in other formats than the present ones."""
    converted: Counter[tuple[FormatNames, FormatNames]] = Counter()
    for p, old in stored.items():
        new = tuple(format_of(local(optimizer.state[p][name])) for name in MOMENTS)
        if old != new:
            converted[old, new] += optimizer._layouts.tensors_in(p)
    if converted:
        say(conversions_line(converted), logging.WARNING)


def check_loaded(state_dict: dict[str, Any], groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
    """Raises ValueError for a state dict that an optimizer of these groups and defaults cannot load."""
    _check_layout(state_dict)
    for i, group in enumerate(state_dict["param_groups"]):
        kept = {k: v for k, v in group.items() if k not in LAYOUT and k not in STOCK_SWITCHES}
        try:
            check_names(group, defaults, {})
            # schedulers may set a rate below 0, which steps accept: such a run must be able to resume
            check_numbers({**defaults, **kept})
        except ValueError as error:
            raise ValueError(f"load_state_dict: parameter group {i}: {error}") from None
    check_groups(state_dict["param_groups"])
    _check_states(state_dict, groups)
    for i, group in enumerate(state_dict["param_groups"]):
        # all torch optimizers have foreach; RAdam has AdamW's states, and SGD may have no states
        if "foreach" in group and "amsgrad" not in group:
            raise ValueError(
                f"load_state_dict: parameter group {i} is another optimizer's and not torch.optim.AdamW's: "
                f"expected amsgrad, found {', '.join(k for k in group if k != 'params')}. Go on with that "
                "one, or start CoatAdamW without its state dict."
            )


def _check_layout(state_dict: dict[str, Any]) -> None:
    """Raises ValueError for a dict that is not the state dict of an optimizer."""
    states, groups = state_dict.get("state"), state_dict.get("param_groups")
    if not isinstance(states, dict):
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


def _is_remainder(value: Any) -> bool:
    """Whether `value` is still a remainder, viewed as FP16: other optimizers cast it to the moments' dtype
    and ignore it."""
    return isinstance(value, torch.Tensor) and value.dtype == torch.float16


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
    """Raises ValueError for groups of an optimizer whose update is not AdamW's."""
    for i, group in enumerate(groups):
        refused = [k for k, value in REFUSED.items() if k in group and bool(group[k]) == value]
        if group.get("weight_decay") and not group.get("decoupled_weight_decay", True):
            refused.append("decoupled_weight_decay")
        if foreign := [key for key in FOREIGN if key in group]:
            raise ValueError(
                f"load_state_dict: parameter group {i} has {', '.join(foreign)}, which AdamW does not have: "
                "it is from an optimizer with another update, such as LAMB, AdamP or Yogi. Go on with that "
                "one, or start CoatAdamW without its state dict."
            )
        for key in refused:
            raise ValueError(
                f"load_state_dict: parameter group {i} has {key}={group[key]!r}, which CoatAdamW does not "
                "support: its next step would not be the saved optimizer's. Go on with that one, or set the "
                f"key to {not group[key]} to change it."
            )


def _steps_of(group: dict[str, Any], states: dict[Any, dict[str, Any]]) -> dict[Any, int]:
    """The number of steps of each parameter of a saved group.

    FusedAdam assumes equal numbers in a parameter group. It stores the number in the state of one parameter;
    other versions of it, and NVIDIA's FusedAdam, store it in the group.
    """
    steps = {index: int(states.get(index, {}).get("step", 0)) for index in group["params"]}
    if "step" not in group:
        return steps
    return dict.fromkeys(steps, max(int(group["step"]), *steps.values(), 0))


def _check_states(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Raises ValueError for a state that does not fit its parameter, before anything is changed."""
    saved = state_dict["param_groups"]
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in groups]:
        return  # torch raises its own message, which users know
    indices = [(index, g) for g in saved for index in g["params"]]
    known = dict(indices)
    for index, entry in state_dict["state"].items():
        # torch copies entries under other keys unchanged
        if index not in known and isinstance(entry, dict) and any(name in entry for name in MOMENTS):
            raise ValueError(
                f"load_state_dict: there is a state of {index!r}, which no parameter group has: the first of "
                f"their params are {', '.join(map(repr, islice(known, 3)))}. Use the same keys in both; JSON "
                "makes strings of numbers."
            )
    params = chain.from_iterable(g["params"] for g in groups)
    for (index, group), p in zip(indices, params, strict=True):
        entry = state_dict["state"].get(index)
        if not entry:
            continue
        if not isinstance(entry, dict):
            raise ValueError(
                f"load_state_dict: expected a dict as the state of parameter {index}, found {_said(entry)}. "
                "Load what state_dict() of an optimizer gave."
            )
        if "max_exp_avg_sq" in entry:
            raise ValueError(
                "load_state_dict: the state is amsgrad's, which CoatAdamW does not support. Go "
                "on with AdamW, or load a checkpoint without it."
            )
        missing = [k for k in (*MOMENTS, *(() if "step" in group else ("step",))) if k not in entry]
        if missing:
            raise ValueError(
                f"load_state_dict: the state of parameter {index} has no {', '.join(missing)}, but "
                f"{', '.join(entry)}. Load the state dict of CoatAdamW or torch.optim.AdamW."
            )
        others = [k for k in entry if k not in ("step", *MOMENTS, "remainder")]
        # in this optimizer's own state dict such entries are notes of the caller
        if others and not any(name in group for name in FORMATS):
            raise ValueError(
                f"load_state_dict: the state of parameter {index} has {', '.join(others)}, which AdamW does "
                "not have: it is from an optimizer with another update. Go on with that one. Remove "
                f"{' and '.join(others)} from the state dict if they are notes of your own."
            )
        if "step" in entry:
            _check_step(entry["step"], f"parameter {index}")
        for name in (*MOMENTS, *(("remainder",) if _is_remainder(entry.get("remainder")) else ())):
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
