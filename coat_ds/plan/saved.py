"""Bytes that a layer saves for backward, a token.

h hidden channels, f of the feed-forward layer, u before its activation (2 f where it is gated), a of q,
k and v, o of attention's output, n heads. g = 17/16 is a byte and a group's share of its scale.

| | BF16, Megatron's | TransformerEngine FP8 | COAT |
|---|---|---|---|
| inputs of norms | 4 h | 4 h | 2 g h |
| inputs of GEMMs | 2 (2 h + o + f) | 2 h + o + f | none but attention's |
| attention | 2 (a + o) + 4 n | 2 (a + o) + 4 n | the same; g (a + o) + 4 n; g o if recomputed |
| activation | 2 u | 2 u | g u |

Experts in place of the feed-forward keep what `experts.py` says.
"""

from coat_ds.plan.experts import BF16, FP32, saved_by_megatron, saved_by_transformers
from coat_ds.plan.layout import Layout
from coat_ds.plan.sizes import Sizes
from coat_ds.plan.systems import System
from coat_kernels.autograd.checkpointing import GROUP_SIZE as CHECKPOINT_GROUP_SIZE


def saved_per_token(sizes: Sizes, layout: Layout, system: System) -> float:
    """Bytes that a layer keeps for backward for a token on a GPU, tables of positions aside."""
    t, between = layout.tensor, layout.between
    if system.recompute == "full":
        return _input_per_token(sizes, system) / between
    h, f, u, o = sizes.hidden, sizes.ffn, sizes.fc1, sizes.queries
    # the norms' deviations
    kept = 2 * FP32 / between
    # queries and keys, where each head is normed, with a deviation each
    normed = (sizes.heads + sizes.groups) * sizes.head_dim if sizes.head_norms else 0
    of_heads = FP32 * (sizes.heads + normed / sizes.head_dim)
    attention = BF16 * (sizes.qkv + o) + of_heads
    if system.layers == "coat":
        activations = system.coat.activations
        grouped = 1 + 1 / activations.group_size
        if activations.attention_format != "bf16":
            attention = grouped * (sizes.qkv + o) + of_heads
        attention += grouped * normed
        if activations.attention_format == "recompute":
            attention += sizes.attends_again * (grouped * o - attention)
        feed_forward = sizes.mean(grouped * u / t, _of_experts(sizes, layout, grouped))
        inputs = 2 * h / between + (f + o) / t if system.keeps_inputs else 0
        return kept + grouped * 2 * h / between + feed_forward + attention / t + inputs
    if system.layers == "transformer_engine":
        attention += BF16 * normed
        return kept + (2 * BF16 * h + 2 * h) / between + (o + f + BF16 * u + attention) / t
    if sizes.maker == "transformers":
        # norms keep FP32 inputs and what they multiply their weight with; the activation's own output, too
        norms, feed_forward = 2 * (FP32 + 2 * BF16) * h, BF16 * (u + (1 + sizes.gated) * f)
        attention += (FP32 + BF16) * normed
    else:
        norms, feed_forward = 2 * 2 * BF16 * h, BF16 * (u + f)
        attention += BF16 * normed
    if system.recompute == "mlp":
        feed_forward = 0
    feed_forward = sizes.mean(feed_forward / t, _of_experts(sizes, layout))
    return kept + norms / between + feed_forward + attention / t


def _of_experts(sizes: Sizes, layout: Layout, grouped: float | None = None) -> float:
    """Bytes that a layer's experts and router keep for a token on a GPU. `grouped`: COAT's of a code."""
    if sizes.experts is None:
        return 0
    if sizes.maker == "megatron":
        return saved_by_megatron(sizes.experts, sizes.hidden, grouped, layout)
    return saved_by_transformers(sizes.experts, sizes.hidden, grouped) / layout.tensor


def _input_per_token(sizes: Sizes, system: System) -> float:
    """Bytes of a layer's input, where the layer is recomputed."""
    if system.layers == "coat" and system.coat.fp8_activation_checkpointing:
        return sizes.hidden * (1 + FP32 / CHECKPOINT_GROUP_SIZE)
    return BF16 * sizes.hidden
