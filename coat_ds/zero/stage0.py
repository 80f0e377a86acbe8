"""Checkpoints of ZeRO stage 0 in 16 bits, from both of DeepSpeed's wrappers.

DeepSpeed wraps FusedAdam in FP16_Optimizer, with one flat master per parameter group, and other optimizers in
FP16_UnfusedOptimizer, with one master per parameter. Neither wrapper reads the other's checkpoints. Engines
with COAT, whose optimizer is a FusedAdam to DeepSpeed, read both layouts and write FP16_Optimizer's.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from coat_ds.patches import Patch

FLAT, APART, STATES = "fp32_groups_flat", "fp32_groups", "optimizer_state_dict"
LOAD = Patch(
    "stage 0",
    "deepspeed",
    "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer.load_state_dict",
    "checkpoints of either of stage 0's wrappers load",
    parameters=("state_dict", "load_optimizer_states"),
)


def read_both_layouts(wrapper) -> None:
    """Has stage 0's `wrapper` load both layouts; other wrappers are unchanged."""
    if not hasattr(wrapper, FLAT):
        return

    def loading(load: Callable) -> Callable:
        @functools.wraps(load)
        def load_state_dict(packed: dict[str, Any] | None, *args, **kwargs):
            if packed is None:
                # ZeRO writes states into separate files, which stage 0 does not read
                raise ValueError(
                    "load_checkpoint: found no optimizer states of stage 0 in the checkpoint. Go on at the "
                    "ZeRO stage that wrote it, or load the weights alone with load_optimizer_states=False."
                )
            if APART in packed:
                packed = {"clip_grad": wrapper.clip_grad, **put_together(packed, wrapper.fp16_groups)}
            return load(packed, *args, **kwargs)

        return load_state_dict

    LOAD.apply(loading, on=wrapper)


def put_together(packed: dict[str, Any], params: Sequence[list[torch.Tensor]]) -> dict[str, Any]:
    """FP16_UnfusedOptimizer's state dict in the layout of FP16_Optimizer.

    params: the model's parameters, by group.
    Raises ValueError if they do not match the state dict.
    """
    saved, states, groups = packed[STATES], {}, []
    if len(saved["param_groups"]) != len(params):
        raise ValueError(
            f"load_checkpoint: the checkpoint has {len(saved['param_groups'])} parameter groups, the "
            f"optimizer {len(params)}. Make the same groups."
        )
    for number, (group, masters, held) in enumerate(
        zip(saved["param_groups"], packed[APART], params, strict=True)
    ):
        if [tuple(m.shape) for m in masters] != [tuple(p.shape) for p in held]:
            raise ValueError(
                f"load_checkpoint: parameter group {number} of the checkpoint has "
                f"{sum(m.numel() for m in masters):,} elements in {len(masters)} parameters, the model's has "
                f"{sum(p.numel() for p in held):,} in {len(held)}, or others. Load a checkpoint of the same "
                "model, with the same parameters frozen."
            )
        entries = [saved["state"].get(index) for index in group["params"]]
        if any(entries):
            states[number] = {
                name: _joined([entry[name] if entry else None for entry in entries], held)
                for name in next(filter(None, entries))
            }
        groups.append({**group, "params": [number]})
    flats = [torch.cat([m.detach().reshape(-1) for m in masters]) for masters in packed[APART]]
    rest = {key: value for key, value in packed.items() if key != APART}
    # keep the mark that COAT wrote it
    wrote = {"coat": saved["coat"]} if "coat" in saved else {}
    return {**rest, STATES: {"state": states, "param_groups": groups, **wrote}, FLAT: flats}


def _joined(values: list[Any], params: list[torch.Tensor]) -> Any:
    """The parts as one flat tensor; for step counts the largest. A part is None, and counts as zeros, if its
    parameter had no gradient yet."""
    known = [value for value in values if value is not None]
    if not isinstance(known[0], torch.Tensor) or not known[0].dim():
        return max(known, key=int)
    pairs = zip(values, params, strict=True)
    return torch.cat([known[0].new_zeros(p.numel()) if x is None else x.reshape(-1) for x, p in pairs])
