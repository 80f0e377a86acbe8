"""`CoatAdamW.load_state_dict`: which state dicts it refuses, and how it loads the others.

`optimizer` is always a `CoatAdamW`. It has no type here because its module imports this one.
"""

import contextlib
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, NoReturn

import torch

from coat_ds.optim.checks import check_changes, check_supported
from coat_ds.optim.moment import pair_up
from coat_ds.optim.options import (
    COAT_KEYS,
    FORMATS,
    MOMENTS,
    SECOND_FIRST,
    STOCK_SWITCHES,
    check_names,
    check_numbers,
    has_remainder,
)
from coat_ds.optim.shards import laid_out_like, shard_of
from coat_ds.optim.states import prepare_state, set_moment, state_device

# the kernels' dither counts steps up to this number
MOST_STEPS = 2**31 - 1
# options of other Adams' parameter groups that CoatAdamW does not support
REFUSED = {"amsgrad": True, "bias_correction": False, "adam_w_mode": False, "correct_bias": False}
LOAD_ONE = "Load what state_dict() of an optimizer gave."


@contextlib.contextmanager
def loading_states(optimizer) -> Iterator[None]:
    """A context in which torch's `load_state_dict` loads the parameter groups and runs all hooks, while the
    states are loaded here. torch would cast moments to the parameters' dtype and hold all of them in FP32 at
    once.

    Raises ValueError, before anything is changed, for a state dict that `optimizer` cannot load.
    """
    own = options_of_groups(optimizer)
    loaded: dict[str, Any] = {}

    def keep_states(_, incoming):
        check_supported(optimizer)
        check_loaded(incoming, optimizer.param_groups, optimizer.defaults)
        loaded.update(incoming)
        return {**incoming, "state": {}}

    def load_states(_):
        restore_options(optimizer, own)
        # states are re-created with the options that the groups have now
        optimizer.checked_options = ()
        check_changes(optimizer)
        _load_states(optimizer, loaded)

    hooks = (
        optimizer.register_load_state_dict_pre_hook(keep_states),
        optimizer.register_load_state_dict_post_hook(load_states, prepend=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _load_states(optimizer, loaded: dict[str, Any]) -> None:
    for group, saved in zip(optimizer.param_groups, loaded["param_groups"], strict=True):
        steps = _steps_of(saved, loaded["state"])
        for p, index in zip(group["params"], saved["params"], strict=True):
            if entry := loaded["state"].get(index):
                optimizer.state[p] = {**entry, "step": torch.tensor(float(steps[index]), dtype=torch.float32)}
                optimizer._load_state(p, group)
    known = {index for saved in loaded["param_groups"] for index in saved["params"]}
    optimizer.state |= {key: note for key, note in loaded["state"].items() if key not in known}


def load_state(optimizer, p: torch.Tensor, group: dict[str, Any]) -> None:
    """Replaces the tensors in the state of `p`, which are those of a state dict, by the optimizer's own."""
    state, device = optimizer.state[p], state_device(optimizer, p, group)
    remainder = state.pop("remainder", None)
    if _is_remainder(remainder) and has_remainder(p, group):
        held = shard_of(remainder, p).view(torch.int16)
        state["remainder"] = laid_out_like(p, held.to(device, copy=True))
    for name in SECOND_FIRST:
        set_moment(optimizer, p, group, name, state[name])
    pair_up(state, p)
    if optimizer.offloads:
        prepare_state(optimizer, p, group)


def options_of_groups(optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group, for `restore_options`."""
    return [{name: group[name] for name in optimizer.defaults} for group in optimizer.param_groups]


def restore_options(optimizer, options: list[dict[str, Any]]) -> None:
    """Restores, from the result of `options_of_groups`, the options that belong to the optimizer and not to a
    checkpoint, and options that the checkpoint did not have.

    Raises ValueError if the groups are now those of an optimizer with another update than AdamW's.
    """
    check_groups(optimizer.param_groups)
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group |= {k: v for k, v in own.items() if k in COAT_KEYS or k in STOCK_SWITCHES or k not in group}
        group |= {k: v for k, v in optimizer.common_options().items() if k in group}
        # FusedAdam's count for the group; here every state has its own `step`
        group.pop("step", None)


def check_loaded(state_dict: dict[str, Any], groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
    """Raises ValueError for a state dict that an optimizer of these groups and defaults cannot load."""
    _check_layout(state_dict)
    saved = state_dict["param_groups"]
    for i, group in enumerate(saved):
        kept = {k: v for k, v in group.items() if k not in COAT_KEYS and k not in STOCK_SWITCHES}
        try:
            check_names(group, defaults, {})
            # schedulers may set a rate below 0, which steps accept: such a run must be able to resume
            check_numbers({**defaults, **kept})
        except ValueError as error:
            raise ValueError(f"load_state_dict: parameter group {i}: {error}") from None
    check_groups(saved)
    _check_states(state_dict, groups)


def _refuse(why: str) -> NoReturn:
    raise ValueError(f"load_state_dict: {why}")


def _check_layout(state_dict: dict[str, Any]) -> None:
    """Raises ValueError for a dict that is not the state dict of an optimizer."""
    states, groups = state_dict.get("state"), state_dict.get("param_groups")
    if not isinstance(states, dict):
        _refuse(f"expected a dict of states under 'state', found {_shown(states)}. {LOAD_ONE}")
    if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
        _refuse(f"expected a list of groups under 'param_groups', found {_shown(groups)}. {LOAD_ONE}")
    for i, group in enumerate(groups):
        params = group.get("params")
        if not isinstance(params, list):
            _refuse(
                f"expected a list under 'params' of parameter group {i}, found {_shown(params)}. {LOAD_ONE}"
            )
        if "step" in group:
            _check_step(group["step"], f"parameter group {i}")


def _is_remainder(value: Any) -> bool:
    """Whether `value` is still a remainder, of a state dict (viewed as FP16) or of a state: other optimizers
    cast it to the moments' dtype and ignore it."""
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.int16)


def _shown(value: Any) -> str:
    return f"a {type(value).__name__}: {str(value)[:60]}"


def _check_step(step: Any, of_what: str) -> None:
    is_number = isinstance(step, int | float) or (isinstance(step, torch.Tensor) and step.numel() == 1)
    if not is_number or not (0 <= float(step) <= MOST_STEPS and float(step).is_integer()):
        _refuse(f"the step of {of_what} is {_shown(step)}. Expected a whole number from 0 to {MOST_STEPS}.")


def check_groups(groups: list[dict[str, Any]]) -> None:
    """Raises ValueError for groups of an optimizer whose update is not AdamW's."""
    for i, group in enumerate(groups):
        refused = [k for k, value in REFUSED.items() if k in group and bool(group[k]) == value]
        if group.get("weight_decay") and not group.get("decoupled_weight_decay", True):
            refused.append("decoupled_weight_decay")
        for key in refused:
            _refuse(
                f"parameter group {i} has {key}={group[key]!r}, which CoatAdamW does not support: its next "
                "step would not be the saved optimizer's. Go on with that one, or set the key to "
                f"{not group[key]} to change it."
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
            _refuse(
                f"there is a state of {index!r}, which no parameter group has: the first of their params are "
                f"{', '.join(map(repr, islice(known, 3)))}. Use the same keys in both; JSON makes strings of "
                "numbers."
            )
    params = chain.from_iterable(g["params"] for g in groups)
    for (index, group), p in zip(indices, params, strict=True):
        if entry := state_dict["state"].get(index):
            _check_state(entry, group, p, f"parameter {index}")


def _check_state(entry: Any, group: dict[str, Any], p: torch.Tensor, of_p: str) -> None:
    if not isinstance(entry, dict):
        _refuse(f"expected a dict as the state of {of_p}, found {_shown(entry)}. {LOAD_ONE}")
    if missing := [k for k in (*MOMENTS, *(() if "step" in group else ("step",))) if k not in entry]:
        _refuse(
            f"the state of {of_p} has no {', '.join(missing)}, but {', '.join(entry)}. Load the state dict "
            "of CoatAdamW or torch.optim.AdamW."
        )
    others = [k for k in entry if k not in ("step", *MOMENTS, "remainder")]
    # in this optimizer's own state dict other entries are notes of the caller
    if "max_exp_avg_sq" in others or (others and not any(name in group for name in FORMATS)):
        _refuse(
            f"the state of {of_p} has {', '.join(others)}, which AdamW does not have: it is from an "
            f"optimizer with another update. Go on with that one. Remove {' and '.join(others)} from the "
            "state dict if they are notes of your own."
        )
    if "step" in entry:
        _check_step(entry["step"], of_p)
    for name in (*MOMENTS, *(("remainder",) if _is_remainder(entry.get("remainder")) else ())):
        value = entry[name]
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor or value.layout is not torch.strided or value.dtype.is_complex:
            found = f"{value.dtype}, {value.layout}" if is_tensor else _shown(value)
            _refuse(f"{name} of {of_p} is {found}. Expected a dense tensor.")
        if value.shape != p.shape:
            _refuse(
                f"{name} of {of_p} is {tuple(value.shape)}, the parameter {tuple(p.shape)}. Load a "
                "checkpoint of the same model and the same layout."
            )
