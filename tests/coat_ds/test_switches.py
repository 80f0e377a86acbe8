"""Switches of the JSON mean to the block what they mean to DeepSpeed."""

import deepspeed
import pytest
import torch
from deepspeed.runtime.precision_config import DeepSpeedFP16Config, get_bfloat16_config
from pydantic import ValidationError

import coat_ds
from coat_ds.plan import from_deepspeed
from coat_ds.zero.block import flag
from coat_ds.zero.deepspeed_config import check, no_conversion, stage_of
from tests.coat_ds.test_plan import SMALL
from tests.util import run_distributed

VALUES = [
    True,
    False,
    0,
    1,
    1.0,
    "auto",
    "true",
    "false",
    "True",
    "FALSE",
    "1",
    "0",
    "yes",
    "no",
    "on",
    "off",
]
# the precisions of a JSON, and whether DeepSpeed trains in BF16
PRECISIONS = {
    "auto": ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": True}}, True),
    "quoted": ({"fp16": {"enabled": "false"}, "bf16": {"enabled": "true"}}, True),
    "fp16": ({"fp16": {"enabled": "true"}, "bf16": {"enabled": "auto"}}, False),
}


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_switch_is_read_as_deepspeed_reads_it(value):
    bf16 = get_bfloat16_config({"bf16": {"enabled": value}})
    assert flag(value) == DeepSpeedFP16Config(enabled=value).enabled == bf16.enabled
    assert flag("auto", auto=True)
    assert bool(no_conversion({"fp16": {"enabled": value}}, coat_ds.CoatConfig().activations)) == flag(value)


def test_words_are_numbers_where_deepspeed_takes_them():
    assert [stage_of({"zero_optimization": {"stage": s}}) for s in (2, "2", "2.0", "auto")] == [2, 2, 2, 0]
    assert from_deepspeed({"zero_optimization": {"stage": "2"}}, SMALL).stage == 2


@pytest.mark.parametrize("word", ["true", "false", "auto"])
def test_any_word_switches_torch_autocast_on(word):
    config = {"coat": {"enabled": True}, "torch_autocast": {"enabled": word, "dtype": "float16"}}
    with pytest.raises(coat_ds.CoatConfigError, match="torch_autocast.dtype"):
        check(config | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, None)


def test_what_deepspeed_refuses_is_left_to_it():
    with pytest.raises(ValidationError):
        DeepSpeedFP16Config(enabled="perhaps")


def _train():
    deepspeed.init_distributed("gloo")
    coat_ds.install()
    found = {}
    for name, (precision, _) in PRECISIONS.items():
        for coat in ({}, {"coat": {"enabled": True, "require": False}}):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.SiLU(), torch.nn.Linear(64, 64))
            config = {
                "train_micro_batch_size_per_gpu": 2,
                "zero_optimization": {"stage": 1},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            }
            engine, *_ = deepspeed.initialize(model=model, config=config | precision | coat)
            kind = next(model.parameters()).dtype
            for _ in range(2):
                loss = engine(torch.ones(2, 64, dtype=kind)).float().square().mean()
                engine.backward(loss)
                engine.step()
            done = coat_ds.conversion_of(model)
            found[name, bool(coat)] = kind, 0 if done is None else len(done.converted["linear"]), loss.item()
    return found


def test_an_engine_converts_where_stock_trains_in_bf16():
    (found,) = run_distributed(_train, 1)
    for name, (_, bf16) in PRECISIONS.items():
        kind, layers, loss = found[name, True]
        stock_kind, none, stock = found[name, False]
        assert kind == stock_kind == (torch.bfloat16 if bf16 else torch.float16)
        assert layers == (2 if bf16 else 0) and none == 0
        # FP8 rounds by 2^-4 of a value at most
        assert loss == pytest.approx(stock, rel=2**-4)
