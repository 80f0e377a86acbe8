"""One decoder layer by every maker: Megatron's own and ours, plain torch, torchao and TransformerEngine.

All compute the same function of the same weights and take their attention from
`torch.nn.functional.scaled_dot_product_attention`, so from the backend that the caller's `sdpa_kernel` names.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.common.attention import attention
from benchmarks.common.environment import device
from benchmarks.common.shapes import LayerShape
from coat_ds.plan.systems import FASTEST

# the layer that errors are measured against, and the one that speed is
REFERENCE, DENOMINATOR = "BF16", "BF16 torch.compile"
EPS = 1e-5
ROTARY_BASE = 10000


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of `actual - expected` over that of `expected`, in FP64."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return ((actual - expected).norm() / expected.norm()).item()


class Layer(NamedTuple):
    """A layer of some maker, how it is called, and what its parameters are in Megatron's layer."""

    module: torch.nn.Module
    forward: Callable[[torch.Tensor], torch.Tensor]
    """From and to hidden states in the layer's own order of dimensions."""
    batch_first: bool = False
    """Hidden states are [b, s, h]; else [s, b, h], as Megatron's."""
    qkv_rows: torch.Tensor | None = None
    """Which row of Megatron's qkv weight each row of this one's is, if they differ."""
    names: dict[str, str] = {}
    """Megatron's prefixes of parameter names by this maker's, the more special first."""

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """By Megatron's names."""
        return {self._megatron(name): p for name, p in self.module.named_parameters()}

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Copies Megatron's weights; KeyError if one is missing, ValueError if one is left over."""
        own = self.parameters()
        if unused := weights.keys() - own.keys():
            raise ValueError(f"the layer has no {', '.join(sorted(unused))}")
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(self.reorder(name, weights[name]))

    def reorder(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Megatron's parameter, or its gradient, with rows in the order of this layer's."""
        return tensor[self.qkv_rows] if "linear_qkv" in name and self.qkv_rows is not None else tensor

    def transpose(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states from Megatron's order of dimensions to the layer's own, and back."""
        return x.transpose(0, 1).contiguous() if self.batch_first else x

    def _megatron(self, name: str) -> str:
        for own, megatron in self.names.items():
            if name.startswith(own):
                return megatron + name.removeprefix(own)
        return name


class Result(NamedTuple):
    """What a layer adds to its input and to its output's gradient, and the gradients of its parameters."""

    y: torch.Tensor
    dx: torch.Tensor
    parameters: dict[str, torch.Tensor]

    def errors(self, expected: "Result", layer: Layer) -> dict[str, float]:
        """Relative RMS error of each tensor; `expected` is in Megatron's order of rows, this is `layer`'s."""
        return {
            "y": relative_rms(self.y, expected.y),
            "dx": relative_rms(self.dx, expected.dx),
            **{
                name: relative_rms(grad, layer.reorder(name, expected.parameters[name]))
                for name, grad in self.parameters.items()
            },
        }


def result_of(layer: Layer, x: torch.Tensor, grad: torch.Tensor) -> Result:
    """One pass forward and backward; `x` and `grad` [s, b, h]. Clears all gradients."""
    leaf = layer.transpose(x).detach().clone().requires_grad_()
    y = layer.forward(leaf)
    y.backward(layer.transpose(grad))
    parameters = {name: p.grad for name, p in layer.parameters().items()}
    layer.module.zero_grad()
    # without the residual, which passes both through unchanged and would make errors look small
    return Result(layer.transpose(y.detach()) - x, layer.transpose(leaf.grad) - grad, parameters)


def random_weights(like: dict[str, torch.Tensor], seed: int = 0) -> dict[str, torch.Tensor]:
    """Normal, so that GEMMs with normal inputs of h columns are of size 1; norms' weights around 1."""
    generator = torch.Generator(device()).manual_seed(seed)
    deviation = like["input_layernorm.weight"].numel() ** -0.5
    return {
        name: deviation * torch.randn(w.shape, generator=generator, device=w.device)
        + ("layernorm.weight" in name)
        for name, w in like.items()
    }


def megatron_layer(shape: LayerShape, spec: str = "sdpa_layer_spec", **activations) -> Layer:
    """The layer that `build_gpt` makes from a spec of `megatron_ext.layer_specs`."""
    from coat_ds.config import ActivationsConfig
    from megatron_ext import layer_specs
    from megatron_ext.model import ModelShape, build_gpt

    gpt = dict(
        normalization="LayerNorm", gated_linear_unit=False, activation_func=F.gelu, add_bias_linear=True
    )
    model = build_gpt(
        ModelShape(1, shape.hidden, shape.ffn, shape.heads, shape.groups, ROTARY_BASE, EPS),
        getattr(layer_specs, spec),
        seq_length=shape.sequence,
        vocab_size=128,
        activations=ActivationsConfig.from_dict(activations),
        # weights are loaded
        perform_initialization=False,
        **({} if shape.llama else gpt),
    )
    layer = model.decoder.layers[0]
    positions = model.rotary_pos_emb(shape.sequence) if shape.llama else None

    def forward(x):
        return layer(x, attention_mask=None, rotary_pos_emb=positions)[0]

    return Layer(layer, forward)


def qkv_rows(shape: LayerShape) -> torch.Tensor:
    """Rows of Megatron's qkv weight, which interleaves groups, in the order q, k, v."""
    ratio = shape.heads // shape.groups
    rows = torch.arange(shape.qkv, device=device()).view(shape.groups, ratio + 2, shape.head_dim)
    return torch.cat([part.flatten() for part in rows.split((ratio, 1, 1), dim=1)])


def rotary_angles(shape: LayerShape) -> torch.Tensor:
    """Angle of every position and channel, FP32 [s, 1, 1, d]."""
    channels = torch.arange(0, shape.head_dim, 2, device=device()) / shape.head_dim
    angles = torch.outer(torch.arange(shape.sequence, device=device()), ROTARY_BASE**-channels)
    return torch.cat((angles, angles), dim=1)[:, None, None]


class TorchLayer(torch.nn.Module):
    """The layer as one writes it in plain torch; parameters have Megatron's names."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        linear = functools.partial(torch.nn.Linear, bias=not shape.llama)
        norm = torch.nn.RMSNorm if shape.llama else torch.nn.LayerNorm
        self.shape = shape
        self.input_layernorm = norm(shape.hidden, EPS)
        self.pre_mlp_layernorm = norm(shape.hidden, EPS)
        self.self_attention = torch.nn.ModuleDict(
            {
                "linear_qkv": linear(shape.hidden, shape.qkv),
                "linear_proj": linear(shape.hidden, shape.hidden),
            }
        )
        self.mlp = torch.nn.ModuleDict(
            {"linear_fc1": linear(shape.hidden, shape.fc1), "linear_fc2": linear(shape.ffn, shape.hidden)}
        )
        angles = rotary_angles(shape).squeeze(1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, t: torch.Tensor) -> torch.Tensor:
        a, b = t.chunk(2, dim=-1)
        return t * self.cos + torch.cat((-b, a), dim=-1) * self.sin

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        if not self.shape.llama:
            return F.gelu(x, approximate="tanh")
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> [b, s, h]."""
        qkv = self.self_attention["linear_qkv"](self.input_layernorm(x))
        x = x + self.self_attention["linear_proj"](attention(qkv, self.shape, self.rotate))
        hidden = self.mlp["linear_fc1"](self.pre_mlp_layernorm(x))
        return x + self.mlp["linear_fc2"](self.activation(hidden))


def torch_layer(
    shape: LayerShape, dtype: torch.dtype = torch.bfloat16, compiled: bool = False, float8: bool = False
) -> Layer:
    """Plain torch; `float8`: its linear layers converted by torchao, one dynamic scale per tensor."""
    with torch.device(device()):
        module = TorchLayer(shape).to(dtype)
    if float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name("tensorwise")
        if device().type == "cpu":
            config = dataclasses.replace(config, emulate=True)
        module = convert_to_float8_training(module, config=config)
    forward = torch.compile(module, dynamic=False) if compiled else module
    return Layer(module, forward, batch_first=True, qkv_rows=qkv_rows(shape))


def transformer_engine_layer(shape: LayerShape, recipe: str | None = None, cached: bool = False) -> Layer:
    """TransformerEngine's modules with its fused rotary positions; `recipe` is a class's name, None is BF16.

    `cached`: the FP8 weights of the first calls are used in all, as in the micro-batches after the first.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    linear = dict(bias=not shape.llama, params_dtype=torch.bfloat16)
    norm = dict(normalization="RMSNorm" if shape.llama else "LayerNorm", eps=EPS)
    module = torch.nn.ModuleDict(
        {
            "qkv": te.LayerNormLinear(shape.hidden, shape.qkv, **norm, **linear),
            "proj": te.Linear(shape.hidden, shape.hidden, **linear),
            "mlp": te.LayerNormMLP(
                shape.hidden, shape.ffn, activation="swiglu" if shape.llama else "gelu", **norm, **linear
            ),
        }
    )
    angles = rotary_angles(shape)
    chosen = getattr(recipes, recipe)() if recipe else None
    # two calls quantize weights for good, since delayed scaling has no scale of theirs in the first
    fresh = 2

    def rotate(t):
        return apply_rotary_pos_emb(t, angles, tensor_format="bshd", fused=True)

    def forward(x):
        nonlocal fresh
        first = fresh > 0 if cached else None
        fresh -= 1
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            qkv = module["qkv"](x, is_first_microbatch=first)
            x = x + module["proj"](attention(qkv, shape, rotate), is_first_microbatch=first)
            return x + module["mlp"](x, is_first_microbatch=first)

    names = {
        "qkv.layer_norm_": "input_layernorm.",
        "qkv.": "self_attention.linear_qkv.",
        "proj.": "self_attention.linear_proj.",
        "mlp.layer_norm_": "pre_mlp_layernorm.",
        "mlp.fc1_": "mlp.linear_fc1.",
        "mlp.fc2_": "mlp.linear_fc2.",
    }
    return Layer(module, forward, batch_first=True, qkv_rows=qkv_rows(shape), names=names)


def layer_makers() -> dict[str, Callable[[LayerShape], Layer]]:
    """How each layer that is compared is made, by name; the reference comes first."""
    ours = functools.partial(megatron_layer, spec="coat_layer_spec")
    te = transformer_engine_layer
    made = {
        REFERENCE: megatron_layer,
        DENOMINATOR: functools.partial(torch_layer, compiled=True),
        "torchao tensorwise": functools.partial(torch_layer, compiled=True, float8=True),
        "TE BF16": te,
    }
    for name, recipe in {
        "delayed": "DelayedScaling",
        "current": "Float8CurrentScaling",
        "blockwise": "Float8BlockScaling",
    }.items():
        made[f"TE {name}"] = functools.partial(te, recipe=recipe)
        made[f"TE {name}, cached"] = functools.partial(te, recipe=recipe, cached=True)
    made["ours"] = ours
    made["ours, saved E4M3"] = functools.partial(ours, saved_format="e4m3")
    made["ours, 8-bit attention"] = functools.partial(ours, attention_format="sqrt8")
    made["ours, recomputed attention"] = functools.partial(ours, attention_format="recompute")
    for cache in ("none", "fp8"):
        made[f"ours, cache {cache}"] = functools.partial(ours, weight_cache=cache)
    made["ours, fastest"] = functools.partial(ours, **FASTEST)
    return made


def forget() -> None:
    """Drops what compilers and TransformerEngine remember of earlier layers, so that none pays for others."""
    torch.compiler.reset()
    if "transformer_engine.pytorch" in sys.modules:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()
