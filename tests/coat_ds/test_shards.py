"""What a rank holds of DTensors, as the optimizer reads it; stochastic rounding of parts, and parameters that
Accelerate and FSDP1 exchange. Runs with DTensors: test_dtensor.py."""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import coat_ds
from coat_ds import CoatAdamW
from coat_ds.optim.shards import local, shard_of
from tests.coat_ds.sharded import FP32, build, coat, start, train
from tests.util import run_distributed


def on_two():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(12.0).view(6, 2)
    own = x.chunk(2)[dist.get_rank()]
    p = distribute_tensor(x, mesh, [Shard(0)])
    trained = torch.nn.Parameter(p.clone())
    optimizer = CoatAdamW([trained])
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
    with pytest.raises(ValueError, match="has exp_avg of .*laid out as .*Shard.*expected .*Replicate"):
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
        # for a parameter that is no DTensor
        "whole": shard_of(p, x).equal(x),
        # without a word from rank to rank: each cuts its own
        "of a plain tensor": shard_of(x + dist.get_rank(), p).equal(own + dist.get_rank()),
    }


def test_shard_of_is_what_a_rank_holds():
    for found in run_distributed(on_two, 2):
        assert all(found.values()), found


def prepared_by_accelerate():
    """States of an optimizer that Accelerate's FSDP2 prepared with the model. Norms are large enough to be
    compressed."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    dist.init_process_group("gloo")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = Accelerator(cpu=True)
    # which it takes for GPUs alone
    accelerator.state._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    accelerator.state.distributed_type = DistributedType.FSDP
    net = build()
    whole = weakref.ref(net[0].weight)
    net, optimizer = accelerator.prepare(net, coat(net, min_numel=16, keep_fp32=("*norm*",)))
    freed = whole() is None
    train(net, optimizer, range(2))
    found = optimizer.optimizer
    sharded = all(isinstance(p, DTensor) for group in found.param_groups for p in group["params"])
    return sharded, freed, coat_ds.state_bytes(found)["by_codec"]["fp32"]


def test_coat_adamw_keeps_names_when_accelerate_exchanges_parameters():
    """It puts DTensors in the place of what the optimizer was given, and frees that."""
    pytest.importorskip("accelerate")
    # half of a norm of 128 weights
    assert run_distributed(prepared_by_accelerate, 2) == [(True, True, 64 * 8)] * 2


def rounded(dimension):
    """Weights cut in rows or columns over all ranks, after stochastically rounded steps, and the weight that
    all of it gives in one piece."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(37, 128, generator=generator).bfloat16()
    whole = nn.Parameter(start.clone())
    cut = nn.Parameter(distribute_tensor(start, mesh, [Shard(dimension)], src_data_rank=None))
    optimizers = [coat_ds.CoatAdamW([p], lr=1e-3, bf16_params="stochastic", **FP32) for p in (whole, cut)]
    for _ in range(4):
        whole.grad = torch.randn(37, 128, generator=generator).bfloat16()
        cut.grad = distribute_tensor(whole.grad, mesh, [Shard(dimension)], src_data_rank=None)
        for optimizer in optimizers:
            optimizer.step()
    return whole.detach(), cut.detach().full_tensor()


def test_stochastic_rounding_of_shards_is_that_of_one_process():
    for whole, cut in run_distributed(rounded, 3, 0):
        assert whole.equal(cut)


def stepped_under_fsdp1():
    """What is logged about BF16 parameters with remainders, and other moments after a load."""
    start()
    out = []
    for whole_parameters in (True, False):
        for dtype, options in (
            (torch.bfloat16, {}),
            (torch.bfloat16, {"bf16_params": "stochastic"}),
            (None, {}),
        ):
            wrapped = FullyShardedDataParallel(
                build(dtype=dtype or torch.float32),
                use_orig_params=whole_parameters,
                device_id=torch.device("cpu"),
            )
            optimizer = coat(wrapped, **options)
            try:
                train(wrapped, optimizer, range(2))
                states = get_optimizer_state_dict(wrapped, optimizer)
                set_optimizer_state_dict(wrapped, optimizer, states)
                out.append(optimizer.pop_load_summary().partition(" ")[2])
            except TypeError as error:
                out.append(f"{len(optimizer.state)} states: {error}")
    return out


def test_fsdp1_saves_fp32_parameters_and_refuses_remainders():
    """It ended in "Expected dtype == info.dtype" where a checkpoint was written."""
    for said in run_distributed(stepped_under_fsdp1, 2):
        for refused, *saved in (said[:3], said[3:]):
            assert refused.startswith("0 states: CoatAdamW: FullyShardedDataParallel cannot save what")
            assert saved == ["restored to the bit"] * 2
