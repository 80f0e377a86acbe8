import copy
import io
import math
from unittest import mock

import pytest
import torch

from coat_ds import CoatAdamW, state_bytes
from coat_ds.optim.moment import Moment
from coat_ds.optim.options import MOMENTS
from coat_ds.optim.recover import SAME_VALUE, recovered
from coat_kernels.codecs import get_codec
from tests.coat_ds.faithful import (
    assert_faithful,
    assert_ratio_faithful,
    assert_second_faithful,
    published_round_trip,
)
from tests.util import rel_rms

SHAPES = [(33, 70), (130,), (1,), (), (0,), (257,), (8, 4, 5)]


def parameters(dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(s, generator=generator).to(device, dtype) for s in SHAPES]
    # a transposed weight: contiguous for nobody
    made.append(torch.randn(40, 50, generator=generator).to(device, dtype).t())
    return [torch.nn.Parameter(p) for p in made]


def set_grads(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        g = torch.randn(p.shape, generator=generator) * torch.rand(p.shape, generator=generator)
        p.grad = g.to(p.device, p.dtype)


def codes(optimizer):
    return [
        t.clone()
        for group in optimizer.param_groups
        for p in group["params"]
        for name in MOMENTS
        for t in optimizer.state[p][name].storage
    ]


def assert_equal(xs, ys):
    for x, y in zip(xs, ys, strict=True):
        assert torch.equal(x, y)


FP32 = {"exp_avg_format": "fp32", "exp_avg_sq_format": "fp32"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 3e-2, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-5},
        {"weight_decay": 0.0},
        {"maximize": True},
        {"lr": torch.tensor(2e-3)},
        {"foreach": False, "fused": False},
    ],
    ids=["defaults", "options", "no-decay", "maximize", "tensor-lr", "switches"],
)
def test_fp32_formats_are_torch_adamw_to_the_bit(options):
    ours, theirs = parameters(), parameters()
    optimizers = (
        CoatAdamW(ours, **FP32, **options),
        torch.optim.AdamW(theirs, **{"foreach": False, **options}),
    )
    for step in range(6):
        set_grads(ours, step)
        set_grads(theirs, step)
        if step == 3:
            # a missing gradient skips the parameter, its step count included
            ours[1].grad = theirs[1].grad = None
        for optimizer in optimizers:
            optimizer.step()
    assert_equal(ours, theirs)
    for p, q in zip(ours, theirs, strict=True):
        exact = optimizers[1].state[q]
        assert_equal(optimizers[0].moments(p), [exact[name] for name in MOMENTS])
        assert optimizers[0].state[p]["step"] == exact["step"]


def test_groups_and_schedulers():
    ours, theirs = parameters(), parameters()

    def groups(params):
        return [
            {"params": params[:3], "weight_decay": 0.2},
            {"params": params[3:], "lr": 5e-3, "betas": (0.7, 0.9), "eps": 1e-6, "maximize": True},
        ]

    mine = CoatAdamW(groups(ours), **FP32)
    stock = torch.optim.AdamW(groups(theirs), foreach=False)
    schedulers = [
        torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 2),
                torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
            ],
            [2],
        )
        for o in (mine, stock)
    ]
    for step in range(6):
        for params, optimizer, scheduler in zip((ours, theirs), (mine, stock), schedulers, strict=True):
            set_grads(params, step)
            optimizer.step()
            scheduler.step()
    assert_equal(ours, theirs)


