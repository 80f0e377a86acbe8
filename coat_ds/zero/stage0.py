"""Checkpoints of ZeRO stage 0 in 16 bits that its wrapper cannot load.

DeepSpeed wraps FusedAdam, and COAT's optimizer, in FP16_Optimizer, with one flat master weight per parameter
group. It wraps other optimizers in FP16_UnfusedOptimizer, with one master weight per parameter. ZeRO writes
states into separate files, which stage 0 does not read.
"""

import functools
from collections.abc import Callable
from typing import Any

from coat_ds.patches import Patch

FLAT = "fp32_groups_flat"
LOAD = Patch(
    "stage 0",
    "deepspeed",
    "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer.load_state_dict",
    "states of other wrappers are refused by a clear error",
    parameters=("state_dict", "load_optimizer_states"),
)


def refuse_other_states(wrapper) -> None:
    """Has stage 0's `wrapper` raise ValueError for states in another layout; other wrappers are unchanged."""
    if not hasattr(wrapper, FLAT):
        return

    def loading(load: Callable) -> Callable:
        @functools.wraps(load)
        def load_state_dict(packed: dict[str, Any] | None, *args, **kwargs):
            if packed is None or FLAT not in packed:
                raise ValueError(
                    "load_checkpoint: expected optimizer states of ZeRO stage 0 with FusedAdam or COAT, "
                    f"found {'none' if packed is None else 'those of another optimizer'}. Go on at the stage "
                    "and with the optimizer that wrote them, or load the weights alone with "
                    "load_optimizer_states=False."
                )
            return load(packed, *args, **kwargs)

        return load_state_dict

    LOAD.apply(loading, on=wrapper)
