"""What a rank holds of DTensors, as the optimizer reads it. Runs with them: test_dtensor.py."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from coat_ds import CoatAdamW
from coat_ds.optim.shards import local, shard_of
from tests.util import run_distributed


def on_two():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(12.0).view(6, 2)
    own = x.chunk(2)[dist.get_rank()]
    p = distribute_tensor(x, mesh, [Shard(0)])
    trained = torch.nn.Parameter(p.clone())
    copy = torch.zeros_like(trained, dtype=torch.bfloat16)
    optimizer = CoatAdamW([trained])
    optimizer.copy_weight(trained, copy)
    trained.grad = p
    optimizer.step()
    # states of before the parameter became a DTensor
    alone = torch.nn.Parameter(x.clone())
    whole = CoatAdamW([alone])
    alone.grad = x
    whole.step()
    later = torch.nn.Parameter(p.clone())
    resharded = CoatAdamW([later])
    resharded.state[later] = whole.state.pop(alone)
    resharded.init_states()
    # a parameter whose shards were made whole since
    turned = torch.nn.Parameter(p.redistribute(placements=[Replicate()]))
    turned.grad = turned.detach()
    stale = CoatAdamW([turned])
    stale.state[turned] = optimizer.state[trained]
    with pytest.raises(ValueError, match="has exp_avg laid out as .*Shard.*, itself as .*Replicate"):
        stale.step()
    return {
        "moments": all(
            found.to_local().equal(expected.to_local())
            for found, expected in zip(resharded.moments(later), optimizer.moments(trained), strict=True)
        ),
        "of itself": shard_of(p, p).data_ptr() == p.to_local().data_ptr(),
        "of a sum": shard_of(DTensor.from_local(x / 2, mesh, [Partial()]), p).equal(own),
        # a kernel reads it by its address, which a collective that is under way has none of
        "under way": type(local(p.redistribute(placements=[Replicate()], async_op=True))) is torch.Tensor,
        "copy": copy.to_local().equal(trained.to_local().bfloat16()) and copy.to_local().any().item(),
        # for a parameter that is no DTensor
        "whole": shard_of(p, x).equal(x),
        # without a word from rank to rank: each cuts its own
        "of a plain tensor": shard_of(x + dist.get_rank(), p).equal(own + dist.get_rank()),
    }


def test_what_a_rank_holds():
    for found in run_distributed(on_two, 2):
        assert all(found.values()), found
