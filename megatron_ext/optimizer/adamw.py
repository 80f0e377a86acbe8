"""`CoatAdamW` in Megatron's own optimizers: the distributed one, with and without
`--use-precision-aware-optimizer`, and those that are not distributed.

Megatron builds its Adam from globals of `megatron.core.optimizer` and has no other extension point.
`install()` patches the function that reads those globals: while it runs, they name the class below. It also
patches the two methods through which every format of distributed checkpoints reads and writes an optimizer's
state. They exchange FP32 tensors of the shard's shape, on the CPU, one at a time. So checkpoints are those of
stock AdamW, in both directions and at any size. Moments are recovered to the bit from their values
(`coat_ds/optim/recover.py`), so a resumed run equals an uninterrupted one. Loading states into other
parameters is refused (`places.py`).

With this optimizer the precision-aware one needs no Transformer Engine: Megatron's check for it passes. And a
distributed optimizer without Transformer Engine or apex can load its checkpoint. Stock AdamW cannot, since
Megatron reads the step count of a state that does not exist yet; MegatronAdamW's always exists.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer
from megatron.core.utils import get_te_version, log_single_rank

from coat_ds import state_bytes
from coat_ds.config import CoatConfig, CoatConfigError, OptimizerConfig
from coat_ds.optim.fragments import Fragment
from coat_ds.optim.lines import states_line
from coat_ds.optim.moment import Moment
from coat_ds.optim.optimizer import CoatAdamW
from coat_ds.optim.options import (
    LAYOUT,
    MOMENTS,
    SECOND_FIRST,
    FormatNames,
    idle_bf16_params,
    idle_patterns,
    keeps_fp32,
)
from coat_ds.optim.pair import pair_up
from coat_ds.optim.state_dict import take_states
from coat_ds.patches import Patch, require
from coat_kernels.adamw import join_master, split_master
from coat_kernels.codecs import parts_of
from megatron_ext.optimizer import places
from megatron_ext.optimizer.chunks import whole_model

logger = logging.getLogger(__name__)


class MegatronAdamW(CoatAdamW, torch.optim.AdamW):
    """`CoatAdamW` with the arguments that Megatron gives to Transformer Engine's FusedAdam.

    adam_w_mode: only True, decoupled weight decay.
    exp_avg_dtype, exp_avg_sq_dtype: FP32, Megatron's default, or uint8, its FP8; formats are the block's.
    use_decoupled_grad: gradients are in `decoupled_grad` of each parameter, FP32 or BF16, and parameters
        are the model's own, BF16 with the 16 bits that make an FP32 master in the state.
    master_weights, store_param_remainders: ignored; they leave nothing to choose.
    counts_in_groups: Megatron reads the step count from the parameter groups, where FusedAdam stores it, and
        not from the states.
    options: `CoatAdamW`'s.

    Raises CoatConfigError for other values, naming Megatron's argument.
    """

    def __init__(
        self,
        params: Iterable,
        *,
        adam_w_mode: bool = True,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = True,
        counts_in_groups: bool = False,
        **options: Any,
    ):
        if not adam_w_mode:
            raise CoatConfigError("--no-decoupled-weight-decay: CoatAdamW is AdamW; remove it")
        for name, dtype in (("exp_avg", exp_avg_dtype), ("exp_avg_sq", exp_avg_sq_dtype)):
            if dtype not in (torch.float32, torch.uint8):
                raise CoatConfigError(
                    f"--{name.replace('_', '-')}-dtype: found {dtype}, expected fp32 or fp8; remove it and "
                    f"set coat.optimizer.{name}_format in the file of COAT_CONFIG"
                )
        if master_weight_dtype != torch.float32:
            raise CoatConfigError(
                f"--main-params-dtype: found {master_weight_dtype}, expected fp32; remove it"
            )
        self._decoupled, self._distributed = use_decoupled_grad, False
        self._counts_in_groups = counts_in_groups
        super().__init__(params, **options)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_decoupled", "_distributed", "_counts_in_groups")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def step(self, closure: Callable[[], float] | None = None, **options: Any) -> float | None:
        """Same as `CoatAdamW.step`."""
        if not self._decoupled:
            return super().step(closure, **options)
        params = [p for group in self.param_groups for p in group["params"]]
        for p in params:
            grad = getattr(p, "decoupled_grad", None)
            if grad is not None and grad.dtype != p.dtype:
                # torch requires a gradient of the parameter's dtype unless `grad_dtype` is None; it cannot be
                # set on FP32 parts, which are views of the model's parameters
                p.grad_dtype = None
            p.grad = grad
        try:
            return super().step(closure, **options)
        finally:
            for p in params:
                p.grad = None

    def link(self, groups: Iterable[tuple[int, torch.Tensor, Fragment]], distributed: bool) -> None:
        """Registers the parts of the model's parameters that this optimizer holds (the group, the tensor, and
        its place in the parameter), and creates the states."""
        self._distributed = distributed
        for index, p, fragment in groups:
            self.set_fragments(p, [fragment], index)

    def keep(self, p: torch.Tensor, whether: bool = True) -> None:
        """Same as `CoatAdamW.keep`. `p` is a tensor that this optimizer holds and that `link` has
        registered."""
        (fragment,) = self._layouts.fragments[p]
        self.set_fragments(p, [fragment._replace(kept=whether)], self._layouts.group_index[p])

    def tensors_of(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """`param`, `exp_avg` and `exp_avg_sq` of `p`, FP32 and of its shape. An FP32 parameter is returned
        itself; the rest is computed and lies on the CPU."""
        state, param = self.state[p], p
        if "remainder" in state:
            param = torch.empty(p.shape, dtype=torch.float32, device="cpu")
            for part in parts_of(p.numel()):
                held = (x.view(-1)[part] for x in (p, state["remainder"]))
                param.view(-1)[part] = join_master(*held)
        return {
            "param": param if param.dtype == torch.float32 else param.cpu().float(),
            **{name: state[name].decode("cpu") for name in MOMENTS},
        }

    @torch.no_grad()
    def take_tensors(self, p: torch.Tensor, group: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Loads what `tensors_of` returned, or stock AdamW's tensors."""
        state = self.state[p]
        if "remainder" in state:
            for part in parts_of(p.numel()):
                master = tensors["param"].reshape(-1)[part].to(p.device, torch.float32)
                for old, new in zip((p, state["remainder"]), split_master(master), strict=True):
                    old.view(-1)[part] = new
        else:
            p.copy_(tensors["param"])
        for name in SECOND_FIRST:
            self._take_moment(p, group, name, tensors[name])
        pair_up(state, p)

    def state_dict(self) -> dict[str, Any]:
        """The layout of `torch.optim.AdamW`, and FusedAdam's step count if Megatron reads that one.

        Moments are FP32 on the CPU; under the distributed optimizer, which writes them by `tensors_of`, they
        are the optimizer's own.
        """
        packed = torch.optim.Optimizer.state_dict(self)
        for group in packed["param_groups"]:
            steps = [int(packed["state"][i]["step"]) for i in group["params"] if packed["state"].get(i)]
            if self._counts_in_groups and steps:
                group["step"] = max(steps)
        taken = take_states(packed, "compressed" if self._distributed else "stock")
        del taken["coat"]
        return taken

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class, of `torch.optim.AdamW` or of FusedAdam."""
        state = {index: dict(entry) for index, entry in state_dict["state"].items()}
        groups = []
        for saved in state_dict["param_groups"]:
            group = dict(saved)
            step = group.pop("step", None)
            for index in saved["params"]:
                entry = state.get(index, {})
                if self._counts_in_groups and step is not None:
                    entry["step"] = step
                # Megatron leaves out counts of 0
                entry.setdefault("step", step or 0)
            groups.append(group)
        super().load_state_dict({"state": state, "param_groups": groups})

    def _load_state(
        self, p: torch.Tensor, group: dict[str, Any], loaded: dict[str, Any], index: int, said: FormatNames
    ) -> FormatNames:
        state = self.state[p]
        if (remainder := state.get("remainder")) is not None and remainder.dtype == torch.float16:
            # the dtype in which state dicts hold it
            state["remainder"] = remainder.view(torch.int16)
        for name in SECOND_FIRST:
            value = state[name]
            if isinstance(value, Moment):
                # the optimizer's own, which Megatron passes through
                state[name] = Moment(value.pieces, value.group_size, value.shape, pair=value.pair)
            else:
                self._take_moment(p, group, name, value)
        self._ready_state(p, group)
        # the moments are FP32, or this optimizer's own, which take the checkpoint's FP32 values later
        return said


def linked(host: MegatronOptimizer) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, int]]:
    """Group, parameter of the model, the tensor that the optimizer holds of it, and the tensor's first
    element in the parameter."""
    if isinstance(host, DistributedOptimizer):
        for model_param, (group, order) in host.model_param_group_index_map.items():
            held = host.optimizer.param_groups[group]["params"][order]
            yield group, model_param, held, host._get_model_param_range_map(model_param)["param"].start
    elif isinstance(host, FP32Optimizer):
        for index, group in enumerate(host.optimizer.param_groups):
            for p in group["params"]:
                yield index, p, p, 0
    else:
        mains = zip(host.float16_groups, host.fp32_from_float16_groups, strict=True)
        for index, (models, held) in enumerate(mains):
            for model_param, main_param in zip(models, held, strict=True):
                yield index, model_param, main_param, 0
        for index, params in enumerate(host.fp32_from_fp32_groups):
            for p in params:
                yield index, p, p, 0


def _link(host: MegatronOptimizer, model_chunks: Iterable[torch.nn.Module], config: CoatConfig) -> None:
    inner = host.optimizer
    host.coat_config = config
    # a rank without parameters has none
    if inner is None:
        return
    names = {p: name for name, p in whole_model(model_chunks).named_parameters()}
    placed = []
    for index, model_param, held, offset in linked(host):
        if held.dtype not in (torch.float32, torch.bfloat16):
            raise CoatConfigError(
                f"--use-precision-aware-optimizer: found {held.dtype} parameters, expected BF16; use --bf16, "
                "or remove it"
            )
        kept = keeps_fp32(config.optimizer.keep_fp32, names.get(model_param), model_param)
        kept = kept or model_param.numel() < config.optimizer.min_numel
        placed.append((index, held, Fragment(0, held.numel(), offset, kept)))
    inner.link(placed, isinstance(host, DistributedOptimizer))
    said = f"COAT: {states_line(inner, state_bytes(inner))}"
    if config.report.states:
        said += f"\n{inner.layout()}"
    _say(said)
    for line in _idle_keys(config.optimizer, list(names.values()), [p for _, p, _ in placed]):
        _say(line)


def _say(line: str, level: int = logging.WARNING) -> None:
    """Logs to Megatron's log, on rank 0, where only warnings are shown."""
    log_single_rank(logger, level, line)


