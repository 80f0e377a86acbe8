"""Gradients that ZeRO hands to the optimizer in 16 bits."""

import functools

import torch

from coat_ds.optim.narrow_grad import NarrowGrad
from coat_kernels.saved import exchanged


def keep_gradients_narrow(wrapper) -> None:
    """Has a DeepSpeed optimizer of ZeRO 1, 2 or 3 hand its gradients over as they are.

    The step of ZeRO 1 and 2 asks for what is flat already before it makes a flat tensor and has that in the
    masters' type. DeepSpeed 0.18 does not ask, and makes FP32.
    """
    if hasattr(wrapper, "_prepare_fp32_grad_for_sub_group"):
        _in_stage3(wrapper)
        return
    ask = getattr(wrapper, "_get_preflattened_grad_partition", None)
    if ask is None:
        return
    from deepspeed import comm as dist

    @functools.wraps(ask)
    def partition(group: int) -> torch.Tensor | None:
        flat = ask(group)
        if flat is None:
            grads, ranks = wrapper.averaged_gradients[group], wrapper.real_dp_process_group[group]
            if dist.get_rank(group=ranks) == dist.get_world_size(group=ranks) - 1:
                flat = wrapper.flatten_dense_tensors_aligned(grads, int(wrapper.partition_size[group]))
            else:
                flat = wrapper.flatten(grads)
        return _as_wide_as(wrapper.single_partition_of_fp32_groups[group], flat)

    wrapper._get_preflattened_grad_partition = partition


def _in_stage3(wrapper) -> None:
    """Its step flattens the gradients of a part of the parameters and then has them in the masters' type."""
    prepare = wrapper._prepare_fp32_grad_for_sub_group

    @functools.wraps(prepare)
    def prepare_narrow(part: int) -> None:
        master, flatten = wrapper.fp32_partitioned_groups_flat[part], wrapper.flatten
        with exchanged(wrapper, flatten=lambda gradients: _as_wide_as(master, flatten(gradients))):
            prepare(part)

    wrapper._prepare_fp32_grad_for_sub_group = prepare_narrow


def _as_wide_as(master: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    return NarrowGrad.of(flat) if flat.dtype != master.dtype == torch.float32 else flat
