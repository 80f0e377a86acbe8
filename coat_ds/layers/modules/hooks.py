"""Drops the notes on tensors (`coat_kernels.autograd.origin`) that users' hooks may change.

A hook may write to a tensor through `.data`, which changes neither its version nor its address. Notes are
therefore dropped if a module has a hook that no framework registered.
"""

from collections.abc import Callable

import torch
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

from coat_kernels.autograd.origin import forget_notes

# packages whose hooks do not change activations, or change them so that autograd detects it
_FRAMEWORKS = frozenset(
    (
        "accelerate",
        "coat_ds",
        "deepspeed",
        "megatron",
        "megatron_ext",
        "torch",
        "transformer_engine",
        "transformers",
    )
)

_OF_ALL_MODULES = (
    _global_forward_hooks,
    _global_forward_pre_hooks,
    _global_backward_hooks,
    _global_backward_pre_hooks,
)


def forget_if_pre_hooked(module: torch.nn.Module, x: torch.Tensor) -> None:
    """Drops the notes on `x`, an input of `module`, if a user's forward pre-hook may have changed it."""
    if module._forward_pre_hooks or _global_forward_pre_hooks:
        _forget(x, module._forward_pre_hooks, _global_forward_pre_hooks)


def forget_if_hooked(module: torch.nn.Module, y: torch.Tensor) -> None:
    """Drops the notes on `y`, the output of `module`, if a user's forward hook may change it."""
    if module._forward_hooks or _global_forward_hooks:
        _forget(y, module._forward_hooks, _global_forward_hooks)


def has_user_hooks(module: torch.nn.Module) -> bool:
    """Whether `module`, or all modules, have a hook that no framework registered. `module` must then be
    called."""
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return _any_foreign(*own, *_OF_ALL_MODULES)


def is_hooked(module: torch.nn.Module) -> bool:
    """Whether `module` has a hook, such as ZeRO-3's when it gathers weights module by module."""
    own = module.__dict__
    if own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return True
    return not all(map(_records_weights, own["_forward_hooks"].values()))


def _records_weights(hook: Callable) -> bool:
    """Whether `hook` is transformers' recorder of attention's weights. Converted attention returns none. A
    model that was called with `output_router_logits` keeps a recorder on each attention."""
    if getattr(hook, "__module__", None) != "transformers.utils.output_capturing":
        return False
    return "attentions" in [cell.cell_contents for cell in hook.__closure__ or ()]


def _forget(x: torch.Tensor, *registered: dict) -> None:
    if type(x) is torch.Tensor and _any_foreign(*registered):
        forget_notes(x)


def _any_foreign(*registered: dict) -> bool:
    for hooks in registered:
        for hook in hooks.values():
            if (getattr(hook, "__module__", None) or "").partition(".")[0] not in _FRAMEWORKS:
                return True
    return False
