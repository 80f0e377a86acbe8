"""Switches of the JSON mean to the block what they mean to DeepSpeed."""

import pytest
from deepspeed.runtime.precision_config import DeepSpeedFP16Config, get_bfloat16_config

import coat_ds
from coat_ds.plan import from_deepspeed
from coat_ds.zero.block import flag
from coat_ds.zero.deepspeed_config import checked_config, stage_of, why_no_conversion
from tests.coat_ds.planned import SMALL

VALUES = [
    True,
    False,
    0,
    1,
    1.0,
    *["auto", "true", "false", "True", "FALSE", "1", "0", "yes", "no", "on", "off"],
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_flag_is_read_as_deepspeed_reads_it(value):
    bf16 = get_bfloat16_config({"bf16": {"enabled": value}})
    assert flag(value) == DeepSpeedFP16Config(enabled=value).enabled == bf16.enabled
    assert flag("auto", auto=True)
    assert bool(why_no_conversion({"fp16": {"enabled": value}})) == flag(value)


def test_stage_may_be_a_word():
    assert [stage_of({"zero_optimization": {"stage": s}}) for s in (2, "2", "2.0", "auto")] == [2, 2, 2, 0]
    assert from_deepspeed({"zero_optimization": {"stage": "2"}}, SMALL).stage == 2


@pytest.mark.parametrize("word", ["true", "false", "auto"])
def test_torch_autocast_is_switched_on_by_any_word(word):
    config = {"coat": {"enabled": True}, "torch_autocast": {"enabled": word, "dtype": "float16"}}
    with pytest.raises(coat_ds.CoatConfigError, match="torch_autocast.dtype"):
        checked_config(config | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, None)
