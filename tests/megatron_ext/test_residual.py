"""The residual path through a layer's norm, and the gradients of its biases."""

import pytest
import torch

from coat_kernels.autograd.origin import take_stand_in
from megatron_ext.layer_specs import coat_layer_spec
from tests.megatron_ext.layers import GPT, B, H, S, build
from tests.util import rel_rms

pytestmark = pytest.mark.usefixtures("megatron")


def test_residual_takes_its_way_through_the_norm(device):
    """The norm's backward computes the sum of both gradients, equal to autograd's sum."""
    layer = build(coat_layer_spec).decoder.layers[0]
    x = torch.randn(S, B, H, dtype=torch.bfloat16, device=device, requires_grad=True)
    normed = layer.input_layernorm(x)
    add = layer.self_attn_bda(True, False)
    y = add((2 * normed, None), x, 0.0)
    assert take_stand_in(x) is x
    grad = torch.randn_like(y)
    (fused,) = torch.autograd.grad(y, x, grad)
    normed = layer.input_layernorm(x)
    # another object with the same values: autograd adds its gradient
    y = add((2 * normed, None), x.view_as(x), 0.0)
    (summed,) = torch.autograd.grad(y, x, grad)
    # rounded to BF16 once, and a second time after the sum
    assert rel_rms(fused, summed) < 2**-8


def gradients_of(layer, x, grad):
    inputs = x.clone().requires_grad_()
    layer.zero_grad()
    layer(inputs, attention_mask=None)[0].backward(grad)
    return {"x": inputs.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def test_biases_of_a_layer(device):
    """Their gradients equal those of a layer whose last biases Megatron adds."""
    layer = build(coat_layer_spec, **GPT).decoder.layers[0]
    torch.manual_seed(0)
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    x, grad = torch.randn(2, S, B, H, device=device).bfloat16()
    # a user's hook on a module keeps the layer from running as fused blocks
    layer.mlp.linear_fc1.register_forward_hook(lambda *_: None)
    found = gradients_of(layer, x, grad)
    for linear in (layer.mlp.linear_fc2, layer.self_attention.linear_proj):
        assert not linear.skip_bias_add
        linear.skip_bias_add = True
    stock = gradients_of(layer, x, grad)
    biases = {name for name in found if "linear" in name and name.endswith("bias")}
    assert len(biases) == 4
    for name in found:
        # sums of the same values in FP32, each rounded to BF16 by at most 2^-9 of its value
        bound = 2**-8 if name in biases else 0
        if device.type == "cpu":
            # the GEMM of a GPU rounds once, after it has added the bias
            assert rel_rms(stock[name], found[name]) <= bound, name
    # the gradient of fc2's bias is that of the residual addition
    assert rel_rms(found["mlp.linear_fc2.bias"], grad.float().sum((0, 1))) < 2**-9
