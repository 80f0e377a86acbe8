"""Puts `MegatronAdamW` into Megatron's own optimizers, and its states into Megatron's checkpoints.

All code that trains with megatron-core gets its optimizer from the function that `BUILD` patches. That
function receives the model, and takes Adam from globals of `megatron.core.optimizer`. There is no other
extension point. `watch()` notes the model on the optimizer, which `watch.py` watches. After `install()` the
globals name `MegatronAdamW` while the function runs.

`install()` also patches the two methods through which every format of distributed checkpoints reads and
writes an optimizer's state. They exchange FP32 tensors of the shard's shape, on the CPU, one at a time. So
checkpoints are those of stock AdamW, in both directions and at any size. Moments are recovered to the bit
from their values (`coat_ds/optim/recover.py`), so a resumed run equals an uninterrupted one. Loading states
into other parameters is refused (`parameter_order.py`).
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import get_te_version

from coat_ds import state_bytes
from coat_ds.config import CoatConfig, CoatConfigError
from coat_ds.log import log_rank_0
from coat_ds.optim.accounting import states_line
from coat_ds.optim.layouts import Fragment
from coat_ds.optim.options import (
    COAT_KEYS,
    idle_patterns,
    keeps_fp32,
    log_idle_bf16_params,
)
from coat_ds.patches import Patch, require, wrapping
from megatron_ext.optimizer import parameter_order
from megatron_ext.optimizer.adamw import MegatronAdamW, linked
from megatron_ext.optimizer.model_chunks import note_model, whole_model
from megatron_ext.optimizer.watch import init_watched
from megatron_ext.unsupported import OPTIMIZER_OFF, check_optimizer


def _link(optimizer: MegatronOptimizer, model_chunks: Iterable[torch.nn.Module], config: CoatConfig) -> None:
    """Gives the MegatronAdamW inside of `optimizer` the model's parameters, and logs its states."""
    inner = optimizer.optimizer
    # a rank without parameters has none
    if inner is None:
        return
    names = {p: name for name, p in whole_model(model_chunks).named_parameters()}
    placed = []
    for index, model_param, held, offset in linked(optimizer):
        if held.dtype not in (torch.float32, torch.bfloat16):
            raise CoatConfigError(
                f"--use-precision-aware-optimizer: found {held.dtype} parameters, expected BF16; use --bf16, "
                "or remove it"
            )
        in_fp32 = keeps_fp32(config.optimizer.keep_fp32, names.get(model_param), model_param)
        in_fp32 = in_fp32 or model_param.numel() < config.optimizer.min_numel
        placed.append((index, held, Fragment(0, held.numel(), offset, in_fp32, model_param)))
    inner.link(placed, isinstance(optimizer, DistributedOptimizer))
    log_rank_0(f"{states_line(inner, state_bytes(inner))}\n{inner.layout()}")
    log_idle_bf16_params(
        config.optimizer.bf16_params, [p for _, p, _ in placed], "Add --use-precision-aware-optimizer"
    )
    # a stage of a pipeline has the names of its own parameters only
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        for line in idle_patterns(config.optimizer.keep_fp32, names.values()):
            log_rank_0(line, logging.WARNING)


_MODULE = "megatron.core.optimizer"
BUILD = Patch(
    "Megatron's optimizer",
    f"{_MODULE}:_get_megatron_optimizer_based_on_param_groups",
    "CoatAdamW in Megatron's optimizers; the watch of their model",
    parameters=("config", "model_chunks", "..."),
)
CHAIN = Patch(
    "Megatron's optimizer",
    f"{_MODULE}.optimizer:ChainedOptimizer.__init__",
    "all optimizers of a model are watched",
    parameters=("chained_optimizers",),
)
_patch = functools.partial(Patch, "Megatron's optimizer", remedy=OPTIMIZER_OFF)
_DISTRIBUTED = f"{_MODULE}.distrib_optimizer:DistributedOptimizer"
GET = _patch(
    f"{_DISTRIBUTED}._get_main_param_and_optimizer_states",
    "checkpoints are written as stock AdamW's",
    parameters=("model_param",),
)
SET = _patch(
    f"{_DISTRIBUTED}._set_main_param_and_optimizer_states",
    "checkpoints of stock AdamW are read",
    parameters=("model_param", "tensors"),
)
SAVE = _patch(
    f"{_DISTRIBUTED}.sharded_state_dict",
    "states that are saved without names are saved with shapes",
    parameters=("...", "is_loading", "...", "metadata", "..."),
)
LOAD = _patch(
    f"{_DISTRIBUTED}.load_state_dict",
    "states of other parameters are refused",
    parameters=("state_dict",),
)
POST_INIT = _patch(
    f"{_MODULE}.optimizer_config:OptimizerConfig.__post_init__",
    "--use-precision-aware-optimizer needs no Transformer Engine",
    parameters=(),
)
# while an optimizer is built, or a config is checked
ADAM, IS_TORCH = (
    _patch(f"{_MODULE}:{name}", "Megatron's adam is CoatAdamW", expected="a global of that name")
    for name in ("Adam", "USING_PYTORCH_OPTIMIZER")
)
VERSION, VERSION_OF_CONFIG = (
    _patch(f"{module}:is_te_min_version", "an absent Transformer Engine has no version")
    for module in (_MODULE, f"{_MODULE}.optimizer_config")
)
OF_STATES = (GET, SET, SAVE, LOAD, POST_INIT)


