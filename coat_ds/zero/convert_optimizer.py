"""In-place conversion of an Adam or AdamW, from the user or Hugging Face's Trainer, to a CoatAdamW."""

import functools
import weakref
from collections.abc import Callable
from itertools import compress
from typing import Any

import torch

from coat_ds.config import CoatConfigError, OptimizerConfig
from coat_ds.optim.optimizer import CoatAdamW
from coat_ds.optim.options import COAT_KEYS, STOCK_SWITCHES

REMEDY = (
    'Drop the argument and use the "optimizer" section, pass a coat_ds.CoatAdamW, set "optim" of Hugging '
    'Face\'s Trainer to "adamw_torch", or coat.optimizer.enabled to false.'
)


def check(optimizer: Any) -> None:
    """Raises CoatConfigError for an optimizer argument whose update CoatAdamW does not compute."""

    def refuse(found: str):
        raise CoatConfigError(f"coat.optimizer.enabled: found {found} as the optimizer argument. {REMEDY}")

    if isinstance(optimizer, CoatAdamW):
        if optimizer._release is not None:
            refuse("a CoatAdamW that releases gradients, which ZeRO keeps until the step,")
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            refuse(repr(optimizer))
        return
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    cls = type(optimizer)
    # not subclasses, which may step differently
    if cls not in (torch.optim.AdamW, torch.optim.Adam, FusedAdam, DeepSpeedCPUAdam):
        refuse(f"{cls.__module__}.{cls.__name__}, which is no Adam or AdamW of torch or DeepSpeed,")
    for group in optimizer.param_groups:
        decoupled = group.get("decoupled_weight_decay", getattr(optimizer, "adam_w_mode", False))
        if group["weight_decay"] and not decoupled:
            refuse(
                f"{cls.__name__} with weight_decay {group['weight_decay']} in the gradient, not decoupled,"
            )
        for name in ("amsgrad", "differentiable"):
            if group.get(name):
                refuse(f"{cls.__name__} with {name}")
        if not group.get("bias_correction", True):
            refuse(f"{cls.__name__} without bias_correction")
    if any(optimizer.state.values()):
        refuse(f"{cls.__name__} that has made steps, whose moments DeepSpeed would lose,")
    if "step" in vars(optimizer) and not _is_tracked(optimizer):
        refuse(f"{cls.__name__} whose step() was exchanged")


def convert_(
    optimizer: torch.optim.Optimizer,
    config: OptimizerConfig,
    cls: type[CoatAdamW] = CoatAdamW,
    **options: Any,
) -> CoatAdamW:
    """Converts `optimizer` to a `cls`, the same object with the same parameter groups, and returns it.

    Schedulers and other holders of the object keep working. Options of the parameter groups are kept:
    learning rates, betas, eps, weight decay, and notes of schedulers. The options of `config` are added.
    options: constructor arguments for the whole optimizer, such as `keep_fp32`.
    """
    check(optimizer)
    if isinstance(optimizer, CoatAdamW):
        return optimizer
    groups = [_group(group, config) for group in optimizer.param_groups]
    made = cls(groups, **options)
    made.defaults.update(
        {k: v for k, v in optimizer.defaults.items() if k in made.defaults and k not in STOCK_SWITCHES}
    )
    # the same dict objects: DeepSpeed's wrappers share them with the optimizer that they wrap
    for group, own in zip(optimizer.param_groups, made.param_groups, strict=True):
        group.update(own)
    hooks = {name: value for name, value in vars(optimizer).items() if name.endswith("_hooks")}
    tracked = _is_tracked(optimizer)
    vars(optimizer).update({**vars(made), **hooks, "param_groups": optimizer.param_groups})
    optimizer.__class__ = cls
    if tracked:
        optimizer.step = _tracked(optimizer)
    return optimizer


def _group(group: dict[str, Any], config: OptimizerConfig) -> dict[str, Any]:
    """An Adam's parameter group as a CoatAdamW's, without frozen parameters, which ZeRO ignores."""
    options = {name: getattr(config, name) for name in COAT_KEYS}
    options |= {name: value for name, value in group.items() if name not in STOCK_SWITCHES}
    trained = [p.requires_grad for p in group["params"]]
    per_parameter = [name for name in ("params", "param_names") if name in group]
    return options | {name: list(compress(group[name], trained)) for name in per_parameter}


def _is_tracked(optimizer: torch.optim.Optimizer) -> bool:
    return hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched")


def _tracked(optimizer: CoatAdamW) -> Callable:
    """`step`, wrapped as torch's learning rate schedulers do to detect a scheduler step before it."""
    step, holder = type(optimizer).step, weakref.ref(optimizer)

    @functools.wraps(step)
    def wrapper(*args, **kwargs):
        optimizer = holder()
        optimizer._opt_called = True
        return step(optimizer, *args, **kwargs)

    wrapper._wrapped_by_lr_sched = True
    return wrapper
