"""Megatron's parallel linear layers in FP8: gradients added to main_grad, biases, sizes and options."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from coat_ds.config import ActivationsConfig
from coat_kernels.linear import LinearFormats
from coat_kernels.linear import op as linear_kernels
from megatron_ext.layer_specs import coat_layer_spec
from megatron_ext.layers.linear import CoatColumnParallelLinear, CoatRowParallelLinear
from tests.megatron_ext.layers import H, batch, build, config, loss_and_grads, rounding_error
from tests.util import rel_rms

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize("overlap", [False, True])
def test_linear_adds_gradients_to_main_grad(device, overlap):
    model = build(coat_layer_spec)
    _, expected = loss_and_grads(model, device)
    model.zero_grad()
    ddp = DistributedDataParallel(
        config=model.config,
        ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlap),
        module=model,
    )
    for passes in (1, 2):
        ddp.zero_grad_buffer()
        for i in range(passes):
            with ddp.no_sync() if i + 1 < passes else torch.enable_grad():
                ddp(*batch(device), labels=batch(device)[0]).mean().backward()
        ddp.finish_grad_sync()
        for name, parameter in model.named_parameters():
            assert parameter.grad is None
            assert parameter.main_grad.dtype == torch.float32
            # added once per pass by our code, and not again by Megatron
            assert torch.equal(parameter.main_grad, passes * expected[name].float()), name
        for module in (
            m for m in model.modules() if isinstance(m, CoatColumnParallelLinear | CoatRowParallelLinear)
        ):
            assert module.weight.grad_added_to_main_grad


@pytest.mark.parametrize("which", ["forward", "all", "none"])
def test_linear_fast_accumulation_by_gemm(device, monkeypatch, which):
    multiply, fast = linear_kernels.scaled_matmul, []

    def noting(*operands):
        fast.append(operands[-1])
        return multiply(*operands)

    monkeypatch.setattr(linear_kernels, "scaled_matmul", noting)
    loss_and_grads(build(coat_layer_spec, activations=ActivationsConfig(fast_accumulation=which)), device)
    # qkv, proj, fc1, fc2; then from fc2 on the gradients of the input and the weight
    assert fast == [which != "none"] * 4 + [which == "all"] * 7 + [False]


@pytest.mark.parametrize("modules", [False, True], ids=["blocks", "modules"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_adds_fast_sums_to_main_grad_unrounded(device, dtype, modules):
    model = build(coat_layer_spec)
    weight = model.decoder.layers[0].mlp.linear_fc1.weight
    model.decoder.layers[0].mlp.linear_fc1._gemm.formats = LinearFormats(fast_weight_grad=True)
    if modules:
        # one hooked module, so that all modules are called
        model.decoder.layers[0].mlp.register_forward_hook(lambda *_: None)
    _, expected = loss_and_grads(model, device)
    model.zero_grad()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight, dtype=dtype), False
    loss = model(*batch(device), labels=batch(device)[0]).mean()
    # Megatron may assign other buffers between forward and backward
    first, weight.main_grad = weight.main_grad, torch.zeros_like(weight, dtype=dtype)
    loss.backward()
    (fc1,) = (grad for name, grad in expected.items() if name.endswith("linear_fc1.weight"))
    assert first.count_nonzero() == 0
    assert weight.main_grad.bfloat16().equal(fc1)
    # a GPU rounds, since this case is too small for its kernel
    unrounded = dtype == torch.float32 and device.type == "cpu"
    assert weight.main_grad.equal(fc1.to(dtype)) != unrounded
    assert weight.grad.shape == weight.shape and weight.grad.dtype == weight.dtype


def test_linear_returns_zeros_with_zero_out_wgrad(device, monkeypatch):
    """With `zero_out_wgrad` Megatron also adds the gradient that autograd returns."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **rest: empty_like(*args, **rest).fill_(1))
    model = build(coat_layer_spec)
    weight = model.decoder.layers[0].mlp.linear_fc1.weight
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, True
    loss_and_grads(model, device)
    assert weight.grad.count_nonzero() == 0
    assert weight.main_grad.count_nonzero() > 0 and weight.grad_added_to_main_grad


