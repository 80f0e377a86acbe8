"""Modules next to each other: hooks of users on them, readers that are no GEMMs, and empty batches."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)

import coat_ds
from tests.coat_ds.layers.measures import fp8_bound
from tests.util import rel_rms


class GatedFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(64, 128, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(128, 64, bias=False), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def models(*inside) -> tuple[nn.Module, nn.Module]:
    """The stock model in FP32, and the converted one in BF16 with the same weights."""
    stock = nn.Sequential(*inside).bfloat16()
    ours = coat_ds.convert(copy.deepcopy(stock))
    return stock.float(), ours


def of_norm():
    torch.manual_seed(0)
    return models(nn.RMSNorm(64, eps=1e-6), nn.Linear(64, 64))


def of_layer_norm():
    torch.manual_seed(0)
    return models(nn.LayerNorm(64), nn.Linear(64, 64))


def of_activation():
    torch.manual_seed(0)
    return models(nn.SiLU(), nn.Linear(64, 64))


def of_gated():
    torch.manual_seed(0)
    return models(nn.RMSNorm(64, eps=1e-6), GatedFeedForward())


def larger(y: torch.Tensor) -> None:
    # autograd does not see it, and codes of the old magnitude would saturate
    y.data.mul_(-8)


@pytest.mark.parametrize("everywhere", [False, True], ids=["own", "global"])
@pytest.mark.parametrize("before", [False, True], ids=["behind the producer", "in front of the reader"])
@pytest.mark.parametrize("build", [of_norm, of_activation, of_gated])
def test_converted_layers_multiply_what_hooks_write_unseen(build, before, everywhere):
    x, results = torch.randn(2, 32, 64).bfloat16(), []
    for model in build():
        place = model[1] if before else model[0]

        def edit(module, args, y=None, place=place):
            if module is place:
                larger(args[0] if y is None else y)

        own = place.register_forward_pre_hook if before else place.register_forward_hook
        of_all = register_module_forward_pre_hook if before else register_module_forward_hook
        with (of_all if everywhere else own)(edit):
            # the first forward may leave the output to the product: the second writes it
            for _ in range(2):
                model.zero_grad()
                y = model(x.to(next(model.parameters()).dtype, copy=True).requires_grad_())
                y.float().square().sum().backward()
        reader = getattr(model[1], "up_proj", model[1])
        results.append((y, reader.weight.grad))
    for expected, found in zip(*results, strict=True):
        assert rel_rms(found, expected) < fp8_bound(3)


@pytest.mark.parametrize(
    "kind", ["forward", "forward pre", "backward", "backward pre", "global", "global backward"]
)
@pytest.mark.parametrize("name", ["act_fn", "up_proj"])
def test_converted_layers_call_modules_with_hooks(name, kind):
    """Kernels call no activation, and multiply two layers as one."""
    _, model = of_gated()
    module, seen = getattr(model[1], name), []
    register = {
        "forward": module.register_forward_hook,
        "forward pre": module.register_forward_pre_hook,
        "backward": module.register_full_backward_hook,
        "backward pre": module.register_full_backward_pre_hook,
        "global": register_module_forward_hook,
        "global backward": register_module_full_backward_hook,
    }[kind]

    def hook(module, *_):
        seen.append(module)

    with register(hook):
        model(torch.randn(2, 32, 64).bfloat16().requires_grad_()).float().sum().backward()
    assert module in seen


@pytest.mark.parametrize("build", [of_norm, of_layer_norm, of_activation, of_gated])
def test_converted_layers_with_hooks_take_a_batch_of_nothing(build, device):
    """Alone, and between others."""
    _, model = build()
    model.to(device)
    some = torch.randn(32, 64, device=device).bfloat16()
    expected = model(some)
    x = torch.zeros(0, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    with torch.no_grad():
        assert model(x).shape == x.shape
    assert model(some).equal(expected)
