"""The fused blocks against their operations, run one by one: the same bits for the output and every gradient,
whatever scales are predicted."""

import dataclasses
import gc
import weakref

import pytest
import torch

from coat_kernels import blocks, norm, tensorwise
from coat_kernels.activation import activation
from coat_kernels.autograd.origin import Origin, origin_of, with_origin
from coat_kernels.blocks import (
    ActivationOptions,
    MlpOptions,
    NormOptions,
    QkvOptions,
    mlp_block,
    qkv_block,
)
from coat_kernels.fp8 import E4M3, E5M2
from coat_kernels.linear import LinearFormats, LinearOptions, fp8_linear
from coat_kernels.norm import normalize
from coat_kernels.rope import rotate_qkv
from coat_kernels.tensorwise import PredictedScale, quantize_tensor, together
from coat_kernels.weights import WeightCache
from tests.interpreter import take_kernels
from tests.util import rel_rms

# the number of tokens is no multiple of 16 or of a tile, the number of channels no multiple of the group size
# 32
S, B, H, F = 5, 2, 48, 80
GROUPS, M, D, R = 2, 2, 16, 16


@pytest.fixture
def kernels(takes_kernels, monkeypatch):
    """Runs a test with the references and with the kernels. Each kernel program covers several tiles."""
    if takes_kernels:
        take_kernels(monkeypatch)
        monkeypatch.setattr(norm.kernels, "FORWARD_TILE", 1024)
        for module in (tensorwise.scale, together):
            monkeypatch.setattr(module, "CORRECTING_PROGRAMS", 3)


def linear_options(cache: str = "none") -> LinearOptions:
    return LinearOptions(
        LinearFormats(),
        WeightCache(cache),
        x_scale=PredictedScale(E4M3),
        grad_scale=PredictedScale(E5M2),
    )


@dataclasses.dataclass
class Model:
    """Parameters of both blocks, and the options of their computation."""

    llama: bool
    dtype: torch.dtype
    device: torch.device
    cache: str = "none"

    def __post_init__(self):
        def parameter(*shape, around=0.0, size=0.2):
            value = around + size * torch.randn(shape)
            return value.to(self.device, self.dtype).requires_grad_()

        width = GROUPS * (M + 2) * D
        self.weights = {
            "norm1": parameter(H, around=1.0),
            "qkv": parameter(width, H),
            "proj": parameter(H, GROUPS * M * D),
            "norm2": parameter(H, around=1.0),
            "fc1": parameter(2 * F if self.llama else F, H),
            "fc2": parameter(H, F),
        }
        biases = {} if self.llama else {name: parameter(len(w)) for name, w in self.weights.items()}
        self.biases = {name: biases.get(name) for name in self.weights}
        angles = torch.randn(S, R, device=self.device)
        self.tables = angles.cos(), angles.sin()
        self.norm = NormOptions(1e-5, not self.llama)
        self.activation = ActivationOptions("silu" if self.llama else "gelu_tanh", self.llama, "sqrt8")
        self.linears = {name: linear_options(self.cache) for name in ("qkv", "proj", "fc1", "fc2")}

    def parameters(self) -> dict[str, torch.Tensor]:
        biases = {f"{name}.bias": b for name, b in self.biases.items() if b is not None}
        return self.weights | biases

    def both(self, *names: str) -> list[torch.Tensor | None]:
        return [t for name in names for t in (self.weights[name], self.biases[name])]

    def by_blocks(self, x: torch.Tensor, origin: Origin | None = None) -> torch.Tensor:
        qkv, proj, fc1, fc2 = self.linears.values()
        options = QkvOptions(self.norm, qkv, GROUPS, D)
        q, k, v, residual = qkv_block(x, *self.both("norm1", "qkv"), *self.tables, options)
        o, options = self.attention(q, k, v), MlpOptions(proj, self.norm, fc1, self.activation, fc2)
        weights = self.both("proj", "norm2", "fc1", "fc2")
        return mlp_block(o, residual, *weights, options, origin or origin_of(o))

    def attention(self, q, k, v):
        """A function of q, k and v, whose output has an origin or none."""
        o = (q * (k + v).repeat_interleave(M, 2)).flatten(2)
        if not self.llama:
            return o

        def columns(o, amax, fmt):
            return tensorwise.quantize_tensor(o, amax, fmt, rows=False, columns=True)

        return with_origin(o, Origin((o.detach().flatten(0, 1),), columns))

    def normed(self, x, name):
        weight, bias, options = self.weights[name], self.biases[name], self.norm
        return normalize(x, weight, bias, options, residual=True)

    def linear(self, x, name):
        return fp8_linear(x, self.weights[name], self.biases[name], self.linears[name], origin=origin_of(x))

    def one_by_one(self, x: torch.Tensor) -> torch.Tensor:
        y, residual = self.normed(x, "norm1")
        q, k, v = rotate_qkv(self.linear(y, "qkv"), *self.tables, GROUPS, D)
        x = residual + self.linear(self.attention(q, k, v), "proj")
        y, residual = self.normed(x, "norm2")
        options = self.activation
        y = activation(self.linear(y, "fc1"), options)
        return residual + self.linear(y, "fc2")


