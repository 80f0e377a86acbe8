"""Mistakes outside the block: messages name the key, what was found and the fix."""

import dataclasses
import inspect
import logging
import re
import weakref

import deepspeed
import pytest
import torch
from deepspeed.ops.adam import FusedAdam

from coat_ds import CoatAdamW, CoatConfig, CoatConfigError
from coat_ds.zero import block, build, deepspeed_config
from coat_ds.zero.deepspeed_config import why_no_conversion
from coat_kernels import device

BLOCK, ADAMW = {"enabled": True}, {"type": "AdamW", "params": {"lr": 1e-3}}


def host(**changes) -> dict:
    return {"coat": BLOCK, "optimizer": ADAMW, **changes}


def params(**values) -> dict:
    return host(optimizer={"type": "AdamW", "params": values})


OFF = {**BLOCK, "optimizer": {"enabled": False}}
COMPRESSES = {**BLOCK, "fp8_activation_checkpointing": True}
# by the key that the error names
MISTAKES = [
    ("optimizer", host(optimizer=["AdamW"])),
    ("optimizer.params", host(optimizer={"type": "AdamW", "params": [["lr", 1]]})),
    ("optimizer.params.weight_decay", params(weight_decay=True)),
    ("optimizer.params.eps", params(eps=None)),
    ("optimizer.params.betas", params(betas=["0.9", 0.95])),
    ("optimizer.params.Coat", {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "Coat": BLOCK}}}),
    (
        "zero_optimization.offload_optimizer.coat",
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"coat": BLOCK}}},
    ),
    ("bf16.coat", host(bf16={"coat": BLOCK})),
    ("coat.optimizer.min_numel", host(coat={"enabled": True, "optimizer": {"min_numel": "auto"}})),
    ("optimizer.params.adam_w_mode", params(lr=1e-3, adam_w_mode=False)),
    ("coat.optimizer.enabled", host(optimizer={"type": "CoatAdamW"}, coat=OFF)),
    ("bfloat16.bf16_master_weights_and_grads", host(bfloat16={"bf16_master_weights_and_grads": True})),
    ("optimizer.legacy_fusion", host(optimizer={"type": "AdamW", "legacy_fusion": True})),
    ("coat.enabled", host(optimizer={"type": "CoatAdamW"}, coat={"enabled": False})),
    ("pipeline.use_reentrant", host(coat=COMPRESSES, pipeline={"use_reentrant": False})),
    ("compile.deepcompile", host(coat=COMPRESSES, compile={"deepcompile": True})),
    *(
        ("torch_autocast.dtype", host(torch_autocast={"enabled": True, "dtype": dtype}))
        for dtype in ("fp16", "half", "torch.float16", torch.float16)
    ),
]


@pytest.mark.parametrize("key, config", MISTAKES)
def test_json_check_names_the_key(key, config):
    """More usual ones, with their messages: tests/mistakes; of whole features: tests/test_support.py."""
    # an engine would come to this check
    assert block.asks_for_coat(config)
    with pytest.raises(CoatConfigError, match=key):
        deepspeed_config.checked_config(config, None)


def test_json_check_accepts():
    implementations = {"torch_adam": True, "fused": True, "foreach": False, "adam_w_mode": True}
    implementations["set_grad_none"] = False
    for values in (
        {"lr": 1},
        {"lr": torch.tensor(1e-3)},
        {"betas": (0.9, 0.95), "eps": 1e-8},
        implementations,
        {},
    ):
        assert deepspeed_config.checked_config(params(**values), None).enabled
    for section in (
        # off, or at its default
        {"amp": {"enabled": False}},
        {"torch_autocast": {"enabled": False, "dtype": "float16"}},
        {"zero_optimization": {"offload_optimizer": {"device": "none", "ratio": 0.5}}},
        # DeepSpeed ignores the section of the old name next to today's, and the key above stage 0
        {"bf16": {"enabled": True}, "bfloat16": {"bf16_master_weights_and_grads": True}},
        {"zero_optimization": {"stage": 1}, "optimizer": {**ADAMW, "legacy_fusion": True}},
    ):
        assert deepspeed_config.checked_config(host(**section), None).enabled
    assert not block.asks_for_coat({"optimizer": ADAMW, "Coatings": {}, "comms_logger": {"coats": 1}})
    # what others make of them is theirs to judge
    compresses = {**BLOCK, "fp8_activation_checkpointing": True}
    assert deepspeed_config.checked_config(host(coat=compresses, pipeline="off", compile=[]), None).enabled
    assert not deepspeed_config.checked_config({"optimizer": "AdamW"}, None).enabled


