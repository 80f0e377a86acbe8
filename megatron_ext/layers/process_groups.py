"""The end of process groups whose collectives CUDA graphs hold.

Layers that are split over tensor-parallel ranks are recorded with their collectives. NCCL destroys no
communicator before all graphs are gone that hold one of its collectives (`commDestroySync` in its init.cc).
So `torch.distributed.destroy_process_group()` would wait for ever while a model lives. It is patched to end
the graphs first.
"""

import functools
from collections.abc import Callable

import torch.distributed as dist

from coat_ds.patches import Patch
from coat_kernels.graphs import end_graphs

# where torch's own modules, and where everybody else looks the function up
ENDS = [
    Patch(
        "end of process groups",
        "torch",
        f"{module}:destroy_process_group",
        "layers' CUDA graphs end first, since NCCL waits for those that hold its collectives",
        parameters=("group",),
    )
    for module in ("torch.distributed.distributed_c10d", "torch.distributed")
]


def end_graphs_first() -> None:
    """From now on layers' CUDA graphs end before a process group of GPUs does. Does nothing a second time.

    A script that took the function itself by `from torch.distributed import destroy_process_group`, before
    there was a model, has the one that waits.

    Raises PatchError if this torch is not as expected.
    """
    for end in ENDS:
        end.apply(_ending_graphs)


def _ending_graphs(destroy: Callable) -> Callable:
    @functools.wraps(destroy)
    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        if _is_of_gpus(group):
            end_graphs()
        destroy(group)

    return destroy_process_group


def _is_of_gpus(group: dist.ProcessGroup | None) -> bool:
    """Whether graphs may hold collectives of what ends with this group, which is all groups where it is None
    or that of all ranks."""
    if not dist.is_initialized() or group is dist.GroupMember.NON_GROUP_MEMBER:
        # torch says what is wrong
        return False
    return group in (None, dist.group.WORLD) or dist.get_backend(group) != "gloo"
