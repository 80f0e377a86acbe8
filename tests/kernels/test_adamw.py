"""The fused step against torch.optim.AdamW, and the kernel against the reference."""

import math

import pytest
import torch
import triton
import triton.language as tl

from coat_kernels import adamw
from coat_kernels.adamw import (
    dither_reference,
    join_master,
    join_tile,
    noise_reference,
    round_stochastically,
    split_master,
    split_tile,
)
from coat_kernels.codecs import CODECS, SIGNED_CODECS, get_codec
from coat_kernels.codecs.codec import Stored, encode_reference
from coat_kernels.fp8 import E4M3, E5M2
from tests.kernels.inputs import wide, with_options
from tests.util import rel_rms

adamw_, adamw_list, adamw_reference = map(
    with_options, (adamw.adamw_, adamw.adamw_triton, adamw.adamw_reference)
)
# every pair of formats that may store two moments, and those that are somebody's default
PAIRS = [(m, v) for m in SIGNED_CODECS for v in CODECS if get_codec(m).stands_beside(get_codec(v))]
DEFAULTS = [("fp8_expanded", "fp8_expanded"), ("fp8_expanded", "log8"), ("ratio8", "log8")]
OPTIONS = {"group_size": 128, "lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def adamw_triton(param, grad, exp_avg, exp_avg_sq, step, **options):
    """The kernel for a list of one."""
    adamw_list([param], [grad], [exp_avg], [exp_avg_sq], [step], **options)


def states(m_name, v_name, n, device):
    codecs = {"exp_avg_codec": get_codec(m_name), "exp_avg_sq_codec": get_codec(v_name)}
    return codecs, [codec.zeros(n, 128, device) for codec in codecs.values()]


def values_of(codecs, stored):
    """Both moments as FP32."""
    beside = Stored(codecs["exp_avg_sq_codec"], stored[1])
    return [codec.decode(s, 128, beside) for codec, s in zip(codecs.values(), stored, strict=True)]


@pytest.mark.parametrize("maximize", [False, True])
def test_reference_with_fp32_moments_is_torch_adamw(maximize):
    p = torch.nn.Parameter(wide(1000))
    stock = torch.optim.AdamW(
        [p], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, maximize=maximize, foreach=False
    )
    mine = p.detach().clone()
    codecs, storage = states("fp32", "fp32", 1000, "cpu")
    for step in range(1, 6):
        p.grad = wide(1000)
        adamw_reference(mine, p.grad, *storage, step, **codecs, **OPTIONS, maximize=maximize)
        stock.step()
        assert mine.equal(p.detach())
    state = stock.state[p]
    assert storage[0].codes.equal(state["exp_avg"]) and storage[1].codes.equal(state["exp_avg_sq"])


@pytest.mark.parametrize(
    "m_name,v_name,n",
    # every pair of formats ends mid-group, and two of them anywhere
    [(m, v, 1000) for m, v in PAIRS if v in ("fp8_expanded", "log8", "fp32")]
    + [(m, v, n) for m, v in DEFAULTS for n in (1, 127, 129, 128 * 5)],
)
def test_kernel_agrees_with_the_reference(m_name, v_name, n, device):
    """The first step and FP32 moments: approximate root and reciprocal, 2^-21, and the rounding of the
    parameter, 2^-24 of at most 10 updates. Stored moments: a code on a tie may go the other way, which moves
    an update by 2^-3 of a moment's code divided by k; over a thousand elements, seldom."""
    codecs, expected_state = states(m_name, v_name, n, device)
    _, actual_state = states(m_name, v_name, n, device)
    start = 0.02 * torch.randn(n, device=device)
    expected, actual = start.clone(), start.clone()
    for step in range(1, 4):
        grad = wide(n).to(device)
        grad[1::5] = 0
        adamw_reference(expected, grad, *expected_state, step, **codecs, **OPTIONS)
        adamw_triton(actual, grad, *actual_state, step, **codecs, **OPTIONS)
        bound = 2e-6 if m_name == v_name == "fp32" or step == 1 else 5e-3
        assert rel_rms(actual - start, expected - start) < bound


@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernel_takes_other_dtypes(param_dtype, grad_dtype, device):
    codecs, expected_state = states("fp8_expanded", "fp8_expanded", 300, device)
    _, actual_state = states("fp8_expanded", "fp8_expanded", 300, device)
    start = wide(300).to(device, param_dtype)
    expected, actual = start.clone(), start.clone()
    grad = torch.randn(300).to(device, grad_dtype)
    adamw_reference(expected, grad, *expected_state, 1, **codecs, **OPTIONS)
    adamw_triton(actual, grad, *actual_state, 1, **codecs, **OPTIONS)
    # BF16 parameters round to 2^-9 of themselves; only a tie may round differently
    assert rel_rms(actual, expected) < (1e-6 if param_dtype == torch.float32 else 2**-9)


@pytest.mark.parametrize("run", [adamw_reference, adamw_triton])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("m_name,v_name", DEFAULTS)
def test_bad_gradient_harms_only_its_own_element(m_name, v_name, run, bad, device):
    codecs, good_state = states(m_name, v_name, 256, device)
    _, bad_state = states(m_name, v_name, 256, device)
    start, grad = wide(256).to(device), wide(256).to(device)
    grad[7] = grad[8]
    good, hurt = start.clone(), start.clone()
    run(good, grad, *good_state, 1, **codecs, **OPTIONS)
    broken = grad.clone()
    broken[7] = bad
    run(hurt, broken, *bad_state, 1, **codecs, **OPTIONS)
    keep = torch.arange(256, device=device) != 7
    assert hurt[7].isnan() and hurt[keep].equal(good[keep])
    for a, b in zip(values_of(codecs, good_state), values_of(codecs, bad_state), strict=True):
        assert b[7].isnan() and b[keep].equal(a[keep])


@pytest.mark.parametrize("run", [adamw_reference, adamw_triton])
@pytest.mark.parametrize("m_name,v_name", DEFAULTS)
def test_first_step_without_gradient_only_decays(m_name, v_name, run, device):
    """DeepSpeed's stage 0 steps once on zero gradients: zeros must stay zeros."""
    codecs, state = states(m_name, v_name, 300, device)
    start = wide(300).to(device)
    p = start.clone()
    run(p, torch.zeros_like(p), *state, 1, **codecs, **OPTIONS)
    assert rel_rms(p, start * (1 - 1e-3)) < 2**-23
    for x in values_of(codecs, state):
        assert x.equal(torch.zeros_like(p))


def test_kernel_is_deterministic(device):
    def once():
        torch.manual_seed(0)
        codecs, state = states("fp8_expanded", "fp8_expanded", 1100, device)
        p = wide(1100).to(device)
        for step in range(1, 3):
            adamw_triton(p, wide(1100).to(device), *state, step, **codecs, **OPTIONS)
        return p, *state[0], *state[1]

    assert all(a.equal(b) for a, b in zip(once(), once(), strict=True))


def test_list_is_what_its_tensors_are_one_by_one(device, monkeypatch):
    """Sizes that end mid-group, nothing at all, several chunks of either size; steps of their own."""
    monkeypatch.setattr(adamw.chunks, "CHUNKS", (8, 2))
    sizes, steps = (128 * 19 + 5, 0, 1, 1024, 130), [3, 1, 7, 2, 1]
    runs = []
    for together in (True, False):
        torch.manual_seed(1)
        params, grads = ([wide(n).to(device) for n in sizes] for _ in range(2))
        codecs, _ = states("fp8_expanded", "fp8_expanded", 1, device)
        ms, vs = ([codec.encode(wide(n).to(device).abs(), 128) for n in sizes] for codec in codecs.values())
        lists = (params, grads, ms, vs, steps)
        for part in (
            [lists]
            if together
            else [tuple([x] for x in xs) for xs in zip(*lists, strict=True) if xs[0].numel()]
        ):
            adamw_list(*part, **codecs, **OPTIONS)
        runs.append([*params, *(t for s in (*ms, *vs) for t in s)])
    assert all(a.equal(b) for a, b in zip(*runs, strict=True))


def test_tensors_that_start_anywhere(device):
    """Views into flat buffers are not aligned to what a vector load wants."""
    codecs, expected_state = states("fp8_expanded", "fp8_expanded", 300, device)
    _, actual_state = states("fp8_expanded", "fp8_expanded", 300, device)
    start, grad = wide(300).to(device), wide(300).to(device)
    view = torch.zeros(301, device=device)[1:]
    view.copy_(start)
    adamw_triton(start, grad, *expected_state, 1, **codecs, **OPTIONS)
    adamw_triton(view, grad, *actual_state, 1, **codecs, **OPTIONS)
    assert view.equal(start) and actual_state[0].codes.equal(expected_state[0].codes)


def run_list(run, params, grads, device, steps=3, **more):
    """Three steps of `adamw_` (the reference on the CPU) or of the kernel; the moments' storages."""
    codecs, _ = states("fp8_expanded", "fp8_expanded", 1, device)
    ms, vs = ([codec.zeros(p.numel(), 128, device) for p in params] for codec in codecs.values())
    for step in range(1, steps + 1):
        extra = {k: v(step) if callable(v) else v for k, v in more.items()}
        run(params, grads[step - 1], ms, vs, [step] * len(params), **codecs, **(OPTIONS | extra))
    return [t for s in (*ms, *vs) for t in s]


def gradients(sizes, device, dtype=torch.float32, steps=3):
    return [[torch.randn(n).to(device, dtype) for n in sizes] for _ in range(steps)]


def from_bits(bits, device="cpu"):
    return torch.as_tensor(bits, device=device).to(torch.int32).view(torch.float32)


def test_master_splits_and_joins_exactly():
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-38, 3.39e38, -3.39e38, torch.inf, -torch.inf])
    master = torch.cat((wide(10_000, sigma=20.0), special))
    weight, remainder = split_master(master)
    assert join_master(weight, remainder).view(torch.int32).equal(master.view(torch.int32))
    finite = master.abs() < 3.3e38
    # the nearest BF16; a tie, which has 16 zero bits but the first, may go to the other side
    away = weight[finite] != master[finite].bfloat16()
    assert (master[finite][away].view(torch.int32) & 0xFFFF == 0x8000).all()