@pytest.mark.parametrize(
    "key, value",
    [
        ("coats", BLOCK),
        ("coat_ds", BLOCK),
        ("Coat-DS", BLOCK),
        ("coat ", BLOCK),
        (" coat", BLOCK),
        ("caot", BLOCK),
        ("coat-train", BLOCK),
        ("coatt", BLOCK),
        ("cot", {"optimizer": {}}),
        ("coats", True),
        ("coats", {}),
        ("cat", BLOCK),
    ],
)
def test_json_check_finds_misspelt_names_of_the_block(key, value):
    """An error, also where the config has a block under the right name."""
    for config in ({key: value, "optimizer": ADAMW}, host(**{key: value})):
        assert block.asks_for_coat(config)
        with pytest.raises(CoatConfigError, match=f"^{key}: found a block there, which would be ignored"):
            deepspeed_config.checked_config(config, None)


def test_json_check_takes_no_other_key_for_the_block():
    runtime = deepspeed.runtime
    source = "".join(map(inspect.getsource, (runtime.constants, runtime.config, runtime.zero.config)))
    known = {
        word for quoted in re.findall("[\"']([^\"'\n]+)[\"']", source) for word in re.findall(r"\w+", quoted)
    }
    assert {"zero_optimization", "bf16"} <= known
    others = {"chat", "cost", "goat", "coatnet", "coating", "float", "compat", "_coat", "//coat"}
    for key in known | others:
        for value in ({**BLOCK}, True):
            assert not block.asks_for_coat({key: value}), key
    for key, value in (
        ("coat_comment", "on"),
        ("coats", "on"),
        ("coast", {"depth": 2}),
    ):
        assert not block.asks_for_coat({key: value}), key
    assert {field.name for field in dataclasses.fields(CoatConfig)} == block.BLOCK_KEYS


@pytest.mark.parametrize(
    ("zero", "stage", "offloads"),
    [
        (True, 1, False),
        ({"stage": 2, "cpu_offload": True}, 2, True),
        ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, 1, True),
        ({"stage": 0}, 0, False),
    ],
)
def test_optimizer_for_engine_reads_old_sections(zero, stage, offloads):
    """The class of the optimizer is that of the stage, and states are where ZeRO's masters are."""
    coat = CoatConfig.from_dict({**BLOCK})
    model = torch.nn.Linear(64, 1, bias=False)
    make = build.optimizer_for_engine(coat, host(zero_optimization=zero), None, model)
    made = make(model.parameters())
    assert (type(made) is CoatAdamW) == bool(stage) and made.offloads == offloads
    # as torch's of either class
    model.weight.grad = torch.ones(1, 64)
    made.zero_grad(set_to_none=False)
    assert not model.weight.grad.any()


@pytest.fixture
def log():
    """Levels and messages of COAT's log."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logger = logging.getLogger("coat_ds")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def keeping(*patterns) -> CoatConfig:
    return CoatConfig.from_dict({**BLOCK, "optimizer": {"keep_fp32": list(patterns)}})


def test_optimizer_for_engine_takes_names_of_the_changed_model():
    """AutoEP exchanges a model's experts, and frees them, before the optimizer is built."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(96, 96, bias=False) for name in ("mlp", "experts")})
    make = build.optimizer_for_engine(keeping("experts*"), host(zero_optimization={"stage": 1}), None, model)
    before = weakref.ref(model["experts"].weight)
    model["experts"] = torch.nn.Linear(96, 96, bias=False)
    assert before() is None
    made = make(model.parameters())
    kept = [made.layouts.keeps_fp32(p, made.param_groups[0]) for p in model.parameters()]
    assert kept == [False, True]


def test_optimizer_for_engine_matches_names_in_the_scripts_own_optimizer(log):
    model = torch.nn.ModuleDict({name: torch.nn.Linear(96, 96, bias=False) for name in ("mlp", "head")})
    given = torch.optim.AdamW(model.parameters())
    coat = keeping("head*", "*haed*")
    made = build.optimizer_for_engine(coat, host(zero_optimization={"stage": 1}), given, model)
    assert [made.layouts.keeps_fp32(p, made.param_groups[0]) for p in model.parameters()] == [False, True]
    assert len([line for _, line in log if "'*haed*' matches no parameter" in line]) == 1


