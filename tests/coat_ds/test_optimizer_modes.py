"""Gradient scalers, device-side steps, graphs, and which tensors stay in FP32."""

import pytest
import torch

from coat_ds import CoatAdamW
from coat_kernels.adamw import step as adamw_step
from tests.coat_ds.optimizers import OPTIONS, all_equal, codes, set_grads, start, train


@pytest.fixture
def by_kernels(monkeypatch):
    """Steps run by the kernel, which on a CPU the interpreter runs."""
    monkeypatch.setattr(adamw_step, "uses_kernels", lambda *_, **__: True)


def test_step_applies_grad_scale(device):
    params, clipped = start(device, 300, 5000), start(device, 300, 5000)
    first, second = CoatAdamW(params, **OPTIONS), CoatAdamW(clipped, **OPTIONS)
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    scaler.scale(torch.ones(1, device=device))
    coefficient = torch.tensor(0.25, device=device)
    for scale, step in (
        (4.0, lambda: second.step(grad_scale=coefficient)),
        # in addition to the scaler's own factor
        (32.0, lambda: scaler.step(second, grad_scale=coefficient)),
    ):
        set_grads(params, 0)
        set_grads(clipped, 0, scale=scale)
        first.step()
        step()
        assert all_equal(params, clipped) and all_equal(codes(first), codes(second))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_step_takes_grad_scale_of_another_dtype(dtype, device, by_kernels):
    """A norm that is summed in FP64 gives such a coefficient. The kernel reads what it is given as FP32."""
    params, clipped = start(device, 300, 5000), start(device, 300, 5000)
    for held, of_type in ((params, torch.float32), (clipped, dtype)):
        set_grads(held, 0)
        CoatAdamW(held, **OPTIONS).step(grad_scale=torch.tensor([0.25], device=device, dtype=of_type))
    assert all_equal(params, clipped)


@pytest.mark.parametrize("name", ["eps", "weight_decay"])
def test_step_takes_options_that_are_tensors(name, device, by_kernels):
    """The kernel takes numbers, and would read a tensor's address."""
    params, plain = start(device, 300), start(device, 300)
    for held, value in ((params, torch.tensor(2.0**-6)), (plain, 2.0**-6)):
        set_grads(held, 0)
        CoatAdamW(held, **{**OPTIONS, name: value}).step()
    assert all_equal(params, plain)


def test_step_kernel_does_not_divide_by_moments_of_zero(device, by_kernels):
    (p,) = params = start(device, 300)
    p.grad, before = torch.zeros_like(p), p.detach().clone()
    CoatAdamW(params, **{**OPTIONS, "eps": 0.0, "weight_decay": 0.0}).step()
    assert p.equal(before)


@pytest.mark.parametrize("scale", [0.25, torch.ones(2), torch.ones(0)])
def test_step_refuses_a_wrong_grad_scale(scale):
    params = start("cpu", 300)
    optimizer = CoatAdamW(params, **OPTIONS)
    set_grads(params, 0)
    with pytest.raises(ValueError, match="grad_scale: expected a tensor of one element"):
        optimizer.step(grad_scale=scale)
    assert not optimizer.state


@pytest.mark.parametrize("bf16_params", ["exact", "nearest"])
def test_step_of_tensors_of_every_kind(bf16_params, device, by_kernels):
    """A launch takes tensors of one kind. Of several kinds each is stepped as it would be alone."""

    def made():
        params = start(device, 300, 700, 750, 900, 800)
        params[1] = torch.nn.Parameter(params[1].detach().bfloat16())
        params[2].grad_dtype = None
        set_grads(params, 0)
        params[2].grad = params[2].grad.bfloat16()
        return params

    together, alone = made(), made()
    options = {**OPTIONS, "min_numel": 600, "bf16_params": bf16_params}
    CoatAdamW(together, **options).step()
    for p in alone:
        CoatAdamW([p], **options).step()
    assert all_equal(together, alone)
    assert not all_equal(together[:1], start(device, 300))


