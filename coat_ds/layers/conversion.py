"""The record of what `convert` changed in a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from coat_ds.config import ActivationsConfig
from coat_ds.log import by_reason

# kinds of modules, each with its plural in the report
PLURALS = {
    "linear": "linear layers",
    "norm": "norms",
    "feed_forward": "feed-forwards",
    "attention": "attentions",
    "layer": "layers",
    # layers that are fused up to attention's output
    "attention_block": "attention blocks",
}
KINDS = tuple(PLURALS)

CONVERSION = "coat_conversion"


@dataclass
class Conversion:
    """Which modules were converted and which were not.

    converted: by kind, the names of the converted modules; an expert layer counts as a linear and as a
        feed-forward layer.
    left: the reason why a module stays stock, by the name of the module.
    found: by kind, the number of modules, converted or not.
    """

    activations: ActivationsConfig
    converted: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    left: dict[str, str] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def add_converted(self, kind: str, name: str) -> None:
        self.found[kind] += 1
        self.converted[kind].append(name)

    def add_left(self, kind: str, name: str, reason: str) -> None:
        self.found[kind] += 1
        self.left[name] = reason

    def summary(self) -> str:
        """What the start log says of the layers, in one line."""
        converted = {kind: len(names) for kind, names in self.converted.items() if names}
        made = {kind: {describe(kind, self.activations): number} for kind, number in converted.items()}
        return "; ".join(report(made, self.found["linear"], self.left))

    def idle_keys(self) -> list[str]:
        """A line for each key of the block that has no effect on this model."""
        key, fmt, lines = self.activations.KEY, self.activations.attention_format, []
        if self.activations.cuda_graphs is True and not self.converted["layer"]:
            lines.append(
                f"{key}.cuda_graphs: found True, but no layer of the model runs as a fused block, which "
                "alone can be recorded. Drop the key."
            )
        if fmt != "bf16" and not self.converted["attention"]:
            lines.append(
                f"{key}.attention_format: found {fmt!r}, but no attention of the model was converted, which "
                "saves what it saved. Drop the key, or take a model of transformers with "
                'attn_implementation="sdpa".'
            )
        elif fmt == "recompute" and not (self.converted["layer"] or self.converted["attention_block"]):
            lines.append(
                f"{key}.attention_format: found 'recompute', but no layer of the model runs as a fused "
                "block, which alone recomputes: queries, keys and values are saved in 8 bits. Write 'sqrt8'."
            )
        return lines

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        if self.converted["attention"]:
            # another process may have unpickled this object, without the registration
            from coat_ds.layers.modules.attention import register

            register()


def report(made: Mapping[str, Mapping[str, int]], linears: int, left: Mapping[str, str]) -> list[str]:
    """Lines on what the layers of a model compute in FP8, what they save, and what stays as it was.

    made: by kind of module and by how it computes or saves, the number of modules. linears: the number of all
        linear layers. left: by name of a module that the framework's own code runs, the reason.
    """
    in_fp8 = made.get("linear", {})
    formats = ", ".join(how if len(in_fp8) == 1 else f"{n} in {how}" for how, n in in_fp8.items())
    lines = [f"{sum(in_fp8.values())} of {linears} linear layers in FP8" + f" ({formats})" * bool(formats)]
    saved = [
        f"{number} {plural} {how}"
        for kind, plural in PLURALS.items()
        if kind not in ("linear", "layer", "attention_block")
        for how, number in sorted(made.get(kind, {}).items())
    ]
    if saved:
        lines.append(f"saved for backward: {', '.join(saved)}")
    if fused := sum(made.get("layer", {}).values()):
        lines.append(f"{fused} layers run fused")
    if blocks := sum(made.get("attention_block", {}).values()):
        lines.append(f"{blocks} layers run fused up to attention's output")
    lines += [f"{count} not converted ({names}): {why}" for count, names, why in by_reason(left)]
    return lines


def describe(kind: str, activations: ActivationsConfig) -> str:
    """How converted modules of a kind compute or save, for the report."""
    if kind == "linear":
        return describe_gemms(activations.backward_format, activations)
    if kind in ("layer", "attention_block"):
        return "run fused"
    return describe_attention(activations) if kind == "attention" else describe_saved(activations)


def describe_gemms(backward_format: str, activations: ActivationsConfig) -> str:
    """The formats of GEMMs."""
    how = f"e4m3, gradients in {backward_format}"
    return f"{how}, evaluation as stock layers" if activations.evaluation == "stock" else how


def describe_saved(activations: ActivationsConfig) -> str:
    """How an activation is saved."""
    return f"in 8 bits ({activations.saved_format})"


def describe_attention(activations: ActivationsConfig) -> str:
    """How attention's tensors are saved."""
    fmt = activations.attention_format
    if fmt == "bf16":
        return "in BF16"
    if fmt == "recompute":
        # outside of a fused block attention cannot recompute its inputs
        return f"{describe_saved(activations)}, in fused layers the output alone"
    return f"in 8 bits ({fmt})"


def holder_of(model: nn.Module) -> nn.Module | None:
    """The module that `convert` was called on: `model` or one inside it; None if there is none."""
    return next((m for m in model.modules() if CONVERSION in m.__dict__), None)


def conversion_of(model: nn.Module) -> Conversion | None:
    """The conversion of `model`, or of the model that it wraps; None for a stock model."""
    holder = holder_of(model)
    return None if holder is None else holder.__dict__[CONVERSION]
