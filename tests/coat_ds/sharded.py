"""A small model whose parameters are DTensors, and its training."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import coat_ds

FP32 = {"exp_avg_format": "fp32", "exp_avg_sq_format": "fp32"}
VOCABULARY = 131


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 256), nn.Linear(256, width)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def build(width=128, dtype=torch.float32):
    """With 128, rows are whole groups. Embedding and head are cut unevenly over four ranks; of the three rows
    of the last layer one rank holds none.
    """
    torch.manual_seed(0)
    layers = nn.Embedding(VOCABULARY, width), Block(width), nn.Linear(width, VOCABULARY)
    return nn.Sequential(*layers, nn.Linear(VOCABULARY, 3, bias=False)).to(dtype)


def sharded(net, kind="fsdp", **options):
    device, size = next(net.parameters()).device.type, dist.get_world_size()
    if kind == "fsdp":
        mesh = init_device_mesh(device, (size,))
    else:
        mesh = init_device_mesh(device, (2, size // 2), mesh_dim_names=("outer", "inner"))
    if kind == "tp":
        parallelize_module(net[1], mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["outer"]
    for module in (net[1], net):
        fully_shard(module, mesh=mesh, **options)
    return net


def coat(net, **options):
    return coat_ds.CoatAdamW(net.named_parameters(), lr=1e-2, **options)


def train(net, optimizer, steps, prepare=None):
    losses = []
    # ranks on the CPU see no GPU
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for step in steps:
        ids = torch.randint(0, VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(step)).to(device)
        loss = nn.functional.cross_entropy(net(ids).float().flatten(0, 1), ids.flatten() % 3)
        loss.backward()
        optimizer.step(**(prepare(net) if prepare else {}))
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def start(backend="gloo"):
    warnings.simplefilter("ignore")
    dist.init_process_group(backend)
