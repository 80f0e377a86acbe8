"""Small feed-forward layers, and what two ranks compute of one, of whose weights each holds half; and a
watched run."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import coat_ds
from coat_ds.watch.readings import Reading
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


class Block(nn.Module):
    """Plain torch."""

    def __init__(self, width=64, norm=nn.RMSNorm, act=nn.SiLU, inner=128):
        super().__init__()
        self.norm, self.act = norm(width), act()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


def plain(norm=nn.RMSNorm, act=nn.SiLU, **sizes):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(norm=norm, act=act, **sizes) for _ in range(2))).bfloat16()


def rewritten(self, x):
    """The forward of a linear layer, written differently."""
    y = x @ self.weight.t()
    return y if self.bias is None else y + self.bias


def tokens(rows=32, seed=1):
    return torch.randn(2, rows, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


def in_two_parts(bias: bool) -> tuple[Net, torch.Tensor, torch.Tensor]:
    """A net with the gradients of its parameters, its output for `tokens()`, and the tokens' gradient for an
    output gradient of ones: as if the parts were FP8 layers of one process, joined, or summed in BF16."""
    net, x = Net(bias=bias), tokens().requires_grad_()
    ups, downs = net.up.weight.chunk(2), net.down.weight.chunk(2, 1)
    biases = net.up.bias.chunk(2) if bias else (None, None)
    parts = [fp8_linear(x, up, one).relu() for up, one in zip(ups, biases, strict=True)]
    y = sum(fp8_linear(part, down) for part, down in zip(parts, downs, strict=True))
    y = y + net.down.bias if bias else y
    y.backward(torch.ones_like(y))
    return net, y.detach(), x.grad


def whole(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients, gathered where they are DTensors."""
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}


def watched(model: nn.Module, batch: dict) -> tuple[list[float], Reading]:
    """The losses of three steps, and the reading of the last one."""
    optimizer, readings = coat_ds.CoatAdamW(model.named_parameters(), lr=1e-3, min_numel=0), []
    watch, losses = coat_ds.watch.Watch(model, optimizer, {"every": 1}, [readings.append]), []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.end_step()
        losses.append(loss.item())
    watch.close()
    return losses, readings[-1]


def check_watched(ranks: list[tuple[list[float], Reading]]) -> None:
    """Ranks are alike; tensors and layers bear the names of the model alone, tied ones once."""
    assert ranks[0] == ranks[1]
    groups = ranks[0][1].groups
    for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"):
        assert groups[f"model.layers.*.{name}"]["input_flushed"] < 0.5, name
    states = {name for name, figures in groups.items() if "update_error" in figures}
    # embeddings, and seven in each layer
    assert len(states) == 8 and "model.embed_tokens.weight" in states
