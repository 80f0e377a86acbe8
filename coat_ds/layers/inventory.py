"""Counts how the layers of a model compute, from its modules.

Megatron layers that are built for COAT describe themselves: each module has `coat_part()`. For other models
the record of `coat_ds.convert` is counted.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from coat_ds.layers.conversion import Conversion, conversion_of, describe, holder_of, report
from coat_ds.layers.modules.attention import SAVING
from coat_ds.layers.modules.converted_forward import converted_forward
from coat_ds.optim.shards import shape_of

# share of all parameters; classes with less, such as norms, are left out of the line
MIN_SHARE = 0.001


class Part(NamedTuple):
    """A module: its kind, one of `conversion.KINDS`; how it computes, None for the framework's own code; and
    then why."""

    kind: str
    how: str | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Layers:
    """How the layers of a model compute and what they keep for backward, counted from the modules."""

    made: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of COAT's modules, by kind and by how they compute."""

    found: dict[str, int] = field(default_factory=dict)
    """Number of all modules by kind, COAT's and the framework's."""

    left: dict[str, str] = field(default_factory=dict)
    """By name of a module that runs the framework's own code: the reason."""

    in_fp8: list[str] = field(default_factory=list)
    """Names of the modules whose weights are multiplied in FP8."""

    weights_left: dict[str, float] = field(default_factory=dict)
    """Share of the model's parameters that no FP8 GEMM reads, by class of module, largest first."""

    def count(self, kind: str) -> tuple[int, int]:
        """The number of COAT's modules of a kind, and of all modules of this kind."""
        return sum(self.made.get(kind, {}).values()), self.found.get(kind, 0)

    def lines(self) -> list[str]:
        """What the layers compute in FP8, what they save for backward, and what stays as it was."""
        lines = report(self.made, self.found.get("linear", 0), self.left)
        shares = [f"{kind} {share:.1%}" for kind, share in self.weights_left.items() if share >= MIN_SHARE]
        if self.in_fp8 and shares:
            lines.append(f"parameters outside FP8 GEMMs: {', '.join(shares)}")
        return lines

    def summary(self) -> str:
        """`lines` in one line."""
        return "; ".join(self.lines())

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
        """Fills `weights_left`."""
        in_fp8, seen, sizes, total = set(self.in_fp8), set(), {}, 0
        for name, module in model.named_modules():
            for p in module._parameters.values():
                if p is None or is_lazy(p) or id(p) in seen:
                    continue
                seen.add(id(p))
                size = shape_of(p).numel()
                total += size
                if name not in in_fp8:
                    kind = type(module).__name__
                    sizes[kind] = sizes.get(kind, 0) + size
        largest = sorted(sizes.items(), key=lambda item: -item[1])
        self.weights_left.update({kind: size / total for kind, size in largest if size})


def layers_of(model: nn.Module, why: str) -> Layers:
    """Counts the layers of `model`. why: the reason given for linear layers that are not converted."""
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
    """Counts the modules that are still converted; returns all names in `conversion`."""
    holder = holder_of(model)
    (prefix,) = (name and f"{name}." for name, module in model.named_modules() if module is holder)
    modules = dict(holder.named_modules())
    for kind, names in conversion.converted.items():
        for name in names:
            module = modules.get(name)
            there = module is not None and (SAVING in vars(module) or converted_forward(module) is not None)
            how = describe(kind, conversion.activations) if there else None
            layers._take(prefix + name, Part(kind, how, "exchanged since it was converted"))
    for kind, found in conversion.found.items():
        left = found - len(conversion.converted[kind])
        layers.found[kind] = layers.found.get(kind, 0) + left
    layers.left.update({prefix + name: why for name, why in conversion.left.items()})
    counted = {*conversion.left, *(n for names in conversion.converted.values() for n in names)}
    return {prefix + name for name in counted}


def _is_linear(module: nn.Module) -> bool:
    """Whether `module` multiplies by a matrix of its own: torch's linear layers, and other frameworks'."""
    weight = module._parameters.get("weight")
    name = type(module).__name__
    named = isinstance(module, nn.Linear) or name.endswith("Linear") or name == "Conv1D"
    return named and weight is not None and not is_lazy(weight) and len(shape_of(weight)) == 2