def inputs(device, dtype):
    x, grad = torch.randn(2, S, B, H, device=device).to(dtype)
    return x, grad


def run(model: Model, forward, x, grad) -> dict[str, torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = forward(leaf)
    y.backward(grad)
    found = {"y": y.detach(), "x": leaf.grad}
    for name, p in model.parameters().items():
        found[name], p.grad = p.grad, None
    return found


# kernels sum their columns over tiles of different sizes
SUMS = ("qkv.bias", "proj.bias", "fc1.bias", "fc2.bias")


def check_same(actual, expected):
    for name, value in expected.items():
        if name in SUMS and value.is_cuda and value.dtype == torch.float32:
            # each of the S * B additions rounds by at most 2^-24 of the sum
            assert rel_rms(actual[name], value) <= S * B * 2.0**-24, name
        else:
            torch.testing.assert_close(actual[name], value, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize(
    ("llama", "dtype"), [(True, torch.bfloat16), (False, torch.float32)], ids=["llama-bf16", "gpt-fp32"]
)
def test_fused_blocks_are_their_operations(llama, dtype, kernels, device):
    model = Model(llama, dtype, device)
    x, grad = inputs(device, dtype)
    expected = run(model, model.one_by_one, x, grad)
    # with the initial scale 1, and with a wrong one
    for scale in (1.0, 2.0**40):
        for options in model.linears.values():
            for predicted in (options.x_scale, options.grad_scale, options.cache.prediction()):
                predicted.on(device).fill_(scale)
        check_same(run(model, model.by_blocks, x, grad), expected)


@pytest.mark.parametrize("special", [torch.nan, torch.inf, 0.0, 3e38, 1e-38], ids=str)
def test_fused_blocks_show_special_values_as_operations_do(special, device):
    model = Model(True, torch.bfloat16, device)
    x, grad = inputs(device, torch.bfloat16)
    x[2, 1, :3], grad[3, 0, 5] = special, special
    if special == 0.0:
        x.zero_()
    check_same(run(model, model.by_blocks, x, grad), run(model, model.one_by_one, x, grad))


def test_fused_blocks_take_cached_weights_once(device, monkeypatch):
    model = Model(True, torch.bfloat16, device, cache="fp8")
    x, grad = inputs(device, torch.bfloat16)
    expected = run(model, model.by_blocks, x, grad)
    quantized = []
    take = WeightCache._quantize
    monkeypatch.setattr(
        WeightCache, "_quantize", lambda *args, **rest: quantized.append(1) or take(*args, **rest)
    )
    check_same(run(model, model.by_blocks, x, grad), expected)
    assert not quantized
    with torch.no_grad():
        model.weights["fc1"].mul_(2)
    run(model, model.by_blocks, x, grad)
    assert len(quantized) == 1


def test_fused_blocks_add_gradients_where_the_caller_wants_them(device):
    model = Model(True, torch.bfloat16, device)
    x, grad = inputs(device, torch.bfloat16)
    expected = run(model, model.by_blocks, x, grad)
    sums = {name: torch.ones_like(model.weights[name], dtype=torch.float32) for name in model.linears}
    for name, options in model.linears.items():
        into = options._replace(grad_buffer=lambda name=name: sums[name])
        model.linears[name] = into
    found = run(model, model.by_blocks, x, grad)
    for name in sums:
        assert not found.pop(name).any()
        exact = expected.pop(name)
        # without fast accumulation the GEMM's result is rounded to BF16 first, like the gradient
        torch.testing.assert_close(sums[name], 1 + exact.float(), rtol=2**-8, atol=2**-8)
    check_same(found, expected)


def test_fused_blocks_refuse_what_changes_between_forward_and_backward(device):
    model = Model(False, torch.bfloat16, device)
    x, grad = inputs(device, torch.bfloat16)
    for name, parameter in model.parameters().items():
        y = model.by_blocks(x.clone().requires_grad_())
        with torch.no_grad():
            parameter.add_(1)
        # the values of biases that are added to the input of a GEMM are not read in backward
        if name in ("qkv.bias", "proj.bias", "fc1.bias", "fc2.bias"):
            continue
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(grad)


def test_fused_blocks_quantize_weights_of_one_kind_in_one_launch(device, monkeypatch):
    """The weights of the second block are quantized together, with attention's output if it can be
    recomputed; in backward fc2's weights are quantized earlier, in a launch of their own. Cached weights and
    weights of other types are quantized one by one, to the same bits."""
    take_kernels(monkeypatch)
    launches = []
    for name in ("rows_together", "columns_together"):
        original = getattr(blocks.mlp, name)

        def counting(xs, *args, original=original):
            launches.append(len(xs))
            return original(xs, *args)

        monkeypatch.setattr(blocks.mlp, name, counting)
    model = Model(True, torch.bfloat16, device)
    x, grad = inputs(device, torch.bfloat16)
    expected = run(model, model.by_blocks, x, grad)
    assert launches == [4, 2]
    launches.clear()
    options = model.linears["fc1"]
    no_prediction = options._replace(cache=WeightCache(predicts=False))
    for changed in (linear_options("fp8"), no_prediction):
        model.linears["fc1"] = changed
        check_same(run(model, model.by_blocks, x, grad), expected)
    assert not launches
    # a weight with another memory layout (transposed)
    model.linears["fc1"] = options
    model.weights["fc1"] = model.weights["fc1"].detach().t().contiguous().t().requires_grad_()
    assert not model.weights["fc1"].is_contiguous()
    check_same(run(model, model.by_blocks, x, grad), expected)
    assert launches == [4, 2]
    launches.clear()
    # without an origin, attention's output is quantized by itself, by rows and by columns
    gpt = Model(False, torch.float32, device)
    run(gpt, gpt.by_blocks, *inputs(device, torch.float32))
    assert launches == [3, 2]


@pytest.mark.parametrize("has_origin", [False, True])
def test_fused_blocks_hold_nothing_behind_backward(has_origin, device):
    """Backward frees the graph. If the graph is still alive, it frees the tensors saved for backward."""
    model = Model(True, torch.bfloat16, device)
    x, grad = inputs(device, torch.bfloat16)
    origin, o = None, torch.randn(S, B, GROUPS * M * D, device=device).bfloat16()
    if has_origin:

        def columns(o, amax, fmt):
            return quantize_tensor(o.flatten(0, 1), amax, fmt, rows=False, columns=True)

        origin = Origin((o,), columns)
    y = model.by_blocks(x.clone().requires_grad_(), origin)
    node, held = weakref.ref(y.grad_fn), weakref.ref(o)
    del o, origin
    assert (held() is not None) == has_origin
    y.backward(grad)
    gc.disable()
    try:
        assert held() is None
        del y
        assert node() is None
    finally:
        gc.enable()
