"""Generates docs/api.md from the signatures and docstrings of the public names.

python docs/api.py > docs/api.md
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass

from coat_ds import CoatConfigError

HEAD = """\
# Python API

<!-- made by: python docs/api.py > docs/api.md -->

`import coat_ds` imports neither DeepSpeed nor torch; each name is imported at its first use.
`coat_ds.CoatConfig` is the whole [`"coat"` block](configuration.md), and `coat_ds.plan` predicts memory
([`coat plan`](plan.md)).
"""
# by section: the module of the names, and the names; "" is the module itself
SECTIONS = {
    "Layers": [("coat_ds", ["convert", "unconvert", "conversion_of"])],
    "Record of a conversion": [("coat_ds.layers.conversion", ["Conversion", "Conversion.summary"])],
    "Optimizer": [("coat_ds", ["CoatAdamW", "CoatAdamW.release_gradients", "state_bytes"])],
    "Activation checkpointing": [("coat_ds", ["compressed_checkpoints"])],
    "DeepSpeed": [("coat_ds", ["install", "uninstall", "CoatConfigError"])],
    "Watching": [("coat_ds.watch", ["Watch", "Watch.end_step", "Watch.close", "Callback"])],
    "Weights": [("coat_kernels.weights", ["invalidate_weight_caches"])],
    "Megatron": [
        ("megatron_ext.layer_specs", [""]),
        ("megatron_ext.hybrid_specs", [""]),
        ("megatron_ext.mpu", ["sum_shared_gradients"]),
    ],
}
ERRORS = (CoatConfigError,)
_ITEM = re.compile(r"(\w+(?:, \w+)*): ")


def shown(annotation: object) -> str:
    """A type without the modules of its names."""
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(annotation))


def signature(name: str, value: object) -> str:
    """The call as code, with a line per parameter if it is long."""
    found = inspect.signature(value)
    parameters = []
    for parameter in found.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        text = parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {shown(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            default = parameter.default
            named = isinstance(default, type) or inspect.isfunction(default)
            text += f" = {default.__name__ if named else repr(default)}".replace("<lambda>", "...")
        parameters.append(text)
    returned = found.return_annotation
    end = ")" if returned in (found.empty, None) else f") -> {shown(returned)}"
    if inspect.isgeneratorfunction(inspect.unwrap(value)):
        name, end = f"with {name}", "):"
    line = f"{name}({', '.join(parameters)}{end}"
    return line if len(line) <= 100 else "\n".join([f"{name}(", *(f"    {p}," for p in parameters), end])


def text_of(doc: str) -> Iterator[str]:
    """The lines of a docstring, its arguments as a list."""
    listed = False
    for line in doc.splitlines():
        bare = line.strip()
        if bare == "Args:":
            continue
        indent = len(line) - len(line.lstrip())
        if _ITEM.match(bare):
            yield from [""] * (not listed)
            listed = True
            yield "- " + _ITEM.sub(r"**\1**: ", bare, count=1)
        elif listed and bare and indent:
            yield f"  {bare}"
        else:
            yield from [""] * listed
            listed = False
            yield line


def text() -> str:
    """The content of docs/api.md."""
    lines = [HEAD]
    for title, homes in SECTIONS.items():
        lines += [f"## {title}", ""]
        for home, names in homes:
            module = importlib.import_module(home)
            for name in names:
                value = module
                for part in filter(None, name.split(".")):
                    value = getattr(value, part)
                whole = ".".join(filter(None, (home, name)))
                lines += [f"### `{whole}`", ""]
                # callers build no errors and no records
                if name and not is_dataclass(value) and value not in ERRORS:
                    lines += ["```text", signature(name, value), "```", ""]
                lines += [*text_of(inspect.getdoc(value)), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


if __name__ == "__main__":
    print(text(), end="")
