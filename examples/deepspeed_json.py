"""DeepSpeed with FP8 layers and 8-bit optimizer states: one key of its JSON. A tiny model that reads bytes.

    python examples/deepspeed_json.py
    torchrun --nproc-per-node 2 examples/deepspeed_json.py
    torchrun --nproc-per-node 2 examples/deepspeed_json.py --stage 3 --steps 40

Without GPUs it runs on the CPU, in less than a minute. The script itself does not mention COAT.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import deepspeed
import torch
from torch import nn
from torch.nn import functional as F

LENGTH, HIDDEN = 32, 128


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Predicts a byte from the LENGTH bytes before it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, HIDDEN // LENGTH)
        self.layers = nn.Sequential(FeedForward(), FeedForward())
        self.head = nn.Linear(HIDDEN, 256)

    def forward(self, ids):
        return self.head(self.layers(self.embedding(ids).flatten(1)))


# DeepSpeed reads the number of ranks from variables that a launcher sets; without one it looks for MPI
single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
os.environ.update({**single, "MASTER_PORT": "29500", **os.environ})

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--stage", type=int, default=2, help="of ZeRO")
args = parser.parse_args()

config = {
    "coat": {"enabled": True},
    "train_micro_batch_size_per_gpu": 256,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": args.stage},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
}

deepspeed.init_distributed()
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
torch.manual_seed(0)
engine, *_ = deepspeed.initialize(model=Model(), config=config)

files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:20]
data = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in files)), dtype=torch.uint8)
for step in range(args.steps):
    generator = torch.Generator().manual_seed(step * ranks + rank)
    starts = torch.randint(len(data) - LENGTH - 1, (256, 1), generator=generator)
    ids = data[starts + torch.arange(LENGTH + 1)].long().to(engine.device)
    loss = F.cross_entropy(engine(ids[:, :-1]).float(), ids[:, -1])
    engine.backward(loss)
    engine.step()
    if rank == 0:
        print(f"step {step + 1} loss {loss.item():.6f}")
