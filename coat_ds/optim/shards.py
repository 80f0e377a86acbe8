"""Parameters that are split over ranks: DTensors of FSDP2 and of tensor parallelism, and ZeRO-3's."""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_distributed(x: object) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor."""
    # a DTensor exists only after this import, which takes longer than that of the rest of the optimizer
    api = sys.modules.get("torch.distributed.tensor")
    return api is not None and isinstance(x, api.DTensor)


def shape_of(p: torch.Tensor) -> torch.Size:
    """The shape of the whole parameter, also if ZeRO-3 has released its tensor."""
    return torch.Size(getattr(p, "ds_shape", p.shape))


def local(x: Any) -> Any:
    """This rank's shard of a DTensor, without a copy; any other object unchanged."""
    if not is_distributed(x):
        return x
    with torch.no_grad():
        held: Any = x.to_local()
    # the result of a collective that still runs
    return held.wait() if type(held).__name__ == "AsyncCollectiveTensor" else held


def laid_out_like(p: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """A DTensor with the layout of `p` whose local shard is `held`; `held` itself if `p` is no DTensor.

    held: contiguous, of the shape of this rank's shard of `p`.
    """
    if not is_distributed(p):
        return held
    from torch.distributed.tensor import DTensor

    whole = torch.empty(p.shape, dtype=held.dtype, device="meta")
    # from_local would move an offloaded shard from the CPU to the mesh's device
    shard = torch.empty(held.shape, dtype=held.dtype, device="meta")
    made = DTensor.from_local(
        shard, p.device_mesh, p.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    parts, context = made.__tensor_flatten__()
    inner = {name: getattr(made, name) for name in parts} | {"_local_tensor": held}
    return DTensor.__tensor_unflatten__(inner, context, whole.shape, whole.stride())


def shard_of(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """This rank's part of `x`, which has the shape of `p`, if `p` is a DTensor; all of `x` otherwise.

    x: plain, with the same values on every rank, or a DTensor of any layout. Ranks communicate only if `x` is
        a DTensor that is not laid out like `p`.
    """
    if is_distributed(x):
        if not is_distributed(p):
            return x.full_tensor()
        if x.placements != p.placements or x.device_mesh != p.device_mesh:
            x = x.redistribute(p.device_mesh, p.placements)
        return local(x)
    if not is_distributed(p):
        return x
    from torch.distributed.tensor import distribute_tensor

    return local(distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None))
