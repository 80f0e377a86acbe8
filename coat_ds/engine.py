"""`deepspeed.initialize` that honours the `"coat"` block. DeepSpeed is imported when it is called."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from coat_ds import checkpointing, client, switch
from coat_ds.config import CoatConfig, CoatConfigError, OptimizerConfig
from coat_ds.grad_norm import batch_gradient_norms
from coat_ds.host_config import check_place, idle_patterns, no_conversion, optimizer_section, stalling
from coat_ds.layer_units import LayerUnits
from coat_ds.model_layers import layers_of, prepare_layers, undo
from coat_ds.module_hooks import lighten_module_hooks
from coat_ds.narrow_grad import keep_gradients_narrow
from coat_ds.optimizer import LAYOUT, CoatAdamW, codec_of, keeps_fp32, layout_table
from coat_ds.partitions import link_partitions
from coat_ds.report import report_compressed, report_saved
from coat_ds.stage0 import translate_checkpoints
from coat_ds.state import streaming
from coat_ds.status import Status, idle_layers
from coat_kernels.codecs import get_codec

# what each key of "optimizer": {"params": ...} has to be to mean what CoatAdamW does; None: passed on
OPTIMIZER_PARAMS: dict[str, tuple | None] = {
    "lr": None,
    "betas": None,
    "eps": None,
    "weight_decay": None,
    "adam_w_mode": (True,),
    "amsgrad": (False,),
    "bias_correction": (True,),
    "set_grad_none": (True, False),
    # how it is implemented: "torch_adam" says at most how checkpoints are laid out (`stage0`)
    "torch_adam": (True, False),
    "fused": (True, False),
    "foreach": (True, False),
}
IMPLEMENTATIONS = ("adam_w_mode", "torch_adam", "fused", "foreach")
CONFIG_ARGS = ("deepspeed_config", "deepscale_config")
# DeepSpeed's AdamW does not decay unless told to; torch's does
DEFAULT_WEIGHT_DECAY = 0.0


def initialize(
    args=None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable | None = None,
    model_parameters=None,
    training_data=None,
    lr_scheduler=None,
    distributed_port: int = 29500,
    mpu=None,
    dist_init_required: bool | None = None,
    collate_fn: Callable | None = None,
    config: str | Mapping[str, Any] | None = None,
    mesh_param=None,
    config_params: str | Mapping[str, Any] | None = None,
):
    """`deepspeed.initialize`: same arguments, same result (engine, optimizer, dataloader, scheduler).

    Without a `"coat"` block, or with a disabled one, this is `deepspeed.initialize`. With one, the
    `"optimizer"` section (Adam or AdamW) makes a `CoatAdamW`, and `engine.coat` says what is (`Status`).
    The config that was given is not changed. An Adam or AdamW of torch or DeepSpeed given as `optimizer`
    becomes a `CoatAdamW`, the same object; a `CoatAdamW` is used as it is: the block's formats do not apply.

    Raises CoatConfigError for a block or a combination that cannot be honoured, before anything is built.
    """
    import deepspeed

    check(_load_config(args, config, config_params), optimizer)
    with switch.installed():
        result = deepspeed.initialize(
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            distributed_port=distributed_port,
            mpu=mpu,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            config=config,
            mesh_param=mesh_param,
            config_params=config_params,
        )
    return result


def check(host: Mapping[str, Any], optimizer: Any) -> CoatConfig:
    """What a DeepSpeed config asks of COAT; disabled if nothing.

    optimizer: the optimizer argument, or None.
    Raises CoatConfigError for what cannot be honoured.
    """
    check_place(host)
    ours = str(_section(host, "optimizer").get("type")).lower() == switch.OPTIMIZER_TYPE.lower()
    coat = CoatConfig.from_dict({"enabled": True} if ours and "coat" not in host else host.get("coat"))
    if ours and not (coat.enabled and coat.optimizer.enabled):
        key = "coat.optimizer.enabled" if coat.enabled else "coat.enabled"
        raise CoatConfigError(
            f'{key}: found False beside "optimizer": {{"type": "{switch.OPTIMIZER_TYPE}"}}. Set it to true, '
            'or the type to "AdamW".'
        )
    if coat.enabled and coat.optimizer.enabled:
        check_host_config(host)
        if optimizer is None:
            _optimizer_options(host)
        else:
            client.check(optimizer)
    if coat.enabled and coat.checkpointing.compress:
        checkpointing.check_host_config(host)
    return coat


class Prepared(NamedTuple):
    """What `finish` needs of `prepare`."""

    coat: CoatConfig
    why: str
    """Why linear layers stay that nobody makes for COAT."""
    units: LayerUnits


def prepare(arguments: dict[str, Any]) -> Prepared:
    """Before `DeepSpeedEngine` is built of `arguments`, by name: checks them, exchanges the optimizer, has
    the layers do what the block says, and chooses those that are to be units of ZeRO-3.

    Raises CoatConfigError for what cannot be honoured.
    """
    config_class = arguments["config_class"]
    host, optimizer = config_class._param_dict, arguments.get("optimizer")
    coat = check(host, optimizer)
    if coat.enabled and coat.optimizer.enabled:
        _let_zero_accept(CoatAdamW)
        arguments["optimizer"] = _client_optimizer(coat, host, optimizer, arguments.get("model"))
        # DeepSpeed would otherwise refuse any optimizer but its own where states are offloaded
        config_class.zero_force_ds_cpu_optimizer = False
    model = arguments.get("model") if coat.enabled else None
    why = "" if model is None else _prepare_layers(model, coat, host)
    return Prepared(coat, why, LayerUnits(model, coat.zero3_layer_units, config_class.zero_config))


def _prepare_layers(model: torch.nn.Module, coat: CoatConfig, host: Mapping[str, Any]) -> str:
    from deepspeed.accelerator import get_accelerator

    obstacle = no_conversion(host, coat.activations, torch.device(get_accelerator().current_device_name()))
    if _section(host, "bf16").get("enabled") and any(p.dtype == torch.float16 for p in model.parameters()):
        # as DeepSpeed does next; layers in FP16 cannot be converted
        model.bfloat16()
    why = prepare_layers(model, coat.activations, "activations" in host.get("coat", {}), obstacle)
    if coat.require:
        # before the engine takes any memory
        idle_layers(coat, layers_of(model, why))
    return why


def finish(engine, prepared: Prepared) -> None:
    """After `engine` was built of what `prepare` left."""
    coat, why, units = prepared
    if not coat.enabled:
        return
    units.complete()
    _undo_at_the_end(engine, units)
    lighten_module_hooks(engine.module)
    if coat.optimizer.enabled:
        link_partitions(engine.optimizer, engine.basic_optimizer)
        keep_gradients_narrow(engine.optimizer)
        batch_gradient_norms(engine.optimizer)
        _link_states(engine)
        translate_checkpoints(engine.optimizer, getattr(engine.basic_optimizer, "apart_in_files", False))
        _guard_checkpoints(engine)
        _guard_offloading(engine)
    if coat.report.saved:
        report_saved(engine.module, _say)
    if coat.checkpointing.compress:
        checkpointing.compress_inputs(engine.module, coat.checkpointing.group_size)
        report_compressed(engine.module, _say, functools.partial(_say, level=logging.WARNING))
    layers = layers_of(engine.module, why)
    if line := idle_layers(coat, layers):
        _say(line, logging.WARNING)
    engine.coat = Status(coat, layers, units, engine.basic_optimizer if coat.optimizer.enabled else None)
    _say(str(engine.coat))


def _load_config(args, config, config_params) -> dict[str, Any]:
    """The JSON config as a dict, found where DeepSpeed looks for it; empty if there is none."""
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    for source in (config, config_params, *(getattr(args, name, None) for name in CONFIG_ARGS)):
        if source is not None:
            return dict(load_ds_config(source))
    return {}


def _section(host: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = host.get(key)
    return value if isinstance(value, Mapping) else {}


def check_host_config(host: Mapping[str, Any]) -> None:
    """Raises CoatConfigError where DeepSpeed would drive CoatAdamW in a way that is not known to be right."""

    def refuse(key: str, found: Any, why: str, way_out: str = "Drop the key"):
        raise CoatConfigError(
            f"{key}: found {found!r}; {why}. {way_out} or set coat.optimizer.enabled to false."
        )

    zero = _section(host, "zero_optimization")
    offload = _section(zero, "offload_optimizer")
    device, ratio = offload.get("device", "none"), offload.get("ratio", 1.0)
    if device not in ("none", "cpu"):
        refuse(
            "zero_optimization.offload_optimizer.device",
            device,
            "CoatAdamW's states, a quarter of stock AdamW's, can be offloaded to the CPU only",
            'Use "cpu"',
        )
    if device == "cpu" and ratio != 1.0:
        refuse("zero_optimization.offload_optimizer.ratio", ratio, "DeepSpeedCPUAdam alone can step in parts")
    for key in ("zenflow", "super_offload"):
        if zero.get(key):
            refuse(f"zero_optimization.{key}", zero[key], "CoatAdamW does not work with it")
    if zero.get("elastic_checkpoint"):
        refuse(
            "zero_optimization.elastic_checkpoint",
            True,
            "DeepSpeed reads such checkpoints at the same size only, and not those of AdamW",
            "Use universal checkpoints",
        )
    bf16, fp16 = _section(host, "bf16"), _section(host, "fp16")
    if bf16.get("bf16_master_weights_and_grads"):
        if not bf16.get("bf16_optimizer_states"):
            refuse(
                "bf16.bf16_master_weights_and_grads",
                True,
                "without bf16.bf16_optimizer_states DeepSpeed takes DeepSpeedCPUAdam only",
                "Set bf16.bf16_optimizer_states to true too",
            )
        if device == "cpu" or zero.get("cpu_offload"):
            refuse(
                "bf16.bf16_master_weights_and_grads",
                True,
                "with zero_optimization.offload_optimizer DeepSpeed takes DeepSpeedCPUAdam only",
                "Drop one of the two",
            )
    if fp16.get("fp16_master_weights_and_grads"):
        refuse("fp16.fp16_master_weights_and_grads", True, "DeepSpeed takes DeepSpeedCPUAdam only with it")
    if _section(host, "amp").get("enabled"):
        refuse("amp.enabled", True, "apex would cast CoatAdamW's states", 'Use "bf16": {"enabled": true}')
    autocast = _section(host, "torch_autocast")
    if autocast.get("enabled") and autocast.get("dtype") in ("float16", "fp16", "half"):
        refuse(
            "torch_autocast.dtype",
            autocast["dtype"],
            "DeepSpeed advances its loss scaler once for each parameter group",
            'Use "bfloat16", or "fp16": {"enabled": true},',
        )


def _client_optimizer(coat: CoatConfig, host: Mapping[str, Any], optimizer, model: torch.nn.Module | None):
    """What DeepSpeed is given as `optimizer`: the user's, converted, or a function that builds one."""
    torch_adam = _section(_section(host, "optimizer"), "params").get("torch_adam", False)

    def class_for(given: torch.optim.Optimizer | None) -> type[CoatAdamW]:
        # DeepSpeed picks its stage-0 wrapper by the optimizer's class
        if _section(host, "zero_optimization").get("stage", 0):
            return CoatAdamW
        is_torch = torch_adam if given is None else type(given).__module__.startswith("torch.")
        apart = is_torch and coat.optimizer.checkpoint_layout == "stock"
        return _fused_adam_class(apart)

    names = {} if model is None else {p: name for name, p in model.named_parameters()}
    rule = functools.partial(_keeps_fp32_by_name, coat.optimizer.keep_fp32, names)
    for line in idle_patterns(coat.optimizer.keep_fp32, names) if names else ():
        _say(line, logging.WARNING)

    own = {
        "keep_fp32": rule,
        "checkpoint_layout": coat.optimizer.checkpoint_layout,
        "compiled": _section(_section(host, "zero_optimization"), "offload_optimizer").get("device") == "cpu",
    }

    def reported(built: CoatAdamW) -> CoatAdamW:
        if line := stalling(built):
            _say(line, logging.WARNING)
        if coat.report.states:
            _say(f"COAT: AdamW states of the whole model\n{_layout(built, names)}")
        return built

    def converted(given: torch.optim.Optimizer) -> CoatAdamW:
        return reported(client.convert_(given, coat.optimizer, class_for(given), **own))

    def build(model_parameters):
        if optimizer is not None:
            return converted(optimizer(model_parameters))
        params = _section(_section(host, "optimizer"), "params")
        if idle := [name for name in IMPLEMENTATIONS if name in params]:
            listed = ", ".join(f"{name} {params[name]}" for name in idle)
            _say(f"COAT: optimizer.params: {listed}: of no effect, CoatAdamW has one implementation")
        groups = parameter_groups(model_parameters, coat.optimizer)
        return reported(class_for(None)(groups, **own, **_optimizer_options(host)))

    return converted(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else build


def _optimizer_options(host: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor's arguments from the `"optimizer"` section."""
    section = optimizer_section(host)
    if section is None:
        raise CoatConfigError(
            'coat.optimizer.enabled: there is neither an "optimizer" section nor an optimizer argument. Add '
            '"optimizer": {"type": "AdamW", "params": {"lr": ...}} or set coat.optimizer.enabled to false.'
        )
    kind = section.get("type")
    if str(kind).lower() not in ("adam", "adamw", switch.OPTIMIZER_TYPE.lower()):
        raise CoatConfigError(
            f'optimizer.type: expected "AdamW" or "Adam", found {kind!r}. Use one of them or set '
            "coat.optimizer.enabled to false."
        )
    params = section.get("params") or {}
    for name, value in params.items():
        if name not in OPTIMIZER_PARAMS:
            raise CoatConfigError(
                f"optimizer.params.{name}: CoatAdamW has no such option (value {value!r}). Known: "
                f"{', '.join(OPTIMIZER_PARAMS)}. Drop it."
            )
        accepted = OPTIMIZER_PARAMS[name]
        if accepted is not None and value not in accepted:
            raise CoatConfigError(
                f"optimizer.params.{name}: CoatAdamW needs {accepted[0]!r}, found {value!r}. Drop it or set "
                "coat.optimizer.enabled to false."
            )
    passed = {name: value for name, value in params.items() if OPTIMIZER_PARAMS[name] is None}
    return {"weight_decay": DEFAULT_WEIGHT_DECAY, **passed}


def parameter_groups(model_parameters: Iterable, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The same parameter groups with the options of `config`, which their own win over.

    Frozen parameters, which ZeRO ignores, are left out.
    model_parameters: parameters or parameter groups.
    """
    model_parameters = list(model_parameters)
    if not all(isinstance(item, dict) for item in model_parameters):
        model_parameters = [{"params": model_parameters}]
    options = {name: getattr(config, name) for name in LAYOUT}
    groups = [
        {**options, **group, "params": [p for p in group["params"] if p.requires_grad]}
        for group in model_parameters
    ]
    return [group for group in groups if group["params"]]


def _keeps_fp32_by_name(patterns: tuple[str, ...], names: Mapping[torch.Tensor, str], _, p) -> bool:
    return keeps_fp32(patterns, names.get(p), p)


def _layout(optimizer: CoatAdamW, names: Mapping[torch.Tensor, str]) -> str:
    def codec(p, group, moment):
        # ZeRO-3 has emptied the tensor and noted its size
        kept = optimizer.keeps(p, group, getattr(p, "ds_numel", p.numel()))
        return get_codec("fp32") if kept else codec_of(group, moment)

    return layout_table(
        (
            names.get(p, ""),
            getattr(p, "ds_shape", p.shape),
            codec(p, group, "exp_avg"),
            codec(p, group, "exp_avg_sq"),
            group["group_size"],
        )
        for group in optimizer.param_groups
        for p in group["params"]
    )


@functools.cache
def _fused_adam_class(apart: bool) -> type[CoatAdamW]:
    """CoatAdamW as a subclass of DeepSpeed's FusedAdam, of which it uses nothing.

    By `isinstance(optimizer, FusedAdam)` stage 0 chooses the wrapper that flattens parameters; the other
    wrapper computes a wrong gradient norm under tensor parallelism.
    apart: whether checkpoints are laid out as that other wrapper's.
    """
    from deepspeed.ops.adam import FusedAdam

    members = {"__doc__": CoatAdamW.__doc__, "zero_grad": torch.optim.Optimizer.zero_grad}
    members["apart_in_files"] = apart
    return type("CoatAdamW", (CoatAdamW, FusedAdam), members)


def _let_zero_accept(cls: type) -> None:
    """Adds `cls` to the optimizers that ZeRO was tested with. May be called again."""
    from deepspeed.runtime.zero import utils

    if cls not in utils.ZERO_SUPPORTED_OPTIMIZERS:
        utils.ZERO_SUPPORTED_OPTIMIZERS.append(cls)


def _link_states(engine) -> None:
    """Creates all states, and links them to the model's parameters where ZeRO does that.

    DeepSpeed links once, after the first parameter group's first step: states made later, and those of a
    checkpoint, would never be found by `safe_get_full_optimizer_state`.
    """
    engine.basic_optimizer.init_states()
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def _guard_checkpoints(engine) -> None:
    load, save = engine.load_checkpoint, engine.save_checkpoint

    @functools.wraps(load)
    def load_checkpoint(*args, **kwargs):
        # a universal checkpoint brings options of the parameter groups that it was saved with
        own = engine.basic_optimizer.layout_options()
        engine.basic_optimizer.take_arrivals()
        result = load(*args, **kwargs)
        engine.basic_optimizer.restore_layout_options(own)
        if hasattr(engine.optimizer, "_link_all_hp_params"):
            # a universal load of 0.18 leaves parameters linked to copies of a moment instead of their masters
            engine.optimizer._link_all_hp_params()
        _link_states(engine)
        arrived = engine.basic_optimizer.take_arrivals()
        _say(f"COAT: moments of the checkpoint: {arrived or 'none was loaded'}")
        return result

    @functools.wraps(save)
    def save_checkpoint(*args, **kwargs):
        with streaming() if _saves_by_torch(engine) else contextlib.nullcontext():
            return save(*args, **kwargs)

    engine.load_checkpoint, engine.save_checkpoint = load_checkpoint, save_checkpoint


def _saves_by_torch(engine) -> bool:
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    saver = engine.checkpoint_engine
    return type(saver) is TorchCheckpointEngine and saver.zipfile_serialization


def _guard_offloading(engine) -> None:
    """Lets `offload_states` and `reload_states` move the states as they are stored.

    By itself DeepSpeed pins an FP32 tensor in place of a moment, and ZeRO-3 moves FusedAdam's states alone.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    wrapper = engine.optimizer
    if not hasattr(wrapper, "offload_states"):
        return
    offload, reload = wrapper.offload_states, wrapper.reload_states
    states = OffloadStateTypeEnum.optim_states
    # passes for what ZeRO-3 asks for, and has nothing to be moved
    empty = FusedAdam.__new__(FusedAdam)
    empty.state = {}

    @contextlib.contextmanager
    def without_states():
        optimizer, wrapper.optimizer = wrapper.optimizer, empty
        empty.param_groups = optimizer.param_groups
        try:
            yield
        finally:
            wrapper.optimizer = optimizer

    @functools.wraps(offload)
    def offload_states(include=None, device=None, pin_memory=True, non_blocking=False):
        given = {"include": include, "pin_memory": pin_memory, "non_blocking": non_blocking}
        given |= {} if device is None else {"device": device}
        if states not in wrapper.offloaded_states and (include is None or states in include):
            _move_states(engine.basic_optimizer, "cpu", pin_memory, non_blocking)
        with without_states():
            offload(**given)
        _link_states(engine)

    @functools.wraps(reload)
    def reload_states(non_blocking=False):
        moved = []
        if states in wrapper.offloaded_states:
            device = get_accelerator().current_device_name()
            # a copy that is under way still reads what is on the host; DeepSpeed waits for it
            moved = _move_states(engine.basic_optimizer, device, False, non_blocking)
        with without_states():
            reload(non_blocking=non_blocking)
        del moved
        _link_states(engine)

    wrapper.offload_states, wrapper.reload_states = offload_states, reload_states


def _move_states(
    optimizer: CoatAdamW, device: str, pin_memory: bool, non_blocking: bool
) -> list[torch.Tensor]:
    """Puts all states on `device`, into pinned memory if they come from a GPU; returns what they were."""
    moved = []
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                moved.append(value)
                pinned = pin_memory and value.device.type != "cpu"
                target = torch.empty_like(value, device=device, pin_memory=pinned)
                state[name] = target.copy_(value, non_blocking=non_blocking)
    return moved


def _undo_at_the_end(engine, units: LayerUnits) -> None:
    destroy = engine.destroy

    @functools.wraps(destroy)
    def destroy_engine():
        destroy()
        units.undo()
        try:
            undo(engine.module)
        except RuntimeError as error:
            _say(f"COAT: layers stay converted: {error}", logging.WARNING)

    engine.destroy = destroy_engine


def _say(text: str, level: int = logging.INFO) -> None:
    """To DeepSpeed's log, on rank 0, whenever warnings are shown there: its own level hides others' news."""
    from deepspeed.utils.logging import get_dist_msg, logger

    message = get_dist_msg(text, ranks=[0])
    if message is not None and logger.isEnabledFor(logging.WARNING):
        record = logger.makeRecord(logger.name, level, __file__, 0, message, (), None, "coat_ds")
        for handler in logger.handlers:
            handler.handle(record)
