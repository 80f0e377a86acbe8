"""Changes of options in `param_groups` between steps: which are refused.

`optimizer` is always a `CoatAdamW`.
"""

import torch

from coat_ds.optim.checks import check_can_keep_remainder
from coat_ds.optim.moment import Moment
from coat_ds.optim.options import (
    FORMATS,
    LAYOUT,
    MOMENTS,
    STOCK_SWITCHES,
    check_names,
    check_options,
    has_remainder,
)
from coat_ds.optim.shards import local


def check_changes(optimizer) -> None:
    """Raises ValueError if an option of a parameter group has changed since the last check to a value that
    the constructor would refuse, or if existing states are stored otherwise."""
    groups = optimizer.param_groups
    # options that every step reads, such as lr, and notes of the caller may change
    fixed = {*LAYOUT, *STOCK_SWITCHES, *optimizer.of_the_whole()}
    options = [{k: v if k in fixed else None for k, v in group.items()} for group in groups]
    if options == optimizer.checked_options:
        return
    check_supported(optimizer)
    for i, group in enumerate(groups):
        for p in optimizer.layouts.held_in(i, group):
            for name in MOMENTS:
                _check_layout(optimizer, i, p, name)
    optimizer.checked_options = options


def _check_layout(optimizer, index: int, p: torch.Tensor, name: str) -> None:
    """Raises ValueError if the moment `name` of `p` exists in another layout than group `index` asks for."""
    group, moment = optimizer.param_groups[index], local(optimizer.state.get(p, {}).get(name))
    layout = optimizer.layouts.layout_of(p, group, name)
    if not isinstance(moment, Moment) or moment.arrangement == layout:
        return
    held, wanted = (" and ".join({codec.name: 0 for _, codec in x}) for x in (moment.arrangement, layout))
    options = ", ".join(f"{option} {group[option]!r}" for option in (*FORMATS, "min_numel"))
    raise ValueError(
        f"CoatAdamW: {name} of a tensor of parameter group {index} is stored as {held}, and the options of "
        f"the group ({options}) ask for {wanted} now. Set them before the first step, or call "
        "optimizer.load_state_dict(optimizer.state_dict()), which re-creates the states."
    )


def check_supported(optimizer) -> None:
    """Raises ValueError for options in parameter groups that the constructor would refuse, except options
    that every step reads, and TypeError for options that the parameters do not support."""
    for group in optimizer.param_groups:
        check_names(group, optimizer.defaults, optimizer.of_the_whole())
        check_options(optimizer.defaults | {k: group[k] for k in (*LAYOUT, *STOCK_SWITCHES) if k in group})
        for p in group["params"]:
            if has_remainder(p, group):
                check_can_keep_remainder(p)
