"""Converted models under FSDP2 train as in one process, and read no codes of a weight that has changed."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import coat_ds
from tests.families import FAMILIES
from tests.util import on_gpus, rel_rms, run_distributed

LLAMA = FAMILIES["llama"]


def shard(model, device, masters):
    """FP32 `masters` are gathered in BF16."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if masters else {}
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **policy)
    return fully_shard(model, mesh=mesh, **policy)


def train(model, device):
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    for step in range(3):
        # every rank sees the same batches, so that averages over ranks are exact; two a step
        for micro in range(2):
            batch = LLAMA.batch(seed=2 * step + micro, tokens=32)
            loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
            (loss / 2).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def losses_of_ranks(device):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    out = {"alone": train(coat_ds.convert(LLAMA.build().to(device)), device)}
    for cache in ("none", "fp8"):
        for masters in (False, True):
            model = LLAMA.build(torch.float32 if masters else torch.bfloat16).to(device)
            coat_ds.convert(model, {"weight_cache": cache})
            out[cache, masters] = train(shard(model, device, masters), device)
    model = coat_ds.convert(shard(LLAMA.build().to(device), device, masters=False))
    assert len(coat_ds.conversion_of(model).converted["linear"]) == 14
    out["sharded first"] = train(model, device)
    return out


def gradients_where_each_module_is_a_unit():
    """Gradients of a converted model in one process, and on both ranks."""
    dist.init_process_group("gloo")
    found, mesh = [], init_device_mesh("cpu", (2,))
    for sharded in (False, True):
        torch.manual_seed(0)
        parts = nn.RMSNorm(64), nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64)
        net = coat_ds.convert(nn.Sequential(*parts).bfloat16())
        if sharded:
            for part in (*parts, net):
                fully_shard(part, mesh=mesh)
        net(torch.randn(32, 64).bfloat16()).float().square().mean().backward()
        grads = [p.grad.full_tensor() if sharded else p.grad for p in net.parameters()]
        found.append([grad.clone() for grad in grads])
    return found


def test_fsdp2_norms_that_are_units_of_their_own():
    """Their weights are freed before linear layers read their outputs."""
    for alone, together in run_distributed(gradients_where_each_module_is_a_unit, 2):
        for expected, gradient in zip(alone, together, strict=True):
            # linear layers with FSDP's hooks save their inputs by themselves, in FP8
            assert rel_rms(gradient, expected) < 2**-4


def check(ranks):
    for losses in ranks:
        # the sums of two ranks' gradients are rounded to BF16, by 2^-9
        for found, expected in zip(losses["none", False], losses["alone"], strict=True):
            assert abs(found - expected) < 2**-7 * expected
        assert losses["none", False][-1] < losses["none", False][0] - 0.1
        # storage that FSDP uses again for other values would give other losses
        for masters in (False, True):
            assert losses["fp8", masters] == losses["none", masters]
        assert losses["sharded first"] == losses["none", False]
        assert losses["none", True] != losses["none", False]


def test_fsdp2_trains_as_one_process_on_two_ranks():
    check(run_distributed(losses_of_ranks, 2, "cpu"))


@on_gpus(2)
def test_fsdp2_trains_as_one_process_on_two_gpus():
    check(run_distributed(losses_of_ranks, 2, "cuda", gpus=True))
