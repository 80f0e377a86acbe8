"""Keys of the block that are of no effect in a DeepSpeed engine: each is warned of in the log, or refused."""

import logging

import pytest
import torch

import coat_ds
from tests.util import run_distributed

OTHER = {"group_size": 64, "checkpoint_layout": "compressed", "keep_fp32": ["*0*"]}


def model():
    nn = torch.nn
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32))


def pipeline():
    from deepspeed.pipe import PipelineModule

    return PipelineModule(list(model()), num_stages=1)


def engine_of(stage=1, optimizer=None, net=None, block=None, **more):
    import deepspeed

    net = model() if net is None else net
    config = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "coat": {"enabled": True, **(block or {})},
        **more,
    }
    if optimizer is None:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
    deepspeed.initialize(model=net, config=config, optimizer=optimizer and optimizer(net))[0].destroy()


def own(**options):
    return lambda net: coat_ds.CoatAdamW(net.named_parameters(), **options)


def half(**options):
    """Options of the first of two parameter groups alone."""

    def made(net):
        named = list(net.named_parameters())
        return coat_ds.CoatAdamW([{"params": named[:2], **options}, {"params": named[2:]}])

    return made


def work():
    import deepspeed

    from tests.util import listening

    deepspeed.init_distributed("gloo")
    coat_ds.install()
    rounded = {"optimizer": {"bf16_params": "stochastic"}}
    masters = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    runs = {
        **{f"FP32 masters, ZeRO {n}": lambda n=n: engine_of(n, block=rounded) for n in range(4)},
        **{f"BF16 masters, ZeRO {n}": lambda n=n: engine_of(n, block=rounded, bf16=masters) for n in (2, 3)},
        "BF16 masters, gradients in FP32": lambda: engine_of(
            1, block=rounded, bf16=masters, data_types={"grad_accum_dtype": "fp32"}
        ),
        "a pipeline": lambda: engine_of(0, net=pipeline(), block=rounded),
        "BF16 weights": lambda: engine_of(
            0, net=model().bfloat16(), block=rounded | {"activations": False}, bf16={"enabled": False}
        ),
        "units, ZeRO 2": lambda: engine_of(2, block={"zero3_layer_units": True}),
        "no units, ZeRO 2": lambda: engine_of(2, block={"zero3_layer_units": False}),
        "units, ZeRO 3": lambda: engine_of(3, block={"zero3_layer_units": True}),
        "own": lambda: engine_of(1, own(), block={"optimizer": OTHER}),
        "own, equal": lambda: engine_of(1, own(**OTHER), block={"optimizer": OTHER}),
        "own, half of it": lambda: engine_of(1, half(group_size=64), block={"optimizer": {"group_size": 64}}),
        # the tensors that it names are not known
        "own, a function": lambda: engine_of(
            1, own(keep_fp32=lambda name, p: False), block={"optimizer": {"keep_fp32": ["*0*"]}}
        ),
        "limits": lambda: engine_of(1, block={"watch": {"flushed": 0.1}}),
        "limits, warned of": lambda: engine_of(1, block={"watch": {"flushed": 0.1, "act": "warn"}}),
    }
    found = {}
    with listening(logging.WARNING) as lines:
        for name, run in runs.items():
            lines.clear()
            run()
            found[name] = [line for line in lines if "of no effect" in line]
        with pytest.raises(coat_ds.CoatConfigError) as error:
            engine_of(1, net=torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3)), block={"require": True})
        found["no linear layer, required"] = [str(error.value)]
    return found


@pytest.fixture(scope="module")
def found():
    return run_distributed(work, 1)[0]


@pytest.mark.parametrize(
    "run, lines",
    [
        *(
            (f"FP32 masters, ZeRO {n}", ["coat.optimizer.bf16_params: found 'stochastic', of no effect"])
            for n in range(4)
        ),
        ("BF16 masters, ZeRO 2", []),
        ("BF16 masters, ZeRO 3", []),
        (
            "BF16 masters, gradients in FP32",
            ["and no BF16 parameters. Take another stage than 1, or drop data_types.grad_accum_dtype"],
        ),
        ("a pipeline", ["and no BF16 parameters. Set bf16.bf16_master_weights_and_grads"]),
        ("BF16 weights", []),
        ("units, ZeRO 2", ["coat.zero3_layer_units: found True, of no effect in ZeRO 2"]),
        ("no units, ZeRO 2", []),
        ("units, ZeRO 3", []),
        (
            "own",
            [f"coat.optimizer.{name}: found " for name in ("group_size", "keep_fp32", "checkpoint_layout")],
        ),
        ("own, equal", []),
        ("own, half of it", ["coat.optimizer.group_size: found 64, of no effect"]),
        ("own, a function", []),
        ("limits", ['coat.watch.flushed: found 0.1, of no effect while act is "off"']),
        ("limits, warned of", []),
        ("no linear layer, required", ["coat.activations.enabled: found True, but 0 of 0 linear layers"]),
    ],
)
def test_keys_of_an_engine(found, run, lines):
    assert len(found[run]) == len(lines)
    assert all(line in said for line, said in zip(lines, found[run], strict=True))
    assert all("Drop" in said or "drop" in said or "set it" in said for said in found[run])
