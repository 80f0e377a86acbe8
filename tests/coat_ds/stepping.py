"""Parameters that take steps of CoatAdamW with gradients in BF16."""

import torch

# a power of two is the same rate in FP32 and FP64
OPTIONS = {"lr": 2.0**-10, "betas": (0.9, 0.95), "weight_decay": 0.1}


def start(device, *sizes):
    generator = torch.Generator().manual_seed(7)
    return [torch.nn.Parameter((0.02 * torch.randn(n, generator=generator)).to(device)) for n in sizes]


def set_grads(params, step, scale=1.0):
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.device, torch.bfloat16).to(p.dtype)


def train(params, optimizer, steps=4, first=0):
    for step in range(first, first + steps):
        set_grads(params, step)
        optimizer.step()


def state_of(optimizer):
    return [
        t
        for group in optimizer.param_groups
        for p in group["params"]
        for name in ("exp_avg", "exp_avg_sq")
        for t in optimizer.state[p][name].piece.storage
    ]


def all_equal(xs, ys):
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))
