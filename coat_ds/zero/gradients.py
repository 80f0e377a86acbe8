"""Gradients that ZeRO passes to the optimizer in 16 bits.

The order of DeepSpeed's calls. Names in capitals are the patches below.

- ZeRO 1 and 2, backward: BEGIN, then each gradient is reduced into a flat tensor for its parameter group if
  FLAT returns true, else into a tensor of its own.
- ZeRO 1 and 2, step: the norm of all gradients, then for each parameter group PARTITION and the optimizer.
- ZeRO 3, step: the norms of all sub-groups, then for each sub-group PREPARE, which calls FLATTEN, and the
  optimizer.
"""

from collections.abc import Callable

import torch

from coat_ds.optim.narrow_grad import NarrowGrad
from coat_ds.patches import Patch, wrapping

_WHY = "gradients stay in 16 bits on their way to the optimizer"
PARTITION = Patch(
    "16-bit gradients",
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._get_preflattened_grad_partition",
    _WHY,
    parameters=("group_idx",),
    optional=True,
)
FLAT = Patch(
    "16-bit gradients",
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._use_compact_grad_partition_buffer",
    "gradients are reduced into the flat tensor that the step reads, as DeepSpeed does in FP32",
    parameters=("group_idx",),
    optional=True,
)
BEGIN = Patch(
    "16-bit gradients",
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.backward_prologue",
    "gradients that no step has taken are dropped, as without the flat tensor",
    parameters=(),
)
PREPARE = Patch(
    "16-bit gradients",
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3._prepare_fp32_grad_for_sub_group",
    _WHY,
)
FLATTEN = Patch(
    "16-bit gradients",
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.flatten",
    "the flat tensor of a step's gradients is a NarrowGrad",
    instance=True,
)


def keep_gradients_narrow(wrapper) -> None:
    """Has a DeepSpeed optimizer of ZeRO 1, 2 or 3 pass its gradients on in 16 bits.

    The step of ZeRO 1 and 2 first calls `_get_preflattened_grad_partition`. The patched method returns the
    16-bit gradients, so that DeepSpeed makes no FP32 copy. DeepSpeed 0.18 has no such method and makes the
    copy. DeepSpeed 0.19.8 can reduce gradients into a flat tensor, which that method then returns. Other
    versions keep one tensor for each parameter, and the step copies them into a flat tensor.
    """
    if hasattr(wrapper, "_prepare_fp32_grad_for_sub_group"):
        PREPARE.apply(wrapping(_prepare_narrow, wrapper), on=wrapper)
        return
    if hasattr(wrapper, "_get_preflattened_grad_partition"):
        PARTITION.apply(wrapping(_narrow_partition, wrapper), on=wrapper)
    # with an offloaded optimizer gradients leave the GPU one by one
    on_gpu = hasattr(wrapper, "_use_compact_grad_partition_buffer") and not wrapper.cpu_offload
    # DeepSpeed does so in FP32 itself
    if on_gpu and wrapper.contiguous_gradients and wrapper.gradient_accumulation_dtype == wrapper.dtype:
        FLAT.apply(wrapping(lambda *_: True), on=wrapper)
        BEGIN.apply(wrapping(_begin_without_old_gradients, wrapper), on=wrapper)


def gradients_move_in_backward(wrapper) -> bool:
    """Whether gradients leave their parameters during backward, after `keep_gradients_narrow` was called for
    this wrapper. ZeRO-2's do, for the flat tensor that the step reads, or for the CPU."""
    is_flat = getattr(wrapper, "_use_compact_grad_partition_buffer", None)
    if is_flat is None or not wrapper.partition_gradients:
        return False
    return wrapper.cpu_offload or all(is_flat(group) for group in range(len(wrapper.bit16_groups)))


def _begin_without_old_gradients(wrapper, begin: Callable) -> None:
    """Drops old gradients before a backward: it overwrites separate tensors, but would add to a flat one."""
    # the boundary as of the backward before
    if wrapper.is_gradient_accumulation_boundary():
        for group in wrapper.averaged_gradients:
            wrapper.averaged_gradients[group] = None
    begin()


def _narrow_partition(wrapper, original: Callable, group: int) -> torch.Tensor | None:
    flat = original(group)
    if flat is None:
        # includes the padding of the last rank's partition
        flat = wrapper.flatten(wrapper.averaged_gradients[group])
    return _as_wide_as(wrapper.single_partition_of_fp32_groups[group], flat)


def _prepare_narrow(wrapper, prepare: Callable, part: int) -> None:
    """Stage 3 flattens the gradients of a part of the parameters, then casts them to the masters' type."""
    master = wrapper.fp32_partitioned_groups_flat[part]

    def flatten_narrow(flatten: Callable, gradients: list[torch.Tensor]) -> torch.Tensor:
        return _as_wide_as(master, flatten(gradients))

    with FLATTEN.applied(wrapping(flatten_narrow), on=wrapper):
        prepare(part)


def _as_wide_as(master: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    return NarrowGrad.of(flat) if flat.dtype != master.dtype == torch.float32 else flat
