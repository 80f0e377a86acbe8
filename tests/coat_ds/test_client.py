"""Adam and AdamW of other libraries, turned into CoatAdamW in place."""

import gc
import warnings
import weakref

import pytest
import torch
from deepspeed.ops import op_builder
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from torch.optim import lr_scheduler

import coat_ds
from coat_ds import CoatAdamW, CoatConfigError
from coat_ds.config import OptimizerConfig
from coat_ds.zero.convert_optimizer import convert_
from tests.coat_ds.engines import STATES, engine_of
from tests.hosts import TorchAdam
from tests.util import run_distributed

STEPS = 6
KEEP = ("*bias*",)
SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    # multiplies what it finds
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    # moves betas too
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[1e-2, 2e-2], total_steps=STEPS + 1),
}


def groups(net):
    return [
        {"params": [net[0].weight, net[2].weight], "weight_decay": 0.1},
        {"params": [net[0].bias, net[2].bias], "weight_decay": 0.0, "lr": 5e-4, "mine": 7},
    ]


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))


def trained(config, make_scheduler, convert=True):
    """Weights, and the options that each step saw, of an AdamW with a scheduler, converted after both."""
    net = model()
    optimizer = torch.optim.AdamW(groups(net), lr=1e-3, betas=(0.9, 0.95), eps=1e-7, fused=True)
    scheduler = make_scheduler(optimizer)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    listed, dicts = optimizer.param_groups, [*optimizer.param_groups]
    if convert:
        assert convert_(optimizer, config, keep_fp32=KEEP) is optimizer
        assert optimizer.param_groups is listed and all(a is b for a, b in zip(listed, dicts, strict=True))
    seen = []
    with warnings.catch_warnings():
        # the scheduler warns if it has lost sight of step()
        warnings.simplefilter("error")
        for i in range(STEPS):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(i))
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            seen.append([(g["lr"], g["betas"], g["eps"], g["weight_decay"], g.get("mine")) for g in listed])
    assert len(calls) == STEPS
    return [p.detach() for p in net.parameters()], seen, optimizer


@pytest.mark.parametrize("name", SCHEDULERS)
def test_converted_optimizer_keeps_its_scheduler(name):
    exact = OptimizerConfig(exp_avg_format="fp32", exp_avg_sq_format="fp32")
    stock, options, _ = trained(exact, SCHEDULERS[name], convert=False)
    ours, same_options, optimizer = trained(exact, SCHEDULERS[name])
    assert options == same_options and len({str(o) for o in options}) == STEPS
    assert type(optimizer) is CoatAdamW and len(optimizer.state_dict()["param_groups"]) == 2
    for a, b in zip(ours, stock, strict=True):
        # the same arithmetic up to the order of FP32 operations, 2^-23 of a step of 1e-3 each
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_converted_optimizer_takes_formats_of_block_and_groups():
    net = model()
    optimizer = torch.optim.AdamW([{**groups(net)[0], "min_numel": 64}, groups(net)[1]])
    net[2].weight.requires_grad_(False)
    convert_(optimizer, OptimizerConfig(exp_avg_format="fp8_expanded"), keep_fp32=KEEP)
    optimizer.init_states()
    assert [g["min_numel"] for g in optimizer.param_groups] == [64, 4096]
    assert optimizer.param_groups[0]["params"] == [net[0].weight]
    moment = optimizer.state[net[0].weight]["exp_avg"]
    assert {piece.codec.name for piece in moment.pieces} == {"fp8_expanded"}
    again = optimizer.state[net[0].weight]
    assert convert_(optimizer, OptimizerConfig(), keep_fp32=KEEP).state[net[0].weight] is again


def test_convert_takes_an_empty_state_for_no_step():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    # a look makes an empty state
    assert not optimizer.state[net[0].weight]
    assert type(convert_(optimizer, OptimizerConfig(), keep_fp32=KEEP)) is CoatAdamW


