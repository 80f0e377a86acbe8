"""What stock autograd refuses or does right, around operations that keep 8 bits: derivatives, edits."""

import ast
from pathlib import Path

import pytest
import torch

import coat_kernels
from coat_kernels.activation import activation
from coat_kernels.deferred import PredictedScale
from coat_kernels.fp8 import E4M3, E5M2
from coat_kernels.linear import fp8_linear
from coat_kernels.norm import layer_norm, rms_norm
from coat_kernels.origin import origin_of
from coat_kernels.residual import deferred_add
from coat_kernels.rope import rotate_qkv

ROOT = Path(coat_kernels.__file__).parent.parent
ROWS, H, F = 24, 64, 96


def functions() -> dict[str, ast.FunctionDef]:
    """The `backward` of every `autograd.Function` in the project's own source, wherever it is defined."""
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


def test_no_function_is_differentiated_twice():
    table = {name: [ast.unparse(d) for d in f.decorator_list] for name, f in functions().items()}
    assert len(table) >= 7
    assert set(map(tuple, table.values())) == {("staticmethod", "once_differentiable")}, table


def leaf(*shape, device, dtype=torch.float32):
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()


def operations(device) -> dict:
    """Functions of one activation [ROWS, H], alone and as layers put them one behind another."""
    weight, bias = leaf(H, device=device), leaf(H, device=device)
    square, gated = leaf(H, H, device=device), leaf(2 * F, H, device=device)
    down = leaf(H, F, device=device)
    angles = torch.rand(ROWS, 16, device=device)

    def stack(x, deferred):
        scales = (
            (PredictedScale(E4M3), PredictedScale(E4M3), PredictedScale(E5M2)) if deferred else [None] * 3
        )
        y = rms_norm(x, weight, 1e-5, y_scale=scales[0])
        up = fp8_linear(y, gated, origin=origin_of(y))
        z = activation(up, "silu", gated=True, y_scale=scales[1], grad_scale=scales[2])
        return x + fp8_linear(z, down, origin=origin_of(z))

    return {
        "rms_norm": lambda x: rms_norm(x, weight, 1e-5),
        "layer_norm": lambda x: layer_norm(x, weight, bias, 1e-5, y_scale=PredictedScale(E4M3)),
        "linear": lambda x: fp8_linear(x, square),
        "activation": lambda x: activation(x, "gelu", gated=False),
        "swiglu, deferred": lambda x: activation(
            x, "silu", gated=True, y_scale=PredictedScale(E4M3), grad_scale=PredictedScale(E5M2)
        ),
        "rope": lambda x: torch.cat(rotate_qkv(x.view(ROWS, 1, H), angles.cos(), angles.sin(), 1, 16), 2),
        "residual": lambda x: rms_norm(deferred_add(x, 2 * x), weight, 1e-5, y_scale=PredictedScale(E4M3)),
        "stack": lambda x: stack(x, False),
        "stack, deferred": lambda x: stack(x, True),
    }


@pytest.mark.parametrize("name", operations(torch.device("cpu")))
def test_gradient_penalties_are_refused(device, name):
    """R1: the gradient's square is part of the loss. A sum hands back a constant gradient, a square does not;
    and beside another loss, which has gradients of its own, nothing may be left out in silence."""
    function = operations(device)[name]
    for loss_of in (torch.sum, lambda y: y.square().sum()):
        x = leaf(ROWS, H, device=device)
        loss = loss_of(function(x))
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            (loss + grad.square().sum()).backward()
    # the first derivatives are the same, with and without a graph of them
    x = leaf(ROWS, H, device=device)
    (plain,) = torch.autograd.grad(function(x).sum(), x)
    (graphed,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    assert graphed.equal(plain) and graphed.requires_grad