def _idle_keys(config: OptimizerConfig, names: list[str], held: list[torch.Tensor]) -> Iterator[str]:
    """A line for each key that has no effect."""
    # a stage of a pipeline has the names of its own parameters only
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        yield from idle_patterns(config.keep_fp32, names)
    yield from idle_bf16_params(config.bf16_params, held, "Add --use-precision-aware-optimizer")


def _check_host(host: Any, model_chunks: Iterable[torch.nn.Module]) -> None:
    """Raises CoatConfigError for a Megatron OptimizerConfig that requests another optimizer, and for a model
    whose optimizer would hold no registered parameter."""
    fsdp = any(getattr(chunk.ddp_config, "use_megatron_fsdp", False) for chunk in model_chunks)
    for argument, found in {
        f"--optimizer {host.optimizer}": host.optimizer != "adam",
        "--optimizer-cpu-offload": host.optimizer_cpu_offload,
        "--use-megatron-fsdp": fsdp,
    }.items():
        if found:
            raise CoatConfigError(
                f"{argument}: not supported by megatron_ext.with_optimizer. Remove it, or take the spec from "
                "megatron_ext.layer_specs."
            )


_MODULE = "megatron.core.optimizer"
_WAY_OUT = "or take the spec from megatron_ext.layer_specs"
_patch = functools.partial(Patch, "Megatron's optimizer", "megatron-core", way_out=_WAY_OUT)

