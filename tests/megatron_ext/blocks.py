"""A tiny GPT whose layers run as fused blocks or by their modules."""

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu

from coat_ds.config import ActivationsConfig
from megatron_ext.layer_specs import coat_layer_spec
from megatron_ext.model import ModelShape, build_gpt
from tests.megatron_ext.layers import GPT, loss_of, random_tokens

S, B, VOCAB = 32, 2, 64
H, FFN, HEADS = 64, 96, 4
# fields of Megatron's config, and of the block's activations
VARIANTS = {
    "llama": ({}, {}),
    "gpt": (GPT, {}),
    "exact-geglu": ({"activation_func": F.gelu, "bias_activation_fusion": False}, {}),
    "squared-relu": (GPT | {"activation_func": squared_relu, "bias_activation_fusion": False}, {}),
    "cached": ({}, {"weight_cache": "fp8"}),
    "8-bit attention": ({}, {"attention_format": "sqrt8"}),
    "head norms": ({"qk_layernorm": True}, {}),
    "head norms, 8-bit attention": (
        {"qk_layernorm": True, "params_dtype": torch.float32, "bf16": False},
        {"attention_format": "sqrt8"},
    ),
    "formats": (
        {},
        {"backward_format": "e4m3", "saved_format": "e4m3", "fast_accumulation": "all"},
    ),
    "fp32": ({"bf16": False}, {}),
    "recomputed": (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {},
    ),
}


def build(config=None, activations=None, layers=2, spec=coat_layer_spec):
    model = build_gpt(
        ModelShape(layers, H, FFN, HEADS, 2),
        spec,
        seq_length=S,
        vocab_size=VOCAB,
        activations=ActivationsConfig(**{"cuda_graphs": False} | (activations or {})),
        **(config or {}),
    )
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if not getattr(p, "tensor_model_parallel", False):
            p.data.add_((0.3 * torch.randn(p.shape, generator=generator)).to(p))
    return model


def batch(device):
    tokens = random_tokens(B, S, VOCAB).to(device)
    return tokens, torch.arange(S, device=device).expand(B, S), None


def take_modules(model) -> list:
    """Hooks one module inside of each layer, so that the layer has to call its modules."""
    return [layer.mlp.register_forward_hook(lambda *_: None) for layer in model.decoder.layers]


def loss_and_grads(model, device):
    model.zero_grad()
    loss = loss_of(model, batch(device)[0])
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


def node(layer, device, **arguments) -> str:
    """The autograd node of a layer's output."""
    x = torch.randn(S, B, H, device=device, dtype=layer.config.params_dtype, requires_grad=True)
    y, _ = layer(x, **({"attention_mask": None} | arguments))
    return type(y.grad_fn).__name__
