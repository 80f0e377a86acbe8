"""The schema in configs/ is the dataclasses', and says yes and no where they do."""

import json
import runpy
from pathlib import Path

import jsonschema
import pytest

from coat_ds import CoatConfig, CoatConfigError

ROOT = Path(__file__).resolve().parents[2]
MADE = runpy.run_path(str(ROOT / "docs/configuration.py"))["schema"]

GOOD = [
    {"enabled": True},
    {"enabled": False, "optimizer": {"exp_avg_sq_format": "log8", "min_numel": 0, "keep_fp32": []}},
    {"enabled": True, "fp8_activation_checkpointing": True},
    *({"enabled": True, "optimizer": {"offload": value}} for value in ("cpu", 0, 12.5)),
    {"enabled": True, "activations": {"backward_format": "e4m3"}},
    {"enabled": True, "activations": False, "require": False},
    {"enabled": True, "activations": True, "require": True},
    *({"enabled": True, "zero3_layer_units": value} for value in (None, True, False)),
    *({"enabled": True, "watch": value} for value in (True, {"every": 0}, {"every": 1, "folder": "run"})),
]
BAD = [
    True,
    {},
    {"optimizer": {}},
    {"enabled": "true"},
    {"enabled": True, "optimiser": {}},
    {"enabled": True, "optimizer": True},
    {"enabled": True, "require": "yes"},
    {"enabled": True, "activations": "off"},
    {"enabled": True, "optimizer": {"exp_avg_format": "log8"}},
    {"enabled": True, "optimizer": {"min_numel": -1}},
    *({"enabled": True, "optimizer": {"offload": value}} for value in ("gpu", -1, True, None)),
    {"enabled": True, "optimizer": {"min_numel": "many"}},
    {"enabled": True, "optimizer": {"keep_fp32": "*norm*"}},
    {"enabled": True, "optimizer": {"keep_fp32": [1]}},
    {"enabled": True, "activations": {"forward_format": "e5m2"}},
    {"enabled": True, "fp8_activation_checkpointing": 1},
    {"enabled": True, "checkpointing": {"compress": True}},
    {"enabled": True, "report": True},
    *({"enabled": True, "zero3_layer_units": value} for value in ("yes", 1, "auto")),
    *({"enabled": True, "watch": value} for value in (100, {"every": 0.5}, {"folder": True}, {"act": "off"})),
]


def schema() -> dict:
    """As a file holds it."""
    return json.loads(json.dumps(MADE()))


def test_schema_file_is_the_generated_one():
    found = json.loads((ROOT / "configs/coat.schema.json").read_text())
    assert found == schema(), "run python docs/configuration.py schema > configs/coat.schema.json"


@pytest.mark.parametrize("block", GOOD, ids=json.dumps)
def test_schema_accepts(block):
    jsonschema.validate({"coat": block, "train_batch_size": 1}, schema())
    CoatConfig.from_dict(block)


@pytest.mark.parametrize("block", BAD, ids=json.dumps)
def test_schema_refuses(block):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"coat": block}, schema())
    with pytest.raises(CoatConfigError) as error:
        CoatConfig.from_dict(block)
    assert str(error.value).startswith("coat")


def test_schema_has_defaults_and_descriptions():
    def check(block, found):
        for name, described in block["properties"].items():
            inner = described.get("anyOf", [{}, described])[1]
            value = getattr(found, name)
            if "properties" in inner:
                check(inner, value)
            else:
                assert described["default"] == (list(value) if isinstance(value, tuple) else value)
                assert described["description"].endswith(".")

    check(schema()["properties"]["coat"], CoatConfig())