@triton.jit
def join_and_split_kernel(p_weight, p_remainder, p_master, p_weight_out, p_remainder_out, N: tl.constexpr):
    o_x = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    b_master = join_tile(tl.load(p_weight + o_x), tl.load(p_remainder + o_x))
    b_weight, b_remainder = split_tile(b_master)
    tl.store(p_master + o_x, b_master)
    tl.store(p_weight_out + o_x, b_weight)
    tl.store(p_remainder_out + o_x, b_remainder)


def join_and_split(weight, remainder):
    """By the kernel's own functions; a power of two of elements."""
    master = torch.empty_like(weight, dtype=torch.float32)
    out = torch.empty_like(weight), torch.empty_like(remainder)
    n = min(weight.numel(), 2**14)
    join_and_split_kernel[(weight.numel() // n,)](weight, remainder, master, *out, N=n)
    return master, *out


def assert_pairs_are_right(weight, remainder, by_kernel=True):
    """Every pair with the same weight after a round trip, every pair that a split makes the same pair; by the
    reference, and by the kernel's functions."""
    master = join_master(weight, remainder)
    again = split_master(master)
    if by_kernel:
        for got, expected in zip(join_and_split(weight, remainder), (master, *again), strict=True):
            assert got.view(torch.uint8).equal(expected.view(torch.uint8))
    nan = weight.isnan()
    # bit by bit: -0 is not 0; of a NaN only its quiet bit may change
    assert (
        again[0].view(torch.int16)
        == torch.where(nan, weight.view(torch.int16) | 0x40, weight.view(torch.int16))
    ).all()
    assert master.isnan().equal(nan) and master.isinf().equal(weight.isinf())
    alone = ~weight.isfinite() | ((weight == 0) & (remainder < 0))
    assert again[1].equal(torch.where(alone, 0, remainder))
    # no jump: at most half a step, 2^-9 of what is normal and 2^-134 of what is not
    off = (master.double() - weight.double()).abs().nan_to_num(0.0, 0.0, 0.0)
    assert (off <= (weight.double().abs().nan_to_num(0.0, 0.0, 0.0) * 2.0**-8).clamp_min(2.0**-134)).all()


def pairs(first, weights, device):
    """All remainders of each of `weights` weights from the bits `first` on."""
    bits = torch.arange(first, first + weights, dtype=torch.int32, device=device).to(torch.int16)
    remainders = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device)
    weight = bits.view(torch.bfloat16).repeat_interleave(2**16)
    return weight, remainders.repeat(weights)


# around zero, the smallest normal, one, the largest, infinity and NaN, of either sign
SPECIAL_WEIGHTS = [s + b for s in (0, 0x8000) for b in (0, 0x007F, 0x3F7F, 0x7F7E, 0x7F80, 0x7FBF, 0x7FFE)]


@pytest.mark.parametrize("first", SPECIAL_WEIGHTS, ids=hex)
def test_special_weights_with_every_remainder(first, device):
    assert_pairs_are_right(*pairs(first, 2, device))


@pytest.mark.gpu
def test_every_weight_with_every_remainder(device):
    for first in range(0, 2**16, 2**9):
        assert_pairs_are_right(*pairs(first, 2**9, device))


def test_masters_that_no_finite_weight_rounds_to(device):
    """Above the largest BF16 a master is infinite as its weight is; a NaN of any payload and sign is NaN."""
    nan = [0x7F800001, 0x7F80FFFF, 0x7FC00000, 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF]
    for sign in (0, 2**31):
        huge = from_bits([sign + 0x7F7F8000, sign + 0x7F7FFFFF, sign + 0x7F800000], device)
        weight, remainder = split_master(huge)
        assert weight.float().equal(from_bits([sign + 0x7F800000] * 3, device)) and not remainder.any()
        weight, remainder = split_master(from_bits([sign + bits for bits in nan], device))
        assert weight.isnan().all() and join_master(weight, remainder).isnan().all()
        assert (weight.signbit() == bool(sign)).all()


@pytest.mark.parametrize("run", [adamw_, adamw_list])
@pytest.mark.parametrize("mode", ["exact", "stochastic"])
def test_a_bad_gradient_shows_in_the_bf16_weight(run, mode, device):
    """CUDA's own NaN has all bits set, and so have others here."""
    bad = [0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000, 0x7F800000, -0x00800000]
    grad = torch.cat((from_bits(bad, device), torch.ones(250, device=device)))
    weight = torch.ones(256, device=device, dtype=torch.bfloat16)
    more = (
        {"stochastic": True}
        if mode == "stochastic"
        else {"remainders": [torch.zeros(256, dtype=torch.int16, device=device)]}
    )
    run_list(run, [weight], [[grad]] * 3, device, **more)
    assert weight[:6].isnan().all() and weight[6:].isfinite().all()


@pytest.mark.parametrize("run", [adamw_, adamw_list])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinite_weights_stay_infinite(run, dtype, device):
    """As in torch.optim.AdamW: masks are made of them."""
    weight = torch.tensor([torch.inf, -torch.inf] * 128, device=device, dtype=dtype)
    start = weight.clone()
    more = (
        {"remainders": [torch.full((256,), -7, dtype=torch.int16, device=device)]}
        if dtype == torch.bfloat16
        else {}
    )
    run_list(run, [weight], gradients((256,), device), device, **more)
    assert weight.equal(start)


@pytest.mark.parametrize("run", [adamw_, adamw_list])
def test_weights_edited_between_steps_keep_their_fp32_run(run, device):
    """A mask after each step: what it leaves is the FP32 run to the bit, what it sets to zero moves on."""
    mask = torch.arange(300, device=device) % 3 > 0
    master, grads = 0.02 * torch.randn(300, device=device), gradients((300,), device)
    weight, remainder = split_master(master)
    codecs, _ = states("fp32", "fp32", 1, device)
    runs = [[codec.zeros(300, 128, device) for codec in codecs.values()] for _ in range(2)]
    for step, (grad,) in enumerate(grads, 1):
        for p, (m, v), more in ((master, runs[0], {}), (weight, runs[1], {"remainders": [remainder]})):
            run([p], [grad], [m], [v], [step], **codecs, **OPTIONS, **more)
            assert (p != 0).all()
            # multiplied, as users do: half of the zeros are negative
            p.mul_(mask)
    assert weight.equal(split_master(master)[0]) and (weight == 0).sum() == 100
    assert join_master(weight, remainder)[mask].equal(master[mask])
    edits = {"clamp": lambda p: p.clamp_(-0.01, 0.01), "other": lambda p: p.copy_(torch.randn_like(p))}
    for edit in edits.values():
        edit(weight)
        seen = weight.clone()
        run(
            [weight],
            [torch.zeros_like(grad)],
            *([s] for s in runs[1]),
            [4],
            **codecs,
            **{**OPTIONS, "lr": 0.0},
            remainders=[remainder],
        )
        assert weight.equal(seen)


@pytest.mark.parametrize("run", [adamw_, adamw_list])
def test_remainders_make_bf16_parameters_the_fp32_run_bit_for_bit(run, device):
    if run is adamw_ and device.type == "cuda":
        pytest.skip("adamw_ is the kernel there, which the other case runs")
    sizes = (300, 128 * 6)
    start = [0.02 * torch.randn(n, device=device) for n in sizes]
    grads = gradients(sizes, device)
    masters = [p.clone() for p in start]
    fp32 = run_list(run, masters, grads, device)
    weights, remainders = [list(t) for t in zip(*(split_master(p) for p in start), strict=True)]
    split = run_list(run, weights, grads, device, remainders=remainders)
    for p, w, r in zip(masters, weights, remainders, strict=True):
        assert join_master(w, r).equal(p)
    assert all(a.equal(b) for a, b in zip(fp32, split, strict=True))


@pytest.mark.parametrize("run", [adamw_, adamw_list])
def test_weight_copy_is_the_rounded_parameter(run, device):
    params = [0.02 * torch.randn(n, device=device) for n in (300, 128 * 6)]
    weights = [torch.full_like(p, torch.nan, dtype=torch.bfloat16) for p in params]
    run_list(run, params, gradients((300, 128 * 6), device), device, weights=weights)
    assert all(w.equal(p.bfloat16()) for p, w in zip(params, weights, strict=True))


@pytest.mark.parametrize("run", [adamw_, adamw_list])
def test_gradient_scale_and_found_inf_stay_on_the_device(run, device):
    sizes = (300, 128 * 6)
    start = [0.02 * torch.randn(n, device=device) for n in sizes]
    grads = gradients(sizes, device)
    doubled = [[2 * g for g in gs] for gs in grads]
    plain, scaled, skipped = ([p.clone() for p in start] for _ in range(3))
    expected = run_list(run, plain, grads, device)
    half = torch.tensor([0.5], device=device)
    assert all(
        a.equal(b)
        for a, b in zip(expected, run_list(run, scaled, doubled, device, grad_scale=half), strict=True)
    )
    assert all(a.equal(b) for a, b in zip(plain, scaled, strict=True))
    flag = torch.tensor([1.0], device=device)
    untouched = run_list(run, skipped, grads, device, found_inf=flag)
    assert all(a.equal(b) for a, b in zip(skipped, start, strict=True))
    assert all((t == 0).all() or (t == 255).all() for t in untouched)


def test_steps_and_rate_on_the_device_are_those_of_the_host(device):
    sizes = (300, 128 * 6)
    start = [0.02 * torch.randn(n, device=device) for n in sizes]
    grads = gradients(sizes, device)
    host, on_device = ([p.clone() for p in start] for _ in range(2))
    run_list(adamw_list, host, grads, device)
    codecs, _ = states("fp8_expanded", "fp8_expanded", 1, device)
    ms, vs = ([codec.zeros(n, 128, device) for n in sizes] for codec in codecs.values())
    for step in range(1, 4):
        steps = torch.full((2,), float(step), device=device)
        rate = {"lr": torch.tensor(OPTIONS["lr"], device=device)}
        adamw_list(on_device, grads[step - 1], ms, vs, steps, **codecs, **(OPTIONS | rate))
    assert all(a.equal(b) for a, b in zip(host, on_device, strict=True))


def test_stochastic_rounding_is_unbiased_and_keyed_by_its_seed(device):
    x = torch.full((100_000,), 1 + 2**-9, device=device)  # a quarter of the way to the next BF16
    noise = noise_reference(3, 1, 0, x.numel(), x.device)
    rounded = round_stochastically(x, noise).float()
    assert set(rounded.unique().tolist()) == {1.0, 1 + 2**-7}
    # the share that goes up has mean 1/4 and deviation sqrt(3/16 / n): five of them
    assert abs((rounded > 1).float().mean().item() - 0.25) < 5 * (3 / 16 / x.numel()) ** 0.5
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0], device=device)
    torch.testing.assert_close(round_stochastically(special, noise[:4]).float(), special, equal_nan=True)

    sizes, runs = (300, 128 * 6), []
    for seed in (5, 5, 6):
        torch.manual_seed(0)
        params = [(0.02 * torch.randn(n)).to(device, torch.bfloat16) for n in sizes]
        run_list(adamw_list, params, gradients(sizes, device), device, stochastic=True, seed=seed)
        runs.append(params)
    assert all(a.equal(b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not runs[0][1].equal(runs[2][1])


@pytest.mark.parametrize("name", ["fp8_expanded", "fp8_expanded_e5m2", "fp8", "log8"])
def test_dithered_codes_are_right_on_average(name):
    """The mean of n roundings deviates from the value by at most 1/2 / sqrt(n) steps: five of that. Just over
    a power of two, where steps double, the lower half reaches into finer ones: an eighth of a step."""
    codec, n = get_codec(name), 400
    x = torch.logspace(-3, 0, 128)
    storage = encode_reference(codec, x, 128)
    shifts = torch.stack([*(dither_reference(step, 128, 128, "cpu") for step in range(n)), torch.zeros(128)])
    codes = torch.stack([encode_reference(codec, x, 128, dither=u).codes for u in shifts])
    if name == "log8":
        values, step = codes.float(), torch.ones(128)
        exact = 254 + x.log2() * 256 / storage.exponent.float()
    else:
        fmt = E5M2 if codec.is_e5m2 else E4M3
        values = codes.view(fmt.dtype).float()
        power = storage.exponent.float() / 16 if codec.has_exponent else 1
        exact = fmt.max * (x / x.max()) ** power
        step = torch.exp2(exact.log2().floor() - (2 if codec.is_e5m2 else 3)).clamp_min(fmt.tiny)
    # the largest is exact to nearest, and cannot be rounded up
    error = ((values[:n].mean(0) - exact) / step).abs()[:-1]
    assert error.max() < 5 * 0.5 / n**0.5 + 1 / 8 and error.mean() < 0.5 / n**0.5 + 1 / 64
    # to nearest the error is a quarter of a step on average
    assert ((values[n] - exact) / step).abs()[:-1].mean() > 0.2


def test_dither_fills_the_interval_evenly_in_steps_and_in_groups():
    """Of n numbers, spread so, each lies within log2(n) / n of its place, where chance would leave
    1 / sqrt(n); and where a tensor is cut, each group has what it had."""
    over_steps = torch.stack([dither_reference(step, 300, 128, "cpu") for step in range(1000, 1100)])
    for x in (*over_steps.T[:128], *over_steps[:, :128]):
        n = len(x)
        places = (torch.arange(n) + 0.5) / n - 0.5
        assert x.abs().max() < 0.5 and (x.sort().values - places).abs().max() < math.log2(n) / n
    assert over_steps[:, 128:256].equal(over_steps[:, :128])
    assert dither_reference(2**24, 128, 128, "cpu").unique().numel() == 128


@pytest.mark.parametrize("name", ["fp8_expanded", "log8"])
def test_dither_lets_second_moments_decay_that_rounding_to_nearest_holds(name, device):
    """One element of each group keeps its maximum up; the others, without gradients, decay to beta2^t."""
    options = {**OPTIONS, "beta2": 0.999, "lr": 0.0}
    left = {}
    for dither in (False, True):
        codecs, (m, v) = states("fp8_expanded", name, 1280, device)
        codec = codecs["exp_avg_sq_codec"]
        start = wide(1280, sigma=0.5).abs().to(device)
        grad = torch.zeros(1280, device=device)
        grad[::128] = 10.0
        start[::128] = 100.0
        for old, new in zip(v, codec.encode(start, 128), strict=True):
            old.copy_(new)
        run = adamw_triton if device.type == "cuda" else adamw_reference
        for step in range(1, 301):
            run(torch.zeros_like(start), grad, m, v, step, **codecs, **options, dither=dither)
        kept = torch.arange(1280, device=device) % 128 != 0
        left[dither] = (codec.decode(v, 128) / start)[kept].mean().item()
    assert left[False] > 0.95
    # 300 steps of 0.1 % in codes a quarter apart at most: 1270 walks of variance 0.3 / 4, five deviations
    assert left[True] == pytest.approx(0.999**300, rel=5 * (0.3 / 4 / 1270) ** 0.5)


def test_first_moments_without_gradient_vanish(device):
    """Beside one that keeps the group's scale up: to nearest, codes below 8 would stay where they are, at a
    hundredth of the largest and more, and the weight would go on moving."""
    options = {**OPTIONS, "beta2": 0.999, "lr": 0.0}
    codecs, (m, v) = states("ratio8", "log8", 128, device)
    run = adamw_triton if device.type == "cuda" else adamw_reference
    kept = torch.arange(128, device=device) > 0
    for step in range(1, 121):
        # of one sign, now and then larger
        grad = torch.where(kept, torch.tensor(float(step <= 40), device=device), 1.0 + (step % 7 == 0))
        run(torch.zeros(128, device=device), grad, m, v, step, **codecs, **options, dither=True)
        first, second = values_of(codecs, (m, v))
        if step == 40:
            assert (first / second.sqrt() > 1).all()
    # 80 steps leave 0.9^80, 0.0002, of it
    assert (first[kept].abs() <= 0.001 * second[kept].sqrt()).all() and first[0] > second[0].sqrt()


@pytest.mark.parametrize("m_name,v_name", [*DEFAULTS, ("fp8_expanded", "fp8")])
def test_stochastic_kernel_agrees_with_the_reference(m_name, v_name, device):
    """The same noise decides, so only a value within rounding of its threshold may go the other way."""
    sizes = (300, 128 * 6)
    start = [(0.02 * torch.randn(n)).to(device, torch.bfloat16) for n in sizes]
    grads = gradients(sizes, device, steps=1)[0]
    noisy = {"stochastic": True, "dither": True, "seed": 11}
    outcomes = []
    for by_kernel in (False, True):
        codecs, _ = states(m_name, v_name, 1, device)
        params = [p.clone() for p in start]
        ms, vs = ([codec.zeros(n, 128, device) for n in sizes] for codec in codecs.values())
        if by_kernel:
            adamw_list(params, grads, ms, vs, [1, 2], **codecs, **OPTIONS, **noisy)
        else:
            for i, tensors in enumerate(zip(params, grads, ms, vs, [1, 2], strict=True)):
                adamw_reference(*tensors, **codecs, **OPTIONS, **noisy, tensor=i)
        outcomes.append((params, [v.codes for v in vs]))
    for expected, actual in zip(*outcomes, strict=True):
        for a, e in zip(actual, expected, strict=True):
            assert (a != e).float().mean() < 0.01
            assert rel_rms(a, e) < 2**-7