def test_step_takes_gradients_of_other_strides(device, by_kernels):
    """The kernel reads them by their addresses, and would take the elements in another order in silence."""
    found = []
    for turned in (False, True):
        p = torch.nn.Parameter(torch.zeros(50, 100, device=device))
        set_grads([p], 0)
        if turned:
            p.grad = p.grad.t().contiguous().t()
        optimizer = CoatAdamW([p], **OPTIONS)
        optimizer.step()
        found.append([p, *codes(optimizer)])
    assert all_equal(*found)


@pytest.mark.parametrize("unscales", [True, False], ids=["in the step", "before it"])
def test_step_under_grad_scaler_skips_and_counts_good_steps(unscales, device):
    params, plain = start(device, 300, 5000), start(device, 300, 5000)
    scaled, expected = CoatAdamW(params, **OPTIONS), CoatAdamW(plain, **OPTIONS)
    # what users of Lightning set to False, who clip gradients
    scaled._step_supports_amp_scaling = unscales
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0, growth_interval=1000)
    scaler.scale(torch.ones(1, device=device))
    for step in range(4):
        set_grads(params, step, scale=8.0)
        if step == 2:
            params[1].grad[17] = torch.inf
            scaler.update(8.0)
        before = [p.detach().clone() for p in params], codes(scaled) if step else []
        scaler.step(scaled)
        scaler.update(8.0)
        if step == 2:
            assert all_equal(params, before[0]) and all_equal(codes(scaled), before[1])
        else:
            set_grads(plain, step)
            expected.step()
            assert all_equal(params, plain)
    assert [int(scaled.state[p]["step"]) for p in params] == [3, 3]
    assert all_equal(codes(scaled), codes(expected))
    # without a scaler the count comes back to the CPU
    train(params, scaled, steps=1, first=4)
    assert scaled.state[params[0]]["step"] == 4 and scaled.state[params[0]]["step"].is_cpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_under_grad_scaler_leaves_unscaled_gradients(dtype, device):
    """As torch.optim.AdamW leaves them, whose norms are logged then; a clip coefficient is not in them."""
    params = [torch.nn.Parameter(p.detach().to(dtype)) for p in start(device, 300, 5000)]
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    scaler.scale(torch.ones(1, device=device))
    set_grads(params, 0)
    expected = [p.grad.clone() for p in params]
    set_grads(params, 0, scale=8.0)
    scaler.step(CoatAdamW(params, **OPTIONS), grad_scale=torch.tensor(0.5, device=device))
    assert all_equal([p.grad for p in params], expected)


def test_capturable_step_counts_on_the_device(device):
    params, plain = start(device, 300, 5000), start(device, 300, 5000)
    rate = torch.tensor(OPTIONS["lr"], device=device)
    optimizer = CoatAdamW(params, **{**OPTIONS, "lr": rate}, capturable=True)
    expected = CoatAdamW(plain, **OPTIONS)
    train(params, optimizer, steps=2)
    train(plain, expected, steps=2)
    rate.mul_(0.5)
    expected.param_groups[0]["lr"] *= 0.5
    train(params, optimizer, steps=2, first=2)
    train(plain, expected, steps=2, first=2)
    assert all_equal(params, plain) and all_equal(codes(optimizer), codes(expected))
    assert optimizer.state[params[0]]["step"].device.type == device.type
    assert optimizer.state_dict()["state"][0]["step"] == 4


def test_step_inside_a_compiled_function(device):
    params, plain = start(device, 300, 5000), start(device, 300, 5000)
    optimizer = CoatAdamW(params, **OPTIONS)

    @torch.compile(backend="eager")
    def train_step(x):
        loss = sum((p * x).square().sum() for p in params)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for x in (1.0, 2.0):
        train_step(torch.tensor(x, device=device))
    expected = CoatAdamW(plain, **OPTIONS)
    for x in (1.0, 2.0):
        sum((p * x).square().sum() for p in plain).backward()
        expected.step()
        expected.zero_grad()
    assert all_equal(params, plain)


def formats(optimizer):
    optimizer.init_states()
    return [optimizer.state[p]["exp_avg"].pieces[0].codec.name for p in optimizer.param_groups[0]["params"]]


