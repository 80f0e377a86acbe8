"""The FP8 linear layer: results and gradients, saved tensors, refused arguments."""

import pytest
import torch
import torch.nn.functional as F

from coat_kernels import linear, tensorwise
from coat_kernels.autograd.origin import (
    Origin,
    maxima_of,
    origin_of,
    share_notes,
    take_passthrough,
    whole_of,
    with_maxima,
    with_origin,
    with_passthrough,
)
from coat_kernels.fp8 import E4M3
from coat_kernels.linear import LinearFormats, LinearOptions, LinearState, fp8_linear
from coat_kernels.tensorwise import quantize_tensor
from coat_kernels.weights import NO_CACHE
from tests.interpreter import take_kernels
from tests.kernels.agreement import E4M3_RMS, E5M2_RMS
from tests.kernels.inputs import check_sums
from tests.util import rel_rms, saved_tensors

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def leaves(*tensors, device, dtype=torch.bfloat16):
    return [t.to(device, dtype).requires_grad_() for t in tensors]


def adding_to(into, formats=None):
    """Options by which the weight's gradient is added to the tensor that `into` returns."""
    return LinearOptions(formats or LinearFormats(), NO_CACHE, grad_buffer=into)


def gradients(y, grad, inputs):
    return torch.autograd.grad(y, inputs, grad)


