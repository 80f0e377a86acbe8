"""The fused decoder layer of every framework: x = x + attention(norm(x)); x + feed_forward(norm(x)), by the
blocks of `coat_kernels.blocks`: one GEMM for queries, keys and values, one for gate and up, and residual
additions inside the norm kernels. `fused_attention` is the part before the output projection, for layers with
another feed-forward, such as experts.

An adapter finds the reason why a layer must call its modules, if there is one (`why_not_fused`). Otherwise it
gathers the layer's weights and its `LayerOptions`, and calls `fused_layer`, eagerly or as a CUDA graph
(`uses_graphs`). The adapter of transformers' models is modules/decoder_layer.py, Megatron's is
megatron_ext/layers/decoder_layer.py.
"""

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from coat_ds.log import log_once
from coat_kernels.attention import origin_in_groups
from coat_kernels.autograd.origin import Origin, origin_of
from coat_kernels.blocks import MlpOptions, NormOptions, QkvOptions, mlp_block, qkv_block
from coat_kernels.graphs import gradient_moves_in_backward, max_graphed_work
from coat_kernels.groups import GROUP_SIZE, quantize_groups
from coat_kernels.head_norm import head_norm
from coat_kernels.linear import LinearOptions
from coat_kernels.rope import no_rotation
from coat_kernels.weights import Weights


class LayerOptions(NamedTuple):
    """The options of a decoder layer: everything except its tensors and its attention."""

    qkv: QkvOptions
    mlp: MlpOptions | None
    """None for `fused_attention` alone."""
    head_norms: tuple[NormOptions, ...]
    """Norms of each head of queries and of keys, before the rotation; or empty."""
    recompute_format: str | None
    """The format in which attention's output is saved while backward recomputes attention; None saves what
    attention saves."""
    batch_first: bool = False
    """The layer takes [b, s, h] and angles [b * s, d], instead of [s, b, h] and [s, d]."""

    @property
    def linears(self) -> tuple[LinearOptions, ...]:
        return self.qkv.linear, self.mlp.proj, self.mlp.fc1, self.mlp.fc2

    def graph_key(self, weights: Sequence[Weights], *attention: Hashable) -> tuple:
        """What a CUDA graph of the layer depends on, except its tensors. `weights`: those of each GEMM.
        `attention`: what attention depends on."""
        found = [self.qkv.norm, self.mlp.norm, *self.head_norms, self.mlp.activation, self.recompute_format]
        for linear, weight in zip(self.linears, weights, strict=True):
            found += linear.graph_key(weight)
        return *found, *attention

    def grad_buffers(self) -> list[torch.Tensor]:
        """The tensors that backward adds weight gradients to, such as Megatron's main_grad."""
        return [linear.grad_buffer() for linear in self.linears if linear.grad_buffer is not None]


class LayerWeights(NamedTuple):
    """The parameters of a decoder layer, in the order in which `fused_layer` takes them. qkv and fc1 may be
    several weights."""

    input_norm: torch.Tensor
    input_norm_bias: torch.Tensor | None
    qkv: torch.Tensor | Weights
    qkv_bias: torch.Tensor | None
    proj: torch.Tensor
    proj_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp_norm_bias: torch.Tensor | None
    fc1: torch.Tensor | Weights
    fc1_bias: torch.Tensor | None
    fc2: torch.Tensor
    fc2_bias: torch.Tensor | None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


def fused_layer(
    options: LayerOptions,
    attend: Callable[..., torch.Tensor],
    constants: tuple,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *weights: torch.Tensor | Weights | None,
) -> torch.Tensor:
    """The output of a decoder layer, of the shape of its input `x`. The arguments are those of
    `fused_attention`, the weights one by one."""
    w = LayerWeights(*weights)
    o, residual, origin = fused_attention(options, attend, constants, x, cos, sin, w)
    y = mlp_block(
        o,
        residual,
        w.proj,
        w.proj_bias,
        w.mlp_norm,
        w.mlp_norm_bias,
        w.fc1,
        w.fc1_bias,
        w.fc2,
        w.fc2_bias,
        options.mlp,
        origin,
    )
    return y.view(x.shape) if options.batch_first else y