def _without_te(patch: Patch) -> contextlib.AbstractContextManager:
    """A context in which a module may query the version of an absent Transformer Engine; 0.16 fails."""
    if get_te_version() is not None:
        return contextlib.nullcontext()
    return patch.applied(lambda _: lambda *args, **kwargs: False)


def installed() -> bool:
    """Whether Megatron builds MegatronAdamW."""
    return GET.is_applied()


def watch(coat: CoatConfig | None = None) -> None:
    """From now on watches the models of Megatron's optimizers, by the watch of `coat` or by the defaults.
    Does nothing after `install`, which watches by its own block.

    Raises RuntimeError, before anything is changed, if this Megatron is not as expected.
    """
    if installed():
        return
    for patch in (BUILD, CHAIN):
        patch.check()
    # in place of the patch of an earlier call
    BUILD.remove()
    BUILD.apply(wrapping(_build, coat or CoatConfig(enabled=True), None))
    CHAIN.apply(wrapping(init_watched))


def install(coat: CoatConfig | None = None) -> None:
    """From now on Megatron's `adam` is `MegatronAdamW`, configured by `coat`, and watched. A second call does
    nothing.

    Raises RuntimeError, before anything is changed, if this Megatron is not as expected.
    """
    if installed():
        return
    coat = coat or CoatConfig(enabled=True)
    for patch in (*OF_STATES, ADAM, IS_TORCH):
        patch.check()
    require(f"{_DISTRIBUTED}._get_model_param_range_map", ("param",), OPTIMIZER_OFF)
    # `link` sets which tensors keep FP32 moments: Megatron passes no names
    options = {name: getattr(coat.optimizer, name) for name in (*COAT_KEYS, "offload")}
    options |= {"keep_fp32": (), "in_framework": True}
    adam = functools.partial(MegatronAdamW, counts_in_groups=not IS_TORCH.original(), **options)

    watch(coat)
    # in place of the patch of `watch`
    BUILD.remove()
    BUILD.apply(wrapping(_build, coat, adam))
    GET.apply(wrapping(_get))
    SET.apply(wrapping(_set))
    POST_INIT.apply(wrapping(_post_init))
    SAVE.apply(wrapping(parameter_order.save))
    LOAD.apply(wrapping(parameter_order.load))


def _build(
    coat: CoatConfig, adam: Callable | None, build: Callable, config, model_chunks, *args, **kwargs
) -> Any:
    """Notes the model on the optimizers that Megatron builds for it; with `adam` in place of Megatron's."""
    if adam is None:
        built = build(config, model_chunks, *args, **kwargs)
    else:
        check_optimizer(config, model_chunks)
        with _without_te(VERSION), ADAM.applied(lambda _: adam), IS_TORCH.applied(lambda _: False):
            built = build(config, model_chunks, *args, **kwargs)
    if isinstance(built, MegatronOptimizer):
        note_model(built, model_chunks, coat)
        if adam is not None:
            _link(built, model_chunks, coat)
    return built


def _held(optimizer: DistributedOptimizer, model_param: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """The tensor that an optimizer holds of a parameter of the model, and its group."""
    group, order = optimizer.model_param_group_index_map[model_param]
    group = optimizer.optimizer.param_groups[group]
    return group["params"][order], group


def _get(get: Callable, self: DistributedOptimizer, model_param: torch.Tensor) -> dict[str, torch.Tensor]:
    if not isinstance(self.optimizer, MegatronAdamW):
        return get(self, model_param)
    return self.optimizer.tensors_of(_held(self, model_param)[0])


def _set(set_: Callable, self: DistributedOptimizer, model_param: torch.Tensor, tensors: dict) -> None:
    if not isinstance(self.optimizer, MegatronAdamW):
        return set_(self, model_param, tensors)
    self.optimizer.take_tensors(*_held(self, model_param), tensors)


def _post_init(post_init: Callable, self) -> None:
    try:
        with _without_te(VERSION_OF_CONFIG):
            post_init(self)
    except RuntimeError as error:
        # the last of its checks, without Transformer Engine
        if "FusedAdam" not in str(error):
            raise


def uninstall() -> None:
    """Undoes `install` and `watch`. Optimizers that were built stay what they are, and watched."""
    for patch in (*OF_STATES, CHAIN, BUILD):
        patch.remove()