_DISTRIBUTED = f"{_MODULE}.distrib_optimizer:DistributedOptimizer"
BUILD = _patch(
    f"{_MODULE}:_get_megatron_optimizer_based_on_param_groups",
    "CoatAdamW in Megatron's optimizers",
    parameters=("config", "model_chunks", "..."),
)
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
    "states that are saved by their places are saved with shapes",
    keywords=("is_loading", "metadata"),
)
LOAD = _patch(
    f"{_DISTRIBUTED}.load_state_dict",
    "states of other places are refused",
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
INSTALLED = (BUILD, GET, SET, SAVE, LOAD, POST_INIT)


def _without_te(patch: Patch) -> contextlib.AbstractContextManager:
    """A context in which a module may query the version of an absent Transformer Engine; 0.16 fails."""
    if get_te_version() is not None:
        return contextlib.nullcontext()
    return patch.applied(lambda _: lambda *args, **kwargs: False)


def installed() -> bool:
    """Whether Megatron builds MegatronAdamW."""
    return BUILD.is_applied()


def install(coat: CoatConfig | None = None) -> None:
    """From now on Megatron's `adam` is `MegatronAdamW`, configured by `coat`. A second call does nothing.

    Raises RuntimeError, before anything is changed, if this Megatron is not as expected.
    """
    if installed():
        return
    coat = coat or CoatConfig(enabled=True)
    for patch in (*INSTALLED, ADAM, IS_TORCH):
        patch.check()
    require("megatron-core", f"{_DISTRIBUTED}._get_model_param_range_map", ("param",), _WAY_OUT)
    # `link` sets which tensors keep FP32 moments: Megatron passes no names
    options = {name: getattr(coat.optimizer, name) for name in LAYOUT} | {"keep_fp32": (), "log": _say}
    adam = functools.partial(MegatronAdamW, counts_in_groups=not IS_TORCH.original(), **options)

    BUILD.apply(functools.partial(_building, coat, adam))
    GET.apply(_getting)
    SET.apply(_setting)
    POST_INIT.apply(_checking)
    SAVE.apply(places.saving)
    LOAD.apply(places.loading)


def _building(coat: CoatConfig, adam: Callable, build: Callable) -> Callable:
    @functools.wraps(build)
    def coat_build(config, model_chunks, *args, **kwargs):
        _check_host(config, model_chunks)
        with _without_te(VERSION), ADAM.applied(lambda _: adam), IS_TORCH.applied(lambda _: False):
            built = build(config, model_chunks, *args, **kwargs)
        if isinstance(built, MegatronOptimizer):
            _link(built, model_chunks, coat)
        return built

    return coat_build


def _held(optimizer: DistributedOptimizer, model_param: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """The tensor that an optimizer holds of a parameter of the model, and its group."""
    group, order = optimizer.model_param_group_index_map[model_param]
    group = optimizer.optimizer.param_groups[group]
    return group["params"][order], group


def _getting(get: Callable) -> Callable:
    @functools.wraps(get)
    def coat_get(self, model_param):
        if not isinstance(self.optimizer, MegatronAdamW):
            return get(self, model_param)
        return self.optimizer.tensors_of(_held(self, model_param)[0])

    return coat_get


def _setting(set_: Callable) -> Callable:
    @functools.wraps(set_)
    def coat_set(self, model_param, tensors):
        if not isinstance(self.optimizer, MegatronAdamW):
            return set_(self, model_param, tensors)
        self.optimizer.take_tensors(*_held(self, model_param), tensors)

    return coat_set


def _checking(post_init: Callable) -> Callable:
    @functools.wraps(post_init)
    def coat_post_init(self):
        try:
            with _without_te(VERSION_OF_CONFIG):
                post_init(self)
        except RuntimeError as error:
            # the last of its checks, without Transformer Engine
            if "FusedAdam" not in str(error):
                raise

    return coat_post_init


def uninstall() -> None:
    """Undoes `install`. Optimizers that were built stay what they are."""
    for patch in reversed(INSTALLED):
        patch.remove()
