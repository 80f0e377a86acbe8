"""The states of a CoatAdamW in DeepSpeed's checkpoints.

ZeRO's own checkpoints hold moments as FP32 tensors, which are decoded and restored one at a time. Moments of
universal checkpoints arrive as FP32 tensors of whole partitions.

Stage 0 in 16 bits cannot load every checkpoint. DeepSpeed wraps FusedAdam, and COAT's optimizer, in
FP16_Optimizer, with one flat master weight per parameter group. It wraps other optimizers in
FP16_UnfusedOptimizer, with one master weight per parameter. ZeRO writes states into separate files, which
stage 0 does not read.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from coat_ds.log import log_rank_0
from coat_ds.optim.loading import options_of_groups, restore_options
from coat_ds.optim.optimizer import CoatAdamW
from coat_ds.optim.options import MOMENTS
from coat_ds.optim.saving import decoding_on_save
from coat_ds.patches import Patch, wrapping

FLAT_STAGE_0 = "fp32_groups_flat"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
LOAD = Patch(
    "checkpoints",
    f"{_ENGINE}.load_checkpoint",
    "states are linked to parameters after a load, and keep this optimizer's formats",
    parameters=("load_dir", "tag", "..."),
)
SAVE = Patch(
    "checkpoints",
    f"{_ENGINE}.save_checkpoint",
    "the last reading is written first; moments are decoded one at a time while a file is written",
    parameters=("save_dir", "tag", "..."),
)
LOAD_STAGE_0 = Patch(
    "stage 0",
    "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer.load_state_dict",
    "states of other wrappers are refused by a clear error",
    parameters=("state_dict", "load_optimizer_states"),
)
FLATTEN = Patch(
    "checkpoints",
    "deepspeed.runtime.base_optimizer:map_to_flat_opt_states",
    "moments of universal checkpoints wait on the CPU until they are encoded",
    parameters=("flat_hp_tensor", "lp_tensors", "optim_state", "opt_keys"),
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


def guard_checkpoints(engine) -> None:
    """Has `engine` restore the codes of a checkpoint, if it has a CoatAdamW, and write readings and
    states in order, one at a time."""
    if engine.coat.optimizer is not None:
        LOAD.apply(wrapping(_load, engine), on=engine)
    SAVE.apply(wrapping(_save, engine), on=engine)


def _load(engine, load: Callable, *args, **kwargs) -> Any:
    optimizer = engine.basic_optimizer
    optimizer.pop_load_summary()
    # a universal checkpoint overwrites options of the parameter groups by its saved ones
    own = options_of_groups(optimizer)
    universal = engine.load_universal_checkpoint()
    if not universal:
        # the parameters' views of states: a moment is freed before a loaded one replaces it
        for p in engine.module.parameters():
            if (mapping := getattr(p, "_hp_mapping", None)) is not None and mapping.optim_fragment:
                mapping.optim_fragment.clear()
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


def _save(engine, save: Callable, *args, **kwargs) -> Any:
    if engine.coat.watch is not None:
        engine.coat.watch.flush()
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    saver = engine.checkpoint_engine
    by_torch = type(saver) is TorchCheckpointEngine and saver.zipfile_serialization
    with decoding_on_save() if by_torch else contextlib.nullcontext():
        return save(*args, **kwargs)


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
        with FLATTEN.applied(wrapping(_on_cpu)):
            yield
    finally:
        for p, state in optimizer.state.items():
            optimizer.state[p] = dict(state)


def _on_cpu(flatten: Callable, flat_hp_tensor, lp_tensors, optim_state, opt_keys) -> None:
    # DeepSpeed reads only shape and dtype
    like = torch.empty((), dtype=flat_hp_tensor.dtype).expand(flat_hp_tensor.shape)
    flatten(like, lp_tensors, {like: optim_state[flat_hp_tensor]}, opt_keys)


def refuse_other_states(wrapper) -> None:
    """Has stage 0's `wrapper` raise ValueError for states in another layout; other wrappers are unchanged."""
    if hasattr(wrapper, FLAT_STAGE_0):
        LOAD_STAGE_0.apply(wrapping(_load_of_same_layout), on=wrapper)


def _load_of_same_layout(load: Callable, packed: dict[str, Any] | None, *args, **kwargs) -> Any:
    if packed is None or FLAT_STAGE_0 not in packed:
        raise ValueError(
            "load_checkpoint: expected optimizer states of ZeRO stage 0 with FusedAdam or COAT, found "
            f"{'none' if packed is None else 'those of another optimizer'}. Go on at the stage and with the "
            "optimizer that wrote them, or load the weights alone with load_optimizer_states=False."
        )
    return load(packed, *args, **kwargs)
