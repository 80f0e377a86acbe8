"""What a rank holds of DTensors, as the optimizer reads it. Runs with them: test_dtensor.py."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from coat_ds.optim.shards import local, shard_of
from tests.util import run_distributed


def on_two():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(12.0).view(6, 2)
    own = x.chunk(2)[dist.get_rank()]
    p = distribute_tensor(x, mesh, [Shard(0)])
    summed = shard_of(DTensor.from_local(x / 2, mesh, [Partial()]), p)
    return {
        "of itself": shard_of(p, p).data_ptr() == p.to_local().data_ptr(),
        "of a sum": summed.equal(own),
        # a kernel reads it by its address, which a collective that is under way has none of
        "of a sum, plain": type(summed) is torch.Tensor,
        "under way": type(local(p.redistribute(placements=[Shard(1)], async_op=True))) is torch.Tensor,
        # for a parameter that is no DTensor
        "whole": shard_of(p, x).equal(x),
        # without a word from rank to rank: each cuts its own
        "of a plain tensor": shard_of(x + dist.get_rank(), p).equal(own + dist.get_rank()),
    }


def test_what_a_rank_holds():
    for found in run_distributed(on_two, 2):
        assert all(found.values()), found
