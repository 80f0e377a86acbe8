"""The claims of docs/support.md match the code and the results."""

import csv
import re
import runpy
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from coat_ds.config import CoatConfigError
from coat_ds.zero import deepspeed_config

ROOT = Path(__file__).resolve().parents[1]
PAGE = runpy.run_path(str(ROOT / "docs/support.py"))
ROWS = {row.feature: row for rows in PAGE["SECTIONS"].values() for row in rows}
BASE = {"coat": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
# a test with a mark, or with a fixture that uses the GPU if there is one
RUNS_ON_GPUS = re.compile(
    r"mark\.gpu|@on_gpus|def test_\w+\([^)]*\b(device|megatron)\b|usefixtures\(\"megatron"
)


def rows(claims):
    """The rows for which `claims` is true, as parameters of a test."""
    return pytest.mark.parametrize("row", [pytest.param(r, id=n) for n, r in ROWS.items() if claims(r)])


def test_rows_are_complete():
    assert len(ROWS) == sum(map(len, PAGE["SECTIONS"].values())), "two rows have one name"
    for row in ROWS.values():
        assert row.layers in PAGE["LAYERS"] | PAGE["EITHER"], row.feature
        assert row.states in PAGE["STATES"] | PAGE["EITHER"], row.feature
        ran = row.cpu or row.h100 or row.h200
        works = row.layers in PAGE["LAYERS"] or row.states in PAGE["STATES"]
        assert not ran or works, f"{row.feature}: ran, and works in no way"


@pytest.mark.parametrize("name", PAGE["VERSIONS"])
def test_versions_that_ran_are_accepted(name):
    accepted, ran = PAGE["VERSIONS"][name]
    if " to " in str(accepted):
        accepted = ">={},<={}".format(*accepted.split(" to "))
    assert accepted == "optional" or all(SpecifierSet(str(accepted)).contains(version) for version in ran)


@rows(lambda row: row.deepspeed)
def test_deepspeed_configs(row):
    for part in row.deepspeed:
        config = BASE | part
        if row.states == "refused":
            with pytest.raises(CoatConfigError, match=r"coat\.optimizer\.enabled to false"):
                deepspeed_config.checked_config(config, None)
            config["coat"] = {"enabled": True, "optimizer": {"enabled": False}}
        assert deepspeed_config.checked_config(config, None).enabled
        if row.layers in PAGE["LAYERS"]:
            why = deepspeed_config.why_no_conversion(config)
            assert (why is None) == (row.layers == "FP8")


@rows(lambda row: row.megatron)
def test_megatron_configs(row):
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    from megatron_ext.layer_specs import coat_layer_spec
    from tests.megatron_ext.conftest import one_megatron_process

    with one_megatron_process():
        for fields in row.megatron:
            kind = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
            config = kind(num_layers=1, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True)
            for name, value in fields.items():
                # not through its constructor, which needs Transformer Engine
                assert hasattr(config, name) or name == "use_transformer_engine_op_fuser"
                setattr(config, name, value)
            if row.layers == "refused":
                with pytest.raises(ValueError, match="supported|about Megatron's own FP8"):
                    coat_layer_spec.module(config, layer_number=1)
            else:
                coat_layer_spec.module(config, layer_number=1)


def measured(path: Path) -> dict[str, int]:
    """The largest number of GPUs of each card with which a file of results was measured."""
    found = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            gpus = int(line.get("gpus") or line.get("ranks") or line.get("tensor_parallel") or 1)
            for card in ("H100", "H200"):
                if card in line["device"]:
                    found[card] = max(gpus, found.get(card, 0))
    return found


@rows(lambda row: row.h100 or row.h200)
def test_claims_on_gpus_have_results_or_a_test_for_gpus(row):
    results = [measured(ROOT / "benchmarks/results" / name) for name in row.proof if name.endswith(".csv")]
    tests = [(ROOT / name).read_text() for name in row.proof if name.endswith(".py")]
    tested = 2 * any(map(RUNS_ON_GPUS.search, tests))
    for card, claimed in ("H100", row.h100), ("H200", row.h200):
        assert claimed <= max([tested, *(found.get(card, 0) for found in results)]), card
        assert claimed >= max([0, *(found.get(card, 0) for found in results)]), card