def fused_attention(
    options: LayerOptions,
    attend: Callable[..., torch.Tensor],
    constants: tuple,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    w: LayerWeights,
) -> tuple[torch.Tensor, torch.Tensor, Origin | None]:
    """The norm, queries, keys and values, and attention of a layer with the input `x`.

    Args:
        attend: attend(q, k, v, *constants) is attention of heads [s, b, n, d], or [b, s, n, d] if
            `batch_first`: [s, b, n * d] or [b, s, n * d], with its origin. If it is recomputed, it must
            return the same result each time.
        cos, sin: as in `rotate_qkv`.

    Returns attention's output; `x` for the residual addition, as [b * s, 1, h] if `batch_first`; and how to
    recompute the output.
    """
    by_token = x.reshape(-1, 1, x.shape[-1]) if options.batch_first else x
    attention, tensors = functools.partial(_attention, options, attend, x.shape), constants
    if options.head_norms:
        # these norms run between the projection and the rotation
        tensors = cos, sin, w.q_norm, w.k_norm, *constants
        cos, sin = no_rotation(cos, sin)

    inputs = by_token, w.input_norm, w.input_norm_bias, w.qkv, w.qkv_bias, cos, sin, options.qkv
    if options.recompute_format is None:
        q, k, v, residual = qkv_block(*inputs)
        o = attention(q, k, v, *tensors)
        origin = origin_of(o)
    else:
        o, residual = qkv_block(*inputs, attention, tensors)
        saved = quantize_groups(o.detach().flatten(0, 1), GROUP_SIZE, options.recompute_format)
        origin = origin_in_groups(saved, o.dtype)
    return o, residual, origin


def _attention(
    options: LayerOptions, attend: Callable[..., torch.Tensor], shape: torch.Size, q, k, v, *tensors
) -> torch.Tensor:
    """`attend` after the head norms, if there are any. `tensors`: the angles and weights of these norms,
    and the constants of `attend`; all are arguments, since tensors in a partial would outlive backward."""
    if options.head_norms:
        (of_q, of_k), (cos, sin, q_norm, k_norm, *tensors) = options.head_norms, tensors
        q, k = head_norm(q, q_norm, cos, sin, of_q), head_norm(k, k_norm, cos, sin, of_k)
    if options.batch_first:
        q, k, v = (t.view(*shape[:2], -1, options.qkv.d) for t in (q, k, v))
    return attend(q, k, v, *tensors)


def log_why_not_fused(why: str) -> None:
    """Logs the reason once. A reason with a second sentence names a fix for the user."""
    level = logging.WARNING if ". " in why else logging.INFO
    log_once(f"decoder layers run unfused, module by module: {why}.", level)


def uses_graphs(
    wanted: bool | None,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    weight_ranks: int = 1,
    token_ranks: int = 1,
    why_not: str | None = None,
) -> bool:
    """Whether a fused layer with the input `x` runs as CUDA graphs, by the key `cuda_graphs`. Never if
    weights move, as under ZeRO-3, or if the adapter has a reason (`why_not`). None: only if it `is_small`.
    """
    if wanted is False:
        return False
    if not x.is_cuda:
        why_not = "on a CPU"
    elif hasattr(weights[0], "ds_id"):
        why_not = "under ZeRO-3, where weights move"
    if why_not is None:
        return wanted is True or is_small(x, weights, weight_ranks, token_ranks)
    if wanted is True:
        log_once(f"coat.activations.cuda_graphs: found True, of no effect {why_not}. Drop the key.")
    return False


def is_small(x: torch.Tensor, weights: Sequence[torch.Tensor], weight_ranks: int, token_ranks: int) -> bool:
    """Whether the GPU would wait for the CPU to launch the kernels of a layer with these `weights`: the CPU
    time of a layer does not depend on the layer's size.

    weight_ranks: number of ranks that hold parts of the weights. token_ranks: number of ranks that hold
    parts of the tokens, which the GEMMs gather.
    """
    max_work = max_graphed_work(weight_ranks, gradient_moves_in_backward(weights[0]))
    return x.shape[0] * x.shape[1] * token_ranks * sum(w.numel() for w in weights) <= max_work
