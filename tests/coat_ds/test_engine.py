"""CoatAdamW in a real DeepSpeed engine of one process. Of every stage and type: test_zero.py."""

import json
import os
import types
import warnings

import deepspeed
import pytest
import torch

import coat_ds
from coat_ds import CoatAdamW, CoatConfig
from coat_ds.config import OptimizerConfig
from coat_ds.zero.build import optimizer_for_engine
from tests.coat_ds.cells import Tied, cell, ds_config, train_step
from tests.util import listening, rel_rms, run_distributed

BLOCK = {"enabled": True, "activations": False}


def engine_of(config, **given):
    torch.manual_seed(0)
    return deepspeed.initialize(model=Tied(), config=config, **given)


def with_the_block():
    """What an engine is and has."""
    config = ds_config(cell(1)) | {"coat": BLOCK}
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": 2e-3}}
    engine, optimizer, loader, scheduler = engine_of(config)
    for _ in range(2):
        train_step(engine)
    return {
        "classes": [type(engine.basic_optimizer).__name__, isinstance(engine.basic_optimizer, CoatAdamW)],
        "same": optimizer is engine.optimizer and loader is None and scheduler is engine.lr_scheduler,
        "bytes": coat_ds.state_bytes(engine) == coat_ds.state_bytes(optimizer),
        "coat": engine.coat.config,
        "groups": [(g["exp_avg_format"], g["weight_decay"]) for g in engine.basic_optimizer.param_groups],
        # warm-up has arrived
        "lr": engine.get_lr(),
    }


def without_the_block():
    """The same run by DeepSpeed alone, and by COAT with no block and with a disabled one."""
    out = []
    for switch, more in (
        (coat_ds.uninstall, {}),
        (coat_ds.install, {}),
        (coat_ds.install, {"coat": {"enabled": False}}),
    ):
        switch()
        # made for each engine: DeepSpeed 0.18 takes options out of it
        engine, *_ = engine_of(ds_config(cell(1), coat=False) | more)
        losses = [train_step(engine) for _ in range(2)]
        out.append((losses, type(engine.basic_optimizer).__name__, hasattr(engine, "coat")))
    return out


def ways_to_give_the_config(folder):
    """As a dict, a path, config_params and an argument of args; the betas tell that it was read."""
    config = ds_config(cell(1))
    before = json.dumps(config)
    path = os.path.join(folder, "ds.json")
    with open(path, "w") as f:
        f.write(before)
    args = types.SimpleNamespace(deepspeed_config=path, local_rank=int(os.environ["LOCAL_RANK"]))
    out = []
    for given in ({"config": config}, {"config": path}, {"config_params": config}, {"args": args}):
        engine, *_ = deepspeed.initialize(model=Tied(), **given)
        out.append((type(engine.basic_optimizer).__name__, engine.basic_optimizer.defaults["betas"]))
    return out, json.dumps(config) == before and args.deepspeed_config == path


def client_optimizers():
    config = {key: value for key, value in ds_config(cell(1)).items() if key != "optimizer"} | {"coat": BLOCK}
    net = Tied()
    # ZeRO's flat partition in the weight's place has no name
    names = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    mine = CoatAdamW(names, lr=5e-4, exp_avg_format="fp8_expanded", keep_fp32=("embed.weight",))
    engine, *_ = deepspeed.initialize(model=net, optimizer=mine, config=config)
    train_step(engine)
    block = {"coat": BLOCK | {"optimizer": {"enabled": False}}}
    other, *_ = engine_of(ds_config(cell(1), coat=False) | block)
    return (
        engine.basic_optimizer is mine,
        coat_ds.state_bytes(engine),
        (type(other.basic_optimizer).__name__, other.coat.states, str(other.coat)),
    )


def without_optimizer():
    """Engines that compute and do not train, as TRL's of reference models."""

    def model():
        torch.manual_seed(0)
        nn = torch.nn
        return nn.Sequential(
            nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32)
        )

    stock = model().bfloat16()
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = []
    for stage, section in ((0, {}), (3, {}), (0, {"optimizer": {"type": None}})):
        config = {"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
        config |= {"coat": {"enabled": True}, **section}
        with listening() as lines:
            engine, *_ = deepspeed.initialize(model=model(), config=config)
        with torch.no_grad():
            watched = engine.coat.watch is not None
            out.append((rel_rms(engine(x), stock(x)), str(engine.coat), watched, lines))
    return out


def work(folder):
    warnings.simplefilter("ignore")
    deepspeed.init_distributed("gloo")
    return {
        "without": without_the_block(),
        "with": with_the_block(),
        "given": ways_to_give_the_config(folder),
        "client": client_optimizers(),
        "no optimizer": without_optimizer(),
    }


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return run_distributed(work, 1, str(tmp_path_factory.mktemp("one")))[0]


def test_engine_builds_what_the_block_says(one):
    run = one["with"]
    assert run["classes"] == ["CoatAdamW", True] and run["same"] and run["bytes"]
    assert run["coat"] == CoatConfig.from_dict(BLOCK) and run["groups"] == [(None, 0.1)]
    assert run["lr"] == [pytest.approx(2e-3)]


def test_engine_without_the_block_is_stock(one):
    stock, absent, disabled = one["without"]
    assert stock == absent == disabled
    assert stock[1:] == ("AdamW", False)


def test_engine_takes_every_way_to_give_the_config(one):
    built, untouched = one["given"]
    assert built == [("CoatAdamW", (0.9, 0.95))] * 4
    assert untouched


def test_engine_takes_client_optimizers(one):
    used, held, left_alone = one["client"]
    assert used and set(held["by_codec"]) == {"fp8_expanded", "log8", "fp32"}
    assert held["by_codec"]["fp32"] > 2 * 4 * 47 * 131
    assert left_alone == ("AdamW", None, "nothing enabled")


def test_engine_without_an_optimizer_has_fp8_layers(one):
    for error, said, watched, lines in one["no optimizer"]:
        assert 0 < error < 0.1
        assert not watched
        assert sum("coat.optimizer and coat.watch are of no effect" in line for line in lines) == 1
        assert "3 of 3 linear layers in FP8" in said


def test_engine_keeps_the_users_parameter_groups():
    large, small, frozen = (torch.nn.Parameter(torch.zeros(n)) for n in (5000, 10, 5000))
    frozen.requires_grad_(False)

    def groups_of(model_parameters, **block):
        coat = CoatConfig(enabled=True, optimizer=OptimizerConfig(**block))
        config = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}}
        return optimizer_for_engine(coat, config, None, torch.nn.Module())(model_parameters).param_groups

    (group,) = groups_of([large, frozen, small], exp_avg_sq_format="bf16", min_numel=64)
    assert [id(p) for p in group["params"]] == [id(large), id(small)]
    assert (group["exp_avg_format"], group["exp_avg_sq_format"], group["min_numel"]) == (None, "bf16", 64)
    # a group's own choice wins, and a group without anything to train is dropped
    (own,) = groups_of([{"params": large, "min_numel": 0, "name": "x"}, {"params": [frozen]}])
    assert (own["min_numel"], own["name"]) == (0, "x")
    # given names are kept, as of `named_parameters`
    (named,) = groups_of([("large", large), ("frozen", frozen)])
    assert (named["params"], named["param_names"]) == ([large], ["large"])