@pytest.mark.parametrize("tokens", [(1,), (7,), (7, 3), (17,), (16, 4), (1001,)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_against_autograd(tokens, bias, device):
    """The error of a GEMM is that of its two rounded operands, independent of each other: sqrt(2) * E4M3_RMS
    forward, sqrt(E4M3_RMS^2 + E5M2_RMS^2) backward, and a tenth more for small samples."""
    inputs = leaves(torch.randn(*tokens, 192), torch.randn(256, 192), torch.randn(256), device=device)
    inputs = inputs if bias else inputs[:2]
    grad = torch.randn(*tokens, 256).to(device, torch.bfloat16)
    y = fp8_linear(*inputs)
    exact = [t.detach().float().requires_grad_() for t in inputs]
    expected = F.linear(*exact)
    forward, backward = 1.1 * 2**0.5 * E4M3_RMS, 1.1 * (E4M3_RMS**2 + E5M2_RMS**2) ** 0.5
    assert rel_rms(y, expected) < forward
    found, wanted = gradients(y, grad, inputs), gradients(expected, grad.float(), exact)
    for a, e, bound in zip(found, wanted, (backward, backward, 2**-8), strict=False):
        assert a.dtype == torch.bfloat16 and rel_rms(a, e) < bound


def test_linear_with_a_frozen_weight_saves_no_input(device):
    x, weight = leaves(torch.randn(16, 32), torch.randn(32, 32), device=device)
    with saved_tensors() as kept:
        y = fp8_linear(x, weight.detach())
    assert [t.numel() for t in kept] == [32 * 32, 1]
    (grad_x,) = torch.autograd.grad(y.sum(), [x])
    assert grad_x.shape == x.shape


def test_linear_backward_shows_a_gradient_that_is_not_finite(device):
    x, weight = leaves(torch.randn(32, 32), torch.randn(32, 32), device=device)
    grad = torch.randn(32, 32, device=device, dtype=torch.bfloat16)
    grad[3, 4] = torch.inf
    grad_x, grad_w = torch.autograd.grad(fp8_linear(x, weight), [x, weight], grad)
    assert grad_x[3].isnan().all() and grad_x[:3].isfinite().all()
    assert grad_w[4].isnan().all() and grad_w[:4].isfinite().all()


@pytest.mark.gpu
def test_linear_refuses_sizes_that_are_no_multiples_of_16():
    x, weight = torch.randn(4, 24, device="cuda"), torch.randn(40, 24, device="cuda")
    with pytest.raises(ValueError, match="multiples of 16, found a weight of 40 x 24"):
        fp8_linear(x, weight)


def test_linear_refuses_wrong_shapes(device):
    x, weight = leaves(torch.randn(16, 32), torch.randn(48, 32), device=device)
    with pytest.raises(ValueError, match="the weight takes 32 columns, x has 16"):
        fp8_linear(x[:, :16], weight)
    # each of these would be broadcast
    for bias in (x.new_zeros(1), x.new_zeros(16, 48)):
        with pytest.raises(ValueError, match="of 48 outputs"):
            fp8_linear(x, weight, bias)
    y = fp8_linear(x, weight, None, adding_to(lambda: torch.zeros(2, 48, 32, device=device)))
    with pytest.raises(ValueError, match=r"grad_buffer: expected shape \[48, 32\], found \[2, 48, 32\]"):
        y.sum().backward()


def test_linear_runs_no_gemm_for_a_frozen_weight_or_input(device, monkeypatch):
    """LoRA's frozen weights need no weight gradient, a first layer needs no input gradient."""
    x, weight = leaves(torch.randn(16, 32), torch.randn(32, 32), device=device)
    products = []
    product = linear.op.scaled_matmul
    monkeypatch.setattr(linear.op, "scaled_matmul", lambda *args: products.append(args) or product(*args))
    for inputs in ((x, weight.detach()), (x.detach(), weight)):
        products.clear()
        fp8_linear(*inputs).sum().backward()
        assert len(products) == 2


def test_linear_takes_any_sizes_on_a_cpu():
    """A weight whose size is no multiple of 16 is padded for the gradient of the input."""
    inputs = leaves(torch.randn(10, 20), torch.randn(24, 20), device="cpu")
    exact = [t.detach().float().requires_grad_() for t in inputs]
    upstream = torch.randn(10, 24).bfloat16()
    found = gradients(fp8_linear(*inputs), upstream, inputs)
    bound = 1.2 * (E4M3_RMS**2 + E5M2_RMS**2) ** 0.5
    for a, e in zip(found, gradients(F.linear(*exact), upstream.float(), exact), strict=True):
        assert rel_rms(a, e) < bound


@pytest.mark.parametrize("trains", [(True, True), (False, True), (True, False), (False, False)], ids=str)
def test_linear_bias_gradient_is_the_sum_over_the_tokens(trains, device):
    """Whatever else is frozen; the sum is FP32 if the bias is FP32. If only the bias is trained, there is no
    GEMM."""
    x, weight = (torch.randn(shape, device=device).bfloat16() for shape in ((3, 7, 32), (48, 32)))
    x.requires_grad_(trains[0])
    weight.requires_grad_(trains[1])
    bias = torch.randn(48, device=device, requires_grad=True)
    grad = torch.randn(3, 7, 48, device=device).bfloat16()
    fp8_linear(x, weight, bias).backward(grad)
    check_sums(bias.grad, grad.flatten(0, 1))
    assert (x.grad is not None, weight.grad is not None) == trains


def test_linear_saves_the_origin_of_its_input(device):
    x, weight = leaves(torch.randn(512, 128), torch.randn(64, 128), device=device)
    made = []

    def columns(kept, amax, fmt):
        made.append(amax.item())
        return quantize_tensor(kept, amax, fmt, rows=False, columns=True)

    with saved_tensors() as kept:
        y = fp8_linear(x, weight, origin=Origin((x.detach(),), columns))
    assert [t.numel() for t in kept] == [weight.numel(), 1, x.numel(), 1]
    grad = torch.randn_like(y)
    plain = torch.autograd.grad(fp8_linear(x, weight), [x, weight], grad)
    for a, e in zip(torch.autograd.grad(y, [x, weight], grad), plain, strict=True):
        assert a.equal(e)
    assert made == [x.abs().max().item()]


def test_origin_and_maxima_are_lost_by_any_change():
    x = torch.randn(4, 32)
    with_origin(x, Origin((), None))
    with_maxima(x, x.abs().amax(1))
    assert origin_of(x) is not None and maxima_of(x) is not None
    for other in (x * 2, x.view(2, 2, 32), x.detach()):
        assert origin_of(other) is None and maxima_of(other) is None
    for change in (lambda x: x.mul_(2), lambda x: setattr(x, "data", x.detach() * 2)):
        with_maxima(with_origin(x, Origin((), None)), x.abs().amax(1))
        change(x)
        assert origin_of(x) is None and maxima_of(x) is None


def test_whole_of_takes_views_of_all_elements_in_order():
    x = torch.randn(4, 32)
    assert whole_of(x) is x and whole_of(x.view(4, 32)) is x and whole_of(x[:]) is x
    for other in (x[:2], x[2:], x.view(2, 64), x[:1].expand(4, 32), x.t()):
        assert whole_of(other) is None


def test_share_notes_with_an_alias():
    x = torch.randn(4, 32)
    maxima, passthrough = x.abs().amax(1), x.view_as(x)
    with_maxima(x, maxima)
    alias = share_notes(x, x.detach())
    assert maxima_of(alias) is maxima
    # of the two aliases, the one that is read first returns notes made on the other one later
    with_passthrough(alias, passthrough, x)
    assert take_passthrough(x) is passthrough and take_passthrough(alias) is alias
    with_passthrough(x, passthrough, x)
    alias.mul_(2)
    assert maxima_of(x) is None and take_passthrough(x) is x


def test_linear_uses_the_maxima_of_its_producers(device, monkeypatch):
    x, weight = leaves(torch.randn(16, 32), torch.randn(32, 32), device=device)
    grad = torch.randn(16, 32, device=device, dtype=torch.bfloat16)
    expected = torch.autograd.grad(fp8_linear(x, weight), [x, weight], grad)
    with_maxima(x, x.detach().abs().float().amax(1))
    with_maxima(grad, grad.abs().float().amax(1))
    read = []
    compute_amax = tensorwise.scale.compute_amax
    monkeypatch.setattr(tensorwise.scale, "compute_amax", lambda t: read.append(t) or compute_amax(t))
    y = fp8_linear(x, weight)
    for a, e in zip(torch.autograd.grad(y, [x, weight], grad), expected, strict=True):
        assert a.equal(e)
    assert [t.data_ptr() for t in read] == [weight.data_ptr()]


@pytest.mark.parametrize("compiled", [False, True])
def test_linear_with_predicted_scales_has_the_same_bits(compiled, device, monkeypatch):
    """Whatever the tensors of the previous pass were. Kernels then make no extra pass for the scale."""
    if not compiled:
        take_kernels(monkeypatch)
    gemm = LinearState()
    x, weight, bias = leaves(torch.randn(33, 64), torch.randn(48, 64), torch.randn(48), device=device)
    grad = torch.randn(33, 48, device=device, dtype=torch.bfloat16)

    def predicting(x, weight, bias):
        return fp8_linear(x, weight, bias, gemm.options(weight))

    if compiled:
        predicting = torch.compile(predicting, backend="aot_eager", fullgraph=True)
    for factor in (1, 2.0**20, 2.0**-40, 1):
        y = fp8_linear(factor * x, factor * weight, bias)
        expected = y, *gradients(y, factor * grad, (x, weight, bias))
        with monkeypatch.context() as patch:
            if not compiled:
                patch.setattr(tensorwise.scale, "compute_amax", None)
            y = predicting(factor * x, factor * weight, bias)
            found = y, *gradients(y, factor * grad, (x, weight, bias))
        for a, e in zip(found, expected, strict=True):
            assert a.equal(e)


def test_linear_formats_and_autocast(device):
    """E4M3 gradients have half of E5M2's error; autocast decides the dtype of the GEMM's output."""
    x, weight = leaves(torch.randn(64, 192), torch.randn(256, 192), device=device)
    grad = torch.randn(64, 256, device=device, dtype=torch.bfloat16)
    y = fp8_linear(x, weight, None, LinearOptions(LinearFormats(E4M3), NO_CACHE))
    exact = [t.detach().float().requires_grad_() for t in (x, weight)]
    wanted = torch.autograd.grad(F.linear(*exact), exact, grad.float())
    for a, e in zip(torch.autograd.grad(y, [x, weight], grad), wanted, strict=True):
        assert rel_rms(a, e) < 1.1 * 2**0.5 * E4M3_RMS
    with torch.autocast(device.type, torch.bfloat16):
        z = fp8_linear(exact[0], exact[1])
        assert z.dtype == torch.bfloat16 and rel_rms(z, F.linear(*exact)) < 1.1 * 2**0.5 * E4M3_RMS
        z.backward(grad)
    assert exact[0].grad.dtype == torch.float32


def test_linear_gradient_of_an_fp32_weight_is_not_rounded_to_bf16(device):
    weight = torch.randn(48, 32, device=device, requires_grad=True)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast(device.type, torch.bfloat16):
            y = fp8_linear(torch.randn(64, 32, device=device, dtype=dtype), weight)
        (grad,) = torch.autograd.grad(y, weight, torch.randn_like(y))
        assert y.dtype == torch.bfloat16 and not grad.equal(grad.bfloat16().float())


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_linear_adds_the_weight_gradient_to_grad_buffer(compiled, fast, device):
    """Other gradients are the same bits, and the placeholder that autograd gets for the weight takes no
    memory."""
    formats = LinearFormats(fast_weight_grad=fast)
    inputs = leaves(torch.randn(33, 64), torch.randn(48, 64), torch.randn(48), device=device)
    grad = torch.randn(33, 48, device=device, dtype=torch.bfloat16)
    expected = gradients(fp8_linear(*inputs, LinearOptions(formats, NO_CACHE)), grad, inputs)
    main = torch.zeros(48, 64, device=device)

    def run(*inputs):
        return fp8_linear(*inputs, adding_to(lambda: main, formats))

    if compiled:
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    for passes in (1, 2):
        grad_x, grad_w, grad_bias = gradients(run(*inputs), grad, inputs)
        assert grad_x.equal(expected[0]) and grad_bias.equal(expected[2])
        assert grad_w.shape == (48, 64) and grad_w.count_nonzero() == 0
        assert compiled or grad_w.untyped_storage().nbytes() == 2
        # exact, since the same number is added twice
        assert (main / passes).bfloat16().equal(expected[1])
    # fast sums are not rounded on a CPU or in a large GEMM
    assert main.bfloat16().float().equal(main) == (not fast or device.type == "cuda")


def test_linear_calls_grad_buffer_in_backward(device):
    x, weight = leaves(torch.randn(16, 32), torch.randn(48, 32), device=device)
    first, second = torch.zeros(2, 48, 32, device=device)
    into = [first]
    y = fp8_linear(x, weight, None, adding_to(into.pop))
    into[0] = second
    gradients(y.sum(), None, [x, weight])
    assert first.count_nonzero() == 0 and second.count_nonzero() > 0
    # a frozen weight adds nothing
    gradients(fp8_linear(x, weight.detach(), None, adding_to(into.pop)).sum(), None, [x])


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="others write the product first")
def test_linear_fast_weight_gradient_takes_no_memory():
    n = 8192
    weight = torch.randn(n, n, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    x, grad = torch.randn(2, 64, n, device="cuda", dtype=torch.bfloat16)
    main = torch.zeros(n, n, device="cuda")
    formats = LinearFormats(fast_weight_grad=True)
    y = fp8_linear(x, weight, None, adding_to(lambda: main, formats))
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(y, weight, grad)
    # operands of 64 tokens only, at most two bytes per element, and the rounding of the allocator
    assert torch.cuda.max_memory_allocated() - held < 4 * 64 * n * 2
    assert main.count_nonzero() > 0


def test_linear_operators_pass_opcheck(device):
    a = torch.zeros(16, 16, device=device).to(torch.float8_e4m3fn)
    one = torch.ones(1, device=device)
    # torch's schema test would multiply FP8 elements, which torch does not support
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    arguments = (a, a, one, one, None, torch.bfloat16, True)
    torch.library.opcheck(linear.scaled_matmul.op, arguments, test_utils=utils)
