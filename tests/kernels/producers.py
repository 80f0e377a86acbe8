"""What defers its output or its input's gradient, alone and between two linear layers."""

import torch

from coat_kernels import activation as act
from coat_kernels import norm, rope
from coat_kernels.deferred import Deferred
from coat_kernels.fp8 import E4M3, E5M2
from coat_kernels.linear import fp8_linear
from coat_kernels.norm import residual
from coat_kernels.origin import origin_of
from coat_kernels.tensorwise import PredictedScale


class Activation:
    """Takes the place of a module with an activation: what it defers, and the same without."""

    def __init__(self, device, shape=(3, 7), f=48, gated=True):
        self.gated = gated
        self.x = torch.randn(*shape, (1 + gated) * f, device=device, dtype=torch.bfloat16)
        self.scales = {"y_scale": PredictedScale(E4M3), "grad_scale": PredictedScale(E5M2)}

    def input(self):
        return self.x.clone().requires_grad_()

    def __call__(self, x, deferred=True):
        return act.activation(x, "silu", gated=self.gated, **(self.scales if deferred else {}))


class Norm:
    """The same for a norm, which defers its output alone."""

    def __init__(self, device, shape=(3, 7), h=48):
        self.x = torch.randn(*shape, h, device=device, dtype=torch.bfloat16)
        parameters = torch.randn(2, h, device=device)
        self.weight, self.bias = parameters[0], parameters[1]
        self.scales = {"y_scale": PredictedScale(E4M3)}

    def input(self):
        return self.x.clone().requires_grad_()

    def __call__(self, x, deferred=True):
        return norm.layer_norm(x, self.weight, self.bias, 1e-5, **(self.scales if deferred else {}))


class Rotation:
    """The same for rotary positions, which defer their input's gradient alone."""

    # tokens, batch, groups, queries in a group, channels, rotated channels
    def __init__(self, device, shape=(3, 3, 1, 2, 16, 16)):
        s, b, groups, m, d, r = shape
        self.x = torch.randn(s, b, groups * (m + 2) * d, device=device, dtype=torch.bfloat16)
        angles = torch.rand(s, r // 2, device=device).repeat(1, 2)
        self.rest = angles.cos(), angles.sin(), groups, d
        self.scales = {"grad_scale": PredictedScale(E5M2)}

    def input(self):
        return self.x.clone().requires_grad_()

    def __call__(self, x, deferred=True):
        parts = rope.rotate_qkv(x, *self.rest, **(self.scales if deferred else {}))
        # gradients as attention leaves them: not contiguous
        return torch.cat([part.transpose(0, 1).flatten(2) for part in parts], -1).transpose(0, 1)


class Addition:
    """The same for a residual addition, of which no product predicts a scale."""

    def __init__(self, device, shape=(3, 7), h=48):
        self.x, self.branch = torch.randn(2, *shape, h, device=device, dtype=torch.bfloat16)
        self.scales = {"y_scale": None}

    def input(self):
        return self.x.clone().requires_grad_()

    def __call__(self, x, deferred=True):
        defers = deferred and residual.may_defer_add(x, self.branch)
        return (residual.deferred_add if defers else residual.residual_add_reference)(x, self.branch)


PRODUCERS = {"activation": Activation, "norm": Norm, "rotation": Rotation}


def same(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def layer(producer, deferred, weights=(True, True), between=lambda t: t, formats=None):
    """Linear, producer, linear, as in a layer: the output and all gradients."""
    torch.manual_seed(1)
    x = producer.input()
    n = producer(x.detach(), False).shape[-1]
    device, size = x.device, x.shape[-1]
    w1, w2 = (
        torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(0.2).requires_grad_(trains)
        for shape, trains in zip(((size, size), (32, n)), weights, strict=True)
    )
    y1 = between(fp8_linear(x, w1, formats=formats))
    y = producer(y1, deferred)
    assert isinstance(y, Deferred) == (deferred and "y_scale" in producer.scales)
    y2 = fp8_linear(y, w2, origin=origin_of(y), formats=formats)
    inputs = [t for t in (x, w1, w2) if t.requires_grad]
    grad = torch.randn(y2.shape, device=device).to(y2)
    return y2, *torch.autograd.grad(y2, inputs, grad)


class Seen:
    def __init__(self):
        self.grad = None

    def keep(self, y):
        y.register_hook(self._hook)
        return y

    def _hook(self, grad):
        self.grad = grad
