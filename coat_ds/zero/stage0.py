"""Checkpoints of ZeRO stage 0 in 16 bits, in the layout of either of DeepSpeed's two wrappers.

DeepSpeed puts FP16_Optimizer around FusedAdam, with one flat master a parameter group, and
FP16_UnfusedOptimizer around other optimizers, with a master for each parameter. Neither reads what the other
wrote. Engines with COAT read both, and write what the same config would write without the block.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from coat_ds.optim.moment import Moment
from coat_ds.patches import Patch

FLAT, APART, STATES = "fp32_groups_flat", "fp32_groups", "optimizer_state_dict"
# what FP16_UnfusedOptimizer reads in BF16 too
NO_LOSS_SCALE = {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": 0}


SAVE, LOAD = (
    Patch(
        "stage 0",
        "deepspeed",
        f"deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer.{method}",
        "checkpoints in the layout of either of stage 0's wrappers",
        parameters=parameters,
    )
    for method, parameters in (
        ("state_dict", ()),
        ("load_state_dict", ("state_dict", "load_optimizer_states")),
    )
)


def translate_checkpoints(wrapper, apart: bool) -> None:
    """Has stage 0's `wrapper` load both layouts, and save that with a master for each parameter if `apart`.

    Other wrappers are left as they are.
    """
    if not (hasattr(wrapper, FLAT) or hasattr(wrapper, APART)):
        return
    params = wrapper.fp16_groups

    def saving(save: Callable) -> Callable:
        @functools.wraps(save)
        def state_dict() -> dict[str, Any]:
            packed = save()
            return taken_apart(packed, params) if apart and FLAT in packed else packed

        return state_dict

    def loading(load: Callable) -> Callable:
        @functools.wraps(load)
        def load_state_dict(packed: dict[str, Any] | None, *args, **kwargs):
            if packed is None:
                # ZeRO's stand in files of their own, which stage 0 does not read
                raise ValueError(
                    "load_checkpoint: found no optimizer states of stage 0 in the checkpoint. Go on at the "
                    "ZeRO stage that wrote it, or load the weights alone with load_optimizer_states=False."
                )
            if hasattr(wrapper, FLAT) and APART in packed:
                packed = {"clip_grad": wrapper.clip_grad, **put_together(packed, params)}
            elif hasattr(wrapper, APART) and FLAT in packed:
                packed = taken_apart(packed, params)
            return load(packed, *args, **kwargs)

        return load_state_dict

    SAVE.apply(saving, on=wrapper)
    LOAD.apply(loading, on=wrapper)


def taken_apart(packed: dict[str, Any], params: Sequence[list[torch.Tensor]]) -> dict[str, Any]:
    """FP16_Optimizer's state dict as FP16_UnfusedOptimizer's.

    params: the model's parameters, by group.
    Raises ValueError if they are not those of the state dict.
    """
    states, groups, masters, count = {}, [], [], itertools.count()
    saved = packed[STATES]
    _check_groups(len(saved["param_groups"]), params)
    for number, (group, flat, held) in enumerate(
        zip(saved["param_groups"], packed[FLAT], params, strict=True)
    ):
        if flat.numel() != sum(p.numel() for p in held):
            raise _of_another_model(number, f"{flat.numel():,} elements", held)
        indices = list(itertools.islice(count, len(held)))
        masters.append(_cut(flat.detach(), held))
        for name, value in saved["state"].get(group["params"][0], {}).items():
            is_flat = isinstance(value, torch.Tensor) and value.dim()
            # a step count is a tensor that each parameter's step advances
            parts = _cut(value, held) if is_flat else [copy.deepcopy(value) for _ in held]
            for index, part in zip(indices, parts, strict=True):
                states.setdefault(index, {})[name] = part
        groups.append({**group, "params": indices})
    rest = {key: value for key, value in packed.items() if key != FLAT}
    return {**NO_LOSS_SCALE, **rest, STATES: _repacked(saved, states, groups), APART: masters}


def put_together(packed: dict[str, Any], params: Sequence[list[torch.Tensor]]) -> dict[str, Any]:
    """FP16_UnfusedOptimizer's state dict as FP16_Optimizer's.

    params: the model's parameters, by group.
    Raises ValueError if they are not those of the state dict.
    """
    states, groups = {}, []
    saved = packed[STATES]
    _check_groups(len(saved["param_groups"]), params)
    for number, (group, masters, held) in enumerate(
        zip(saved["param_groups"], packed[APART], params, strict=True)
    ):
        if [tuple(m.shape) for m in masters] != [tuple(p.shape) for p in held]:
            elements = sum(m.numel() for m in masters)
            raise _of_another_model(number, f"{elements:,} elements in {len(masters)} parameters", held)
        entries = [saved["state"].get(index) for index in group["params"]]
        if any(entries):
            states[number] = {
                name: _joined([entry[name] if entry else None for entry in entries], held)
                for name in next(filter(None, entries))
            }
        groups.append({**group, "params": [number]})
    flats = [torch.cat([m.detach().reshape(-1) for m in masters]) for masters in packed[APART]]
    rest = {key: value for key, value in packed.items() if key != APART}
    return {**rest, STATES: _repacked(saved, states, groups), FLAT: flats}


def _repacked(saved: dict[str, Any], states: dict, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The optimizer's state dict. That COAT wrote `saved` stays known, not what that says of its tensors."""
    wrote = {"coat": {}} if "coat" in saved else {}
    return {"state": states, "param_groups": groups, **wrote}


def _check_groups(found: int, params: Sequence[list[torch.Tensor]]) -> None:
    if found != len(params):
        raise ValueError(
            f"load_checkpoint: the checkpoint has {found} parameter groups, the optimizer {len(params)}. "
            "Make the same groups."
        )


def _of_another_model(number: int, found: str, held: list[torch.Tensor]) -> ValueError:
    return ValueError(
        f"load_checkpoint: parameter group {number} of the checkpoint has {found}, the model's has "
        f"{sum(p.numel() for p in held):,} in {len(held)}, or others. Load a checkpoint of the same model, "
        "with the same parameters frozen."
    )


def _cut(flat: torch.Tensor, params: list[torch.Tensor]) -> list[torch.Tensor]:
    """A tensor for each of `params`; copied, since a file would hold the whole of what it is a part of. On
    the CPU: the device may have no room for all of them."""
    parts = zip(flat.split([p.numel() for p in params]), params, strict=True)
    parts = [part.view(p.shape) for part, p in parts]
    return [part if isinstance(part, Moment) else part.to("cpu", copy=True) for part in parts]


def _joined(values: list[Any], params: list[torch.Tensor]) -> Any:
    """The flat tensor of parts, None where a parameter had no gradient yet; of step counts the largest."""
    known = [value for value in values if value is not None]
    if not isinstance(known[0], torch.Tensor) or not known[0].dim():
        return max(known, key=int)
    pairs = zip(values, params, strict=True)
    return torch.cat([known[0].new_zeros(p.numel()) if x is None else x.reshape(-1) for x, p in pairs])
