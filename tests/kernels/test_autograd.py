"""Autograd's rules for operations that save 8 bits: second derivatives are refused, in-place edits are
handled."""

import ast
import copy
import functools
import io
from pathlib import Path

import pytest
import torch

from coat_kernels.activation import ActivationOptions, activation
from coat_kernels.autograd.origin import maxima_of, origin_of
from coat_kernels.linear import fp8_linear
from coat_kernels.norm import NormOptions, normalize
from coat_kernels.rope import rotate_qkv
from tests.interpreter import take_kernels
from tests.util import rel_rms

ROOT = Path(__file__).parents[2]
ROWS, H, F = 24, 64, 96


def functions() -> dict[str, ast.FunctionDef]:
    """The `backward` of every `autograd.Function` in the project's source, in any scope."""
    found = {}
    for room in ("kernels", "megatron_ext", "coat_ds", "launch"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.ClassDef):
                    continue
                if any(ast.unparse(base).split(".")[-1] == "Function" for base in node.bases):
                    (backward,) = (n for n in node.body if getattr(n, "name", None) == "backward")
                    found[f"{room}/{path.stem}.{node.name}"] = backward
    return found


def test_every_autograd_function_is_once_differentiable():
    table = {name: [ast.unparse(d) for d in f.decorator_list] for name, f in functions().items()}
    assert len(table) >= 7
    assert set(map(tuple, table.values())) == {("staticmethod", "once_differentiable")}, table


def leaf(*shape, device, dtype=torch.float32):
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()


def operations(device) -> dict:
    """Functions of one activation [ROWS, H]: single operations, and operations chained as in layers."""
    weight, bias = leaf(H, device=device), leaf(H, device=device)
    square, gated = leaf(H, H, device=device), leaf(2 * F, H, device=device)
    down = leaf(H, F, device=device)
    angles = torch.rand(ROWS, 16, device=device)

    def stack(x):
        y = normalize(x, weight, None, NormOptions(1e-5))
        up = fp8_linear(y, gated, origin=origin_of(y))
        z = activation(up, ActivationOptions("silu", True))
        return x + fp8_linear(z, down, origin=origin_of(z))

    return {
        "rms_norm": lambda x: normalize(x, weight, None, NormOptions(1e-5)),
        "layer_norm": lambda x: normalize(x, weight, bias, NormOptions(1e-5, True)),
        "linear": lambda x: fp8_linear(x, square),
        "activation": lambda x: activation(x, ActivationOptions("gelu", False)),
        "swiglu": lambda x: activation(x, ActivationOptions("silu", True)),
        "rope": lambda x: torch.cat(rotate_qkv(x.view(ROWS, 1, H), angles.cos(), angles.sin(), 1, 16), 2),
        "stack": stack,
    }


@pytest.mark.parametrize("name", operations(torch.device("cpu")))
def test_operations_refuse_second_derivatives(device, name):
    """Refused both for a constant incoming gradient (that of a sum) and for any other. First derivatives are
    unaffected."""
    function = operations(device)[name]
    for loss_of in (torch.sum, lambda y: y.square().sum()):
        x = leaf(ROWS, H, device=device)
        loss = loss_of(function(x))
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(loss, x, create_graph=True)
        assert torch.autograd.grad(loss_of(function(x)), x)[0].isfinite().all()


@pytest.mark.parametrize("name", operations(torch.device("cpu")))
@pytest.mark.parametrize("trains", [True, False])
def test_operations_refuse_forward_mode(device, name, trains):
    function, x = operations(device)[name], torch.randn(ROWS, H, device=device)
    with torch.autograd.forward_ad.dual_level(), torch.set_grad_enabled(trains):
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        # torch's own error is a NotImplementedError
        with pytest.raises((RuntimeError, NotImplementedError)):
            function(dual)


