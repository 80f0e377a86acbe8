"""What the layers of a model do, counted from its modules.

Layers that are built for COAT, Megatron's, say of themselves what they do: each module has `coat_part()`. Of
others `coat_ds.convert` has noted it.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from coat_ds.config import ActivationsConfig
from coat_ds.layers.attention import STATE
from coat_ds.layers.conversion import Conversion, conversion_of, holder_of
from coat_ds.layers.formats import formats
from coat_ds.layers.replaced import replaced
from coat_kernels.linear import LinearFormats

PLURALS = {
    "linear": "linear layers",
    "norm": "norms",
    "feed_forward": "feed-forwards",
    "attention": "attentions",
    "layer": "layers",
}
# how many names of modules that stay a line shows
NAMED = 3


class Part(NamedTuple):
    """What a module does: its kind, one of `PLURALS`, how, and why if it stays as the framework made it."""

    kind: str
    how: str | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Layers:
    """How the layers of a model compute and what they keep for backward, counted from the modules."""

    made: dict[str, dict[str, int]] = field(default_factory=dict)
    """By kind, and by how they do it: the number of modules."""

    found: dict[str, int] = field(default_factory=dict)
    """By kind: all modules, with those that stay as the framework made them."""

    left: dict[str, str] = field(default_factory=dict)
    """By name of a module: why it stays as the framework made it."""

    def count(self, kind: str) -> tuple[int, int]:
        """Modules of a kind that are made for COAT, and all of them."""
        return sum(self.made.get(kind, {}).values()), self.found.get(kind, 0)

    def summary(self) -> str:
        """One line."""
        made, linears = self.count("linear")
        parts = [f"{made} of {linears} linear layers in FP8"]
        for kind, plural in PLURALS.items():
            for how, number in sorted(self.made.get(kind, {}).items()):
                parts.append(f"{number} {plural} {how}")
        reasons: dict[str, list[str]] = {}
        for name, why in self.left.items():
            reasons.setdefault(why, []).append(name or "the model")
        for why, names in reasons.items():
            listed = ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
            parts.append(f"left as they are {len(names)} ({listed}): {why}")
        return "; ".join(parts)

    def _take(self, name: str, part: Part) -> None:
        self.found[part.kind] = self.found.get(part.kind, 0) + 1
        if part.how is None:
            self.left[name] = part.why
        else:
            counts = self.made.setdefault(part.kind, {})
            counts[part.how] = counts.get(part.how, 0) + 1


def layers_of(model: nn.Module, why: str) -> Layers:
    """Counts the layers of `model`. why: the reason given for linear layers that stay as they are."""
    layers = Layers()
    conversion = conversion_of(model)
    converted = {} if conversion is None else _count_converted(layers, model, conversion)
    for name, module in model.named_modules():
        if hasattr(module, "coat_part"):
            part = module.coat_part()
        else:
            part = Part("linear", None, why) if _is_linear(module) and name not in converted else None
        if part is not None:
            layers._take(name, part)
    return layers


def _count_converted(layers: Layers, model: nn.Module, conversion: Conversion) -> set[str]:
    """Counts what is still converted; the names that `conversion` speaks of."""
    holder = holder_of(model)
    (prefix,) = (name and f"{name}." for name, module in model.named_modules() if module is holder)
    modules = dict(holder.named_modules())
    for kind, names in conversion.converted.items():
        for name in names:
            module = modules.get(name)
            there = module is not None and (STATE in vars(module) or replaced(module) is not None)
            how = _how(kind, conversion.activations) if there else None
            layers._take(prefix + name, Part(kind, how, "exchanged since it was converted"))
    for kind, found in conversion.found.items():
        left = found - len(conversion.converted[kind])
        layers.found[kind] = layers.found.get(kind, 0) + left
    layers.left.update({prefix + name: why for name, why in conversion.left.items()})
    spoken_of = {*conversion.left, *(n for names in conversion.converted.values() for n in names)}
    return {prefix + name for name in spoken_of}


def _how(kind: str, activations: ActivationsConfig) -> str:
    """What converted modules of a kind do."""
    if kind == "linear":
        return multiplied(formats(activations), activations)
    if kind == "layer":
        return "can run as fused blocks"
    return attended(activations) if kind == "attention" else grouped(activations)


def multiplied(linear: LinearFormats, activations: ActivationsConfig) -> str:
    """How linear layers compute, for the log."""
    how = f"multiply in {linear.forward.name}, gradients in {linear.backward.name}"
    return f"{how}, evaluation as stock layers" if activations.evaluation == "stock" else how


def grouped(activations: ActivationsConfig) -> str:
    """How activations are kept, for the log."""
    return f"keep {activations.saved_format} 1x{activations.group_size}"


def attended(activations: ActivationsConfig) -> str:
    """How attention is kept, for the log."""
    kept = activations.attention_format
    if kept == "bf16":
        return "keep BF16"
    if kept == "recompute":
        # by itself attention cannot recompute its inputs
        return f"{grouped(activations)}, in fused blocks the output alone"
    return f"keep {kept} 1x{activations.group_size}"


def _is_linear(module: nn.Module) -> bool:
    """Whether `module` multiplies by a matrix of its own: torch's linear layers, and other frameworks'."""
    weight = module._parameters.get("weight")
    name = type(module).__name__
    named = isinstance(module, nn.Linear) or name.endswith("Linear") or name == "Conv1D"
    # ZeRO-3 has emptied the tensor and noted its shape
    return named and weight is not None and len(getattr(weight, "ds_shape", weight.shape)) == 2
