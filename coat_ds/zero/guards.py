"""DeepSpeed's other uses of an optimizer's states: checkpoints and offloading."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

from coat_ds.log import log_rank_0
from coat_ds.optim.loading import options_of_groups, restore_options
from coat_ds.optim.moment import Moment
from coat_ds.optim.optimizer import CoatAdamW
from coat_ds.optim.options import MOMENTS
from coat_ds.optim.streaming import streaming
from coat_ds.patches import Patch
from coat_ds.zero.grad_norm import STAGE_1_AND_2, STAGE_3
from coat_ds.zero.universal import moments_wait_on_cpu

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
LOAD = Patch(
    "checkpoints",
    "deepspeed",
    f"{_ENGINE}.load_checkpoint",
    "states are linked to parameters after a load, and keep this optimizer's formats",
    parameters=("load_dir", "tag", "..."),
)
SAVE = Patch(
    "checkpoints",
    "deepspeed",
    f"{_ENGINE}.save_checkpoint",
    "moments are decoded one at a time while a file is written",
    parameters=("save_dir", "tag", "..."),
)
(OFFLOAD, RELOAD), (OFFLOAD_3, RELOAD_3) = (
    (
        Patch(
            "offloading",
            "deepspeed",
            f"{wrapper}.offload_states",
            "states are moved as they are stored",
            parameters=("include", "device", "pin_memory", "non_blocking"),
        ),
        Patch(
            "offloading",
            "deepspeed",
            f"{wrapper}.reload_states",
            "states are moved as they are stored",
            parameters=("non_blocking",),
        ),
    )
    for wrapper in (STAGE_1_AND_2, STAGE_3)
)


def link_states(engine) -> None:
    """Creates all states, and links them to the model's parameters if ZeRO does that.

    DeepSpeed links once, after the first step of the first parameter group. `safe_get_full_optimizer_state`
    would never find states that are created later, or loaded from a checkpoint.
    """
    engine.basic_optimizer.init_states()
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def _unlink_states(engine) -> None:
    """Drops the parameters' views of states, so that a moment is freed before a loaded one replaces it."""
    for p in engine.module.parameters():
        if (mapping := getattr(p, "_hp_mapping", None)) is not None and mapping.optim_fragment:
            mapping.optim_fragment.clear()


def guard_checkpoints(engine) -> None:
    """Has `engine` restore the codes of a checkpoint, and write states one at a time."""
    LOAD.apply(lambda load: _loading(engine, load), on=engine)
    SAVE.apply(lambda save: _saving(engine, save), on=engine)


def _loading(engine, load: Callable) -> Callable:
    @functools.wraps(load)
    def load_checkpoint(*args, **kwargs):
        optimizer = engine.basic_optimizer
        optimizer.pop_load_summary()
        # a universal checkpoint overwrites options of the parameter groups by its saved ones
        own = options_of_groups(optimizer)
        universal = engine.load_universal_checkpoint()
        if not universal:
            _unlink_states(engine)
        try:
            with moments_wait_on_cpu(optimizer) if universal else contextlib.nullcontext():
                result = load(*args, **kwargs)
        except BaseException:
            # After an interrupt, as after a refused load, the engine is unchanged and linked. If a load
            # failed halfway, states to link may be missing. The load's own error is raised.
            with contextlib.suppress(Exception):
                link_states(engine)
            raise
        finally:
            restore_options(optimizer, own)
        if hasattr(engine.optimizer, "_link_all_hp_params"):
            # a universal load in DeepSpeed 0.18 to 0.19.5 leaves parameters linked to copies of a moment
            # instead of their masters (tests with 0.18.9 check this); 0.19.8 does not
            engine.optimizer._link_all_hp_params()
        link_states(engine)
        log_rank_0(f"moments of the checkpoint: {optimizer.pop_load_summary() or 'none was loaded'}")
        return result

    return load_checkpoint


def _saving(engine, save: Callable) -> Callable:
    @functools.wraps(save)
    def save_checkpoint(*args, **kwargs):
        with streaming() if _saves_by_torch(engine) else contextlib.nullcontext():
            return save(*args, **kwargs)

    return save_checkpoint


def _saves_by_torch(engine) -> bool:
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    saver = engine.checkpoint_engine
    return type(saver) is TorchCheckpointEngine and saver.zipfile_serialization


def guard_offloading(engine) -> None:
    """Has `offload_states` and `reload_states` move the states as codes.

    Otherwise DeepSpeed pins an FP32 tensor in place of a moment, and ZeRO-3 moves FusedAdam's states only.
    """
    wrapper = engine.optimizer
    if not hasattr(wrapper, "offload_states"):
        return
    offload, reload = (OFFLOAD, RELOAD) if hasattr(wrapper, "bit16_groups") else (OFFLOAD_3, RELOAD_3)
    offload.apply(lambda original: _offloading(engine, original), on=wrapper)
    reload.apply(lambda original: _reloading(engine, original), on=wrapper)


def _offloading(engine, offload: Callable) -> Callable:
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    wrapper, states = engine.optimizer, OffloadStateTypeEnum.optim_states

    @functools.wraps(offload)
    def offload_states(include=None, device=None, pin_memory=True, non_blocking=False):
        given = {"include": include, "pin_memory": pin_memory, "non_blocking": non_blocking}
        given |= {} if device is None else {"device": device}
        if states not in wrapper.offloaded_states and (include is None or states in include):
            _move_states(engine.basic_optimizer, "cpu", pin_memory, non_blocking)
        with _without_states(wrapper):
            offload(**given)
        link_states(engine)

    return offload_states


def _reloading(engine, reload: Callable) -> Callable:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    wrapper, states = engine.optimizer, OffloadStateTypeEnum.optim_states

    @functools.wraps(reload)
    def reload_states(non_blocking=False):
        moved = []
        if states in wrapper.offloaded_states:
            device = get_accelerator().current_device_name()
            # keeps the CPU tensors alive while an asynchronous copy reads them; DeepSpeed waits for it
            moved = _move_states(engine.basic_optimizer, device, False, non_blocking)
        with _without_states(wrapper):
            reload(non_blocking=non_blocking)
        del moved
        link_states(engine)

    return reload_states


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
        if optimizer.streams(p):
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