@pytest.mark.parametrize("marks", [{}, {"grad_added_to_main_grad": False, "__fsdp_param__": True}], ids=list)
def test_linear_leaves_main_grad_of_other_frameworks(device, marks):
    """Megatron's FSDP also has `main_grad`, and other frameworks have it without the other attributes."""
    model = build(coat_layer_spec)
    _, expected = loss_and_grads(model, device)
    weight = model.decoder.layers[0].mlp.linear_fc1.weight
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    for name, value in marks.items():
        setattr(weight, name, value)
    _, grads = loss_and_grads(model, device)
    assert weight.main_grad.count_nonzero() == 0
    assert all(grads[name].equal(grad) for name, grad in expected.items())


def test_linear_needs_no_apex_for_gradient_accumulation_fusion(device):
    for experts in ({}, {"num_moe_experts": 2, "moe_grouped_gemm": True}):
        settings = config(gradient_accumulation_fusion=True, **experts)
        mlp = coat_layer_spec.module(settings, layer_number=1).to(device).mlp
        assert (mlp.experts if experts else mlp).linear_fc1.weight.numel() > 0
        # attributes that Megatron's own layers read
        assert settings.gradient_accumulation_fusion and (experts or mlp.linear_fc1.config is settings)


def linear(cls, inputs=H, outputs=H, name="qkv", settings=None, **kwargs):
    settings = settings or config()
    extra = {"input_is_parallel": True} if cls is CoatRowParallelLinear else {}
    return cls(
        inputs,
        outputs,
        config=settings,
        init_method=settings.init_method,
        bias=kwargs.pop("bias", False),
        skip_bias_add=kwargs.pop("skip_bias_add", False),
        tp_comm_buffer_name=name,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        **extra,
    )


@pytest.mark.parametrize("cls", [CoatColumnParallelLinear, CoatRowParallelLinear])
@pytest.mark.parametrize("skip_bias_add", [False, True])
def test_linear_bias(device, cls, skip_bias_add):
    torch.manual_seed(0)
    module = linear(cls, outputs=32, bias=True, skip_bias_add=skip_bias_add).to(device)
    module.bias.data.normal_()
    x = torch.randn(64, 2, H, dtype=torch.bfloat16, device=device)
    y, bias = module(x)
    assert (bias is module.bias) if skip_bias_add else (bias is None)
    expected = x.float() @ module.weight.float().t() + (0 if skip_bias_add else module.bias.float())
    # two operands rounded to E4M3, and the result to BF16; plus three deviations for a sample of this size
    bound = (2 * rounding_error(torch.float8_e4m3fn, device) ** 2 + 2**-16) ** 0.5
    assert rel_rms(y, expected) < bound * (1 + 3 / y.numel() ** 0.5)


def test_linear_refuses_another_output_dtype(device):
    """Newer versions of Megatron can request another dtype; FP8 GEMMs return the dtype of the input."""
    module = linear(CoatColumnParallelLinear, name="fc1").to(device)
    x = torch.randn(4, 2, H, dtype=torch.bfloat16, device=device)
    given = {"input": x, "weight": module.weight}
    assert module._forward_impl(**given, output_dtype=torch.bfloat16).equal(module(x)[0])
    with pytest.raises(ValueError, match="output_dtype: expected torch.bfloat16.*found torch.float32"):
        module._forward_impl(**given, output_dtype=torch.float32)


def test_linear_with_sizes_not_multiples_of_16_stays_megatrons(device, caplog):
    with mock.patch("torch.cuda.is_available", lambda: True):
        module = linear(CoatRowParallelLinear, inputs=40, name="fc2").to(device)
    assert "fc2: FP8 GEMMs need sizes that are multiples of 16, found 40 -> 128" in caplog.text
    assert module.coat_part().why == "sizes that 16 does not divide"
    x = torch.randn(4, 2, 40, dtype=torch.bfloat16, device=device, requires_grad=True)
    y, _ = module(x)
    torch.testing.assert_close(y, F.linear(x, module.weight), rtol=0, atol=0)
    y.sum().backward()
    assert module.weight.grad is not None
