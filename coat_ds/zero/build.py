"""The optimizer that is passed to a DeepSpeed engine with the block."""

import functools
from collections.abc import Mapping
from typing import Any

import torch

from coat_ds.config import CoatConfig, OptimizerConfig
from coat_ds.log import log_rank_0, warn_rank_0
from coat_ds.optim.optimizer import CoatAdamW
from coat_ds.optim.options import idle_patterns, keeps_fp32
from coat_ds.zero import convert_optimizer
from coat_ds.zero.deepspeed_config import IMPLEMENTATIONS, offloads, optimizer_options, section, stage_of


def optimizer_for_engine(coat: CoatConfig, config: Mapping[str, Any], optimizer: Any, model: torch.nn.Module):
    """The `optimizer` argument for DeepSpeed: the user's, converted, or a function that builds one."""
    # DeepSpeed picks its stage-0 wrapper by the optimizer's class
    cls = CoatAdamW if stage_of(config) else _fused_adam_class()
    names: dict[torch.Tensor, str] = {}
    rule = functools.partial(_keeps_fp32_by_name, coat.optimizer.keep_fp32, names)

    def take_names() -> None:
        # DeepSpeed replaces parameters before it builds an optimizer: AutoEP replaces those of experts
        names.update({p: name for name, p in model.named_parameters()})
        # a pipeline stage does not have the parameters of other stages
        is_whole = getattr(model, "num_stages", 1) == 1
        for line in idle_patterns(coat.optimizer.keep_fp32, names.values()) if is_whole else ():
            warn_rank_0(line)

    own = {
        "keep_fp32": rule,
        "checkpoint_layout": coat.optimizer.checkpoint_layout,
        # states are where ZeRO's masters are
        "offload": "cpu" if offloads(config) else coat.optimizer.offload,
        "in_framework": True,
    }

    def converted(given: torch.optim.Optimizer) -> CoatAdamW:
        take_names()
        if isinstance(given, CoatAdamW):
            given.layouts.note_fp32(given.param_groups)
            if offloads(config) and not given.offloads:
                warn_rank_0(
                    "zero_optimization.offload_optimizer: found the script's own CoatAdamW with "
                    "offload='none', which steps on the CPU, slowly. Give it offload='cpu'."
                )
            if coat.optimizer != OptimizerConfig():
                warn_rank_0(
                    "coat.optimizer: its keys are of no effect: the script's own CoatAdamW is used as it is. "
                    "Give it these options, and drop the keys."
                )
        built = convert_optimizer.convert_(given, coat.optimizer, cls, **own)
        log_rank_0(f"AdamW states of the whole model\n{built.layout(names)}")
        return built

    def build(model_parameters):
        if optimizer is not None:
            return converted(optimizer(model_parameters))
        params = section(section(config, "optimizer"), "params")
        if idle := [name for name in IMPLEMENTATIONS if name in params]:
            listed = ", ".join(f"{name} {params[name]}" for name in idle)
            log_rank_0(f"optimizer.params: {listed}: of no effect, CoatAdamW has one implementation")
        # torch reads all forms of parameters, groups and names
        made = torch.optim.AdamW(model_parameters, **optimizer_options(config))
        made.param_groups = trained_groups(made.param_groups)
        return converted(made)

    return converted(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else build


def trained_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups with a parameter that is trained, and those that ZeRO requires for the experts of
    DeepSpeed's MoE. If DeepSpeed builds the optimizer, it makes these groups itself."""
    from deepspeed.moe.utils import configure_moe_param_groups, is_moe_param

    groups = [group for group in groups if any(p.requires_grad for p in group["params"])]
    if any(is_moe_param(p) for group in groups for p in group["params"]):
        for i, group in enumerate(groups):
            # DeepSpeed reads this name, and distributes the parameters without theirs
            group.setdefault("name", f"group {i}")
            group.pop("param_names", None)
        groups = configure_moe_param_groups(groups)
    return groups


def _keeps_fp32_by_name(patterns: tuple[str, ...], names: Mapping[torch.Tensor, str], _, p) -> bool:
    return keeps_fp32(patterns, names.get(p), p)


@functools.cache
def _fused_adam_class() -> type[CoatAdamW]:
    """CoatAdamW as a subclass of DeepSpeed's FusedAdam, without using any code of FusedAdam.

    Stage 0 uses the wrapper that flattens parameters if the optimizer is a FusedAdam. The other wrapper
    computes a wrong gradient norm under tensor parallelism.
    """
    from deepspeed.ops.adam import FusedAdam

    members = {"__doc__": CoatAdamW.__doc__, "zero_grad": torch.optim.Optimizer.zero_grad}
    return type("CoatAdamW", (CoatAdamW, FusedAdam), members)
