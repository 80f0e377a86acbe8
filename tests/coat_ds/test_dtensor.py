"""FSDP2, HSDP and tensor parallelism: parameters that are DTensors, and their checkpoints.

Every rank sees the same batch, so that averages over ranks are exact, and one process is the reference.
"""

import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

import coat_ds
from coat_ds.optim.accounting import state_bytes
from coat_ds.optim.options import MOMENTS
from tests.coat_ds.sharded import FP32, VOCABULARY, build, coat, sharded, start, train
from tests.util import rel_rms, run_distributed

KINDS = ("fsdp", "hsdp", "tp")
NESTED, FLAT = StateDictOptions(), StateDictOptions(flatten_optimizer_state_dict=True)
FULL = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def moments(net, optimizer):
    """Whole, by name, as `moments` gives them."""
    found = {}
    for name, p in net.named_parameters():
        for kind, moment in zip(MOMENTS, optimizer.moments(p), strict=True):
            assert isinstance(moment, DTensor) == isinstance(p, DTensor)
            found[f"{name}.{kind}"] = whole(moment).cpu()
    return found


def remainders(net, optimizer):
    """Whole, in a type that ranks can gather, by name."""
    states = {name: optimizer.state[p] for name, p in net.named_parameters()}
    return {name: whole(s["remainder"].int()) for name, s in states.items() if "remainder" in s}


def differing(ours, others):
    return [name for name in ours if not torch.equal(ours[name], others[name])]


def clip(net):
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    return {}


def scale(net):
    """The same by the step; the norm of sharded gradients is a DTensor that is not summed yet."""
    norm = nn.utils.get_total_norm([p.grad for p in net.parameters()])
    return {"grad_scale": (0.01 / (norm + 1e-6)).clamp(max=1.0)}


def check_runs():
    """For each mesh, width and format: losses and moments of the first rank alone, and of all ranks."""
    out = {}
    # of groups that shards cut, HSDP cuts as FSDP does
    for width, compressed, kinds in (
        (128, True, KINDS),
        (96, True, ("fsdp", "tp")),
        (96, False, ("fsdp", "tp")),
    ):
        formats, alone = {} if compressed else FP32, None
        if dist.get_rank() == 0:
            net = build(width)
            optimizer = coat(net, **formats)
            alone = train(net, optimizer, range(3)), moments(net, optimizer)
        for kind in kinds:
            net = sharded(build(width), kind)
            optimizer = coat(net, **formats)
            out[kind, width, compressed] = alone, (train(net, optimizer, range(3)), moments(net, optimizer))
    return out


def check_steps():
    """Losses of the first rank alone, and of all ranks."""
    out = {}
    for name, prepare, options, dtype in (
        ("clip", clip, {}, torch.float32),
        ("scale", scale, {}, torch.float32),
        ("everything", None, {"min_numel": 0, "keep_fp32": ()}, torch.float32),
        ("bf16", None, {}, torch.bfloat16),
    ):
        nets = [sharded(build(dtype=dtype))]
        if dist.get_rank() == 0:
            nets.insert(0, build(dtype=dtype))
        out[name] = [train(net, coat(net, **options), range(3), prepare) for net in nets]
    return out


def check_skipped():
    """What a GradScaler's step changes after one rank alone has met an infinity."""
    net = sharded(build())
    optimizer = coat(net)
    train(net, optimizer, range(1))
    before = [p.detach().to_local().clone() for p in net.parameters()]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net(torch.zeros(1, 4, dtype=torch.long)).sum()).backward()
    if dist.get_rank() == 0:
        net[0].weight.grad.to_local()[0, 0] = torch.inf
    scaler.step(optimizer)
    return [i for i, p in enumerate(net.parameters()) if not p.detach().to_local().equal(before[i])]


def check_state():
    net = sharded(build())
    options = {"min_numel": 20_000, "keep_fp32": lambda name, p: p.shape[0] == 256 and p.dim() == 2}
    optimizer = coat(net, **options)
    train(net, optimizer, range(2))
    state = {name: (p, optimizer.state[p]["exp_avg"]) for name, p in net.named_parameters()}
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    again = coat(net, **options)
    again.load_state_dict(torch.load(saved, weights_only=False))
    return {
        "laid out alike": all(m.placements == p.placements and m.shape == p.shape for p, m in state.values()),
        "codecs": {name: m.to_local().pieces[0].codec.name for name, (_, m) in state.items()},
        "shapes": {name: tuple(m.to_local().shape) for name, (_, m) in state.items()},
        "bytes": state_bytes(optimizer),
        "arrivals": again.pop_load_summary(),
        "differing": differing(moments(net, optimizer), moments(net, again)),
    }


