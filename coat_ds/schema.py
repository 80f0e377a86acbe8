"""The JSON schema of the `"coat"` block, made from its dataclasses.

coat schema > configs/coat.schema.json
"""

import ast
import inspect
import json
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from coat_ds.config import CoatConfig

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
        return {"anyOf": [{"type": "boolean"}, block]} if f.type.OR_BOOLEAN else block
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


def text() -> str:
    """The content of configs/coat.schema.json."""
    return json.dumps(schema(), indent=2) + "\n"
