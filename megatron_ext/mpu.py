"""Megatron's process groups under DeepSpeed's names: `deepspeed.initialize(..., mpu=mpu)`.

`megatron.core.parallel_state` itself lacks `get_model_parallel_world_size`, `get_model_parallel_rank` and
`get_data_parallel_group_ranks`. Data-parallel groups here contain the context-parallel ranks, which hold the
same weights and whose gradients have to be summed too. There is no `initialize_sequence_parallel`: if it
exists, DeepSpeed leaves tensor parallelism out of norms and overflow checks.
"""

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_data_parallel_group as _data_parallel_group
from megatron.core.parallel_state import (  # noqa: F401 (DeepSpeed calls them)
    get_model_parallel_group,
    get_pipeline_model_parallel_group,
    get_pipeline_model_parallel_rank,
    get_pipeline_model_parallel_world_size,
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_src_rank,
    get_tensor_model_parallel_world_size,
)

# norms of each rank's own heads, in Megatron's names
_HEAD_NORMS = ("q_layernorm.", "k_layernorm.")


def get_data_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold the same weights, context-parallel ones included."""
    return _data_parallel_group(with_context_parallel=True)


def get_data_parallel_world_size() -> int:
    return get_data_parallel_group().size()


def get_data_parallel_rank() -> int:
    return get_data_parallel_group().rank()


def get_data_parallel_group_ranks() -> list[int]:
    """The global ranks of the data-parallel group."""
    return dist.get_process_group_ranks(get_data_parallel_group())


def get_model_parallel_world_size() -> int:
    """The number of ranks that share one copy of the model: tensor times pipeline parallel size."""
    return get_model_parallel_group().size()


def get_model_parallel_rank() -> int:
    return get_model_parallel_group().rank()


def sum_shared_gradients(model: torch.nn.Module) -> list[str]:
    """Sums gradients over the tensor-parallel ranks where each rank processes only its part of the data.

    These are gradients of parameters that Megatron marks `sequence_parallel`, and of norms of queries and
    keys. Parameters that are marked `average_gradients_across_tp_domain` are excepted.

    Call it once, before `deepspeed.initialize`. DeepSpeed never sums them: norm weights would drift apart
    without an error. Megatron's own training loop sums them by itself. Returns the names of the parameters;
    empty with one rank.
    Raises ValueError for a model whose ranks hold different experts, whose gradients DeepSpeed would average.
    """
    for name, parameter in model.named_parameters():
        if not getattr(parameter, "allreduce", True):
            raise ValueError(
                f"expert_model_parallel_size: expected 1 under DeepSpeed, which would average {name} over "
                "ranks that hold different experts. Set it to 1, or train with Megatron's data parallelism."
            )
    group = get_tensor_model_parallel_group()
    if group.size() == 1:
        return []

    def add_up(grad: torch.Tensor) -> torch.Tensor:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    names = []
    for name, parameter in model.named_parameters():
        split = getattr(parameter, "sequence_parallel", False) or any(norm in name for norm in _HEAD_NORMS)
        whole = getattr(parameter, "average_gradients_across_tp_domain", False)
        if split and not whole and parameter.requires_grad:
            parameter.register_hook(add_up)
            names.append(name)
    return names
