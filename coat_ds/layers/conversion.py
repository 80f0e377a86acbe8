"""What `convert` did to a model."""

from dataclasses import dataclass, field

from torch import nn

from coat_ds.config import ActivationsConfig

KINDS = ("linear", "norm", "feed_forward", "attention", "layer")
_NAMES = {
    "linear": ("linear layer multiplies", "linear layers multiply", "in FP8"),
    "norm": ("norm saves", "norms save", "in 8 bits"),
    "feed_forward": ("feed-forward activation saves", "feed-forward activations save", "in 8 bits"),
    "attention": ("attention saves", "attentions save", "in {attention}"),
    "layer": ("layer can run", "layers can run", "as fused blocks"),
}
# how many names of modules that stay a line shows
NAMED = 4

ATTRIBUTE = "coat_conversion"


@dataclass
class Conversion:
    """What was converted and what stayed as it was.

    converted: names of modules by kind, one of `KINDS`; an expert layer counts as a linear and a feed-forward
        layer. left: by name of the module, why it stayed.
    """

    activations: ActivationsConfig
    converted: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    left: dict[str, str] = field(default_factory=dict)
    # how many of a kind there are, with those that stayed
    found: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def take(self, kind: str, name: str) -> None:
        self.found[kind] += 1
        self.converted[kind].append(name)

    def leave(self, kind: str, name: str, reason: str) -> None:
        self.found[kind] += 1
        self.left[name] = reason

    def give_up(self, kind: str, name: str, reason: str) -> None:
        """Of what was taken."""
        self.converted[kind].remove(name)
        self.left[name] = reason

    def summary(self) -> str:
        """One line for the log."""
        fmt = self.activations.attention_format
        parts = []
        for kind, (one, many, how) in _NAMES.items():
            done, found = len(self.converted[kind]), self.found[kind]
            if found:
                attention = "BF16" if fmt == "bf16" else "8 bits"
                what = one if found == 1 else many
                parts.append(f"{done} of {found} {what} {how.format(attention=attention)}")
        line = ", ".join(parts) or "nothing was converted"
        if self.left:
            names = [f"{name or 'the model'} ({reason})" for name, reason in self.left.items()]
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            line += f"; left: {', '.join(names[:NAMED])}{more}"
        return line

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
        elif fmt == "recompute" and not self.converted["layer"]:
            lines.append(
                f"{key}.attention_format: found 'recompute', but no layer of the model runs as a fused "
                "block, which alone recomputes: queries, keys and values are saved in 8 bits. Write 'sqrt8'."
            )
        return lines

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        if self.converted["attention"]:
            # a copy that another process has read
            from coat_ds.layers.attention import register

            register()


def holder_of(model: nn.Module) -> nn.Module | None:
    """The module, `model` or one inside it, that was converted."""
    return next((m for m in model.modules() if ATTRIBUTE in m.__dict__), None)


def conversion_of(model: nn.Module) -> Conversion | None:
    """What was converted of `model`, or of the model that it wraps; None of a stock model."""
    holder = holder_of(model)
    return None if holder is None else holder.__dict__[ATTRIBUTE]
