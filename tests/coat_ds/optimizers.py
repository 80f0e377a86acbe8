"""Parameters, gradients and optimizers that the tests of CoatAdamW share."""

import io

import torch

from coat_ds import CoatAdamW
from coat_ds.optim.moment import Moment
from coat_ds.optim.options import MOMENTS

SHAPES = [(33, 70), (130,), (1,), (), (0,), (257,), (8, 4, 5)]


def parameters(dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(s, generator=generator).to(device, dtype) for s in SHAPES]
    # a transposed weight, which is not contiguous
    made.append(torch.randn(40, 50, generator=generator).to(device, dtype).t())
    return [torch.nn.Parameter(p) for p in made]


def encoded(x, piece_layout):
    """`x` as a moment."""
    return Moment.zeros(x.shape, piece_layout, x.device).encode_(x)


def set_grads(params, seed, scale=1.0):
    """Gradients that BF16 can represent, so that parameters of either type get the same ones."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.device, torch.bfloat16).to(p.dtype)


def start(device, *sizes):
    generator = torch.Generator().manual_seed(7)
    return [torch.nn.Parameter((0.02 * torch.randn(n, generator=generator)).to(device)) for n in sizes]


def train(params, optimizer, steps=4, first=0):
    for step in range(first, first + steps):
        set_grads(params, step)
        optimizer.step()


def codes(optimizer):
    return [
        t.clone()
        for group in optimizer.param_groups
        for p in group["params"]
        for name in MOMENTS
        for t in optimizer.state[p][name].pieces[0].storage
    ]


def all_equal(xs, ys):
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


def assert_equal(xs, ys):
    for x, y in zip(xs, ys, strict=True):
        assert torch.equal(x, y)


FP32 = {"exp_avg_format": "fp32", "exp_avg_sq_format": "fp32"}
# a power of two is the same rate in FP32 and FP64
OPTIONS = {"lr": 2.0**-10, "betas": (0.9, 0.95), "weight_decay": 0.1}


def trained(steps=3, **options):
    params = parameters()
    optimizer = CoatAdamW(params, min_numel=100, **options)
    train(params, optimizer, steps)
    return params, optimizer


def through_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def stored(optimizer):
    """All tensors of the states, in order."""
    out = []
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state.get(p, {})
        out += [
            t for name in ("exp_avg", "exp_avg_sq") if name in state for t in state[name].unpaired().stored()
        ]
        out += [state[name] for name in ("remainder", "step") if name in state]
    return [t.cpu() for t in out]
