"""The sizes of a model of transformers, read from its modules: no table of model types, and no default that
a config leaves to its class.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from coat_ds.layers.detection.probe import shape_of
from coat_ds.layers.modules.experts import is_experts, why_not
from coat_ds.layers.modules.replaced import replaced
from coat_ds.plan.errors import PlanError
from coat_ds.plan.experts import Experts
from coat_ds.plan.sizes import Sizes, check_parameters

# model types whose saved activations tests compare with what autograd saves
COUNTED = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
# what configs call the number of experts that a token takes
_USED = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")


class _Layer(NamedTuple):
    """The sizes of one decoder layer. `ffn` is 0 where the layer has experts."""

    heads: int
    groups: int
    head_dim: int
    head_norms: bool
    ffn: int
    gated: bool
    experts: tuple | None


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
    (vocabulary, hidden), layers = shape_of(table), _layers(decoder)
    found = [_layer(layer, hidden, config) for layer in layers]
    dense = {layer._replace(experts=None) for layer in found if layer.experts is None}
    sparse = {layer._replace(ffn=0) for layer in found if layer.experts is not None}
    if len(dense) > 1 or len(sparse) > 1 or len({layer[:4] for layer in found}) > 1:
        raise _refused(model, "has layers of different sizes")
    experts = None
    if sparse:
        (kind,) = sparse
        count = sum(layer.experts is not None for layer in found)
        experts = Experts(**dict(kind.experts), gated=kind.gated, layers=count)
    one = next(iter(dense), found[0])
    sizes = Sizes(
        layers=len(found),
        hidden=hidden,
        ffn=one.ffn if dense else experts.ffn,
        heads=one.heads,
        groups=one.groups,
        head_dim=one.head_dim,
        vocabulary=vocabulary,
        gated=one.gated,
        tied=head is None or head.weight is table,
        head_norms=one.head_norms,
        counted=config.model_type in COUNTED,
        maker="transformers",
        experts=experts,
    )
    parts = [part.parameters() for part in (decoder, head) if part is not None]
    own = _numel_of({id(p): p for p in (table, *itertools.chain(*parts))}.values())
    check_parameters(type(model).__name__, own, sizes)
    numel = _numel_of(model.parameters())
    return dataclasses.replace(
        sizes, other_parameters=max(0, numel - sizes.parameters), outside=max(0, numel - own)
    )


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
    return list(max(lists, key=lambda found: _numel_of(found.parameters())))


def _layer(layer: nn.Module, hidden: int, config) -> _Layer:
    attention = _highest(layer, lambda module: re.search("Attention|Attn", type(module).__name__))
    if not attention:
        raise _refused(layer, "is a layer without attention")
    of_attention = {id(p) for module in attention for p in module.parameters()}
    heads = config.num_attention_heads
    dims = (getattr(holder, "head_dim", None) for holder in (attention[0], config))
    head_dim = next(filter(None, dims), hidden // heads)
    matrices = [p for p in attention[0].parameters() if len(shape_of(p)) == 2 and 1 not in shape_of(p)]
    columns = _numel_of(matrices) / hidden
    groups = (columns / head_dim - 2 * heads) / 2
    said = getattr(config, "num_key_value_heads", None) or groups
    if len(attention) > 1 or groups != said or groups not in range(1, heads + 1) or heads % int(groups):
        raise _refused(attention[0], "is not attention of queries, keys, values and an output")
    vectors = [shape_of(p) for n, p in attention[0].named_parameters() if not n.endswith("bias")]
    rest = [
        (name, module, p)
        for name, module in layer.named_modules()
        for p in module._parameters.values()
        if p is not None and id(p) not in of_attention
    ]
    experts, widths = _experts(layer, rest, hidden, config), []
    known = set() if experts is None else experts.pop("seen")
    for _, module, p in rest:
        if id(p) in known or len(shape_of(p)) < 2:
            continue
        if len(shape_of(p)) > 2 or hidden not in shape_of(p):
            raise _refused(module, f"has a weight of {list(shape_of(p))} in a layer of {hidden} channels")
        widths.append(_numel(p) // hidden)
    ffn = min(widths, default=0)
    if sum(widths) not in (2 * ffn, 3 * ffn):
        raise _refused(layer, f"has matrices of {hidden} x {widths} that are no feed-forward's")
    gated = sum(widths) == 3 * ffn
    if experts is not None:
        gated = experts.pop("gated")
        experts = tuple((experts | {"shared": ffn}).items())
    return _Layer(heads, int(groups), head_dim, vectors.count((head_dim,)) == 2, ffn, gated, experts)


def _experts(layer: nn.Module, rest: list, hidden: int, config) -> dict | None:
    """Fields of `Experts`, whether they are gated, and the identities of their weights and of the router's;
    None of a layer without them."""
    found = _highest(layer, is_experts)
    if not found:
        return None
    module = found[0]
    # a converted layer's forward is COAT's
    why = "two in a layer" if len(found) > 1 else replaced(module) is None and why_not(module, 16)
    if why:
        raise _refused(module, f"COAT does not convert it: {why}")
    count, *sides = shape_of(module.down_proj)
    ffn = math.prod(sides) // hidden
    used = next((value for name in _USED if (value := getattr(config, name, None))), None)
    if used is None:
        raise _refused(module, f"has experts, and its config none of {', '.join(_USED)}")
    seen = {id(p) for p in module.parameters()}
    gate = False
    for _, _, p in rest:
        if shape_of(p) == (count, hidden):
            seen.add(id(p))
        elif shape_of(p) == (1, hidden):
            gate = True
            seen.add(id(p))
    return {
        "count": count,
        "used": used,
        "ffn": ffn,
        "shared_gate": gate,
        "gated": _numel(module.gate_up_proj) == 2 * _numel(module.down_proj),
        "seen": seen,
    }


def _highest(module: nn.Module, matches) -> list[nn.Module]:
    """The modules inside, and not inside another of them, that match."""
    found = []
    for child in module.children():
        found += [child] if matches(child) else _highest(child, matches)
    return found


def _numel(p) -> int:
    return math.prod(shape_of(p))


def _numel_of(parameters: Iterable) -> int:
    return sum(map(_numel, parameters))
