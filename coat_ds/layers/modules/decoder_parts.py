"""Finds the pre-norm decoder layers of a model, such as Llama's, by what they compute.

What is tried, in this order, after the modules inside a layer were converted:

1. The layer has no parameters and four children: two norms and an attention, all converted, and one more, its
   mlp: a converted gated feed-forward layer, or any module if the layer's forward is of transformers itself.
   Attention has q_proj, k_proj, v_proj and o_proj, perhaps q_norm and k_norm, and nothing else.
2. The layer's own forward runs on numbers [1, 3, 8], with stand-ins for its children: sin(x), sin(x)^2, ...
   The output has to be y + mlp(norm(y)) with y = x + attention(norm(x)), in either order of the norms.
3. The attention's own forward runs with small weights, without a mask and with one. The output has to be that
   of causal attention with rotary positions.

What breaks it: a fifth child, even an unused one; dropout or a factor on the residual; attention and
feed-forward layers that read the same input; norms after them; rotation of interleaved pairs; soft-capped
scores; a forward with further required arguments. Such a layer runs its converted modules one by one, and
`conversion_of(model).converted["layer"]` does not list it. To find out why, call `parts_of(layer)` in a
debugger: `run` in probe.py suppresses the exceptions of a layer's forward.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from coat_ds.layers.detection.probe import ProbeDevice, close, first_found, linear_of, run, shadow
from coat_ds.layers.modules.attention import SAVING
from coat_ds.layers.modules.converted_forward import converted_forward
from coat_ds.layers.modules.feed_forward import Fp8GatedFeedForward
from coat_ds.layers.modules.linear import can_fuse
from coat_ds.layers.modules.norm import Fp8Norm
from coat_kernels.attention import causal_attention
from coat_kernels.rope import rotate

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
# norms of each head of queries and keys, as in Qwen3
HEAD_NORMS = ("q_norm", "k_norm")


class DecoderParts(NamedTuple):
    """The modules of a layer. The fused blocks replace mlp_norm and mlp only if mlp is a converted gated
    feed-forward layer."""

    input_norm: nn.Module
    attention: nn.Module
    mlp_norm: nn.Module
    mlp: nn.Module


class _StandIn(nn.Module):
    """A stand-in for a part of a layer. Each stand-in computes another function."""

    def __init__(self, power: int):
        super().__init__()
        self.power = power

    def forward(self, hidden_states):
        return hidden_states.sin() ** self.power


class _AttentionStandIn(_StandIn):
    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states), None


def parts_of(layer: nn.Module) -> DecoderParts | None:
    """The parts of a layer that computes x = x + attention(norm(x)); x + mlp(norm(x)), if its norms and its
    attention were converted; else None."""
    children = {name: child for name, child in layer._modules.items() if child is not None}
    norms = [child for child in children.values() if type(converted_forward(child)) is Fp8Norm]
    attentions = [child for child in children.values() if SAVING in child.__dict__]
    if layer._parameters or [len(children), len(norms), len(attentions)] != [4, 2, 1]:
        return None
    (mlp_of_layer,) = [child for child in children.values() if child not in (*norms, *attentions)]
    # other code may unpack the output of an unknown mlp, or hand it more, in ways that stand-ins do not show
    if not is_gated(mlp_of_layer) and not type(layer).forward.__module__.startswith("transformers."):
        return None
    # the blocks have no sinks
    if attentions[0]._parameters or set(attentions[0]._modules) - set(HEAD_NORMS) != set(PROJECTIONS):
        return None
    # some models set their norms to None
    head_norms = [norm and converted_forward(norm) for norm in head_norms_of(attentions[0])]
    are_rms = all(type(norm) is Fp8Norm and not norm.options.layer_norm for norm in head_norms)
    if len(head_norms) not in (0, 2) or not are_rms:
        return None
    names = {id(child): name for name, child in children.items()}
    for first, second in (norms, norms[::-1]):
        parts = DecoderParts(first, attentions[0], second, mlp_of_layer)
        fakes = {
            names[id(part)]: (_AttentionStandIn if part is parts.attention else _StandIn)(power)
            for power, part in enumerate(parts, 1)
        }
        x = ProbeDevice(torch.device("cpu"), torch.float32).numbers(1, 3, 8, seed=0)
        norm1, attention, norm2, mlp = (fakes[names[id(part)]] for part in parts)
        expected = x + attention(norm1(x))[0]
        expected = expected + mlp(norm2(expected))
        # Qwen3-VL's layers require position_embeddings, and the stand-ins do not read them
        like = partial(shadow(layer, {}, fakes), position_embeddings=None)
        if close(run(like, x), expected) and first_found(layer, partial(_is_rotary, parts.attention)):
            return parts
    return None


def is_gated(mlp: nn.Module) -> bool:
    """Whether `mlp` is a converted gated feed-forward layer."""
    return type(converted_forward(mlp)) is Fp8GatedFeedForward


def head_norms_of(attention: nn.Module) -> list[nn.Module]:
    """The norms of queries and keys; empty if `attention` has none."""
    inside = attention._modules
    return [inside[name] for name in HEAD_NORMS if name in inside]


def dropout_names(module: nn.Module) -> list[str]:
    """Names of the attributes of a module that are dropout rates."""
    rates = (int, float)
    return [n for n, v in vars(module).items() if "drop" in n and isinstance(v, rates)]


def why_never_fused(parts: DecoderParts) -> str | None:
    """Why no fused block can replace these parts, by the first linear layer that prevents it; else None."""
    linears = {name: parts.attention._modules[name] for name in PROJECTIONS}
    if is_gated(parts.mlp):
        form = converted_forward(parts.mlp).form
        names = [name for name in (form.gate, form.up, form.down) if name is not None]
        linears |= {name: parts.mlp._modules[name] for name in names}
    for name, linear in linears.items():
        if not can_fuse(converted_forward(linear)):
            # an adapter may be merged later; the base layer may still compute in FP8
            what = "has an adapter" if "base_layer" in linear._modules else "is not converted"
            return f"no fused block, since its {name} {what}"
    config = getattr(parts.attention, "config", None)
    rope = getattr(config, "rope_parameters", None) or {}
    turned = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if turned not in (None, 1):
        return f"no fused block, since its angles turn {turned} of each head"
    return None


def _is_rotary(attention: nn.Module, probe: ProbeDevice) -> bool:
    """Whether `attention` is causal attention with rotary positions as in `coat_kernels.rope`, applied after
    the head norms if there are any."""
    d, groups, m, h, s = 8, 2, 2, 16, 5
    small, sizes = {}, dict(zip(PROJECTIONS, (groups * m * d, groups * d, groups * d, h), strict=True))
    for i, (name, n) in enumerate(sizes.items()):
        k = groups * m * d if name == "o_proj" else h
        small[name] = linear_of(probe.numbers(n, k, seed=i) / k**0.5)
    norms = {name: nn.RMSNorm(d, eps=1e-3) for name in HEAD_NORMS if name in attention._modules}
    for i, norm in enumerate(norms.values()):
        norm.weight = nn.Parameter(1 + probe.numbers(d, seed=20 + i) / 4)
    like = shadow(attention, {}, small | norms)
    # attention reads its dropout rate in each forward
    like.__dict__.update(dict.fromkeys(dropout_names(attention), 0.0))
    like.__dict__.update(head_dim=d, num_key_value_groups=m, scaling=0.3)
    for name in ("num_heads", "num_attention_heads"):
        if name in like.__dict__:
            like.__dict__[name] = groups * m
    if "num_key_value_heads" in like.__dict__:
        like.__dict__["num_key_value_heads"] = groups
    angles = probe.numbers(1, s, d // 2, seed=7)
    cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
    x = probe.numbers(1, s, h, seed=8)
    # two cases: causal without a mask, and a mask that is only added to the scores
    mask = probe.numbers(1, 1, s, s, seed=9)
    with torch.no_grad():
        q, k, v = (small[name](x).view(1, s, -1, d) for name in PROJECTIONS[:3])
        q, k = (norm(t) for norm, t in zip(norms.values(), (q, k), strict=True)) if norms else (q, k)
        q, k = (rotate(t.transpose(0, 1), cos[0], sin[0]).transpose(0, 1) for t in (q, k))
        causal = causal_attention(q, k, v, scale=0.3, batch_first=True)
        heads = (t.transpose(1, 2) for t in (q, k, v))
        masked = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.3, enable_gqa=True)
        expected = [small["o_proj"](o) for o in (causal, masked.transpose(1, 2).flatten(2))]
    attend = partial(like, position_embeddings=(cos, sin))
    return all(
        close(run(lambda x, given=given: attend(x, attention_mask=given)[0], x), y)
        for given, y in zip((None, mask), expected, strict=True)
    )
