"""Changes of options in `param_groups` between steps: which are refused.

`optimizer` is always a `CoatAdamW`.
"""

from itertools import product
from typing import Any, NamedTuple

from coat_ds.optim.checks import check_can_keep_remainder
from coat_ds.optim.options import (
    LAYOUT,
    OF_STATES,
    STOCK_SWITCHES,
    check_names,
    check_options,
    has_remainder,
)


class CheckedGroup(NamedTuple):
    """A parameter group as it was when its options were checked."""

    group: dict[str, Any]
    """The dict itself, to notice if another group has replaced it."""
    options: dict[str, Any]
    held: frozenset[int]
    """The ids of its tensors; references would keep tensors alive that Accelerate removes from the group."""


def check_changes(optimizer) -> None:
    """Raises ValueError if an option of a parameter group has changed since the last check to a value that
    the constructor would refuse, or if it determines existing states."""
    groups, before = optimizer.param_groups, optimizer.checked_groups
    # options that every step reads, such as lr, and notes of the caller may change
    fixed = {*LAYOUT, *STOCK_SWITCHES, *optimizer.of_the_whole()}
    options = [{k: v if k in fixed else None for k, v in group.items()} for group in groups]
    if options == [old.options for old in before] and all(
        old.group is group for old, group in zip(before, groups, strict=True)
    ):
        return
    check_supported(optimizer)
    held = [frozenset(map(id, optimizer.layouts.held_in(i, group))) for i, group in enumerate(groups)]
    now = list(map(CheckedGroup, groups, options, held))
    for (i, new), old, name in product(enumerate(now), before, OF_STATES):
        was, found = old.options[name], new.options[name]
        if was != found and any(id(p) in new.held & old.held for p in optimizer.state):
            raise ValueError(
                f"CoatAdamW: {name} was {was!r} when states of parameter group {i} were made, and is "
                f"{found!r} now. Set it before the first step, or call "
                "optimizer.load_state_dict(optimizer.state_dict()), which re-creates them."
            )
    optimizer.checked_groups = now


def check_supported(optimizer) -> None:
    """Raises ValueError for options in parameter groups that the constructor would refuse, except options
    that every step reads, and TypeError for options that the parameters do not support."""
    for group in optimizer.param_groups:
        check_names(group, optimizer.defaults, optimizer.of_the_whole())
        check_options(optimizer.defaults | {k: group[k] for k in (*LAYOUT, *STOCK_SWITCHES) if k in group})
        for p in group["params"]:
            if has_remainder(p, group):
                check_can_keep_remainder(p)