def test_converted_optimizer_gives_later_groups_the_defaults():
    net, given = model(), {"lr": 3e-4, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
    stock = torch.optim.AdamW(net[0].parameters(), **given, fused=True)
    optimizer = convert_(stock, OptimizerConfig(), keep_fp32=KEEP)
    # except how AdamW is implemented
    optimizer.add_param_group({"params": net[2].parameters()})
    assert given.items() <= optimizer.param_groups[1].items()


def test_converted_optimizer_keeps_a_group_of_frozen_parameters():
    """Schedulers have a number for each group."""
    net = model()
    net[0].requires_grad_(False)
    params = [{"params": net[0].parameters(), "lr": 5e-4}, {"params": net[2].parameters()}]
    optimizer = convert_(torch.optim.AdamW(params), OptimizerConfig(), keep_fp32=KEEP)
    assert [(g["lr"], len(g["params"])) for g in optimizer.param_groups] == [(5e-4, 0), (1e-3, 2)]


def test_converted_optimizer_keeps_names():
    net = model()
    net[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(net.named_parameters())
    convert_(optimizer, OptimizerConfig(min_numel=0), keep_fp32=KEEP)
    assert optimizer.param_groups[0]["param_names"] == ["0.bias", "2.weight", "2.bias"]
    optimizer.init_states()
    kept = [optimizer.state[p]["exp_avg"].pieces[0].codec.name for p in optimizer.param_groups[0]["params"]]
    assert kept == ["fp32", "ratio8", "fp32"]


def test_converted_optimizer_is_freed():
    net = model()
    optimizer = convert_(torch.optim.AdamW(net.parameters()), OptimizerConfig(), keep_fp32=KEEP)
    lr_scheduler.ConstantLR(optimizer)
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None
    finally:
        gc.enable()


class Mine(torch.optim.AdamW):
    pass


def stepped(params):
    optimizer = torch.optim.AdamW(params)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def replaced(params):
    optimizer = torch.optim.AdamW(params)
    optimizer.step = lambda: None
    return optimizer


# by a word of the error
REFUSED = {
    "SGD": lambda p: torch.optim.SGD(p),
    "Mine": lambda p: Mine(p),
    "weight_decay 0.1": lambda p: torch.optim.Adam(p, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "differentiable": lambda p: torch.optim.AdamW(p, differentiable=True),
    "has made steps": stepped,
    "was exchanged": replaced,
    "found 3": lambda p: 3,
    # of DeepSpeed, with other steps
    "FusedAdam with weight_decay 0.1": lambda p: FusedAdam(p, adam_w_mode=False, weight_decay=0.1),
    "FusedAdam without bias_correction": lambda p: FusedAdam(p, bias_correction=False),
    "CPUAdam with weight_decay 0.1": lambda p: DeepSpeedCPUAdam(p, adamw_mode=False, weight_decay=0.1),
    "CPUAdam without bias_correction": lambda p: DeepSpeedCPUAdam(p, bias_correction=False),
}


@pytest.mark.parametrize("word", REFUSED)
def test_convert_refuses_other_optimizers(word, not_compiled):
    with pytest.raises(CoatConfigError, match=f"{word}.*coat.optimizer.enabled"):
        convert_(REFUSED[word](model().parameters()), OptimizerConfig(), keep_fp32=KEEP)


def test_convert_takes_adam_without_decay():
    made = convert_(torch.optim.Adam(model().parameters()), OptimizerConfig(), keep_fp32=KEEP)
    assert type(made) is CoatAdamW and made.param_groups[0]["decoupled_weight_decay"]


@pytest.fixture
def not_compiled(monkeypatch):
    """DeepSpeed's optimizers for CPUs, which are made and not stepped."""
    for builder in (op_builder.CPUAdamBuilder, op_builder.FusedAdamBuilder):
        monkeypatch.setattr(builder, "load", lambda self: TorchAdam())
    # takes a second
    monkeypatch.setattr("cpuinfo.get_cpu_info", lambda: {"vendor_id_raw": "GenuineIntel"})


@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam])
def test_convert_takes_deepspeeds_adamw(cls, not_compiled):
    optimizer = cls(groups(model()), lr=2e-3, betas=(0.8, 0.9))
    assert type(convert_(optimizer, OptimizerConfig(), keep_fp32=KEEP)) is CoatAdamW
    options = [(g["lr"], g["betas"], g["weight_decay"]) for g in optimizer.param_groups]
    assert options == [(2e-3, (0.8, 0.9), 0.1), (5e-4, (0.8, 0.9), 0.0)]


def engines():
    """A client AdamW under each stage, as an object and as a function, whose scheduler DeepSpeed steps."""
    out = []
    for stage, as_function in ((0, False), (1, True), (2, False), (3, False)):
        net = model()
        optimizer = torch.optim.AdamW(groups(net), lr=1e-3)
        scheduler = SCHEDULERS["exponential"](optimizer)
        given = {
            "optimizer": (lambda p: torch.optim.AdamW(p, lr=1e-3)) if as_function else optimizer,
            "model_parameters": net.parameters() if as_function else None,
            "lr_scheduler": SCHEDULERS["exponential"] if as_function else scheduler,
        }
        engine = engine_of(net, stage, STATES, given, optimizer=None)
        for i in range(3):
            x = torch.randn(2, 64, generator=torch.Generator().manual_seed(i))
            share = x[torch.distributed.get_rank() :: torch.distributed.get_world_size()]
            engine.backward(engine(share.bfloat16()).float().square().mean())
            engine.step()
        held = set(coat_ds.state_bytes(engine)["by_codec"])
        same = as_function or engine.basic_optimizer is optimizer
        rates = [g["lr"] for g in engine.optimizer.param_groups]
        out.append((isinstance(engine.basic_optimizer, CoatAdamW), same, held, rates))
    return out


def test_engines_convert_the_scripts_optimizer():
    for built in run_distributed(engines, 2):
        for (converted, same, held, rates), as_function in zip(built, (0, 1, 0, 0), strict=True):
            assert converted and same and held == {"ratio8", "log8", "fp32"}
            expected = [1e-3] if as_function else [1e-3, 5e-4]
            assert rates == pytest.approx([lr * 0.7**3 for lr in expected])
