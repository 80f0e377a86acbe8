"""The work before and after a DeepSpeed engine with the `"coat"` block is built."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from coat_ds.config import CoatConfig, CoatConfigError
from coat_ds.layers.inventory import layers_of
from coat_ds.log import log_rank_0, warn_rank_0
from coat_ds.optim.optimizer import CoatAdamW
from coat_ds.optim.options import log_idle_bf16_params
from coat_ds.patches import Patch, wrapping
from coat_ds.zero import recompute
from coat_ds.zero.block import enabled, section
from coat_ds.zero.build import optimizer_for_engine
from coat_ds.zero.checkpoints import guard_checkpoints, link_states, refuse_other_states
from coat_ds.zero.deepspeed_config import (
    bf16_key,
    checked_config,
    fp32_warning,
    has_optimizer,
    why_no_conversion,
)
from coat_ds.zero.grad_norm import batch_gradient_norms
from coat_ds.zero.gradients import gradients_move_in_backward, keep_gradients_narrow
from coat_ds.zero.layer_units import LayerUnits
from coat_ds.zero.model_layers import check_adapters, convert_replaced, prepare_layers, restore_layers
from coat_ds.zero.module_hooks import lighten_module_hooks
from coat_ds.zero.offloading import guard_offloading
from coat_ds.zero.partitions import link_partitions
from coat_ds.zero.status import Status, idle_layers_warning
from coat_ds.zero.watch import watch_engine
from coat_kernels.graphs import MOVES_IN_BACKWARD

DESTROY = Patch(
    "end of an engine",
    "deepspeed.runtime.engine:DeepSpeedEngine.destroy",
    "converted layers become stock layers again",
    parameters=(),
)
TESTED = Patch(
    "ZeRO's optimizers",
    "deepspeed.runtime.engine:is_zero_supported_optimizer",
    "ZeRO takes CoatAdamW as one of the optimizers that it was tested with",
    parameters=("optimizer",),
    used_by="DeepSpeedEngine",
)

# by model, the units of the last engine that was prepared; only that engine restores the model's layers
_last: weakref.WeakKeyDictionary[torch.nn.Module, LayerUnits] = weakref.WeakKeyDictionary()


class Prepared(NamedTuple):
    """The results of `prepare` that `finish` needs."""

    coat: CoatConfig
    model: torch.nn.Module | None
    """None if the block is disabled."""
    why: str
    """Why linear layers outside the converted ones were not converted."""
    units: LayerUnits


def prepare(arguments: dict[str, Any]) -> Prepared:
    """Runs before `DeepSpeedEngine` is built from `arguments`, a dict by name: checks them, replaces the
    optimizer, configures the layers by the block, and chooses the layers that become units of ZeRO-3.

    Raises CoatConfigError for unsupported arguments.
    """
    config_class = arguments["config_class"]
    config, optimizer = config_class._param_dict, arguments.get("optimizer")
    coat = checked_config(config, optimizer)
    if coat.enabled:
        check_adapters(arguments["model"], section(config, "tensor_parallel"))
    if coat.enabled and optimizer is None and not has_optimizer(config):
        log_rank_0(
            'found neither an "optimizer" section nor an optimizer argument, as of a reference model: '
            "FP8 layers alone. coat.optimizer and coat.watch are of no effect in this engine"
        )
    if coat.enabled and coat.optimizer.enabled:
        TESTED.apply(wrapping(lambda tested, given: isinstance(given, CoatAdamW) or tested(given)))
        arguments["optimizer"] = optimizer_for_engine(coat, config, optimizer, arguments["model"])
        # DeepSpeed would otherwise refuse all optimizers except its own when states are offloaded
        config_class.zero_force_ds_cpu_optimizer = False
    model = arguments["model"] if coat.enabled else None
    why = "" if model is None else _prepare_layers(model, coat, config)
    units = LayerUnits(model, coat.zero3_layer_units, config_class.zero_config)
    if model is not None:
        _last[model] = units
    return Prepared(coat, model, why, units)


def _prepare_layers(model: torch.nn.Module, coat: CoatConfig, config: Mapping[str, Any]) -> str:
    from deepspeed.accelerator import get_accelerator

    # undo the changes of an earlier engine
    recompute.stop_compressing_inputs(model)
    if (units := _last.get(model)) is not None:
        units.undo()
    obstacle = why_no_conversion(config, torch.device(get_accelerator().current_device_name()))
    if enabled(config, bf16_key(config)) and any(p.dtype == torch.float16 for p in model.parameters()):
        # DeepSpeed does this next; layers in FP16 cannot be converted
        model.bfloat16()
    if (line := fp32_warning(config, coat)) and any(p.dtype == torch.float32 for p in model.parameters()):
        warn_rank_0(line)
    why = prepare_layers(model, coat.activations, "activations" in config.get("coat", {}), obstacle)
    if coat.require:
        # before the engine takes any memory
        try:
            idle_layers_warning(coat, layers_of(model, why))
        except CoatConfigError:
            restore_layers(model)
            raise
    return why


def finish(engine, prepared: Prepared) -> None:
    """Runs after `engine` was built from the arguments that `prepare` changed.

    First the layers get their final forwards and hooks, then the optimizer its partitions, gradients and
    states. Layers read afterwards how gradients move. The report and the readings need both. A failure before
    the end is undone by `restore_model`.
    """
    coat, why, units = prepared.coat, prepared.why, prepared.units
    if not coat.enabled:
        return
    convert_replaced(engine.module)
    units.complete(engine.optimizer)
    if coat.zero3_layer_units and engine.zero_optimization_stage() != 3:
        warn_rank_0(
            "coat.zero3_layer_units: found True, of no effect: only ZeRO-3 gathers weights. Drop the key."
        )
    lighten_module_hooks(engine.module)
    if coat.optimizer.enabled:
        _connect_optimizer(engine, coat)
    # `keep_gradients_narrow` has decided whether they move
    _mark_gradients(engine.module, gradients_move_in_backward(engine.optimizer))
    if coat.fp8_activation_checkpointing:
        recompute.compress_inputs(engine.module)
        recompute.report_compressed(engine.module)
    layers = layers_of(engine.module, why)
    if line := idle_layers_warning(coat, layers):
        warn_rank_0(line)
    watch = watch_engine(engine, coat.watch, coat.optimizer.enabled)
    optimizer = engine.basic_optimizer if coat.optimizer.enabled else None
    engine.coat = Status(coat, layers, units, optimizer, watch)
    guard_checkpoints(engine)
    DESTROY.apply(wrapping(_destroy, engine, prepared), on=engine)
    log_rank_0(str(engine.coat))


def _connect_optimizer(engine, coat: CoatConfig) -> None:
    # names and shapes of parameters in partitions, which states and checkpoints are made of
    link_partitions(engine.optimizer, engine.basic_optimizer)
    keep_gradients_narrow(engine.optimizer)
    batch_gradient_norms(engine.optimizer)
    link_states(engine)
    refuse_other_states(engine.optimizer)
    guard_offloading(engine)
    remedy = "Set bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states, from ZeRO 1 on"
    log_idle_bf16_params(coat.optimizer.bf16_params, engine.basic_optimizer.state, remedy)


def _mark_gradients(model: torch.nn.Module, move: bool) -> None:
    """Marks parameters for `gradients_move_in_backward`, which layers read before they record CUDA graphs."""
    for p in model.parameters():
        if move:
            setattr(p, MOVES_IN_BACKWARD, True)
        else:
            p.__dict__.pop(MOVES_IN_BACKWARD, None)


def restore_model(prepared: Prepared) -> None:
    """Restores the model's stock layers, unless a later engine has the model. May be called repeatedly."""
    prepared.units.undo()
    model = prepared.model
    if model is None or _last.get(model) is not prepared.units:
        return
    recompute.stop_compressing_inputs(model)
    _mark_gradients(model, False)
    try:
        restore_layers(model)
    except RuntimeError as error:
        warn_rank_0(f"layers stay converted: {error}")


def _destroy(engine, prepared: Prepared, destroy: Callable) -> None:
    if engine.coat.watch is not None:
        engine.coat.watch.close()
    destroy()
    restore_model(prepared)
