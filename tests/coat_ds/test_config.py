import json
import subprocess
import sys

import pytest

from coat_ds import CoatConfig, CoatConfigError
from coat_ds.config import ActivationsConfig, OptimizerConfig


def test_defaults():
    assert CoatConfig.from_dict(None) == CoatConfig.from_dict({}) == CoatConfig()
    assert not CoatConfig().enabled
    config = CoatConfig.from_dict({"enabled": True})
    assert config.optimizer == OptimizerConfig(True, "auto", "log8", "auto", 128, 4096)
    assert config.activations == ActivationsConfig(True, 16, "e5m2")
    for value in (True, False):
        given = CoatConfig.from_dict({"enabled": True, "activations": value}).activations
        assert given == ActivationsConfig(enabled=value)


def test_every_key():
    block = {
        "enabled": True,
        "optimizer": {
            "enabled": False,
            "exp_avg_format": "fp8",
            "exp_avg_sq_format": "bf16",
            "group_size": 64,
            "min_numel": 0,
        },
        "activations": {
            "enabled": False,
            "group_size": 32,
            "backward_format": "e4m3",
        },
    }
    config = CoatConfig.from_dict(json.loads(json.dumps(block)))
    for name in ("optimizer", "activations"):
        for key, value in block[name].items():
            assert getattr(getattr(config, name), key) == value
    with pytest.raises(AttributeError):
        config.optimizer.group_size = 64


@pytest.mark.parametrize(
    ("block", "words"),
    [
        pytest.param({"enabled": True, "optimiser": {}}, ["coat.optimiser", "optimizer"], id="unknown"),
        pytest.param({"enabled": True, "x": 1}, ["coat.x", "1", "activations", "Drop"], id="nothing-near"),
        pytest.param(
            {"enabled": True, "optimizer": {"groupsize": 128}},
            ["coat.optimizer.groupsize", "128", "Did you mean 'group_size'"],
            id="unknown-inside",
        ),
        pytest.param({"enabled": "true"}, ["coat.enabled", "'true'", "true or false"], id="string-boolean"),
        pytest.param({"enabled": 1}, ["coat.enabled", "1", "true or false"], id="integer-boolean"),
        pytest.param(
            {"enabled": True, "optimizer": {"min_numel": True}},
            ["coat.optimizer.min_numel", "True", "an integer"],
            id="boolean-integer",
        ),
        pytest.param(
            {"enabled": True, "optimizer": {"min_numel": -1}},
            ["coat.optimizer.min_numel", "-1", "0 or more"],
            id="negative",
        ),
        pytest.param(
            {"enabled": True, "optimizer": {"group_size": 100}},
            ["coat.optimizer.group_size", "100", "64, 128, 256"],
            id="group-size",
        ),
        pytest.param(
            {"enabled": True, "optimizer": {"group_size": 128.0}},
            ["coat.optimizer.group_size", "128.0", "an integer"],
            id="float-integer",
        ),
        pytest.param(
            {"enabled": True, "optimizer": {"exp_avg_format": "fp8_expand"}},
            ["coat.optimizer.exp_avg_format", "'fp8_expand'", "Did you mean 'fp8_expanded'"],
            id="format",
        ),
        pytest.param(
            {"enabled": True, "activations": {"forward_format": "e5m2"}},
            ["coat.activations.forward_format", "'e5m2'", "'e4m3'"],
            id="removed-key",
        ),
        pytest.param(
            {"enabled": True, "activations": {"backward_format": "E4M3"}},
            ["coat.activations.backward_format", "'E4M3'", "'e4m3'"],
            id="fp8-format",
        ),
        pytest.param(
            {"enabled": True, "activations": {"weight_cache": True}},
            ["coat.activations.weight_cache", "True", "'none', 'fp8'"],
            id="boolean-choice",
        ),
        pytest.param(
            {"enabled": True, "activations": {"weight_cache": "scale"}},
            ["coat.activations.weight_cache", "'scale'", "removed", "'none'", "'fp8'"],
            id="removed-weight-cache",
        ),
        pytest.param(
            {"enabled": True, "activations": {"attention_format": "e4m3"}},
            ["coat.activations.attention_format", "'e4m3'", "removed", "'sqrt8'"],
            id="removed-attention-format",
        ),
        pytest.param(
            {"enabled": True, "activations": {"saved_format": "fp8"}},
            ["coat.activations.saved_format", "'fp8'", "'sqrt8', 'e4m3'", "Did you mean 'e4m3'"],
            id="other-name",
        ),
        pytest.param(
            {"enabled": True, "activations": {"group_size": 0}},
            ["coat.activations.group_size", "16, 32"],
            id="activation-group-size",
        ),
        pytest.param(
            {"enabled": True, "optimizer": True}, ["coat.optimizer", "True", "object"], id="no-object"
        ),
        pytest.param(True, ["coat", "True", "object"], id="no-object-at-all"),
        pytest.param(
            {"enabled": True, "zero3_layer_units": 1},
            ["coat.zero3_layer_units", "found 1", "'auto', True, False"],
            id="word-or-boolean",
        ),
        pytest.param({"optimizer": {}}, ["coat.enabled", "missing", "optimizer"], id="enabled-missing"),
    ],
)
def test_errors_name_key_value_and_way_out(block, words):
    with pytest.raises(CoatConfigError) as error:
        CoatConfig.from_dict(block)
    for word in words:
        assert word in str(error.value)
    assert isinstance(error.value, ValueError)


def test_importing_does_not_import_deepspeed():
    code = "import coat_ds, sys; sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
