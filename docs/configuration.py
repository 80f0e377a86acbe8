"""Generates docs/configuration.md and configs/coat.schema.json from the dataclasses of the `"coat"` block.

python docs/configuration.py > docs/configuration.md
python docs/configuration.py schema > configs/coat.schema.json
"""

import ast
import inspect
import json
import sys
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from coat_ds.config import CoatConfig

HEAD = """\
# Configuration

<!-- made by: python docs/configuration.py > docs/configuration.md -->

The `"coat"` block is a key of a DeepSpeed JSON config. Megatron reads the same block from the JSON file that
the environment variable `COAT_CONFIG` names. `coat_ds.convert(model, {...})` takes the keys of `activations`.

Only `enabled` is required. The whole block, each other key with its default:

```json
{example}
```

Unknown keys, wrong types and impossible combinations raise an error before any memory is allocated. The error
names the key, the value and the fix. COAT chooses the value of a key whose default is
`null`.

Editors check and complete the block with its JSON schema, [coat.schema.json](../configs/coat.schema.json).
"""
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def schema() -> dict[str, Any]:
    """A JSON schema, draft 2020-12, of a DeepSpeed config. It describes only the `"coat"` block."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "DeepSpeed config with a coat block",
        "type": "object",
        "properties": {"coat": _block(CoatConfig)},
    }


def _block(cls: type) -> dict[str, Any]:
    described = _descriptions(cls)
    properties = {f.name: _property(f) | {"description": described[f.name]} for f in fields(cls)}
    block = {
        "description": inspect.getdoc(cls),
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    if cls is CoatConfig:
        block["required"] = ["enabled"]
    return block


def _property(f: Field) -> dict[str, Any]:
    if is_dataclass(f.type):
        block = _block(f.type)
        return {"anyOf": [{"type": "boolean"}, block]} if f.type.OFF else block
    if "check" in f.metadata:
        number = {"type": "number", "minimum": f.metadata["minimum"]}
        return {"anyOf": [{"enum": list(f.metadata["choices"])}, number], "default": f.default}
    if f.type in JSON_TYPES:
        made = {"type": JSON_TYPES[f.type]}
    elif "choices" in f.metadata:
        made = {}
    else:
        made = {"type": "array", "items": {"type": "string"}}
    if "choices" in f.metadata:
        made["enum"] = list(f.metadata["choices"])
    if "minimum" in f.metadata:
        made["minimum"] = f.metadata["minimum"]
    if f.default is not MISSING:
        made["default"] = f.default
    return made


def _descriptions(cls: type) -> dict[str, str]:
    """The docstrings of the fields: the string literal after each field."""
    body = ast.parse(inspect.getsource(cls)).body[0].body
    return {
        field.target.id: inspect.cleandoc(text.value.value).replace("\n", " ")
        for field, text in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def parts(block: dict, path: str = "coat") -> list[tuple[str, dict]]:
    """The block and its inner blocks, each with its path."""
    found = [(path, block)]
    for name, described in block["properties"].items():
        inner = next((d for d in described.get("anyOf", [described]) if "properties" in d), None)
        if inner is not None:
            found += parts(inner, f"{path}.{name}")
    return found


def example(block: dict) -> dict:
    values = {}
    for name, described in block["properties"].items():
        inner = next((d for d in described.get("anyOf", [described]) if "properties" in d), None)
        values[name] = described["default"] if inner is None else example(inner)
    return values


def section(path: str, block: dict) -> list[str]:
    lines = [f"## `{path}`", "", block["description"].replace("\n", " "), ""]
    lines += ["| key | default | values | meaning |", "|---|---|---|---|"]
    for name, described in block["properties"].items():
        if "default" not in described:
            where = f"{path}.{name}"
            lines.append(f"| `{name}` | | [object](#{where.replace('.', '')}) | {described_as(described)} |")
            continue
        values = ", or ".join(map(values_of, described.get("anyOf", [described])))
        default = json.dumps(list(d) if isinstance(d := described["default"], tuple) else d)
        lines.append(f"| `{name}` | `{default}` | {values} | {described['description']} |")
    return [*lines, ""]


def values_of(described: dict) -> str:
    if "enum" in described:
        return ", ".join(f"`{json.dumps(value)}`" for value in described["enum"])
    return described["type"] + (f", {described['minimum']} or more" if "minimum" in described else "")


def described_as(described: dict) -> str:
    boolean = " `true` or `false` may replace the object." if "anyOf" in described else ""
    return described["description"] + boolean


def text() -> str:
    """The content of docs/configuration.md."""
    block = schema()["properties"]["coat"]
    whole = json.dumps({"coat": example(block) | {"enabled": True}}, indent=2)
    lines = [HEAD.replace("{example}", whole)]
    for path, inner in parts(block):
        lines += section(path, inner)
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2) + "\n" if sys.argv[1:] == ["schema"] else text(), end="")
