"""The sizes of a model of transformers, read from its modules: no table of model types, and no default that
a config leaves to its class.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable

from torch import nn

from coat_ds.layers.modules.converted_forward import converted_forward
from coat_ds.layers.modules.experts import is_experts, why_not
from coat_ds.optim.shards import shape_of
from coat_ds.plan.errors import PlanError
from coat_ds.plan.experts import Experts
from coat_ds.plan.sizes import Sizes

# model types whose saved activations tests compare with what autograd saves
COUNTED = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
# a decoder whose parameters differ by more from those of its layers and tables has other parts
TOLERANCE = 0.02
# what configs call the number of experts that a token takes
_USED = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")


def from_module(model: nn.Module) -> Sizes:
    """The sizes of a model of transformers, on any device, the meta device included.

    All parameters are counted: those that the sizes of its decoder do not give are `other_parameters`. Raises
    PlanError, naming the module, for models with other layers than attention and a feed-forward.
    """
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise PlanError(
            f'{type(model).__name__}: expected a model of transformers, which has its sizes in "config". '
            "Hand over a Sizes instead."
        )
    try:
        return _read(model)
    # of configs without such sizes
    except (AttributeError, RuntimeError) as error:
        raise PlanError(f"{type(model).__name__}: its sizes could not be read ({error}).") from error


def _read(model: nn.Module) -> Sizes:
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise _refused(model, "has an encoder and a decoder")
    decoder, head = model.get_decoder() or model, model.get_output_embeddings()
    if any(getattr(module, "is_causal", True) is False for module in decoder.modules()):
        raise _refused(model, "is an encoder: its attention is not causal")
    table = model.get_input_embeddings().weight
    vocabulary, hidden = shape_of(table)
    layers = _layers(decoder)
    attention = [_attention(layer, hidden, config) for layer in layers]
    dense, sparse = set(), set()
    for layer in layers:
        found = _feed_forward(layer, hidden, config)
        (sparse if isinstance(found, Experts) else dense).add(found)
    if len(dense) > 1 or len(sparse) > 1 or any(sizes != attention[0] for sizes in attention):
        raise _refused(model, "has layers of different sizes")
    experts = next(iter(sparse), None)
    if experts is not None:
        count = sum(bool(_highest(layer, is_experts)) for layer in layers)
        experts = dataclasses.replace(experts, layers=count)
    ffn, gated = next(iter(dense)) if dense else (experts.ffn, experts.gated)
    sizes = Sizes(
        **attention[0],
        layers=len(layers),
        hidden=hidden,
        ffn=ffn,
        gated=gated,
        vocabulary=vocabulary,
        tied=head is None or head.weight is table,
        counted=config.model_type in COUNTED,
        maker="transformers",
        experts=experts,
    )
    parts = [part.parameters() for part in (decoder, head) if part is not None]
    own = _numel({id(p): p for p in (table, *itertools.chain(*parts))}.values())
    if abs(own - sizes.parameters) > TOLERANCE * own:
        raise _refused(model, f"has {own:,} parameters, and a decoder of its sizes {sizes.parameters:,}")
    numel = _numel(model.parameters())
    other = max(0, numel - sizes.parameters)
    return dataclasses.replace(sizes, other_parameters=other, outside=max(0, numel - own))


def _refused(module: nn.Module, why: str) -> PlanError:
    return PlanError(
        f"{type(module).__name__}: {why}. Expected a decoder of attention and feed-forward layers: hand over "
        "a Sizes to coat_ds.plan.predict instead."
    )


def _layers(decoder: nn.Module) -> list[nn.Module]:
    """The modules of the list that holds most parameters."""
    lists = [m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise _refused(decoder, "has no list of layers")
    return list(max(lists, key=lambda found: _numel(found.parameters())))


def _is_attention(module: nn.Module) -> bool:
    return re.search("Attention|Attn", type(module).__name__) is not None


def _attention(layer: nn.Module, hidden: int, config) -> dict:
    """Fields of `Sizes`."""
    found = _highest(layer, _is_attention)
    if not found:
        raise _refused(layer, "is a layer without attention")
    attention, heads = found[0], config.num_attention_heads
    dims = (getattr(holder, "head_dim", None) for holder in (attention, config))
    head_dim = next(filter(None, dims), hidden // heads)
    matrices = [p for p in attention.parameters() if len(shape_of(p)) == 2 and 1 not in shape_of(p)]
    groups = (_numel(matrices) / hidden / head_dim - 2 * heads) / 2
    named = getattr(config, "num_key_value_heads", None) or groups
    if len(found) > 1 or groups != named or groups not in range(1, heads + 1) or heads % int(groups):
        raise _refused(attention, "is not attention of queries, keys, values and an output")
    vectors = [shape_of(p) for name, p in attention.named_parameters() if not name.endswith("bias")]
    head_norms = vectors.count((head_dim,)) == 2
    return {"heads": heads, "groups": int(groups), "head_dim": head_dim, "head_norms": head_norms}


def _feed_forward(layer: nn.Module, hidden: int, config) -> Experts | tuple[int, bool]:
    """The experts of a layer, or the channels of its feed-forward and whether it is gated."""
    inside = {id(p) for module in _highest(layer, _is_attention) for p in module.parameters()}
    matrices = [p for p in layer.parameters() if id(p) not in inside and len(shape_of(p)) > 1]
    experts = _highest(layer, is_experts)
    shared_gate = False
    if experts:
        own = {id(p) for p in experts[0].parameters()}
        count = shape_of(experts[0].down_proj)[0]
        shared_gate = any(shape_of(p) == (1, hidden) for p in matrices)
        routers = ((count, hidden), (1, hidden))
        matrices = [p for p in matrices if id(p) not in own and shape_of(p) not in routers]
    for p in matrices:
        if len(shape_of(p)) > 2 or hidden not in shape_of(p):
            raise _refused(layer, f"has a weight of {list(shape_of(p))} with {hidden} channels")
    widths = [_numel([p]) // hidden for p in matrices]
    ffn = min(widths, default=0)
    if sum(widths) not in (2 * ffn, 3 * ffn):
        raise _refused(layer, f"has matrices of {hidden} x {widths} that are no feed-forward's")
    if experts:
        return _experts(experts, hidden, config, ffn, shared_gate)
    return ffn, sum(widths) == 3 * ffn


def _experts(found: list[nn.Module], hidden: int, config, shared: int, shared_gate: bool) -> Experts:
    module = found[0]
    # a converted layer's forward is COAT's
    why = "two in a layer" if len(found) > 1 else converted_forward(module) is None and why_not(module, 16)
    if why:
        raise _refused(module, f"COAT does not convert it: {why}")
    used = next((value for name in _USED if (value := getattr(config, name, None))), None)
    if used is None:
        raise _refused(module, f"has experts, and its config none of {', '.join(_USED)}")
    count, *sides = shape_of(module.down_proj)
    return Experts(
        layers=1,
        count=count,
        used=used,
        ffn=math.prod(sides) // hidden,
        shared=shared,
        shared_gate=shared_gate,
        gated=_numel([module.gate_up_proj]) == 2 * _numel([module.down_proj]),
    )


def _highest(module: nn.Module, matches) -> list[nn.Module]:
    """The modules inside, and not inside another of them, that match."""
    found = []
    for child in module.children():
        found += [child] if matches(child) else _highest(child, matches)
    return found


def _numel(parameters: Iterable) -> int:
    return sum(math.prod(shape_of(p)) for p in parameters)