@pytest.mark.parametrize(
    "exp_avg_format,exp_avg_sq_format,group_size",
    # every two of the three values meet
    [
        (m, v, (64, 128, 256)[(i + j) % 3])
        for i, m in enumerate(("fp8_expanded", "fp8", "fp32"))
        for j, v in enumerate(("fp8_expanded", "fp8_expanded_e5m2", "bf16"))
    ],
)
def test_a_step_is_a_torch_step_from_the_stored_moments(exp_avg_format, exp_avg_sq_format, group_size):
    """The parameter sees the fresh FP32 moments; what is stored is their encoding and nothing else."""
    params = parameters()
    formats = {"exp_avg": exp_avg_format, "exp_avg_sq": exp_avg_sq_format}
    optimizer = CoatAdamW(
        params,
        lr=1e-2,
        min_numel=0,
        group_size=group_size,
        **{f"{name}_format": f for name, f in formats.items()},
    )
    for step in range(4):
        before = [p.detach().clone() for p in params]
        moments = [optimizer.moments(p) for p in params]
        set_grads(params, step)
        optimizer.step()
        for p, start, (m, v) in zip(params, before, moments, strict=True):
            q = torch.nn.Parameter(start)
            q.grad = p.grad
            stock = torch.optim.AdamW([q], lr=1e-2, foreach=False)
            stock.state[q] = {"step": torch.tensor(float(step)), "exp_avg": m, "exp_avg_sq": v}
            stock.step()
            assert torch.equal(p, q)
            for name, stored in zip(MOMENTS, optimizer.moments(p), strict=True):
                codec = get_codec(formats[name])
                expected = Moment.encoded(stock.state[q][name], codec, group_size)
                assert torch.equal(stored, expected.decode())


def test_bf16_parameters_are_updated_in_fp32_and_rounded_once():
    ours = parameters(torch.bfloat16)
    optimizer = CoatAdamW(ours, lr=1e-2, **FP32)
    set_grads(ours, 0)
    wide = [torch.nn.Parameter(p.detach().float()) for p in ours]
    for p, q in zip(ours, wide, strict=True):
        q.grad = p.grad.float()
    optimizer.step()
    torch.optim.AdamW(wide, lr=1e-2, foreach=False).step()
    assert_equal(ours, [q.bfloat16() for q in wide])


def test_small_tensors_keep_fp32_moments():
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (4095, 4096)]
    optimizer = CoatAdamW(params)
    set_grads(params, 0)
    optimizer.step()
    assert [optimizer.state[p]["exp_avg"].codec.name for p in params] == ["fp32", "ratio8"]
    held = state_bytes(optimizer)
    # twice 4095 FP32 numbers; twice 4096 codes, and 32 groups of two FP32 scales and an 8-bit exponent
    assert held["by_codec"] == {"fp32": 2 * 4 * 4095, "ratio8": 4096 + 4 * 32, "log8": 4096 + 5 * 32}
    assert held["bytes"] == sum(held["by_codec"].values())
    assert held["parameters"] == 4095 + 4096
    big = CoatAdamW(params[1:])
    big.init_states()
    assert state_bytes(big)["bytes_per_parameter"] == 2 + 9 / 128
    stock = torch.optim.AdamW(params)
    stock.step()
    assert state_bytes(stock)["bytes_per_parameter"] == pytest.approx(8, rel=1e-3)