class Stack:
    """norm -> linear -> SwiGLU -> linear; `hooks` receive the outputs of the parts."""

    def __init__(self, device, with_bias: bool = False):
        self.norm_weight, self.up = leaf(H, device=device), leaf(2 * F, H, device=device)
        self.norm_bias = leaf(H, device=device) if with_bias else None
        self.down = leaf(H, F, device=device)
        self.hooks = {}

    def __call__(self, x):
        def seen(name, t):
            # a hook changes the output in place, or returns another one
            changed = self.hooks.get(name, lambda t: None)(t)
            return t if changed is None else changed

        y = seen("norm", normalize(x, self.norm_weight, self.norm_bias, NormOptions(1e-5, True)))
        up = seen("up", fp8_linear(y, self.up, origin=origin_of(y)))
        z = seen("activation", activation(up, ActivationOptions("silu", True)))
        return seen("down", fp8_linear(z, self.down, origin=origin_of(z)))


@pytest.mark.parametrize("part", ["norm", "up", "activation", "down"])
@pytest.mark.parametrize("ndim", [2, 3])
def test_operation_outputs_may_be_changed_in_place(device, part, ndim):
    """As with stock layers: their own backward does not need the output, and every reader gets the changed
    value."""
    stack, x = Stack(device), leaf(2, ROWS, H, device=device)
    x = x if ndim == 3 else x.detach()[0].clone().requires_grad_()
    wanted = [x, stack.norm_weight, stack.up, stack.down]
    changes = {
        "add": (lambda t: t.add_(1), lambda t: t + 1),
        "relu": (torch.relu_, torch.relu),
        "scale": (lambda t: t.mul_(100), lambda t: t * 100),
        "part": (lambda t: (t[..., :8].zero_(), t)[1], lambda t: torch.cat((0 * t[..., :8], t[..., 8:]), -1)),
    }
    for name, ways in changes.items():
        results = []
        for change in ways:
            stack.hooks = {part: change}
            y = stack(x)
            results.append([y.detach(), *torch.autograd.grad(y.square().sum(), wanted)])
        for a, e in zip(*results, strict=True):
            assert rel_rms(a, e) < 2**-20, name


@pytest.mark.parametrize("parameter", ["norm_weight", "norm_bias"])
def test_linear_refuses_an_origin_whose_parameters_changed(device, parameter):
    stack, x = Stack(device, with_bias=True), leaf(ROWS, H, device=device)
    y = stack(x)
    with torch.no_grad():
        getattr(stack, parameter).mul_(2)
    # the gradient of `down` does not need the norm, so nothing is raised
    torch.autograd.grad(y.sum(), stack.down, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), stack.up)


def test_outputs_are_saved_and_copied_without_notes(device):
    stack, x, seen = Stack(device), leaf(ROWS, H, device=device), {}
    stack.hooks = {name: functools.partial(seen.__setitem__, name) for name in ("norm", "activation")}
    stack(x)
    for y in seen.values():
        file = io.BytesIO()
        torch.save(y, file)
        file.seek(0)
        # weights_only reads only tensors and types that torch allows
        again = torch.load(file, weights_only=True)
        assert again.equal(y) and origin_of(again) is None and maxima_of(again) is None
    y = normalize(x.detach(), stack.norm_weight.detach(), None, NormOptions(1e-5))
    assert maxima_of(y) is not None and maxima_of(copy.deepcopy(y)) is None


@pytest.mark.parametrize("shape", [(0, H), (0, 2, H), (3, 0, H)], ids=str)
def test_operations_on_empty_tensors(shape, takes_kernels, device, monkeypatch):
    """Experts without tokens and empty batches: results and gradients are empty, gradients of weights are
    zero."""
    if takes_kernels:
        take_kernels(monkeypatch)
    stack, x = Stack(device, with_bias=True), leaf(*shape, device=device)

    def whole(x):
        y = normalize(x, stack.norm_weight, None, NormOptions(1e-5))
        gated = activation(y, ActivationOptions("silu", True))
        parts = [stack(x), activation(x, ActivationOptions("gelu", False)), gated]
        if x.ndim == 3:
            angles = torch.rand(shape[0], 16, device=device)
            parts += rotate_qkv(x, angles.cos(), angles.sin(), 1, 16)
            parts += rotate_qkv(x, *torch.empty(2, 0, 0, device=device), 1, 16)
        return parts

    parts = whole(x)
    assert all(part.numel() == 0 for part in parts)
    torch.autograd.backward([part.sum() for part in parts])
    assert x.grad.shape == x.shape
    for weight in (stack.norm_weight, stack.norm_bias, stack.up, stack.down):
        assert weight.grad.count_nonzero() == 0
    with torch.no_grad():
        assert all(part.numel() == 0 for part in whole(x))


