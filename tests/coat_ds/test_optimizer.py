"""CoatAdamW's steps against torch.optim.AdamW's, and what torch expects of any optimizer."""

import contextlib
import copy
import itertools
import weakref

import pytest
import torch

from coat_ds import CoatAdamW, state_bytes
from coat_ds.optim.moment import Moment
from coat_ds.optim.options import MOMENTS
from coat_ds.optim.recover import SAME_VALUE
from coat_kernels.codecs import get_codec
from tests.coat_ds.optimizers import (
    FP32,
    assert_equal,
    codes,
    encoded,
    parameters,
    set_grads,
    through_file,
    train,
    trained,
)
from tests.util import default_dtype, rel_rms


def in_groups(params):
    return [
        {"params": params[:3], "weight_decay": 0.2},
        {"params": params[3:], "lr": 5e-3, "betas": (0.7, 0.9), "eps": 1e-6, "maximize": True},
    ]


@pytest.mark.parametrize(
    "options, grouped",
    [
        ({}, list),
        ({}, in_groups),
        ({"lr": 3e-2, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-5}, list),
        ({"weight_decay": 0.0}, list),
        ({"maximize": True}, list),
        ({"lr": torch.tensor(2e-3)}, list),
        ({"foreach": False, "fused": False}, list),
    ],
    ids=["defaults", "groups", "options", "no-decay", "maximize", "tensor-lr", "switches"],
)
def test_coat_adamw_with_fp32_moments_is_torch_adamw_to_the_bit(options, grouped):
    ours, theirs = parameters(), parameters()
    optimizers = (
        CoatAdamW(grouped(ours), **FP32, **options),
        torch.optim.AdamW(grouped(theirs), **{"foreach": False, **options}),
    )
    scheduled = optimizers if grouped is in_groups else ()
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5) for optimizer in scheduled]
    for step in range(6):
        set_grads(ours, step)
        set_grads(theirs, step)
        if step == 3:
            # a missing gradient skips the parameter, its step count included
            ours[1].grad = theirs[1].grad = None
        for stepped in (*optimizers, *schedulers):
            stepped.step()
    assert_equal(ours, theirs)
    for p, q in zip(ours, theirs, strict=True):
        exact = optimizers[1].state[q]
        assert_equal(optimizers[0].moments(p), [exact[name] for name in MOMENTS])
        assert optimizers[0].state[p]["step"] == exact["step"]


@pytest.mark.parametrize(
    "exp_avg_format,exp_avg_sq_format",
    itertools.product(("fp8_expanded", "fp32"), ("fp8_expanded", "bf16")),
)
def test_coat_adamw_step_is_torchs_from_the_stored_moments(exp_avg_format, exp_avg_sq_format):
    """The parameter sees the fresh FP32 moments; what is stored is their encoding and nothing else."""
    params = parameters()
    formats = {"exp_avg": exp_avg_format, "exp_avg_sq": exp_avg_sq_format}
    optimizer = CoatAdamW(
        params,
        lr=1e-2,
        min_numel=0,
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
                expected = encoded(stock.state[q][name], codec)
                assert torch.equal(stored, expected.decode())


def test_coat_adamw_keeps_fp32_moments_of_small_tensors():
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (4095, 4096)]
    optimizer = CoatAdamW(params)
    set_grads(params, 0)
    optimizer.step()
    assert [optimizer.state[p]["exp_avg"].pieces[0].codec.name for p in params] == ["fp32", "ratio8"]
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


def test_coat_adamw_encodes_a_plain_tensor_put_into_its_state():
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
        # encoded as any write, except a last group of two elements, which codes may hold exactly
        exact = (a - moment).abs() <= SAME_VALUE * moment.abs()
        whole = moment.numel() // 128 * 128
        assert ((a == b) | exact).all() and torch.equal(a.flatten()[:whole], b.flatten()[:whole])
    set_grads(params, 3)
    optimizer.step()
    assert all(optimizer.state[p]["step"] == 4 for p in params)


def test_moments_before_the_first_step_and_of_strangers():
    params = parameters()
    optimizer = CoatAdamW(params)
    with default_dtype(torch.bfloat16):
        found = [(p, moment) for p in params for moment in optimizer.moments(p)]
    for p, moment in found:
        assert moment.shape == p.shape and moment.dtype == torch.float32 and not moment.any()
    # a value of another type that the caller put there
    optimizer.state[params[0]]["exp_avg"] = torch.ones_like(params[0]).half()
    assert optimizer.moments(params[0])[0].dtype == torch.float32
    with pytest.raises(ValueError, match="none of this optimizer's parameters"):
        optimizer.moments(torch.zeros(3))


