"""DeepSpeed's `offload_states` and `reload_states`, for the states of a CoatAdamW."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from coat_ds.optim.moment import Moment
from coat_ds.optim.optimizer import CoatAdamW
from coat_ds.optim.options import MOMENTS
from coat_ds.patches import Patch, wrapping
from coat_ds.zero.checkpoints import link_states
from coat_ds.zero.grad_norm import STAGE_1_AND_2, STAGE_3

(OFFLOAD, RELOAD), (OFFLOAD_3, RELOAD_3) = (
    (
        Patch(
            "offloading",
            f"{wrapper}.offload_states",
            "states are moved as they are stored",
            parameters=("include", "device", "pin_memory", "non_blocking"),
        ),
        Patch(
            "offloading",
            f"{wrapper}.reload_states",
            "states are moved as they are stored",
            parameters=("non_blocking",),
        ),
    )
    for wrapper in (STAGE_1_AND_2, STAGE_3)
)


def guard_offloading(engine) -> None:
    """Has `offload_states` and `reload_states` move the states as codes.

    Otherwise DeepSpeed pins an FP32 tensor in place of a moment, and ZeRO-3 moves FusedAdam's states only.
    """
    wrapper = engine.optimizer
    if not hasattr(wrapper, "offload_states"):
        return
    offload, reload = (OFFLOAD, RELOAD) if hasattr(wrapper, "bit16_groups") else (OFFLOAD_3, RELOAD_3)
    offload.apply(wrapping(_offload, engine), on=wrapper)
    reload.apply(wrapping(_reload, engine), on=wrapper)


def _offload(
    engine, offload: Callable, include=None, device=None, pin_memory=True, non_blocking=False
) -> None:
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    wrapper, states = engine.optimizer, OffloadStateTypeEnum.optim_states
    given = {"include": include, "pin_memory": pin_memory, "non_blocking": non_blocking}
    given |= {} if device is None else {"device": device}
    if states not in wrapper.offloaded_states and (include is None or states in include):
        _move_states(engine.basic_optimizer, "cpu", pin_memory, non_blocking)
    with _without_states(wrapper):
        offload(**given)
    link_states(engine)


def _reload(engine, reload: Callable, non_blocking=False) -> None:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    wrapper, moved = engine.optimizer, []
    if OffloadStateTypeEnum.optim_states in wrapper.offloaded_states:
        device = get_accelerator().current_device_name()
        # keeps the CPU tensors alive while an asynchronous copy reads them; DeepSpeed waits for it
        moved = _move_states(engine.basic_optimizer, device, False, non_blocking)
    with _without_states(wrapper):
        reload(non_blocking=non_blocking)
    del moved
    link_states(engine)


@contextlib.contextmanager
def _without_states(wrapper) -> Iterator[None]:
    """A context in which the optimizer of `wrapper` is an empty FusedAdam, the class that ZeRO-3 requires, so
    that DeepSpeed moves no states."""
    from deepspeed.ops.adam import FusedAdam

    empty = FusedAdam.__new__(FusedAdam)
    empty.state = {}
    optimizer, wrapper.optimizer = wrapper.optimizer, empty
    empty.param_groups = optimizer.param_groups
    try:
        yield
    finally:
        wrapper.optimizer = optimizer


def _move_states(
    optimizer: CoatAdamW, device: str, pin_memory: bool, non_blocking: bool
) -> list[torch.Tensor]:
    """Puts all states on `device`, into pinned memory if they come from a GPU. Returns the old tensors.
    States that stream from host memory stay there."""
    moved: list[torch.Tensor] = []
    for p, state in optimizer.state.items():
        if optimizer.is_offloaded(p):
            continue
        first, second = (state.get(name) for name in MOMENTS)
        together = isinstance(first, Moment) and isinstance(second, Moment) and first.is_relative_to(second)
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name != "step":
                moved.append(value)
                pinned = pin_memory and value.device.type != "cpu"
                # a relative moment in a pair would copy its second moment too
                held = first.unpaired() if together and value is first else value
                target = torch.empty_like(held, device=device, pin_memory=pinned)
                state[name] = target.copy_(held, non_blocking=non_blocking)
        if together:
            state["exp_avg"] = state["exp_avg"].relative_to(state["exp_avg_sq"])
    return moved