def wrong_shapes(device) -> dict:
    """Calls with tensors whose sizes do not match, and the two sizes that the error has to name."""

    def t(*shape):
        return torch.randn(*shape, device=device)

    def rope_of(mixed, cos, sin, groups=1, d=16):
        return lambda: rotate_qkv(mixed, cos, sin, groups, d)

    x = t(ROWS, H)
    return {
        "norm, short weight": (lambda: normalize(x, t(H // 2), None, NormOptions(1e-5)), "64.*32"),
        "norm, long weight": (lambda: normalize(x, t(2 * H), None, NormOptions(1e-5)), "64.*128"),
        "norm, matrix": (lambda: normalize(x, t(1, H), None, NormOptions(1e-5)), r"64.*\[1, 64\]"),
        "norm, short bias": (
            lambda: normalize(x, t(H), t(H // 2), NormOptions(1e-5, True)),
            r"64.*bias \[32\]",
        ),
        "linear, weight": (lambda: fp8_linear(x, t(H, 2 * H)), "128.*64"),
        "linear, bias": (lambda: fp8_linear(x, t(H, H), t(H // 2)), "32.*64"),
        "activation, odd": (lambda: activation(t(ROWS, 65), ActivationOptions("silu", True)), "65"),
        "rope, short tables": (rope_of(t(8, 1, H), t(7, 16), t(7, 16)), r"\[8, 16\].*\[7, 16\]"),
        "rope, two tables": (rope_of(t(8, 1, H), t(8, 16), t(8, 8)), r"\[8, 16\] and \[8, 8\]"),
        "rope, wide tables": (rope_of(t(8, 1, H), t(8, 32), t(8, 32)), r"\[8, 16\].*\[8, 32\]"),
        "rope, odd tables": (rope_of(t(8, 1, H), t(8, 7), t(8, 7)), r"\[8, 16\].*\[8, 7\]"),
        "rope, channels": (rope_of(t(8, 1, 72), t(8, 16), t(8, 16)), "16 channels.*72 columns"),
        "rope, too few": (rope_of(t(8, 1, 32), t(8, 16), t(8, 16)), "16 channels.*32 columns"),
    }


@pytest.mark.parametrize("name", wrong_shapes(torch.device("cpu")))
def test_operations_refuse_wrong_shapes(name, device):
    """On a GPU a tensor that is too short would be read beyond its end."""
    call, found = wrong_shapes(device)[name]
    with pytest.raises(ValueError, match=found):
        call()


@pytest.mark.gpu
def test_kernels_read_no_further_than_their_inputs(device):
    """Sizes end within a tile, and a norm of the wrong width launches no kernel. Run this with
    PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that each tensor ends where its allocation ends, under
    compute-sanitizer --tool memcheck."""
    for rows, h in ((1, 16), (7, 80), (129, 208)):
        x, weight = leaf(rows, h, device=device), leaf(h, device=device)
        for wrong in (h - 8, h + 8):
            with pytest.raises(ValueError, match=f"{h}.*{wrong}"):
                normalize(x, leaf(wrong, device=device), None, NormOptions(1e-5))
        up, down = leaf(2 * h, h, device=device), leaf(h, h, device=device)
        y = normalize(x, weight, None, NormOptions(1e-5))
        u = fp8_linear(y, up, origin=origin_of(y))
        z = activation(u, ActivationOptions("silu", True))
        fp8_linear(z, down, origin=origin_of(z)).sum().backward()
    torch.cuda.synchronize()
