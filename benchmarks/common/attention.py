"""Causal self-attention by torch, and which of its backends computes it."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common.environment import device
from benchmarks.common.harness import reason
from benchmarks.common.shapes import LayerShape
from benchmarks.common.timing import measure

# the first to be had on this device serves all rows
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)


def attention(
    qkv: torch.Tensor, shape: LayerShape, rotate: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Causal self-attention, [b, s, q | k | v] -> [b, s, h]; `rotate` gives positions to [b, s, n, d]."""
    heads = qkv.unflatten(-1, (-1, shape.head_dim))
    q, k, v = heads.split((shape.heads, shape.groups, shape.groups), dim=2)
    if shape.llama:
        # v gets its own storage: a view would keep all of qkv in addition to the rotated q and k
        q, k, v = rotate(q), rotate(k), v.contiguous()
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape.groups != shape.heads)
    return y.transpose(1, 2).flatten(2)


def attention_backend(shape: LayerShape) -> SDPBackend:
    """The first backend that runs this shape's attention, forward and backward, on this device."""
    for backend in BACKENDS:
        try:
            attention_ms(shape, backend, repeats=1)
        except RuntimeError as error:
            print(f"no {backend.name}: {reason(error)}", flush=True)
        else:
            return backend
    raise RuntimeError("scaled_dot_product_attention has no backend for this device")


def attention_ms(shape: LayerShape, backend: SDPBackend, repeats: int = 10) -> float:
    """Attention alone, forward and backward, on q, k and v in storages of their own."""

    def tensor(heads):
        sizes = (shape.batch, shape.sequence, heads, shape.head_dim)
        return torch.randn(sizes, device=device(), dtype=torch.bfloat16).transpose(1, 2).requires_grad_()

    q, k, v = (tensor(heads) for heads in (shape.heads, shape.groups, shape.groups))
    grad = tensor(shape.heads).detach()

    def both():
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape.groups != shape.heads)
        torch.autograd.grad(y, (q, k, v), grad)

    with sdpa_kernel(backend):
        return measure(both, warmup=2, repeats=repeats).median
