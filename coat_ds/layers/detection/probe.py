"""Finds out what a module computes, by running it on a few numbers.

The module that runs is a shadow: an object of the same class with the same attributes, but with small
parameters of its own. So the real parameters may be anywhere: on another device, on "meta", or split over
ranks. A forward that was patched, on the instance or on the class, runs with the patch.

    norm_form         a norm, against RMSNorm and LayerNorm, each with weights around 0 and around 1
    activation_kind   an elementwise module, against the functions of `coat_kernels.activation`
    is_linear         a module with a matrix, against x W^T + b
    gated_form        a module with two or three linear layers, against down(a(gate(x)) * up(x))

A module is not recognised if its forward has a second argument, raises an exception on the CPU and on the
module's own GPU, or gives results that differ by more than `TOLERANCE` of the largest value.
"""

import contextlib
import copy
import functools
import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from coat_ds.optim.shards import shape_of
from coat_kernels.activation import KINDS, value_and_slope_reference

T = TypeVar("T")
EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps")
# relative error between FP32 results of the same formula in another order of operations
TOLERANCE = 1e-5
# dtype and device of numbers made here, independent of torch's defaults
PLAIN: Any = {"dtype": torch.float32, "device": "cpu"}


class ProbeDevice(NamedTuple):
    """Where to run a shadow."""

    device: torch.device
    dtype: torch.dtype

    def numbers(self, *shape: int, seed: int) -> torch.Tensor:
        """The same normal random numbers in each call, independent of the global generators."""
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), **PLAIN)
        return x.to(self.device, self.dtype)


def probe_devices(module: nn.Module) -> list[ProbeDevice]:
    """First the CPU in FP64, which no setting makes less precise. Then the module's GPU, since some forwards
    have kernels that run only there."""
    found = [ProbeDevice(torch.device("cpu"), torch.float64)]
    device = next((p.device for p in module.parameters()), found[0].device)
    if device.type not in ("cpu", "meta"):
        found.append(ProbeDevice(device, torch.float32))
    return found


def first_found(module: nn.Module, find: Callable[[ProbeDevice], T | None]) -> T | None:
    """The first result of find(device), over `probe_devices`, that is true; else None."""
    return next((found for probe in probe_devices(module) if (found := find(probe))), None)


def shadow(module: nn.Module, parameters: dict | None = None, children: dict | None = None) -> nn.Module:
    """A copy of `module` with other parameters and children and without hooks. It is in training mode, since
    a model that was just loaded is not and would hide its dropout. Its buffers are copies, since modules such
    as BatchNorm write to them."""
    like = object.__new__(type(module))
    like.__dict__.update({**module.__dict__, **nn.Module().__dict__})
    like._parameters = dict(parameters or {})
    like._buffers = _copied(module._buffers)
    children = module._modules if children is None else children
    like._modules = {name: child and _training(child) for name, child in children.items()}
    if "gradient_checkpointing" in like.__dict__:
        like.__dict__["gradient_checkpointing"] = False
    own = module.__dict__.get("forward")
    if isinstance(own, types.MethodType) and own.__self__ is module:
        like.__dict__["forward"] = types.MethodType(own.__func__, like)
    return like


def _training(module: nn.Module) -> nn.Module:
    """A copy of `module` in training mode, with copies of its buffers."""
    copied = copy.copy(module)
    copied.__dict__["training"] = True
    copied._buffers = _copied(module._buffers)
    copied._modules = {name: child and _training(child) for name, child in module._modules.items()}
    return copied


def _copied(buffers: dict) -> dict:
    return {name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()}


def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """The output of `module` for `x`, as FP64 on the CPU; None unless the output is one tensor."""
    # any exception on the made-up input means that the module is not of the expected form
    device, gpus = x.device.type, [] if x.device.type == "cpu" else [x.device]
    rng = torch.random.fork_rng(gpus, device_type=device)
    with contextlib.suppress(Exception), torch.no_grad(), torch.autocast(device, enabled=False), rng:
        y = module(x)
        if isinstance(y, torch.Tensor):
            return y.double().cpu()
    return None


def uses_interface(module: nn.Module) -> bool:
    """Whether the module's forward looks up its attention function in transformers."""
    forward = inspect.unwrap(type(module).forward)
    return "ALL_ATTENTION_FUNCTIONS" in getattr(getattr(forward, "__code__", None), "co_names", ())


def takes_one_input(module: nn.Module) -> bool:
    """Whether its forward has no second argument, such as a gate. A run without the argument would not show
    what the module computes from it."""
    try:
        _, *more = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        # a forward in another language than Python, or one without arguments
        return False
    return all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in more)


def linear_of(weight: torch.Tensor) -> nn.Linear:
    """A linear layer with this weight. Its construction draws no random numbers."""
    linear = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    linear.weight = nn.Parameter(weight)
    return linear


def close(y: torch.Tensor | None, expected: torch.Tensor) -> bool:
    if y is None or y.shape != expected.shape:
        return False
    expected = expected.double().cpu()
    return bool((y - expected).abs().amax() <= TOLERANCE * expected.abs().amax())


class NormForm(NamedTuple):
    """How a norm computes."""

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
    if not takes_one_input(module):
        return None
    return first_found(module, lambda probe: _norm_form(module, eps, probe))