def _exponents(low, high, count=128):
    return torch.logspace(low, high, count) * torch.tensor([1.0, -1.0]).repeat(count // 2)


def _hidden_minimum():
    # the zero in lane 1 hides lane 17 from the published minimum, and 0.01 falls below the mapped range
    x = torch.linspace(0.5, 1.0, 128)
    x[1], x[17] = 0.0, 0.01
    return x


HAZARDS = {
    "zero-first": torch.cat([torch.zeros(1), torch.linspace(0.1, 1.0, 127)]),
    "zero-hides-the-minimum": _hidden_minimum(),
    "constant-negative": torch.cat([torch.full((128,), -c) for c in torch.linspace(0.1, 1.0, 16).tolist()]),
    "one-negative-element-left": torch.cat([torch.linspace(0.1, 1.0, 128), torch.tensor([-0.7])]),
    "all-zero": torch.zeros(200),
    "zero-group-among-others": torch.cat([torch.linspace(0.1, 1.0, 128), torch.zeros(128)]),
    "tiny": _exponents(-16.5, -15.5),
    "huge-span": _exponents(-17, 17),
    "infinity": torch.cat([torch.linspace(0.1, 1.0, 100), torch.tensor([torch.inf]), torch.ones(27)]),
    "negative-infinity": torch.cat([torch.tensor([-torch.inf]), -torch.linspace(0.1, 1.0, 140)]),
}
ORDINARY = {
    "normal": torch.randn(1000, generator=torch.Generator().manual_seed(0)),
    "wide": _exponents(-4, 2),
    "nan": torch.cat([torch.linspace(0.1, 1.0, 100), torch.tensor([torch.nan]), torch.ones(27)]),
}
PARTIAL = {f"{n}-left": torch.linspace(0.1, 1.0, 128 + n) for n in (1, 2, 127)}


def _fresh_moments(grad):
    """Exact FP32 moments after one step from zero."""
    v = torch.zeros_like(grad)
    return torch.zeros_like(grad).lerp_(grad, 1 - 0.9), v.addcmul_(grad, grad, value=1 - 0.999)


@pytest.mark.parametrize(
    "grad", [*HAZARDS.values(), *ORDINARY.values(), *PARTIAL.values()], ids=[*HAZARDS, *ORDINARY, *PARTIAL]
)
def test_stored_moments_are_faithful(grad):
    p = torch.nn.Parameter(torch.zeros_like(grad))
    options = {"min_numel": 0, "exp_avg_sq_rounding": "nearest"}
    optimizer = CoatAdamW([p], **options, exp_avg_sq_format="fp8_expanded")
    p.grad = grad.clone()
    optimizer.step()
    exact = _fresh_moments(grad)
    for stored, expected in zip(optimizer.moments(p), exact, strict=True):
        assert_faithful(stored, expected)
    optimizer = CoatAdamW([p], **options)
    optimizer.step()
    first, second = optimizer.moments(p)
    assert_second_faithful(second, exact[1])
    # small codes are dithered, by less than half a step more: less than the largest one's
    assert_ratio_faithful(first, exact[0], second)


@pytest.mark.parametrize("grad", HAZARDS.values(), ids=HAZARDS)
def test_the_hazards_defeat_the_published_formula(grad):
    """The inputs above are the ones that matter: the test of faithfulness fails on the public formula."""
    with pytest.raises(AssertionError):
        for exact in _fresh_moments(grad):
            assert_faithful(published_round_trip(exact), exact)


@pytest.mark.parametrize("grad", ORDINARY.values(), ids=ORDINARY)
def test_the_published_formula_is_faithful_elsewhere(grad):
    for exact in _fresh_moments(grad):
        assert_faithful(published_round_trip(exact), exact)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_gradient_stays_where_it_is(bad):
    """Element 5 is within its group's range, so that without it the group has the same scales."""
    grad = torch.linspace(-1.0, 1.0, 300)
    params = {x: torch.nn.Parameter(torch.ones(300)) for x in (grad[5].item(), bad)}
    for value, p in params.items():
        optimizer = CoatAdamW([p], min_numel=0, exp_avg_sq_rounding="nearest")
        for _ in range(3):
            p.grad = grad.clone()
            p.grad[5] = value
            optimizer.step()
            p.grad = None
    clean, dirty = params.values()
    others = torch.arange(300) != 5
    assert torch.equal(dirty[others], clean[others])
    assert dirty[5].isnan()
    for moment in optimizer.moments(dirty):
        assert moment[5].isnan() and moment[others].isfinite().all()


def test_second_moments_never_reach_zero():
    """What a flushed second moment does: the first moment over eps."""
    p = torch.nn.Parameter(torch.zeros(128))
    optimizer = CoatAdamW([p], lr=1.0, weight_decay=0.0, min_numel=0)
    p.grad = torch.logspace(-12, 2, 128)
    optimizer.step()
    assert (optimizer.moments(p)[1] > 0).all()
    p.grad = torch.zeros(128)
    before = p.detach().clone()
    optimizer.step()
    # exact: 0.9 * 0.1 / 0.19 / sqrt(0.999 * 0.001 / 0.001999) = 0.67; stored with k = 0.1875 a moment is
    # off by at most (1 + 0.22)^(1 / 0.1875) = 2.9 either way, its root by 1.7; eps only shrinks it
    assert ((p - before).abs() < 0.67 * 2.9 * 1.7 * 1.7).all()


def trained(steps=3, **options):
    params = parameters()
    optimizer = CoatAdamW(params, min_numel=100, **options)
    for step in range(steps):
        set_grads(params, step)
        optimizer.step()
    return params, optimizer


def through_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("exp_avg_format", ["fp8_expanded", "fp8_expanded_e5m2", "fp8", "bf16", "fp32"])
def test_resume_is_bit_exact(exp_avg_format):
    params, optimizer = trained(exp_avg_format=exp_avg_format)
    saved = through_file(optimizer.state_dict())
    resumed_params = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = CoatAdamW(resumed_params, min_numel=100, exp_avg_format=exp_avg_format, lr=7.0)
    with mock.patch("coat_ds.optim.state_dict.recovered", wraps=recovered) as searched:
        resumed.load_state_dict(saved)
    # the scales that were saved are taken, nothing is searched
    assert not any(call.args[0].has_scale for call in searched.call_args_list)
    assert_equal(codes(resumed), codes(optimizer))
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for step in range(3, 6):
        for ps, o in ((params, optimizer), (resumed_params, resumed)):
            set_grads(ps, step)
            o.step()
    assert_equal(resumed_params, params)
    assert_equal(codes(resumed), codes(optimizer))


def test_state_dict_has_the_stock_layout():
    params, optimizer = trained()
    set_grads(params, 9)
    stock = torch.optim.AdamW(params)
    stock.step()
    ours, theirs = optimizer.state_dict(), stock.state_dict()
    assert ours.keys() - theirs.keys() == {"coat"}
    assert ours["state"].keys() == theirs["state"].keys()
    for index, entry in theirs["state"].items():
        assert ours["state"][index].keys() == entry.keys()
        for name, value in entry.items():
            mine = ours["state"][index][name]
            assert type(mine) is torch.Tensor and mine.device.type == "cpu"
            assert (mine.shape, mine.dtype) == (value.shape, value.dtype)
    for group, own in zip(theirs["param_groups"], ours["param_groups"], strict=True):
        assert group.keys() <= own.keys() and own["params"] == group["params"]
    metadata = ours["coat"]["moments"][0]["exp_avg"]
    assert (ours["coat"]["version"], metadata["group_size"]) == (2, 128)
    ((begin, codec, scale, exponent),) = metadata["pieces"]
    assert (begin, codec) == (0, "ratio8")
    groups = -(-params[0].numel() // 128)
    assert (scale.shape, scale.dtype) == ((groups,), torch.float32)
    assert (exponent.shape, exponent.dtype) == ((0,), torch.uint8)
    ((begin, codec, scale, exponent),) = ours["coat"]["moments"][0]["exp_avg_sq"]["pieces"]
    assert (begin, codec, scale.shape) == (0, "log8", (groups,))
    assert (exponent.shape, exponent.dtype) == ((groups,), torch.uint8)


def test_torch_adamw_goes_on_from_our_state_dict():
    params, optimizer = trained()
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in params]
    stock = torch.optim.AdamW(theirs, lr=7.0, foreach=False)
    stock.load_state_dict(through_file(optimizer.state_dict()))
    set_grads(params, 3)
    set_grads(theirs, 3)
    optimizer.step()
    stock.step()
    # one step from the same moments is the same step
    assert_equal(theirs, params)


def test_we_go_on_from_a_torch_state_dict():
    theirs = parameters()
    stock = torch.optim.AdamW(theirs, lr=2e-3, weight_decay=0.3, foreach=True)
    for step in range(3):
        set_grads(theirs, step)
        stock.step()
    ours = [torch.nn.Parameter(p.detach().clone()) for p in theirs]
    optimizer = CoatAdamW(ours, min_numel=100)
    optimizer.load_state_dict(through_file(stock.state_dict()))
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (2e-3, 0.3)
    assert (group["exp_avg_format"], group["min_numel"], group["foreach"]) == ("auto", 100, None)
    for p, q in zip(ours, theirs, strict=True):
        stored, exact = optimizer.moments(p), [stock.state[q][name] for name in MOMENTS]
        if p.numel() < 100:
            assert_equal(stored, exact)
        else:
            first, second = (x.contiguous() for x in stored)
            assert_ratio_faithful(first, exact[0].contiguous(), second)
            assert_second_faithful(second, exact[1].contiguous())
        assert optimizer.state[p]["step"] == 3
    set_grads(ours, 3)
    optimizer.step()


# the options of a parameter group that versions of torch, DeepSpeed and NVIDIA's libraries write
FIRST = ("lr", "betas", "eps", "weight_decay", "params")
GROUP_KEYS = {
    "torch 1.0": (*FIRST, "amsgrad"),
    "torch 1.12": (*FIRST, "amsgrad", "maximize", "foreach", "capturable"),
    "torch 2.0": (*FIRST, "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"),
    "DeepSpeedCPUAdam": (*FIRST, "amsgrad", "bias_correction"),
    "FusedAdam": (*FIRST, "bias_correction", "step"),
    "FusedAdam that counts in groups": (*FIRST, "bias_correction", "step"),
}


@pytest.mark.parametrize("kind", GROUP_KEYS)
def test_options_that_others_do_not_have_stay(kind):
    theirs = parameters()
    stock = torch.optim.AdamW(theirs, lr=2e-3, weight_decay=0.3)
    for step in range(3):
        set_grads(theirs, step)
        stock.step()
    saved = copy.deepcopy(stock.state_dict())
    (group,) = saved["param_groups"]
    counts = "counts" in kind
    group |= {"bias_correction": True, "step": 3 if counts else 0}
    for key in group.keys() - set(GROUP_KEYS[kind]):
        del group[key]
    for index, entry in saved["state"].items():
        entry["step"] = int(entry["step"])
        if counts:
            del entry["step"]
        elif kind == "FusedAdam":
            # DeepSpeed's counts in the state of the last parameter alone
            entry["step"] = 3 if index == max(saved["state"]) else 0
    ours, expected = ([torch.nn.Parameter(p.detach().clone()) for p in theirs] for _ in range(2))
    optimizer, other = (
        CoatAdamW(params, **FP32, maximize=True, capturable=True) for params in (ours, expected)
    )
    optimizer.load_state_dict(through_file(saved))
    other.load_state_dict(stock.state_dict())
    (own,), (full,) = optimizer.param_groups, other.param_groups
    assert own.keys() == full.keys() == {*optimizer.defaults, "params"}
    assert (own["lr"], own["weight_decay"], own["bias_correction"]) == (2e-3, 0.3, True)
    for name in ("maximize", "capturable"):
        assert own[name] == (name not in GROUP_KEYS[kind])
    assert [int(optimizer.state[p]["step"]) for p in ours] == [3] * len(ours)
    own["maximize"] = False
    set_grads(ours, 3)
    set_grads(expected, 3)
    optimizer.step()
    other.step()
    assert_equal(ours, expected)
    assert optimizer.state_dict()["param_groups"][0]["bias_correction"] is True


@pytest.mark.parametrize(
    "key,value",
    [("amsgrad", True), ("bias_correction", False), ("adam_w_mode", 0), ("decoupled_weight_decay", False)],
)
def test_steps_that_would_be_others_are_refused(key, value):
    params, optimizer = trained()
    saved = optimizer.state_dict()
    saved["param_groups"][0][key] = value
    before, rates = codes(optimizer), [g["lr"] for g in optimizer.param_groups]
    saved["param_groups"][0]["lr"] = 5.0
    with pytest.raises(ValueError, match=f"parameter group 0 has {key}={value!r}"):
        optimizer.load_state_dict(saved)
    assert_equal(before, codes(optimizer))
    assert rates == [g["lr"] for g in optimizer.param_groups]


def test_changed_moments_are_not_forced_into_old_scales():
    params, optimizer = trained()
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        entry["exp_avg"].mul_(1000)
    optimizer.load_state_dict(saved)
    for i, p in enumerate(params):
        exact = saved["state"][i]["exp_avg"]
        if p.numel() >= 100:
            assert_ratio_faithful(optimizer.moments(p)[0], exact, optimizer.moments(p)[1])
        else:
            assert torch.equal(optimizer.moments(p)[0], exact)


@pytest.mark.parametrize("change", ["version", "format", "group-size", "trimmed", "missing"])
def test_metadata_that_does_not_fit_is_ignored(change):
    """And where the format and the groups are the saved ones, codes are found again without it."""
    params, optimizer = trained()
    saved, options = optimizer.state_dict(), {"min_numel": 100}
    match change:
        case "version":
            saved["coat"]["version"] = 3
        case "format":
            options["exp_avg_format"] = "fp8_expanded_e5m2"
        case "group-size":
            options["group_size"] = 64
        case "trimmed":
            for moments in saved["coat"]["moments"].values():
                for metadata in moments.values():
                    metadata["pieces"] = [
                        (*piece[:2], piece[2][:1], piece[3]) for piece in metadata["pieces"]
                    ]
        case "missing":
            del saved["coat"]
    resumed = CoatAdamW(parameters(), **options)
    resumed.load_state_dict(saved)
    if change not in ("format", "group-size"):
        assert_equal(codes(resumed), codes(optimizer))
    for p, q in zip(params, resumed.param_groups[0]["params"], strict=True):
        for a, b in zip(optimizer.moments(p), resumed.moments(q), strict=True):
            # one more encoding; E5M2, the coarsest here, rounds by 2^-3 at most, over k >= 1
            assert p.numel() == 0 or rel_rms(b, a) < 2**-3


def test_misspelled_options_of_a_group_are_errors():
    p = torch.nn.Parameter(torch.ones(3))
    for name, meant in (("weight_decy", "weight_decay"), ("Betas", "betas"), ("groupsize", "group_size")):
        with pytest.raises(ValueError, match=f"{name!r}, which is no option. Did you mean {meant!r}"):
            CoatAdamW([{"params": [p], name: 0.1}])
    with pytest.raises(ValueError, match="Did you mean 'params'"):
        CoatAdamW([{"param": [p]}])
    # what schedulers, DeepSpeed, Megatron and users note there
    notes = dict.fromkeys(
        ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "name", "moe"), 1
    )
    notes |= dict.fromkeys(("lr_mult", "wd_mult", "is_decoupled_lr", "lr_scale", "use_muon", "start_wd"), 1)
    assert CoatAdamW([{"params": [p], **notes}]).param_groups[0].items() >= notes.items()


