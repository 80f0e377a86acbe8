"""DeepSpeed's universal checkpoints, whose moments arrive as FP32 tensors of whole partitions."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from coat_ds.optim.optimizer import CoatAdamW
from coat_ds.optim.options import MOMENTS
from coat_ds.patches import Patch

FLATTEN = Patch(
    "checkpoints",
    "deepspeed",
    "deepspeed.runtime.base_optimizer:map_to_flat_opt_states",
    "moments of universal checkpoints wait on the CPU until they are encoded",
    parameters=("flat_hp_tensor", "lp_tensors", "optim_state", "opt_keys"),
)


class _MomentsOnCpu(dict):
    """The state of a parameter; moments that are put into it are moved to the CPU."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value.cpu() if name in MOMENTS else value)


@contextlib.contextmanager
def moments_wait_on_cpu(optimizer: CoatAdamW) -> Iterator[None]:
    """A context in which moments that DeepSpeed loads stay on the CPU: in FP32 they take four times the
    memory of their codes, which the device may not have. `CoatAdamW.init_states` then encodes them in parts.

    ZeRO 1 and 2 assemble one flat tensor like the partition, ZeRO 3 one for each of its parts.
    """
    for p, state in optimizer.state.items():
        optimizer.state[p] = _MomentsOnCpu(state)
    try:
        with FLATTEN.applied(_on_cpu):
            yield
    finally:
        for p, state in optimizer.state.items():
            optimizer.state[p] = dict(state)


def _on_cpu(flatten: Callable) -> Callable:
    @functools.wraps(flatten)
    def map_to_flat_opt_states(flat_hp_tensor, lp_tensors, optim_state, opt_keys):
        # DeepSpeed reads only shape and dtype
        like = torch.empty((), dtype=flat_hp_tensor.dtype).expand(flat_hp_tensor.shape)
        flatten(like, lp_tensors, {like: optim_state[flat_hp_tensor]}, opt_keys)

    return map_to_flat_opt_states
