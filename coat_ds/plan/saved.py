"""Bytes that a layer saves for backward, a token.

h hidden channels, f of the feed-forward layer, u before its activation (2 f where it is gated), a of q,
k and v, o of attention's output, n heads. g = 17/16 is a byte and a group's share of its scale.

| | BF16, Megatron's | Transformer Engine's FP8 | COAT |
|---|---|---|---|
| inputs of norms | 4 h | 4 h | 2 g h |
| inputs of GEMMs | 2 (2 h + o + f) | 2 h + o + f | none except attention's |
| attention | 2 (a + o) + 4 n | 2 (a + o) + 4 n | the same; g (a + o) + 4 n; g o if recomputed |
| activation | 2 u | 2 u | g u |

What experts save instead of the feed-forward is in `experts.py`.
"""

from coat_ds.plan.experts import BF16, FP32
from coat_ds.plan.sizes import Sizes
from coat_ds.plan.systems import System
from coat_kernels.autograd.checkpointing import GROUP_SIZE as CHECKPOINT_GROUP_SIZE
from coat_kernels.groups import GROUP_SIZE


def saved_per_token(sizes: Sizes, system: System) -> float:
    """Bytes that a layer saves for backward for a token, tables of positions aside, mean over the layers."""
    if system.recompute == "full":
        compressed = system.layers == "coat" and system.coat.fp8_activation_checkpointing
        return sizes.hidden * (1 + FP32 / CHECKPOINT_GROUP_SIZE if compressed else BF16)
    # the norms' deviations
    return 2 * FP32 + (_by_coat(sizes, system) if system.layers == "coat" else _by_others(sizes, system))


def _by_coat(sizes: Sizes, system: System) -> float:
    activations = system.coat.activations
    code = 1 + 1 / GROUP_SIZE
    normed, deviations = _head_norms(sizes)
    attention = (BF16 if activations.attention_format == "bf16" else code) * (sizes.qkv + sizes.queries)
    attention += deviations + code * normed
    if activations.attention_format == "recompute":
        attention += sizes.recomputes_attention * (code * sizes.queries - attention)
    return code * 2 * sizes.hidden + attention + _feed_forward(sizes, code * sizes.fc1, code)


def _by_others(sizes: Sizes, system: System) -> float:
    """Bytes of layers of Megatron, of transformers, and of Transformer Engine."""
    h, f, u = sizes.hidden, sizes.ffn, sizes.fc1
    normed, deviations = _head_norms(sizes)
    attention = BF16 * (sizes.qkv + sizes.queries + normed) + deviations
    if system.layers == "transformer_engine":
        return 2 * BF16 * h + 2 * h + sizes.queries + attention + f + BF16 * u
    if sizes.maker == "transformers":
        # norms save FP32 inputs and what they multiply their weight with; the activation's own output, too
        norms, feed_forward = 2 * (FP32 + 2 * BF16) * h, BF16 * (u + (1 + sizes.gated) * f)
        attention += FP32 * normed
    else:
        norms, feed_forward = 2 * 2 * BF16 * h, BF16 * (u + f)
    if system.recompute == "mlp":
        feed_forward = 0
    return norms + attention + _feed_forward(sizes, feed_forward, None)


def _feed_forward(sizes: Sizes, dense: float, code: float | None) -> float:
    """The mean of dense layers, each of which saves `dense` bytes, and layers with experts."""
    if sizes.experts is None:
        return dense
    return sizes.mean(dense, sizes.experts.saved(sizes.hidden, code, sizes.maker == "megatron"))


def _head_norms(sizes: Sizes) -> tuple[float, float]:
    """Elements of queries and keys, where each head is normed, and bytes of what attention and these norms
    save for each head."""
    normed_heads = sizes.heads + sizes.groups if sizes.head_norms else 0
    return normed_heads * sizes.head_dim, FP32 * (sizes.heads + normed_heads)
