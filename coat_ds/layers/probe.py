"""What a module computes, found by running it on a few numbers.

The module that runs is a shadow: an object of the same class and attributes whose parameters are small ones
of its own. So it does not matter where the real ones are: on another device, on none (meta), or spread over
ranks. A module whose forward was patched, on the instance or on the class, is run as it is patched.
"""

import contextlib
import itertools
import types
from typing import NamedTuple

import torch
from torch import nn

from coat_kernels.activation import KINDS, value_and_slope_reference

EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps")
# of FP32 results of the same formula in another order
TOLERANCE = 1e-5


def shape_of(p: torch.Tensor) -> torch.Size:
    """The shape of a whole parameter, also where ZeRO-3 has taken it away."""
    return torch.Size(getattr(p, "ds_shape", p.shape))


def device_of(module: nn.Module) -> torch.device:
    """Where to run a shadow: with the module, whose kernels may run nowhere else, or on the CPU."""
    for p in module.parameters():
        return p.device if p.device.type != "meta" else torch.device("cpu")
    return torch.device("cpu")


def shadow(module: nn.Module, parameters: dict | None = None, children: dict | None = None) -> nn.Module:
    """A module like `module`, in evaluation, with other parameters and children and without hooks."""
    copy = object.__new__(type(module))
    fresh = nn.Module().__dict__
    copy.__dict__.update({**module.__dict__, **{k: v for k, v in fresh.items() if k != "training"}})
    copy._parameters = dict(parameters or {})
    copy._buffers = dict(module._buffers)
    copy._modules = dict(module._modules if children is None else children)
    copy.__dict__["training"] = False
    own = module.__dict__.get("forward")
    if isinstance(own, types.MethodType) and own.__self__ is module:
        copy.__dict__["forward"] = types.MethodType(own.__func__, copy)
    return copy


def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """What `module` makes of `x`, FP32 on the CPU; None if it makes something else than one tensor."""
    # whatever a foreign forward raises on a made-up input says that it is not what was expected
    with contextlib.suppress(Exception), torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        y = module(x)
        if isinstance(y, torch.Tensor):
            return y.float().cpu()
    return None


def close(y: torch.Tensor | None, expected: torch.Tensor) -> bool:
    return (
        y is not None
        and y.shape == expected.shape
        and bool((y - expected).abs().amax() <= TOLERANCE * expected.abs().amax())
    )


