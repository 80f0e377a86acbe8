"""Ends CUDA graphs before the process groups whose collectives they hold.

Layers that are split over tensor-parallel ranks are recorded with their collectives. NCCL destroys a
communicator only after all graphs that hold one of its collectives are gone (`commDestroySync` in its
init.cc). So `torch.distributed.destroy_process_group()` would never return while a model lives. The patch
ends the graphs first.
"""

from collections.abc import Callable

import torch.distributed as dist

from coat_ds.patches import Patch, wrapping
from coat_kernels.graphs import end_graphs

# the name that torch's own modules look up, and the public one
ENDS = [
    Patch(
        "end of process groups",
        f"{module}:destroy_process_group",
        "layers' CUDA graphs end first, since NCCL waits for those that hold its collectives",
        parameters=("group",),
    )
    for module in ("torch.distributed.distributed_c10d", "torch.distributed")
]


def end_graphs_first() -> None:
    """From now on layers' CUDA graphs end before a process group of GPUs does. A second call does nothing.

    A script that ran `from torch.distributed import destroy_process_group` before there was a model holds the
    unpatched function, which never returns.

    Raises PatchError if this torch is not as expected.
    """
    for end in ENDS:
        end.apply(wrapping(_destroy))


def _destroy(destroy: Callable, group: dist.ProcessGroup | None = None) -> None:
    # torch raises an error for any other group
    exists = dist.is_initialized() and group is not dist.GroupMember.NON_GROUP_MEMBER
    # all groups end if it is None or the group of all ranks
    if exists and (group in (None, dist.group.WORLD) or dist.get_backend(group) != "gloo"):
        end_graphs()
    destroy(group)
