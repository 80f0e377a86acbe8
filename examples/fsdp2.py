"""FP8 layers and 8-bit optimizer states under FSDP2, with torch.distributed.checkpoint, in plain PyTorch.

    torchrun --nproc-per-node 2 examples/fsdp2.py --steps 20
    torchrun --nproc-per-node 4 examples/fsdp2.py --steps 40 --resume

The second run goes on from the first one's checkpoint at another number of ranks. Without GPUs it runs on the
CPU. Two lines are COAT's: `convert` and `CoatAdamW`.
"""

import argparse
import sysconfig
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import coat_ds

VOCABULARY = 256


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 6 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x):
        q, k, v = (
            self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, hidden: int = 128, heads: int = 4, layers: int = 2, length: int = 128):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, hidden), nn.Embedding(length, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def text() -> torch.Tensor:
    """The bytes of some of the standard library's sources."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in islice(files, 50))), dtype=torch.uint8)


def batch(data: torch.Tensor, step: int, size: int = 8, length: int = 128) -> torch.Tensor:
    """This rank's part of the step's batch, int64 [size / ranks, length + 1]."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(data) - length - 1, (size,), generator=generator)
    mine = starts[dist.get_rank() :: dist.get_world_size(), None]
    return data[mine + torch.arange(length + 1)].long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="in all, those of the checkpoint included")
    parser.add_argument("--checkpoint", default="runs/fsdp2", help="folder that is written at the end")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    if on_gpu:
        torch.cuda.set_device(dist.get_node_local_rank())
    device = "cuda" if on_gpu else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    torch.manual_seed(0)
    model = coat_ds.convert(Model().to(device))
    # gathered in BF16; what the optimizer updates is FP32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    # after fully_shard, with names, by which norms keep FP32 moments
    optimizer = coat_ds.CoatAdamW(model.named_parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    first = 0
    if args.resume:
        weights, states = get_state_dict(model, optimizer)
        loaded = {"model": weights, "optimizer": states, "step": 0}
        dcp.load(loaded, checkpoint_id=args.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=loaded["optimizer"])
        first = loaded["step"]

    data = text()
    for step in range(first, args.steps):
        ids = batch(data, step).to(device)
        loss = F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {mean.item():.6f}")

    held = coat_ds.state_bytes(optimizer)
    if dist.get_rank() == 0:
        print(optimizer.layout())
        print(f"rank 0 holds {held['bytes_per_parameter']:.3f} bytes of AdamW states per parameter")
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states, "step": args.steps}, checkpoint_id=args.checkpoint)
    # a thread of gloo's that still frees a tensor while Python ends would abort (pytorch/pytorch#190489)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