def numbers(*shape: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """The same normal random numbers each time, whatever the global generators are at."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


class NormForm(NamedTuple):
    """How a norm computes; `eps` is None where it is the least step of FP32, torch's default."""

    layer_norm: bool
    zero_centered: bool
    eps: float


def norm_form(module: nn.Module) -> NormForm | None:
    """How `module` computes if it is RMSNorm or LayerNorm over its last dimension, else None."""
    names = set(module._parameters)
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if module._modules or names - {"weight", "bias"} or weight is None or len(shape_of(weight)) != 1:
        return None
    if isinstance(module, nn.RMSNorm) and module.eps is None:
        eps = torch.finfo(torch.float32).eps
    else:
        eps = next((e for e in (getattr(module, n, None) for n in EPS_NAMES) if isinstance(e, float)), None)
    if eps is None or (bias is not None and shape_of(bias) != shape_of(weight)):
        return None
    h, device = shape_of(weight)[0], device_of(module)
    w, b = 1 + numbers(h, device=device, seed=1) / 4, numbers(h, device=device, seed=2)
    parameters = {"weight": nn.Parameter(w), "bias": None if bias is None else nn.Parameter(b)}
    like = shadow(module, {name: parameters[name] for name in module._parameters})
    # in the second row, eps is half of what is under the root
    x = numbers(2, h, device=device, seed=3) * torch.tensor([[1.0], [eps**0.5]], device=device) + eps**0.5
    y = run(like, x)
    if y is None:
        return None
    x, w, b = x.cpu(), w.cpu(), 0 if bias is None else b.cpu()
    for layer_norm in (False, True):
        c = x - x.mean(1, keepdim=True) if layer_norm else x
        normed = c * torch.rsqrt(c.square().mean(1, keepdim=True) + eps)
        for zero_centered in (False, True):
            expected = normed * (w + 1 if zero_centered else w) + b
            # the kernels add a bias to a LayerNorm alone
            if (layer_norm or bias is None) and close(y, expected):
                return NormForm(layer_norm, zero_centered, eps)
    return None


def activation_kind(module: nn.Module | types.FunctionType) -> str | None:
    """The name in `coat_kernels.activation` of the elementwise function that `module` is, else None."""
    if isinstance(module, nn.Module) and (module._modules or module._parameters):
        return None
    x = torch.linspace(-8, 8, 513)[None]
    y = run(module, x)
    for kind in KINDS:
        if close(y, value_and_slope_reference(x, kind)[0]):
            return kind
    return None


def is_product(module: nn.Module, transposed: bool) -> bool:
    """Whether `module` is x W^T + b, or x W + b if `transposed`, of its `weight` and `bias`."""
    device, bias = device_of(module), module._parameters.get("bias")
    inputs, outputs = 16, 24
    w = numbers(*((inputs, outputs) if transposed else (outputs, inputs)), device=device, seed=1)
    b = numbers(outputs, device=device, seed=2)
    parameters = {"weight": nn.Parameter(w), "bias": None if bias is None else nn.Parameter(b)}
    like = shadow(module, {name: parameters[name] for name in module._parameters})
    # Conv1D's names of its sizes, one of which it reads
    like.__dict__.update(nx=inputs, nf=outputs)
    x = numbers(3, inputs, device=device, seed=3)
    expected = x @ (w if transposed else w.t()) + (0 if bias is None else b)
    return close(run(like, x), expected.cpu())


class GatedForm(NamedTuple):
    """Names of the children of a gated feed-forward layer; `up` is None where `gate` makes both."""

    gate: str
    up: str | None
    down: str
    kind: str


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of whatever stands in a linear layer's place."""
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return sizes if all(isinstance(s, int) for s in sizes) else None


def gated_form(module: nn.Module) -> GatedForm | None:
    """The children of `module` if it is down(a(gate(x)) * up(x)), with a known a, else None."""
    if module._parameters or not 2 <= len(module._modules) <= 5:
        return None
    sizes = {name: _sizes(m) for name, m in module._modules.items() if m is not None}
    linears = {name: pair for name, pair in sizes.items() if pair}
    for roles in itertools.permutations(linears):
        found = None
        if len(roles) == 3:
            found = _gated(module, linears, *roles)
        elif len(roles) == 2:
            found = _gated(module, linears, roles[0], None, roles[1])
        if found:
            return found
    return None


def _gated(module: nn.Module, linears: dict, gate: str, up: str | None, down: str) -> GatedForm | None:
    """The form of `module` if its children have these roles."""
    f, h = linears[down]
    if linears[gate] != (h, f if up else 2 * f) or (up and linears[up] != (h, f)):
        return None
    device, (small_h, small_f) = device_of(module), (16, 24)
    x = numbers(3, small_h, device=device, seed=9)
    weights = {down: numbers(small_h, small_f, device=device, seed=1) / small_f**0.5}
    weights[gate] = numbers(small_f if up else 2 * small_f, small_h, device=device, seed=2) / small_h**0.5
    g, u = x @ weights[gate].t(), None
    if up:
        weights[up] = numbers(small_f, small_h, device=device, seed=3) / small_h**0.5
        u = x @ weights[up].t()
    else:
        g, u = g.chunk(2, -1)
    small = {}
    for name, weight in weights.items():
        small[name] = nn.Linear(*reversed(weight.shape), bias=False, device=device)
        small[name].weight = nn.Parameter(weight)
    y = run(shadow(module, {}, {**module._modules, **small}), x)
    for kind in KINDS:
        if close(y, ((value_and_slope_reference(g, kind)[0] * u) @ weights[down].t()).cpu()):
            return GatedForm(gate, up, down, kind)
    return None