@pytest.mark.parametrize(
    "options",
    [
        {"lr": "auto"},
        {"lr": None},
        {"weight_decay": torch.zeros(2)},
        {"betas": 0.9},
        {"betas": ("0.9", 0.95)},
    ],
)
def test_options_of_a_wrong_kind_are_errors_that_name_them(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"CoatAdamW: {name} must be"):
        CoatAdamW(parameters(), **options)


def test_load_errors_come_first():
    _, optimizer = trained()
    before, good = codes(optimizer), optimizer.state_dict()

    def broken(change):
        state_dict = copy.deepcopy(good)
        change(state_dict)
        return state_dict

    for change, message in (
        (lambda d: d["param_groups"].append(d["param_groups"][0]), "different number of parameter groups"),
        (lambda d: d["param_groups"][0]["params"].pop(), "doesn't match the size of optimizer's group"),
        (lambda d: d["state"][0].update(exp_avg=torch.zeros(5)), r"exp_avg of parameter 0 is \(5,\)"),
        (lambda d: d["state"][0].update(max_exp_avg_sq=torch.zeros(5)), "amsgrad"),
        (lambda d: d["state"][1].pop("exp_avg_sq"), "no exp_avg_sq, but step, exp_avg"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(broken(change))
        assert_equal(codes(optimizer), before)


def test_load_hooks_see_the_whole_state():
    _, optimizer = trained()
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda o, d: seen.append(len(d["state"])))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [len(SHAPES) + 1] * 2


def test_copies_of_the_optimizer():
    params, optimizer = trained()
    twin = copy.deepcopy(optimizer)
    assert_equal(codes(twin), codes(optimizer))
    set_grads(params, 3)
    set_grads(twin.param_groups[0]["params"], 3)
    optimizer.step()
    twin.step()
    assert_equal(twin.param_groups[0]["params"], params)
    assert_equal(codes(twin), codes(optimizer))


def test_a_plain_tensor_in_the_state_is_encoded_by_the_next_step():
    params, optimizer = trained()
    _, expected = trained()
    others, given = expected.param_groups[0]["params"], []
    for p, q in zip(params, others, strict=True):
        moments = [moment + torch.rand_like(moment) for moment in optimizer.moments(p)]
        # the second first: a first moment that is there before it is rounded once more
        for i, name in reversed(list(enumerate(MOMENTS))):
            optimizer.state[p][name] = moments[i]
            assert torch.equal(optimizer.moments(p)[i], moments[i])
            expected.state[q][name].copy_(moments[i])
        given += moments
        optimizer.state[p]["step"] = torch.tensor(3.0)
    optimizer.init_states()
    both = (optimizer, params), (expected, others)
    found, encoded = ([m for p in mine for m in of.moments(p)] for of, mine in both)
    for a, b, moment in zip(found, encoded, given, strict=True):
        # as any write is encoded, but for a last group of two elements, which codes may hold as they are
        exact = (a - moment).abs() <= SAME_VALUE * moment.abs()
        whole = moment.numel() // 128 * 128
        assert ((a == b) | exact).all() and torch.equal(a.flatten()[:whole], b.flatten()[:whole])
    set_grads(params, 3)
    optimizer.step()
    assert all(optimizer.state[p]["step"] == 4 for p in params)


def test_decoded_moments_in_the_state_get_their_codes_again():
    params, optimizer = trained()
    before = codes(optimizer)
    for p in params:
        optimizer.state[p].update(zip(MOMENTS, optimizer.moments(p), strict=True))
    optimizer.init_states()
    assert_equal(codes(optimizer), before)


def test_moments_before_the_first_step_and_of_strangers():
    params = parameters()
    optimizer = CoatAdamW(params)
    for p in params:
        for moment in optimizer.moments(p):
            assert moment.shape == p.shape and moment.dtype == torch.float32 and not moment.any()
    with pytest.raises(ValueError, match="none of this optimizer's parameters"):
        optimizer.moments(torch.zeros(3))


def test_closure():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = CoatAdamW([p])

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert p.max() < 1


def test_autograd_notices_the_step():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = CoatAdamW([p])
    loss = p.square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fused": True}, ["fused=True"]),
        ({"foreach": True}, ["foreach=True"]),
        ({"exp_avg_sq_rounding": "up"}, ["exp_avg_sq_rounding", "'up'", "'stochastic'"]),
        ({"bf16_params": "rounded"}, ["bf16_params", "'rounded'", "'stochastic'"]),
        ({"differentiable": True}, ["differentiable=True"]),
        ({"lr": -1.0}, ["lr", "-1.0"]),
        ({"lr": math.nan}, ["lr", "nan"]),
        ({"lr": torch.ones(2)}, ["tensor lr", "(2,)"]),
        ({"eps": -1e-8}, ["eps"]),
        ({"weight_decay": -0.1}, ["weight_decay"]),
        ({"betas": (0.9, 1.0)}, ["betas", "(0.9, 1.0)"]),
        ({"betas": (0.9,)}, ["betas"]),
        ({"exp_avg_format": "fp9"}, ["exp_avg_format", "'fp9'", "fp8_expanded"]),
        ({"min_numel": -1}, ["min_numel", "-1"]),
        ({"min_numel": True}, ["min_numel", "True"]),
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, dict) else "",
)
def test_bad_options(options, words):
    p = torch.nn.Parameter(torch.zeros(3))
    for build in (
        lambda: CoatAdamW([p], **options),
        lambda: CoatAdamW([{"params": [p], **options}]),
    ):
        with pytest.raises(ValueError) as error:
            build()
        for word in words:
            assert word in str(error.value)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda p: setattr(p, "grad", torch.ones(300).to_sparse()), TypeError, "sparse"),
        (lambda p: setattr(p, "data", p.data.double()), TypeError, "float64"),
        (lambda p: setattr(p, "data", p.data.to(torch.complex64)), TypeError, "complex64"),
        (lambda p: setattr(p, "data", p.data.to(torch.float8_e4m3fn)), TypeError, "float8"),
        (lambda p: setattr(p, "data", p.data[:200].clone()), ValueError, "300"),
    ],
    ids=["sparse", "double", "complex", "fp8", "shape"],
)
def test_the_step_checks_before_it_changes_anything(spoil, error, message):
    good, bad = torch.nn.Parameter(torch.ones(300)), torch.nn.Parameter(torch.ones(300))
    optimizer = CoatAdamW([{"params": [good]}, {"params": [bad]}], min_numel=0)
    for p in (good, bad):
        p.grad = torch.ones(300)
    optimizer.step()
    before = good.detach().clone(), codes(optimizer)
    spoil(bad)
    with pytest.raises(error, match=message):
        optimizer.step()
    assert torch.equal(good, before[0])
    assert_equal(codes(optimizer), before[1])
    assert optimizer.state[good]["step"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("formats", [{}, FP32], ids=["fp8", "fp32"])
def test_gpu_steps_are_the_cpu_steps(formats):
    here, there = parameters(), parameters(device="cuda")
    optimizers = [CoatAdamW(params, lr=1e-2, min_numel=100, **formats) for params in (here, there)]
    for step in range(2):
        for params, optimizer in zip((here, there), optimizers, strict=True):
            set_grads(params, step)
            optimizer.step()
        if step == 0:
            for p, q in zip(here, there, strict=True):
                # the kernel gets FP32 betas: 1 - 0.999 is off by up to 2^-25 / 0.001 = 2^-15 of itself, the
                # second moment likewise, an update of lr by half of that; and p is rounded twice
                assert (p - q.cpu()).abs().le(1e-2 * 2**-16 + p.abs() * 2**-23).all()
    for p, q in zip(here, there, strict=True):
        if p.numel():
            for a, b in zip(optimizers[0].moments(p), optimizers[1].moments(q), strict=True):
                # and a value between two codes may take the other one: 2^-3 of a few values, over k >= 1
                assert rel_rms(b, a) < (2**-6 if formats == {} else 2**-15)
    # resuming on the GPU what was saved there
    twin = CoatAdamW(there, min_numel=100, **formats)
    twin.load_state_dict(through_file(optimizers[1].state_dict()))
    assert_equal(codes(twin), codes(optimizers[1]))
    # and what was saved on the CPU
    twin.load_state_dict(through_file(optimizers[0].state_dict()))
    assert_equal([t.cpu() for t in codes(twin)], codes(optimizers[0]))
