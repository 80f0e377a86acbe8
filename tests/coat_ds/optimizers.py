"""Parameters, gradients and optimizers that the tests of CoatAdamW share."""

import io

import torch

from coat_ds import CoatAdamW
from coat_ds.optim.options import MOMENTS

SHAPES = [(33, 70), (130,), (1,), (), (0,), (257,), (8, 4, 5)]


def parameters(dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(s, generator=generator).to(device, dtype) for s in SHAPES]
    # a transposed weight, which is not contiguous
    made.append(torch.randn(40, 50, generator=generator).to(device, dtype).t())
    return [torch.nn.Parameter(p) for p in made]


def set_grads(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        g = torch.randn(p.shape, generator=generator) * torch.rand(p.shape, generator=generator)
        p.grad = g.to(p.device, p.dtype)


def codes(optimizer):
    return [
        t.clone()
        for group in optimizer.param_groups
        for p in group["params"]
        for name in MOMENTS
        for t in optimizer.state[p][name].piece.storage
    ]


def assert_equal(xs, ys):
    for x, y in zip(xs, ys, strict=True):
        assert torch.equal(x, y)


FP32 = {"exp_avg_format": "fp32", "exp_avg_sq_format": "fp32"}


def trained(steps=3, **options):
    params = parameters()
    optimizer = CoatAdamW(params, min_numel=100, **options)
    for step in range(steps):
        set_grads(params, step)
        optimizer.step()
    return params, optimizer


def through_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
