"""CoatAdamW in a real DeepSpeed engine. One spawn of 1 process and one of 2 serve all tests."""

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
from tests.util import listening, rel_rms, run_distributed

BATCH, STEPS = 8, 2
# stage 0 has a wrapper of its own for each type; the others hold FP32 masters of either
CELLS = [(0, False), *((stage, True) for stage in range(4))]


def model():
    """24,576 weights in tensors of whole groups, so that no group crosses a tensor or a rank; 544 others."""
    torch.manual_seed(0)
    nn = torch.nn
    return nn.Sequential(
        nn.Linear(32, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32)
    )


def ds_config(stage, bf16, coat=True, **more):
    return {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.1, "betas": [0.9, 0.95]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": STEPS, "warmup_max_lr": 2e-3}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        **({"coat": {"enabled": True, "activations": False}} if coat else {}),
        **more,
    }


def train_step(engine, step):
    """One step on this rank's share of a fixed batch; the loss of the whole batch."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    generator = torch.Generator().manual_seed(step)
    share = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    x, y = (torch.randn(BATCH, 32, generator=generator)[share] for _ in range(2))
    dtype = next(engine.module.parameters()).dtype
    loss = (engine(x.to(dtype)).float() - y).square().mean()
    engine.backward(loss)
    engine.step()
    loss = loss.detach().clone()
    torch.distributed.all_reduce(loss)
    return loss.item() / world


def storages(engine):
    return [
        t.clone()
        for state in engine.basic_optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq")
        for t in state[name].stored()
    ]


def full_states(engine):
    from deepspeed.utils import safe_get_full_optimizer_state

    return [
        safe_get_full_optimizer_state(p, name).clone()
        for p in engine.module.parameters()
        for name in ("exp_avg", "exp_avg_sq")
    ]


def run_stage(stage, bf16, folder):
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model(), config=ds_config(stage, bf16))
    out = {
        "losses": [train_step(engine, i) for i in range(STEPS)],
        "lr": engine.get_lr()[0],
        "classes": [type(engine.basic_optimizer).__name__, isinstance(engine.basic_optimizer, CoatAdamW)],
        "optimizer": optimizer is engine.optimizer and loader is None and scheduler is engine.lr_scheduler,
        "bytes": coat_ds.state_bytes(engine),
        "same_bytes": coat_ds.state_bytes(engine) == coat_ds.state_bytes(optimizer),
        "coat": engine.coat.config,
        "groups": [(g["exp_avg_format"], g["weight_decay"]) for g in engine.basic_optimizer.param_groups],
    }
    tag = f"stage{stage}-{bf16}"
    saved = storages(engine)
    if stage:
        out["full"] = full_states(engine)
    engine.save_checkpoint(folder, tag=tag)
    out["next"] = [train_step(engine, STEPS + i) for i in range(2)]

    # into a fresh engine, and into one that has stepped
    fresh, *_ = deepspeed.initialize(model=model(), config=ds_config(stage, bf16))
    for name, target in (("fresh", fresh), ("stepped", engine)):
        target.load_checkpoint(folder, tag=tag)
        loaded = storages(target)
        out[f"{name}_equal"] = len(saved) == len(loaded) and all(map(torch.equal, saved, loaded))
        if stage:
            out[f"{name}_full"] = all(map(torch.equal, full_states(target), out["full"]))
        out[f"{name}_next"] = [train_step(target, STEPS + i) for i in range(2)]
    return out


def without_the_block():
    """The same run by DeepSpeed alone, and by COAT with no block and with a disabled one."""
    out = []
    for switch, more in (
        (coat_ds.uninstall, {}),
        (coat_ds.install, {}),
        (coat_ds.install, {"coat": {"enabled": False}}),
    ):
        switch()
        # of its own: DeepSpeed 0.18 takes options out of it
        section = {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}}
        config = {**ds_config(1, True, False, optimizer=section), **more}
        engine, *_ = deepspeed.initialize(model=model(), config=config)
        losses = [train_step(engine, i) for i in range(2)]
        out.append((losses, type(engine.basic_optimizer).__name__, hasattr(engine, "coat")))
    return out


def ways_to_give_the_config(folder):
    """As a dict, a path, config_params and an argument of args; the learning rate tells that it was read."""
    config = ds_config(1, True)
    before = json.dumps(config)
    path = os.path.join(folder, "ds.json")
    with open(path, "w") as f:
        f.write(before)
    args = types.SimpleNamespace(deepspeed_config=path, local_rank=int(os.environ["LOCAL_RANK"]))
    out = []
    for given in ({"config": config}, {"config": path}, {"config_params": config}, {"args": args}):
        engine, *_ = deepspeed.initialize(model=model(), **given)
        out.append((type(engine.basic_optimizer).__name__, engine.basic_optimizer.defaults["betas"]))
    return out, json.dumps(config) == before and args.deepspeed_config == path


def client_optimizers():
    config = {key: value for key, value in ds_config(1, True).items() if key != "optimizer"}
    net = model()
    # ZeRO's flat partition in the weight's place has no name
    mine = CoatAdamW(net.named_parameters(), lr=5e-4, exp_avg_format="fp8_expanded", keep_fp32=("0.weight",))
    engine, *_ = deepspeed.initialize(model=net, optimizer=mine, config=config)
    train_step(engine, 0)
    left_alone = {
        **ds_config(1, True),
        "coat": {"enabled": True, "activations": False, "optimizer": {"enabled": False}},
    }
    left_alone["optimizer"]["params"]["torch_adam"] = True
    other, *_ = deepspeed.initialize(model=model(), config=left_alone)
    return (
        engine.basic_optimizer is mine,
        coat_ds.state_bytes(engine),
        (type(other.basic_optimizer).__name__, other.coat.states, str(other.coat)),
    )


def without_optimizer():
    """Engines that compute and do not train, as TRL's of reference models."""
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
    out = {cell: run_stage(*cell, folder) for cell in CELLS}
    if torch.distributed.get_world_size() == 1:
        out["without"] = without_the_block()
        out["given"] = ways_to_give_the_config(folder)
        out["client"] = client_optimizers()
        out["no optimizer"] = without_optimizer()
    return out


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return run_distributed(work, 1, str(tmp_path_factory.mktemp("one")))[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_distributed(work, 2, str(tmp_path_factory.mktemp("two")))


every_cell = pytest.mark.parametrize(
    "stage,bf16", CELLS, ids=[f"{'bf16' if bf16 else 'fp32'}-{stage}" for stage, bf16 in CELLS]
)


@every_cell
def test_engine_resumes_with_the_same_moments_and_losses(one, two, stage, bf16):
    for rank in (one, *two):
        run = rank[stage, bf16]
        assert run["fresh_equal"] and run["stepped_equal"]
        assert run["fresh_next"] == run["stepped_next"] == run["next"]
        if stage:
            assert run["fresh_full"] and run["stepped_full"]


@pytest.mark.parametrize("stage", range(4))
def test_engine_builds_what_the_block_says(one, two, stage):
    for world, ranks in ((1, [one]), (2, two)):
        for rank in ranks:
            run = rank[stage, True]
            assert run["classes"] == ["CoatAdamW", True]
            assert run["optimizer"] and run["same_bytes"]
            assert run["coat"] == CoatConfig.from_dict({"enabled": True, "activations": False})
            assert run["groups"] == [(None, 0.1)]
            # warm-up has arrived
            assert run["lr"] == pytest.approx(2e-3)
            assert run["bytes"]["parameters"] == 25120 // (world if stage else 1)
        held = [rank[stage, True]["bytes"]["by_codec"] for rank in (ranks if stage else ranks[:1])]
        # stages 1 and 2 cut the flat tensor of all parameters within a group: both parts have metadata
        groups = 24576 // 128 + (world == 2 and stage in (1, 2))
        assert sum(h["ratio8"] for h in held) == 24576 + groups * 4
        assert sum(h["log8"] for h in held) == 24576 + groups * 5
        assert sum(h["fp32"] for h in held) == 8 * 544


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
    assert held["by_codec"]["fp32"] > 2 * 4 * 32 * 128
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