def save(folder):
    """Writes checkpoints of ours and of the stock optimizer, nested and flat; what was in them."""
    out = {}
    for name in ("coat", "stock"):
        net = sharded(build())
        optimizer = coat(net) if name == "coat" else torch.optim.AdamW(net.parameters(), lr=1e-2)
        train(net, optimizer, range(2))
        for form, options in (("nested", NESTED), ("flat", FLAT)):
            model, states = get_state_dict(net, optimizer, options=options)
            dcp.save({"model": model, "optimizer": states}, checkpoint_id=f"{folder}/{name}-{form}")
        full = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))
        held = {f"{p}.{k}": v for p, entry in full["state"].items() for k, v in entry.items()}
        out[name] = held, train(net, optimizer, range(2, 4))
    return out


def resume(folder, name, kind, form, stock=False):
    """The losses that follow, and what the loaded states are."""
    net = sharded(build(), kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2) if stock else coat(net)
    options = FLAT if form == "flat" else NESTED
    model, states = get_state_dict(net, optimizer, options=options)
    planner = DefaultLoadPlanner(allow_partial_load=name == "stock")
    dcp.load({"model": model, "optimizer": states}, checkpoint_id=f"{folder}/{name}-{form}", planner=planner)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=states, options=options)
    if not stock:
        return moments(net, optimizer), train(net, optimizer, range(2, 4))
    state = {name: optimizer.state[p] for name, p in net.named_parameters()}
    held = {f"{name}.{k}": whole(v).clone() for name, entry in state.items() for k, v in entry.items()}
    return held, train(net, optimizer, range(2, 4))


