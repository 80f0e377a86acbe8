import pytest

from coat_ds import CoatConfig, CoatConfigError
from coat_ds.config import ActivationsConfig, OptimizerConfig, WatchConfig


def test_coat_config_defaults():
    assert CoatConfig.from_dict(None) == CoatConfig()
    assert not CoatConfig().enabled
    config = CoatConfig.from_dict({"enabled": True})
    assert config.optimizer == OptimizerConfig(True, None, "log8", 4096)
    assert config.activations == ActivationsConfig(True, "e5m2")
    for value in (True, False):
        given = CoatConfig.from_dict({"enabled": True, "activations": value}).activations
        assert given == ActivationsConfig(enabled=value)
    for watch, every in (({}, 100), ({"watch": True}, 100), ({"watch": False}, 0)):
        assert CoatConfig.from_dict({"enabled": True, **watch}).watch == WatchConfig(every=every)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"enabled": 1}, "coat.enabled: expected true or false, found 1"),
        ({"enabled": True, "optimizer": {"min_numel": True}}, "min_numel: expected an integer, found True"),
        (
            {"enabled": True, "optimizer": {"exp_avg_format": "auto"}},
            "exp_avg_format: expected one of None, .*; found 'auto'. Write null .*or drop the key",
        ),
        (
            {"enabled": True, "optimizer": {"offload": float("nan")}},
            "offload: expected 'none', 'cpu' or GB .*, 0 or more; found nan",
        ),
        ({"enabled": True, "zero3_layer_units": 1}, "zero3_layer_units: .*None, True, False; found 1"),
    ],
    ids=str,
)
def test_coat_config_refuses_values_of_nearly_the_right_kind(block, said):
    """Messages for the rest: tests/test_mistakes.py."""
    with pytest.raises(CoatConfigError, match=said) as error:
        CoatConfig.from_dict(block)
    assert isinstance(error.value, ValueError)
