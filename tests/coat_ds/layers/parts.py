"""A small feed-forward layer, and what two ranks compute of it that hold half of its weights each."""

import torch
from torch import nn

from coat_kernels.linear import fp8_linear


class Net(nn.Module):
    def __init__(self, norm=None, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.norm = norm
        self.up, self.down = nn.Linear(64, 96, bias), nn.Linear(96, 64, bias)
        self.bfloat16()
        for p in self.parameters():
            nn.init.normal_(p, std=0.2)

    def forward(self, x):
        x = x if self.norm is None else self.norm(x)
        return self.down(self.up(x).relu())


def tokens(rows=32, seed=1):
    return torch.randn(2, rows, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


def in_two_parts(bias: bool) -> tuple[Net, torch.Tensor, torch.Tensor]:
    """A net with the gradients of its parameters, its output for `tokens()`, and the gradient of those, where
    the output's is one: as if the parts were FP8 layers of one process, joined, or summed in BF16."""
    net, x = Net(bias=bias), tokens().requires_grad_()
    ups, downs = net.up.weight.chunk(2), net.down.weight.chunk(2, 1)
    biases = net.up.bias.chunk(2) if bias else (None, None)
    parts = [fp8_linear(x, up, one).relu() for up, one in zip(ups, biases, strict=True)]
    y = sum(fp8_linear(part, down) for part, down in zip(parts, downs, strict=True))
    y = y + net.down.bias if bias else y
    y.backward(torch.ones_like(y))
    return net, y.detach(), x.grad
