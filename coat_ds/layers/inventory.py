"""What the layers of a model do, counted from its modules.

Layers that are built for COAT, Megatron's, say of themselves what they do: each module has `coat_part()`. Of
others `coat_ds.convert` has noted it.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

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
# of all parameters: smaller ones, such as norms, are not in the line
LEAST_SHARE = 0.001


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

    in_fp8: list[str] = field(default_factory=list)
    """Names of the modules whose weights are multiplied in FP8."""

    weights_left: dict[str, float] = field(default_factory=dict)
    """By class of module, largest first: the share of the model's parameters that no FP8 GEMM reads."""

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
        shares = [f"{kind} {share:.1%}" for kind, share in self.weights_left.items() if share >= LEAST_SHARE]
        if made and shares:
            parts.append(f"weights outside of FP8, of all parameters: {', '.join(shares)}")
        return "; ".join(parts)

    def _take(self, name: str, part: Part) -> None:
        self.found[part.kind] = self.found.get(part.kind, 0) + 1
        if part.how is None:
            self.left[name] = part.why
        else:
            counts = self.made.setdefault(part.kind, {})
            counts[part.how] = counts.get(part.how, 0) + 1
            if part.kind == "linear":
                self.in_fp8.append(name)

    def _weigh(self, model: nn.Module) -> None:
        """Notes the shares of `weights_left`."""
        in_fp8, seen, sizes, total = set(self.in_fp8), set(), {}, 0
        for name, module in model.named_modules():
            for p in module._parameters.values():
                if p is None or is_lazy(p) or id(p) in seen:
                    continue
                seen.add(id(p))
                # ZeRO-3 has emptied the tensor and noted its size
                size = getattr(p, "ds_numel", p.numel())
                total += size
                if name not in in_fp8:
                    kind = type(module).__name__
                    sizes[kind] = sizes.get(kind, 0) + size
        largest = sorted(sizes.items(), key=lambda item: -item[1])
        self.weights_left.update({kind: size / total for kind, size in largest if size})


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
    layers._weigh(model)
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
    named = named and weight is not None and not is_lazy(weight)
    return named and len(getattr(weight, "ds_shape", weight.shape)) == 2
