"""The layers of a model as an engine finds them: what the block's `activations` make of them, and a count of
what they are.

Layers that are built for COAT, Megatron's, say of themselves what they do: each module has `coat_part()`. It
takes other options by `take_activations(activations)`, has those of now as `activations`, and `told_by` says
who chose them, None if nobody did.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch

from coat_ds.config import ActivationsConfig, CoatConfigError
from coat_kernels.fp8 import set_emulation

PLURALS = {
    "linear": "linear layers",
    "norm": "norms",
    "feed_forward": "feed-forwards",
    "attention": "attentions",
}


class Part(NamedTuple):
    """What a module does: its kind, one of `PLURALS`, how, and where it stays as the host has it, why."""

    kind: str
    how: str | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Layers:
    """How the layers of a model compute and what they keep for backward, counted from the modules."""

    made: dict[str, dict[str, int]] = field(default_factory=dict)
    """By kind, and by how they do it: the number of modules."""

    left: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """By kind, and by why they stay as the host has them: names of modules."""

    def count(self, kind: str) -> tuple[int, int]:
        """Modules of a kind that are made for COAT, and all of them."""
        made = sum(self.made.get(kind, {}).values())
        return made, made + sum(map(len, self.left.get(kind, {}).values()))

    def summary(self) -> str:
        """One line."""
        made, linears = self.count("linear")
        parts = [f"{made} of {linears} linear layers in FP8"]
        for kind, plural in PLURALS.items():
            parts += [f"{number} {plural}: {how}" for how, number in sorted(self.made.get(kind, {}).items())]
        for kind, reasons in self.left.items():
            for why, names in reasons.items():
                listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
                parts.append(f"left {len(names)} {PLURALS[kind]} ({listed}): {why}")
        return "; ".join(parts)


def layers_of(model: torch.nn.Module, why: str) -> Layers:
    """Counts the layers of `model`. why: what is said of linear layers that nobody has made for COAT."""
    layers = Layers()
    for name, module in model.named_modules():
        if hasattr(module, "coat_part"):
            part = module.coat_part()
        else:
            part = Part("linear", None, why) if _is_linear(module) else None
        if part is None:
            continue
        if part.how is None:
            layers.left.setdefault(part.kind, {}).setdefault(part.why, []).append(name)
        else:
            counts = layers.made.setdefault(part.kind, {})
            counts[part.how] = counts.get(part.how, 0) + 1
    return layers


def _is_linear(module: torch.nn.Module) -> bool:
    """Whether `module` multiplies by a matrix of its own: torch's linear layers, and other hosts'."""
    weight = module._parameters.get("weight")
    name = type(module).__name__
    named = isinstance(module, torch.nn.Linear) or name.endswith("Linear") or name == "Conv1D"
    # ZeRO-3 has emptied the tensor and noted its shape
    return named and weight is not None and len(getattr(weight, "ds_shape", weight.shape)) == 2


def reach(model: torch.nn.Module, activations: ActivationsConfig, said: bool) -> None:
    """Has layers that were built for COAT before the engine do what the block says.

    said: whether the block says something of activations; if not, layers stay as they were built.
    Raises CoatConfigError for layers that somebody else told otherwise, and if the block switches them off.
    """
    built = list(_built(model))
    if not built:
        return
    if not activations.enabled:
        raise CoatConfigError(
            "coat.activations.enabled: found False, but the model was built of layers that compute in FP8 "
            f"({built[0][0]} and {len(built) - 1} more modules). Build it with sdpa_layer_spec in place of "
            "coat_layer_spec, or drop the key."
        )
    others = [(name, module) for name, module in built if said and module.activations != activations]
    for name, module in others:
        if module.told_by is not None:
            key, found, wanted = _difference(module.activations, activations)
            raise CoatConfigError(
                f"coat.activations.{key}: found {wanted!r}, but {name} was built with {found!r}, as "
                f"{module.told_by} says. Make them equal, or drop one of the two."
            )
    # what a module holds is asked by those around it
    for _, module in reversed(others):
        module.take_activations(activations)
    if others:
        set_emulation(activations.emulate)


def _built(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    return ((name, m) for name, m in model.named_modules() if hasattr(m, "take_activations"))


def _difference(found: ActivationsConfig, wanted: ActivationsConfig) -> tuple[str, object, object]:
    """The first key in which two differ, and both values."""
    pairs = ((f.name, getattr(found, f.name), getattr(wanted, f.name)) for f in fields(ActivationsConfig))
    return next(pair for pair in pairs if pair[1] != pair[2])