def check_full():
    """What a full state dict, which rank 0 alone has, changes on its way to another mesh, of moments and of
    BF16 parameters' remainders."""
    changed = []
    for dtype in (torch.float32, torch.bfloat16):
        net, other = sharded(build(dtype=dtype)), sharded(build(dtype=dtype), "hsdp")
        optimizer, again = coat(net), coat(other)
        train(net, optimizer, range(2))
        states = get_optimizer_state_dict(
            net, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        set_optimizer_state_dict(other, again, states if dist.get_rank() == 0 else {}, options=FULL)
        changed += differing(moments(net, optimizer), moments(other, again))
        changed += differing(remainders(net, optimizer), remainders(other, again))
    return changed


def check_refused():
    """The errors."""
    said = []
    two = nn.Parameter(TwoTensor(torch.ones(4), torch.ones(4)))
    two.grad = two.detach().clone()
    mixed = sharded(build())[2].weight
    mixed.grad = torch.zeros(mixed.shape)
    late = coat_ds.CoatAdamW([nn.Parameter(torch.ones(4))], checkpoint_layout="compressed")
    for attempt in (
        lambda: coat_ds.CoatAdamW([two]).step(),
        lambda: coat_ds.CoatAdamW([mixed]).step(),
        lambda: coat(sharded(build()), checkpoint_layout="compressed"),
        lambda: late.add_param_group({"params": sharded(build()).parameters()}),
    ):
        try:
            attempt()
        except (TypeError, ValueError) as error:
            said.append(str(error))
    return *said, len(late.param_groups)


def on_four(folder):
    start()
    return {
        "steps": check_steps(),
        "refused": check_refused(),
        "runs": check_runs(),
        "skipped": check_skipped(),
        "state": check_state(),
        "full": check_full(),
        "saved": save(folder),
        "resumed": [
            resume(folder, "coat", kind, form) for kind, form in (("hsdp", "flat"), ("tp", "nested"))
        ],
    }


def on_two(folder):
    start()
    return {
        (name, stock): resume(folder, name, "fsdp", form, stock)
        for name, form, stock in (("coat", "nested", False), ("stock", "flat", False), ("coat", "flat", True))
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def four(folder):
    return run_distributed(on_four, 4, folder)


@pytest.fixture(scope="module")
def two(folder, four):
    return run_distributed(on_two, 2, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_dtensor_shards_of_whole_groups_are_one_process_to_the_bit(four, kind):
    (losses, held), (others, shards) = four[0]["runs"][kind, 128, True]
    if kind == "tp":
        # its products are sums in another order
        assert others == pytest.approx(losses, rel=1e-5)
        assert max(rel_rms(shards[name], held[name]) for name in held) < 1e-2
    else:
        assert others == losses and not differing(shards, held)
        # the other replica's too
        assert not differing(four[-1]["runs"][kind, 128, True][1][1], held)


@pytest.mark.parametrize("kind", ["fsdp", "tp"])
def test_dtensor_shards_that_cut_groups_are_as_exact(four, kind):
    runs = four[0]["runs"]
    (losses, exact), (others, shards) = runs[kind, 96, False]
    assert others == (pytest.approx(losses, rel=1e-6) if kind == "tp" else losses)
    assert max(rel_rms(shards[name], exact[name]) for name in exact) < (1e-5 if kind == "tp" else 1e-30)
    (losses, held), (others, shards) = runs[kind, 96, True]
    assert others == pytest.approx(losses, rel=1e-4)
    for name in exact:
        assert rel_rms(shards[name], exact[name]) <= 1.25 * rel_rms(held[name], exact[name]), name


@pytest.mark.parametrize("name", ["clip", "scale", "bf16"])
def test_dtensor_steps_of_every_kind(four, name):
    alone, together = four[0]["steps"][name]
    assert together == pytest.approx(alone, rel=1e-6)
    assert together[-1] < alone[0] - 0.1


def test_dtensor_rank_that_holds_nothing_of_a_compressed_tensor(four):
    assert four[3]["state"]["shapes"]["3.weight"] == (0, VOCABULARY)
    alone, together = four[0]["steps"]["everything"]
    assert together == pytest.approx(alone, rel=1e-4)


def test_dtensor_infinity_on_one_rank_skips_the_step_on_all(four):
    assert [out["skipped"] for out in four] == [[]] * 4


def test_dtensor_states_are_laid_out_like_the_parameter(four):
    codecs = four[0]["state"]["codecs"]
    # by the size of the whole tensor; every rank has less than min_numel of it
    assert {name for name, codec in codecs.items() if codec != "fp32"} == {"1.down.weight"}
    for out in (rank["state"] for rank in four):
        assert out["laid out alike"] and out["codecs"] == codecs
        # a rank's own state dict
        assert out["arrivals"] == "18 restored to the bit" and not out["differing"]
    held = [out["state"]["bytes"] for out in four]
    assert sum(h["parameters"] for h in held) == sum(p.numel() for p in build().parameters())
    assert {h["by_codec"]["ratio8"] for h in held} == {32 * 256 + 4 * 64}
    assert {h["by_codec"]["log8"] for h in held} == {32 * 256 + 5 * 64}


def test_dtensor_full_state_dict_goes_to_another_mesh(four):
    assert [out["full"] for out in four] == [[]] * 4


def test_dtensor_checkpoints_resume_to_the_bit_on_any_mesh(four, two):
    saved, losses = four[0]["saved"]["coat"]
    assert {saved[name].dtype for name in saved} == {torch.float32}
    for held, others in (*four[0]["resumed"], two[0]["coat", False]):
        assert not differing(held, saved)
        assert others == pytest.approx(losses, rel=1e-6)


def test_dtensor_checkpoints_of_stock_adamw_go_both_ways(four, two):
    saved, losses = four[0]["saved"]["coat"]
    held, others = two[0]["coat", True]
    assert held.keys() == saved.keys() and not differing(held, saved)
    assert others == pytest.approx(losses, rel=1e-3)
    saved, losses = four[0]["saved"]["stock"]
    held, others = two[0]["stock", False]
    assert max(rel_rms(held[name], saved[name]) for name in held) < 0.04
    assert others[0] == losses[0] and others[1] == pytest.approx(losses[1], rel=1e-3)


def test_dtensor_refusals(four):
    elsewhere, mixed, compressed, late, groups = four[0]["refused"]
    assert "is a DTensor, its gradient a Tensor" in mixed
    assert "is a TwoTensor, which holds its values elsewhere" in elsewhere
    assert "Take 'stock'" in compressed and late == compressed and groups == 1


def on_gpu(folder):
    start("cpu:gloo,cuda:nccl")
    net = build().cuda()
    out = [train(net, coat(net), range(4), clip)]
    for options, given in (({}, {}), ({"offload_policy": CPUOffloadPolicy()}, {"offload": "cpu"})):
        net = sharded(build().cuda(), **options)
        optimizer = coat(net, **given)
        losses = train(net, optimizer, range(2), clip)
        model, states = get_state_dict(net, optimizer)
        dcp.save({"model": model, "optimizer": states}, checkpoint_id=f"{folder}/{len(out)}")
        held = moments(net, optimizer)
        net = sharded(build().cuda(), **options)
        optimizer = coat(net, **given)
        model, states = get_state_dict(net, optimizer)
        dcp.load({"model": model, "optimizer": states}, checkpoint_id=f"{folder}/{len(out)}")
        set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=states)
        devices = {optimizer.state[p]["exp_avg"].device.type for p in net.parameters()}
        changed = differing(moments(net, optimizer), held)
        out.append((losses + train(net, optimizer, range(2, 4), clip), devices, changed))
    return out


@pytest.mark.gpu
def test_dtensor_shards_on_a_gpu_and_offloaded_ones(tmp_path):
    alone, *runs = run_distributed(on_gpu, 1, str(tmp_path), gpus=True)[0]
    for (losses, devices, changed), device in zip(runs, ("cuda", "cpu"), strict=True):
        assert losses == pytest.approx(alone, rel=1e-4)
        assert devices == {device} and not changed
