"""Sums that a layer's norms, residual additions and biases make for each other."""

import pytest
import torch

from coat_kernels.deferred import Deferred, Source
from coat_kernels.norm import is_deferred_sum, residual
from coat_kernels.origin import take_stand_in
from megatron_ext.layer_specs import coat_layer_spec, coat_parts
from megatron_ext.ledger import saved_bytes
from megatron_ext.norm import coat_bias_dropout_add, deferred_bias_dropout_add
from tests.megatron_ext.layers import GPT, B, H, S, batch, build, config, loss_and_grads
from tests.util import rel_rms

pytestmark = pytest.mark.usefixtures("megatron")


def test_residual_takes_its_way_through_the_norm(device):
    """The sum of both gradients is made in the norm's backward, and is that of autograd."""
    layer = build(coat_layer_spec).decoder.layers[0]
    x = torch.randn(S, B, H, dtype=torch.bfloat16, device=device, requires_grad=True)
    normed = layer.input_layernorm(x)
    add = layer.self_attn_bda(True, False)
    y = add((2 * normed, None), x, 0.0)
    assert take_stand_in(x) is x
    grad = torch.randn_like(y)
    (fused,) = torch.autograd.grad(y, x, grad)
    normed = layer.input_layernorm(x)
    # another object of the same values: its gradient is added by autograd
    y = add((2 * normed, None), x.view_as(x), 0.0)
    (summed,) = torch.autograd.grad(y, x, grad)
    # rounded to BF16 once, and once more after the sum
    assert rel_rms(fused, summed) < 2**-8


@pytest.mark.parametrize("variant", [{}, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("reads", [False, True])
def test_the_norm_makes_the_sum_behind_attention(device, variant, reads, monkeypatch):
    """To the bit what the addition gives by itself, with as many bytes kept, also where a hook reads it."""
    monkeypatch.setattr(residual, "WAITS_FROM", 0)
    model, results, seen = build(coat_layer_spec, layers=2, **variant), [], []
    for name, parameter in model.named_parameters():
        if "bias" in name:
            parameter.data.normal_()

    def look(module, args):
        seen.append((is_deferred_sum(args[0]), reads and args[0].sum()))

    def left(module, args, y):
        assert not is_deferred_sum(args[0])

    for layer in model.decoder.layers:
        assert layer.self_attn_bda is deferred_bias_dropout_add
        layer.pre_mlp_layernorm.register_forward_pre_hook(look)
        layer.pre_mlp_layernorm.register_forward_hook(left)
    for addition in (deferred_bias_dropout_add, coat_bias_dropout_add):
        for layer in model.decoder.layers:
            layer.self_attn_bda = addition
        seen.clear()
        kept = saved_bytes(model, lambda: model(*batch(device))).total
        assert [pending for pending, _ in seen] == 2 * [addition is deferred_bias_dropout_add]
        results.append((kept, *loss_and_grads(model, device)))
    (kept, loss, grads), (kept_by_itself, loss_by_itself, grads_by_itself) = results
    assert kept == kept_by_itself and loss.equal(loss_by_itself)
    assert all(grads[name].equal(grad) for name, grad in grads_by_itself.items())


def test_other_additions_are_megatrons(device, monkeypatch):
    """Where something is dropped, and where nothing is trained."""
    monkeypatch.setattr(residual, "WAITS_FROM", 0)
    layer = coat_layer_spec.module(config(hidden_dropout=0.5, attention_dropout=0.0), layer_number=1)
    x = torch.randn(S, B, H, dtype=torch.bfloat16, device=device, requires_grad=True)
    seen = []
    layer.to(device).pre_mlp_layernorm.register_forward_pre_hook(lambda _, args: seen.append(type(args[0])))
    layer(x, attention_mask=None)
    layer.eval()(x, attention_mask=None)
    with torch.no_grad():
        layer(x.detach(), attention_mask=None)
    assert seen == [torch.Tensor, Deferred, torch.Tensor]


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_moe_experts": 2},
        # needs Transformer Engine to be built
        {"fine_grained_activation_offloading": True},
    ],
    ids=lambda overrides: next(iter(overrides)),
)
def test_where_the_sum_must_not_wait(overrides):
    settings = config()
    for name, value in overrides.items():
        setattr(settings, name, value)
    parts = coat_parts(settings, experts="num_moe_experts" in overrides)
    assert parts.self_attn_bda is coat_bias_dropout_add
    assert coat_parts(config(), experts=False).self_attn_bda is deferred_bias_dropout_add


def gradients_of(layer, x, grad):
    inputs = x.clone().requires_grad_()
    layer.zero_grad()
    layer(inputs, attention_mask=None)[0].backward(grad)
    return {"x": inputs.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def test_biases_sum_gradients_that_are_never_written(device, monkeypatch):
    """As the same layer does whose gradients are written, and whose last biases Megatron adds."""
    layer = build(coat_layer_spec, **GPT).decoder.layers[0]
    torch.manual_seed(0)
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    x, grad = torch.randn(2, S, B, H, device=device).bfloat16()
    made, value = [], Source.value

    def note(source):
        # the residual addition is no gradient
        if not isinstance(source, residual.Sum):
            made.append(source.shape)
        return value(source)

    monkeypatch.setattr(Source, "value", note)
    seen = []

    def watch(module, inputs, output):
        output[0].register_hook(lambda grad: seen.append(type(grad)))

    for linear in (layer.mlp.linear_fc1, layer.self_attention.linear_qkv):
        linear.register_forward_hook(watch)
    found = gradients_of(layer, x, grad)
    assert seen == [Deferred, Deferred] and not made
    layer.mlp._grad_scale = layer.self_attention._grad_scale = None
    written = gradients_of(layer, x, grad)
    for linear in (layer.mlp.linear_fc2, layer.self_attention.linear_proj):
        assert not linear.skip_bias_add
        linear.skip_bias_add = True
    stock = gradients_of(layer, x, grad)
    biases = {name for name in found if "linear" in name and name.endswith("bias")}
    assert len(biases) == 4
    for name in found:
        # sums of the same values in FP32, each rounded to BF16 by at most 2^-9 of its value
        bound = 2**-8 if name in biases else 0
        assert rel_rms(found[name], written[name]) <= bound, name
        if device.type == "cpu":
            # a GPU's product rounds once, behind the bias
            assert rel_rms(stock[name], written[name]) <= bound, name
    # what is behind fc2's bias is the residual addition
    assert rel_rms(found["mlp.linear_fc2.bias"], grad.float().sum((0, 1))) < 2**-9


def test_tensors_wait_for_fp8_products_alone(device):
    """Whatever else reads one would have it computed each time."""
    mlp = build(coat_layer_spec).decoder.layers[0].mlp
    x, seen = torch.randn(S, B, H, dtype=torch.bfloat16, device=device, requires_grad=True), {}
    mlp.linear_fc2.register_forward_pre_hook(lambda _, args: seen.update(product=type(args[0])))

    def watch(module, inputs, output):
        output[0].register_hook(lambda grad: seen.update(grad=type(grad)))

    mlp.linear_fc1.register_forward_hook(watch)
    for paused, expected in (
        (None, {"product": Deferred, "grad": Deferred}),
        (mlp.linear_fc1, {"product": Deferred, "grad": torch.Tensor}),
        (mlp.linear_fc2, {"product": torch.Tensor, "grad": Deferred}),
    ):
        for linear in (mlp.linear_fc1, mlp.linear_fc2):
            linear.paused = linear is paused
        mlp(x)[0].sum().backward()
        assert seen == expected
