"""Which tensors, and which changes of options between steps, `CoatAdamW` refuses before anything is changed.

`optimizer` is always a `CoatAdamW`.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from coat_ds.optim.moment import Moment
from coat_ds.optim.options import (
    COAT_KEYS,
    FORMATS,
    MOMENTS,
    STOCK_SWITCHES,
    check_names,
    check_options,
    has_remainder,
)
from coat_ds.optim.shards import is_distributed, local

PARAM_DTYPES = (torch.float32, torch.bfloat16)
GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def grad_of(p: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter that has one."""
    assert p.grad is not None
    return p.grad


def _of(p: torch.Tensor) -> str:
    return f"CoatAdamW: a parameter of shape {tuple(p.shape)} on {p.device}"


def check_tensors(p: torch.Tensor, state: dict[str, Any], device: torch.device) -> None:
    """Raises TypeError or ValueError for a parameter, gradient or state that the step cannot handle.

    device: where the state belongs.
    """
    grad = grad_of(p)
    if is_distributed(p) != is_distributed(grad):
        raise TypeError(
            f"{_of(p)} is a {type(p).__name__}, its gradient a {type(grad).__name__}. Make both DTensors, "
            "or none."
        )
    if is_traceable_wrapper_subclass(local(p)):
        raise TypeError(
            f"{_of(p)} is a {type(local(p)).__name__}, which holds its values elsewhere. Give the optimizer "
            "a plain tensor, or a DTensor of plain shards."
        )
    if grad.layout is not torch.strided or p.layout is not torch.strided:
        raise TypeError(
            f"{_of(p)} has a gradient of layout {grad.layout}. Use a dense gradient, as with "
            "torch.nn.Embedding(sparse=False)."
        )
    check_dtype(p)
    if grad.dtype not in GRAD_DTYPES:
        raise TypeError(f"{_of(p)} has a {grad.dtype} gradient; expected FP32, BF16 or FP16. Cast it first.")
    if grad.shape != p.shape or grad.device != p.device:
        raise ValueError(
            f"{_of(p)} has a gradient of shape {tuple(grad.shape)} on {grad.device}. Give it the "
            "parameter's shape and device."
        )
    for name in (*MOMENTS, "remainder"):
        value: Any = state.get(name)
        if value is None:
            continue
        held, alike = local(value), value.shape == p.shape
        if is_distributed(value) and is_distributed(p):
            alike = alike and value.placements == p.placements
        if name == "remainder":
            # kernels read it by its address
            alike = alike and held.dtype == torch.int16 and held.is_contiguous()
        # the step encodes plain moments, of any device
        if not alike or (held.device != device and (isinstance(held, Moment) or name == "remainder")):
            layout = getattr(p, "placements", "contiguous")
            dtype, remedy = "", ""
            if name == "remainder":
                dtype, remedy = ", torch.int16", " A remainder may be deleted: it starts at 0 again."
            raise ValueError(
                f"{_of(p)} has {name} of {_described(value)}; expected shape {tuple(p.shape)}, {layout}"
                f"{dtype}, on {device}. Move and redistribute the model before the first step, or load a "
                f"state dict again.{remedy}"
            )


def _described(x: Any) -> str:
    layout = f", laid out as {x.placements}" if is_distributed(x) else ""
    return f"shape {tuple(x.shape)}, {x.dtype}, strides {x.stride()} on {x.device}{layout}"


def check_params(params: list[torch.Tensor], in_framework: bool, checkpoint_layout: str) -> None:
    """Raises TypeError or ValueError for parameters of a new group. Frameworks may keep FP32 masters of
    parameters of other types."""
    if not in_framework:
        for p in params:
            if p.requires_grad:
                check_dtype(p)
    check_listed_once(params)
    if checkpoint_layout == "compressed" and any(map(is_distributed, params)):
        raise ValueError(
            "CoatAdamW: checkpoint_layout='compressed' cannot be cut for another number of ranks, as "
            "checkpoints of DTensors are. Take 'stock'."
        )


def check_listed_once(params: list[torch.Tensor]) -> None:
    """Raises ValueError for a tensor that a parameter group lists twice."""
    if len(set(params)) < len(params):
        raise ValueError(
            "CoatAdamW: a parameter group lists a tensor twice, which torch only warns of. List it once."
        )


def check_dtype(p: torch.Tensor) -> None:
    """Raises TypeError for a trained parameter of another type than FP32 or BF16."""
    if p.dtype not in PARAM_DTYPES:
        remedy = "Give the optimizer FP32 master weights."
        if p.is_complex():
            remedy = "Make torch.view_as_real of it the parameter, and in forward view_as_complex of that."
        raise TypeError(f"{_of(p)} is {p.dtype}; expected FP32 or BF16. {remedy}")


def check_grad_scale(scale: Any) -> None:
    """Raises ValueError unless a kernel can read one factor for all gradients from `scale`."""
    if not isinstance(scale, torch.Tensor) or scale.numel() != 1:
        raise ValueError(
            "CoatAdamW.step: grad_scale: expected a tensor of one element, by which all gradients are "
            f"multiplied; found {scale!r}. Give torch.tensor(...) of one factor, on their device."
        )


def check_changes(optimizer) -> None:
    """Raises ValueError if an option of a parameter group has changed since the last check to a value that
    the constructor would refuse, or if existing states are stored otherwise."""
    groups = optimizer.param_groups
    # options that every step reads, such as lr, and notes of the caller may change
    fixed = {*COAT_KEYS, *STOCK_SWITCHES, *optimizer.common_options()}
    options = [{k: v if k in fixed else None for k, v in group.items()} for group in groups]
    if options == optimizer.checked_options:
        return
    check_supported(optimizer)
    for i, group in enumerate(groups):
        for p in optimizer.layouts.held_in(i, group):
            for name in MOMENTS:
                _check_layout(optimizer, i, p, name)
    optimizer.checked_options = options


def _check_layout(optimizer, index: int, p: torch.Tensor, name: str) -> None:
    """Raises ValueError if the moment `name` of `p` exists in another layout than group `index` asks for."""
    group, moment = optimizer.param_groups[index], local(optimizer.state.get(p, {}).get(name))
    layout = optimizer.layouts.layout_of(p, group, name)
    if not isinstance(moment, Moment) or moment.piece_layout == layout:
        return
    held, wanted = (" and ".join({codec.name: 0 for _, codec in x}) for x in (moment.piece_layout, layout))
    options = ", ".join(f"{option} {group[option]!r}" for option in (*FORMATS, "min_numel"))
    raise ValueError(
        f"CoatAdamW: {name} of a tensor of parameter group {index} is stored as {held}, and the options of "
        f"the group ({options}) ask for {wanted} now. Set them before the first step, or call "
        "optimizer.load_state_dict(optimizer.state_dict()), which re-creates the states."
    )


def check_supported(optimizer) -> None:
    """Raises ValueError for options in parameter groups that the constructor would refuse, except options
    that every step reads, and TypeError for options that the parameters do not support."""
    for group in optimizer.param_groups:
        check_names(group, optimizer.defaults, optimizer.common_options())
        check_options(optimizer.defaults | {k: group[k] for k in (*COAT_KEYS, *STOCK_SWITCHES) if k in group})
        for p in group["params"]:
            # FSDP1 saves all states in one dtype
            if has_remainder(p, group) and getattr(p, "_fsdp_flattened", False):
                raise TypeError(
                    "CoatAdamW: FullyShardedDataParallel cannot save what bf16_params='exact' keeps of BF16 "
                    "parameters. Use fully_shard, FP32 parameters with MixedPrecision, or "
                    "bf16_params='stochastic'."
                )