def test_init_states_skips_frozen_parameters():
    params = parameters()
    params[0].requires_grad_(False)
    optimizer = CoatAdamW(params)
    optimizer.init_states()
    assert optimizer.state.keys() == set(params[1:])


def test_coat_adamw_frees_parameters_that_are_exchanged():
    """Accelerate puts shards in their place under FSDP2."""
    p = torch.nn.Parameter(torch.ones(5000))
    optimizer = CoatAdamW([("norm", p)])
    twin = copy.deepcopy(optimizer)
    held = weakref.ref(p)
    optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.ones(50))]
    del p
    assert held() is None
    twin.init_states()
    assert state_bytes(twin)["by_codec"] == {"fp32": 2 * 4 * 5000}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coat_adamw_starts_afresh_once_every_state_tensor_is_zero(dtype):
    """As it does of torch.optim.AdamW, whose step count is a tensor too."""
    params = parameters(dtype)
    optimizer = CoatAdamW(params, min_numel=100)
    train(params, optimizer, 3)
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    fresh = CoatAdamW(twins, min_numel=100)
    train(params, optimizer, 3)
    train(twins, fresh, 3)
    assert_equal(params, twins)
    assert_equal(codes(optimizer), codes(fresh))


def test_coat_adamw_step_with_a_closure():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = CoatAdamW([p])

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert p.max() < 1


def test_coat_adamw_step_is_seen_by_autograd():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = CoatAdamW([p])
    loss = p.square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def with_fp64_gradient(p):
    p.grad_dtype = None
    p.grad = torch.ones(300, dtype=torch.float64)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda p: setattr(p, "grad", torch.ones(300).to_sparse()), TypeError, "sparse"),
        (lambda p: setattr(p, "data", p.data.double()), TypeError, "float64"),
        (lambda p: setattr(p, "data", p.data.to(torch.complex64)), TypeError, "complex64.*view_as_real"),
        (lambda p: setattr(p, "data", p.data.to(torch.float8_e4m3fn)), TypeError, "float8"),
        (lambda p: setattr(p, "data", p.data[:200].clone()), ValueError, "300"),
        (with_fp64_gradient, TypeError, "float64 gradient"),
    ],
    ids=["sparse", "double", "complex", "fp8", "shape", "gradient"],
)
def test_coat_adamw_step_checks_before_it_changes_anything(spoil, error, message):
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


@pytest.mark.parametrize(
    ("moment", "found"),
    [
        (torch.zeros(200), r"has exp_avg of shape \(200,\)"),
        (Moment.zeros((300,), get_codec("ratio8"), "meta"), "has exp_avg of .* on meta"),
    ],
    ids=["shape", "device"],
)
def test_coat_adamw_step_refuses_moments_that_do_not_fit(moment, found):
    p = torch.nn.Parameter(torch.ones(300))
    optimizer = CoatAdamW([p], min_numel=0)
    p.grad = torch.ones(300)
    optimizer.step()
    before = p.detach().clone()
    optimizer.state[p]["exp_avg"] = moment
    with pytest.raises(ValueError, match=found):
        optimizer.step()
    assert torch.equal(p, before) and optimizer.state[p]["step"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("formats", [{}, FP32], ids=["fp8", "fp32"])
def test_coat_adamw_steps_on_a_gpu_as_on_a_cpu(formats):
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


@contextlib.contextmanager
def swapping(on):
    torch.__future__.set_swap_module_params_on_conversion(on)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_coat_adamw_steps_after_parameters_were_swapped():
    """Steps between conversions of the module, which exchange all tensors under the optimizer."""

    def run(swaps):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 80), torch.nn.Linear(80, 3))
        optimizer = CoatAdamW(net.named_parameters(), keep_fp32=("1.weight",), min_numel=100)
        for step in range(4):
            with swapping(swaps):
                net.double().float()
            set_grads(list(net.parameters()), step)
            optimizer.step()
        return list(net.parameters()), codes(optimizer), optimizer.layout()

    (expected, coded, layout), (params, found, table) = run(False), run(True)
    assert_equal(params, expected)
    assert_equal(found, coded)
    assert table == layout and "fp32" in table