KEPT_BY_NAME = {
    # DBRX, Cohere's norms of heads, gpt-oss's biases of experts, an adaptive norm of diffusion models
    "blocks.0.norm_attn_norm.attn.Wqkv.weight": ((192, 64), False),
    "blocks.0.norm_attn_norm.norm_1.weight": ((5000,), True),
    "blocks.0.norm_attn_norm.attn.Wqkv.bias": ((5000,), True),
    "self_attn.q_norm.weight": ((64, 128), True),
    "mlp.experts.gate_up_proj_bias": ((32, 256), True),
    "blocks.0.norm1.linear.weight": ((768, 128), False),
    "final_norm_proj": ((300, 256), False),
}


@pytest.mark.parametrize("name", KEPT_BY_NAME)
def test_keep_fp32_default_patterns(name):
    shape, kept = KEPT_BY_NAME[name]
    p = torch.nn.Parameter(torch.zeros(shape))
    optimizer = CoatAdamW([(name, p)])
    assert optimizer.layouts.keeps_fp32(p, optimizer.param_groups[0]) == kept


def test_keep_fp32_by_name_size_and_function(device):
    names = ("embed.weight", "layers.0.LayerNorm.weight", "layers.0.bias", "layers.0.tiny", "head.weight")
    sizes = (5000, 5000, 5000, 100, 5000)
    named = list(zip(names, start(device, *sizes), strict=True))
    compressed = "ratio8"
    assert formats(CoatAdamW(named)) == [compressed, "fp32", "fp32", "fp32", compressed]
    assert formats(CoatAdamW(named, keep_fp32=("HEAD.*",), min_numel=0)) == [compressed] * 4 + ["fp32"]
    # without names there is nothing to match
    assert formats(CoatAdamW([p for _, p in named])) == [compressed] * 3 + ["fp32", compressed]
    by_size = CoatAdamW(
        named, keep_fp32=lambda name, p: p.numel() == 100 or name == "embed.weight", min_numel=0
    )
    assert formats(by_size) == ["fp32", compressed, compressed, "fp32", compressed]


@pytest.mark.gpu
def test_capturable_step_is_replayed_as_a_cuda_graph():
    device = torch.device("cuda")
    params, plain = start(device, 300, 5000), start(device, 300, 5000)
    rate = torch.tensor(OPTIONS["lr"], device=device)
    optimizer = CoatAdamW(params, **{**OPTIONS, "lr": rate}, capturable=True)
    expected = CoatAdamW(plain, **OPTIONS)
    static = [torch.zeros_like(p) for p in params]
    for p, g in zip(params, static, strict=True):
        p.grad = g
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        set_grads(plain, 0)
        for g, p in zip(static, plain, strict=True):
            g.copy_(p.grad)
        optimizer.step()
        expected.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(1, 5):
        set_grads(plain, step)
        for g, p in zip(static, plain, strict=True):
            g.copy_(p.grad)
        graph.replay()
        expected.step()
    assert all_equal(params, plain) and all_equal(codes(optimizer), codes(expected))
    assert optimizer.state[params[0]]["step"] == 5


@pytest.mark.gpu
def test_step_takes_almost_no_memory():
    for dtype in (torch.float32, torch.bfloat16):
        params = [
            torch.nn.Parameter(torch.randn(n, device="cuda", dtype=dtype)) for n in (2**24, 2**20 + 3, 5000)
        ]
        optimizer = CoatAdamW(params, **OPTIONS)
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step(grad_scale=torch.ones(1, device="cuda"))
        assert torch.cuda.max_memory_allocated() - held <= 1e6


@pytest.mark.gpu
def test_step_of_more_than_two_to_the_31_elements():
    n = 2**31 + 300
    p = torch.nn.Parameter(torch.full((n,), 0.5, device="cuda"))
    p.grad = torch.full((n,), 0.25, device="cuda")
    p.grad[-150:] = -1.0
    optimizer = CoatAdamW([p], **OPTIONS)
    optimizer.step()
    small = torch.nn.Parameter(torch.full((4396,), 0.5, device="cuda"))
    small.grad = p.grad[-4396:].clone()
    CoatAdamW([small], **OPTIONS).step()
    with torch.no_grad():
        assert p[-300:].equal(small[-300:])
        assert (p[: 2**31] == p[0]).all() and p[0] == small[0]
    exp_avg = optimizer.state[p]["exp_avg"]
    # a scale has 12 bits
    assert exp_avg[-1:].item() == pytest.approx(-0.1, rel=2**-12)