def _norm_form(module: nn.Module, eps: float, probe: ProbeDevice) -> NormForm | None:
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    h = shape_of(weight)[0]
    # norms compute in FP32 or FP64
    probe = ProbeDevice(probe.device, torch.float32)
    w, b = 1 + probe.numbers(h, seed=1) / 4, probe.numbers(h, seed=2)
    parameters = {"weight": nn.Parameter(w), "bias": None if bias is None else nn.Parameter(b)}
    like = shadow(module, {name: parameters[name] for name in module._parameters})
    # In the second row, eps is half of the sum under the root. Of three dimensions the last one is not that
    # of channels, over which GroupNorm with one group norms
    x = probe.numbers(1, 2, h, seed=3)
    x[:, 1] *= eps**0.5
    y = run(like, x)
    x, w, b = x.double(), w.double(), 0 if bias is None else b.double()
    for layer_norm in (False, True):
        c = x - x.mean(-1, keepdim=True) if layer_norm else x
        normed = c * torch.rsqrt(c.square().mean(-1, keepdim=True) + eps)
        for zero_centered in (False, True):
            expected = normed * (w + 1 if zero_centered else w) + b
            # the kernels support a bias only for LayerNorm
            if (layer_norm or bias is None) and close(y, expected):
                return NormForm(layer_norm, zero_centered, eps)
    return None


def activation_kind(module: nn.Module | types.FunctionType) -> str | None:
    """The name in `coat_kernels.activation` of the elementwise function that `module` computes, else None."""
    if isinstance(module, nn.Module) and (
        module._modules or module._parameters or not takes_one_input(module)
    ):
        return None
    x = torch.linspace(-8, 8, 513, **PLAIN)[None]
    y = run(shadow(module) if isinstance(module, nn.Module) else module, x.clone())
    for kind in KINDS:
        if close(y, value_and_slope_reference(x, kind)[0]):
            return kind
    return None


def writes_into_its_input(module: nn.Module) -> bool:
    """Whether an elementwise `module` works in place, so that later readers of its input see the change."""
    x = torch.linspace(-8, 8, 513, **PLAIN)[None]
    before = x.clone()
    run(shadow(module), x)
    return not x.equal(before)


def is_linear(module: nn.Module, transposed: bool) -> bool:
    """Whether `module` computes x W^T + b, or x W + b if `transposed`, with its `weight` and `bias`."""
    if not takes_one_input(module):
        return False
    return bool(first_found(module, lambda probe: _is_linear(module, transposed, probe)))


def _is_linear(module: nn.Module, transposed: bool, probe: ProbeDevice) -> bool:
    bias, inputs, outputs = module._parameters.get("bias"), 16, 24
    w = probe.numbers(*((inputs, outputs) if transposed else (outputs, inputs)), seed=1)
    b = probe.numbers(outputs, seed=2)
    parameters = {"weight": nn.Parameter(w), "bias": None if bias is None else nn.Parameter(b)}
    like = shadow(module, {name: parameters[name] for name in module._parameters})
    # the attributes of Conv1D with its sizes; its forward reads nf
    like.__dict__.update(nx=inputs, nf=outputs)
    x = probe.numbers(3, inputs, seed=3)
    expected = x @ (w if transposed else w.t()) + (0 if bias is None else b)
    return close(run(like, x), expected)


class GatedForm(NamedTuple):
    """Names of the children of a gated feed-forward layer. `up` is None if `gate` computes both halves."""

    gate: str
    up: str | None
    down: str
    kind: str


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear layer or of a module that replaces one; None for other modules."""
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return sizes if all(isinstance(s, int) for s in sizes) else None


def gated_form(module: nn.Module) -> GatedForm | None:
    """The roles of the children if `module` computes down(a(gate(x)) * up(x)) with a known a, else None."""
    if module._parameters or not 2 <= len(module._modules) <= 5 or not takes_one_input(module):
        return None
    sizes = {name: _sizes(m) for name, m in module._modules.items() if m is not None}
    linears = {name: pair for name, pair in sizes.items() if pair}
    for roles in itertools.permutations(linears):
        if len(roles) == 3:
            gate, up, down = roles
        elif len(roles) == 2:
            (gate, down), up = roles, None
        else:
            return None
        f, h = linears[down]
        if linears[gate] != (h, f if up else 2 * f) or (up and linears[up] != (h, f)):
            continue
        find = functools.partial(_gated, module, gate, up, down)
        if found := first_found(module, find):
            return found
    return None


def _gated(module: nn.Module, gate: str, up: str | None, down: str, probe: ProbeDevice) -> GatedForm | None:
    h, f = 16, 24
    x = probe.numbers(3, h, seed=9)
    weights = {down: probe.numbers(h, f, seed=1) / f**0.5}
    weights[gate] = probe.numbers(f if up else 2 * f, h, seed=2) / h**0.5
    g, u = x @ weights[gate].t(), None
    if up:
        weights[up] = probe.numbers(f, h, seed=3) / h**0.5
        u = x @ weights[up].t()
    else:
        g, u = g.chunk(2, -1)
    small = {}
    for name, weight in weights.items():
        small[name] = linear_of(weight)
    y = run(shadow(module, {}, {**module._modules, **small}), x)
    for kind in KINDS:
        if close(y, ((value_and_slope_reference(g, kind)[0] * u) @ weights[down].t())):
            return GatedForm(gate, up, down, kind)
    return None
