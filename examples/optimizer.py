"""The optimizer alone, in the place of torch.optim.AdamW: the same model with FP32 and with 8-bit states.

    python examples/optimizer.py

It runs on the CPU or a GPU, in a few seconds.
"""

import argparse

import torch
from torch import nn

import coat_ds

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--steps", type=int, default=200)
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


def train(optimizer_class) -> tuple[float, torch.optim.Optimizer]:
    """The last loss of a network that learns another, random one."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).to(device)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).to(device)
    optimizer = optimizer_class(model.named_parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for _ in range(args.steps):
        x = torch.randn(256, 64, device=device)
        loss = (model(x) - teacher(x).detach()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), optimizer


stock, _ = train(torch.optim.AdamW)
ours, optimizer = train(coat_ds.CoatAdamW)
print(optimizer.layout())
print(f"bytes of states per parameter: {coat_ds.state_bytes(optimizer)['bytes_per_parameter']:.3f}, AdamW 8")
print(f"last loss: CoatAdamW {ours:.8f}, AdamW {stock:.8f}")

# a checkpoint of one loads into the other: moments are written as FP32
loaded = torch.optim.AdamW(optimizer.param_groups[0]["params"])
loaded.load_state_dict(optimizer.state_dict())
weight = optimizer.param_groups[0]["params"][0]
print(f"first moment, from AdamW's own state: {loaded.state[weight]['exp_avg'].dtype}")
