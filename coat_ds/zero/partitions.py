"""The flat tensors that DeepSpeed passes to the optimizer, and the parts of parameters in each of them."""

import functools
from collections.abc import Iterator

import torch

from coat_ds.optim.layouts import Fragment
from coat_ds.optim.optimizer import CoatAdamW


def link_partitions(wrapper, optimizer: CoatAdamW) -> None:
    """Passes the fragments of each flat tensor of `wrapper` to `optimizer`, and creates its states.

    wrapper: DeepSpeed's wrapper of the optimizer: ZeRO 1, 2 or 3, BF16_Optimizer, stage 0's FP16_Optimizer,
    or any other wrapper that passes the parameters on unchanged.
    """
    groups, keeps = optimizer.param_groups, optimizer.layouts.keeps_fp32
    placed = [
        (
            flat,
            [Fragment(start, n, offset, keeps(p, groups[i]), p) for p, start, n, offset in parts],
            i,
        )
        for i, flat, parts in partitions(wrapper, len(groups))
    ]
    optimizer.set_fragments(placed)


Placed = tuple[torch.Tensor, int, int, int]


def partitions(wrapper, groups: int) -> Iterator[tuple[int, torch.Tensor, Iterator[Placed]]]:
    """Parameter group, flat tensor, and (parameter, start in the flat tensor, numel, offset in parameter)."""
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):
        flats, params = wrapper.fp32_partitioned_groups_flat, wrapper.fp16_groups
        indices, place = [wrapper.sub_group_to_group_id[i] for i in range(len(flats))], _in_stage3
    elif hasattr(wrapper, "single_partition_of_fp32_groups"):
        flats, params = wrapper.single_partition_of_fp32_groups, range(groups)
        indices, place = range(groups), functools.partial(_in_stage1_or_2, wrapper)
    elif hasattr(wrapper, "fp32_groups_flat_partition"):
        flats, params = wrapper.fp32_groups_flat_partition, wrapper.bf16_groups
        indices, place = range(groups), _in_bf16_optimizer
    elif hasattr(wrapper, "fp32_groups_flat"):
        flats, params = wrapper.fp32_groups_flat, wrapper.fp16_groups
        indices, place = range(groups), _in_stage0
    else:
        return
    for index, flat, held in zip(indices, flats, params, strict=True):
        yield index, flat, place(held)


def _in_stage1_or_2(wrapper, index: int) -> Iterator[Placed]:
    """The places where ZeRO 1 and 2 put gradients. With `round_robin_gradients` the order of parameters
    differs from their group's, and DeepSpeed's notes on them (`_hp_mapping`) are not always right.
    """
    rank = torch.distributed.get_rank(wrapper.real_dp_process_group[index])
    starts, offsets = (
        places[index][rank] for places in (wrapper.grad_partition_insertion_offset, wrapper.grad_start_offset)
    )
    for p in wrapper.params_in_partition[index]:
        number = wrapper.get_param_id(p)
        # these are floats in DeepSpeed 0.18
        start, offset, size = map(int, (starts[number], offsets[number], wrapper.partition_size[index]))
        yield p, start, min(p.numel() - offset, size - start), offset


def _in_bf16_optimizer(params: list[torch.Tensor]) -> Iterator[Placed]:
    """The places that BF16_Optimizer notes on the parameters."""
    for p in params:
        if p._hp_mapping:
            held = p._hp_mapping.hp_fragment_address
            yield p, held.start, held.numel, p._hp_mapping.lp_fragment_address.start


def _in_stage3(params: list[torch.Tensor]) -> Iterator[Placed]:
    """Every rank holds an equal share of each parameter; the last ones end in padding."""
    start = 0
    for p in params:
        share = p.partition_numel()
        yield p, start, share, share * torch.distributed.get_rank(p.ds_process_group)
        start += share


def _in_stage0(params: list[torch.Tensor]) -> Iterator[Placed]:
    start = 0
    for p in params:
        yield p, start, p.numel(), 0
        start += p.numel()