def built(log, optimizer=None, params=None, block=None, size=64):
    """What is logged when the optimizer is built for a matrix of `size` x `size`."""
    coat = CoatConfig.from_dict({**BLOCK, "optimizer": block or {}})
    config = host(zero_optimization={"stage": 1})
    config["optimizer"] = {"type": "AdamW", "params": params or {}}
    model = torch.nn.Linear(size, size, bias=False)
    given = optimizer and optimizer(model.parameters())
    made = build.optimizer_for_engine(coat, config, given, model)
    if given is None:
        made(model.parameters())
    lines = [line for line in log if "AdamW states of the whole model" not in line[1]]
    log.clear()
    return lines


def test_optimizer_for_engine_warns_of_second_moments_that_cannot_decay(log):
    slow, key = {"betas": [0.9, 0.999]}, "coat.optimizer.exp_avg_sq_format: "
    fp8 = {"exp_avg_sq_format": "fp8_expanded"}
    for lines in (
        built(log, params=slow, block=fp8),
        built(log, params={"betas": [0.9, 0.985]}, block=fp8),
        built(log, torch.optim.AdamW, block=fp8),
        built(log, params=slow, block={"exp_avg_sq_format": "bf16"}),
    ):
        ((level, line),) = lines
        assert level == "WARNING" and key in line and "beta2 0.9" in line
        assert "optimizer.params.betas" in line and "adam_beta2" in line
    assert "Set exp_avg_sq_format to 'log8'" in line
    for lines in (
        built(log, params={"betas": [0.9, 0.95]}, block=fp8),
        built(log, params={"betas": [0.9, 63 / 64]}, block=fp8),
        built(log, params=slow),
        built(log, params=slow, block={"exp_avg_sq_format": "fp32"}),
        built(log, params={"betas": [0.9, 0.99]}, block={"exp_avg_sq_format": "bf16"}),
        # all of it keeps FP32 moments
        built(log, params=slow, block=fp8, size=32),
    ):
        assert not lines
    # the script's own has logged it, under its own name, and does once
    lines = built(log, lambda params: CoatAdamW(params, exp_avg_sq_format="fp8_expanded"))
    (line,) = (line for level, line in lines if level == "WARNING")
    assert "CoatAdamW: exp_avg_sq_format: " in line


def test_no_conversion_on_gpus_without_fp8_and_with_fp16(monkeypatch):
    """On a GPU without FP8 a block gives FP8 states, as before there were converted layers."""
    gpu = torch.device("cuda", 0)
    for found, reason in (((8, 0), "compute capability 8.0, and FP8 GEMMs need 8.9"), ((8, 9), None)):
        for module in (device, deepspeed_config):
            monkeypatch.setattr(module, "capability", lambda _, found=found: found)
        said = why_no_conversion({}, gpu)
        assert said is None if reason is None else said.endswith(reason)
        assert why_no_conversion({"fp16": {"enabled": False}}, torch.device("cpu")) is None
        assert "fp16.enabled" in why_no_conversion({"fp16": {"enabled": True}}, gpu)


@pytest.mark.parametrize("torch_adam, stock", [(False, FusedAdam), (True, torch.optim.AdamW)])
def test_optimizer_options_decay_as_without_the_block(torch_adam, stock):
    """By what the optimizer that DeepSpeed would build does unless told."""
    made = [torch.nn.Parameter(torch.zeros(3))]
    for given in ({}, {"weight_decay": 0.3}):
        options = deepspeed_config.optimizer_options(params(lr=1e-3, torch_adam=torch_adam, **given))
        expected = given.get("weight_decay", inspect.signature(stock).parameters["weight_decay"].default)
        assert CoatAdamW(made, **options).param_groups[0]["weight_decay"] == expected


def test_optimizer_options_take_a_beta_of_zero_as_json_writes_it():
    (p,) = torch.nn.Linear(4, 4, bias=False).parameters()
    options = deepspeed_config.optimizer_options(params(betas=[0, 0.95]))
    assert torch.optim.AdamW([p], **options).defaults["betas"] == (0.0, 0.95)


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
@pytest.mark.parametrize("value", [-1e-3, float("nan")])
def test_optimizer_options_below_zero_are_refused(name, value):
    with pytest.raises(CoatConfigError, match=f"optimizer.params.{name}: .*{value}"):
        deepspeed_config.optimizer_options(params(**{name: value}))
