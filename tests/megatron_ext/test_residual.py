"""The residual path through a layer's norm, and the gradients of its biases."""

import pytest
import torch

from coat_kernels.autograd.origin import take_stand_in
from megatron_ext.layer_specs import coat_layer_spec
from tests.megatron_ext.layers import B, H, S, build
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
