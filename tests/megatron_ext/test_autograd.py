"""Operations of users around the training steps: inference, penalties, edits, leaves, hooks."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from coat_ds.config import ActivationsConfig
from coat_kernels.autograd.origin import maxima_of, share_notes, take_passthrough
from megatron_ext.layer_specs import coat_layer_spec
from megatron_ext.layers.norm import CoatNorm
from tests.megatron_ext.layers import (
    GPT,
    B,
    H,
    S,
    batch,
    build,
    config,
    loss_and_grads,
)
from tests.util import rel_rms

pytestmark = pytest.mark.usefixtures("megatron")


def evaluate(model, device):
    return model(*batch(device))


def in_inference_mode(model, device):
    with torch.inference_mode():
        return evaluate(model, device).clone()


def in_evaluation(model, device):
    with torch.no_grad():
        model.eval()
        found = evaluate(model, device)
        model.train()
    return found


@pytest.mark.parametrize("cache", ["none", "fp8"])
@pytest.mark.parametrize("variant", [{}, GPT], ids=["llama", "gpt"])
def test_layers_alternate_between_inference_and_training(device, variant, cache):
    """In either order: tables and notes made by one of them also work for the other."""

    def make():
        return build(coat_layer_spec, layers=2, activations=ActivationsConfig(weight_cache=cache), **variant)

    logits, (loss, grads) = evaluate(make(), device).detach(), loss_and_grads(make(), device)
    for first in (in_inference_mode, in_evaluation):
        model = make()
        for _ in range(2):
            assert first(model, device).equal(logits)
            again, found = loss_and_grads(model, device)
            assert again.equal(loss) and all(found[name].equal(grad) for name, grad in grads.items())
        assert in_inference_mode(model, device).equal(logits)


def test_norm_adds_the_gradient_of_the_residual(device):
    """The norm's backward computes the sum of both gradients, equal to autograd's sum."""
    layer = build(coat_layer_spec).decoder.layers[0]
    x = torch.randn(S, B, H, dtype=torch.bfloat16, device=device, requires_grad=True)
    normed = layer.input_layernorm(x)
    add = layer.self_attn_bda(True, False)
    y = add((2 * normed, None), x, 0.0)
    assert take_passthrough(x) is x
    grad = torch.randn_like(y)
    (fused,) = torch.autograd.grad(y, x, grad)
    normed = layer.input_layernorm(x)
    # another object with the same values: autograd adds its gradient
    y = add((2 * normed, None), x.view_as(x), 0.0)
    (summed,) = torch.autograd.grad(y, x, grad)
    # rounded to BF16 once, and a second time after the sum
    assert rel_rms(fused, summed) < 2**-8


@pytest.mark.parametrize("behind_a_node", [False, True])
def test_norm_frees_the_input_of_a_recomputed_region(device, behind_a_node):
    """In the recompute, the region's input is a leaf, and the residual is a plain addition."""
    norm, inputs = CoatNorm(config(), H).to(device), []

    def region(x):
        inputs.append(weakref.ref(x))
        # ZeRO-3's hooks pass tensors on in this way
        y = norm(share_notes(x, x.view_as(x)) if behind_a_node else x)
        return x + 2 * y

    for _ in range(3):
        x = torch.randn(S, B, H, dtype=torch.bfloat16, device=device, requires_grad=True)
        checkpoint(region, x * 1, use_reentrant=True).sum().backward()
    gc.collect()
    assert len(inputs) == 6 and [ref() for ref in inputs] == [None] * 6


# the hook that writes, before or after a module, and the layer whose GEMM reads the written tensor
WRITTEN = {
    "input_layernorm": ("forward", "self_attention.linear_qkv"),
    "self_attention": ("forward_pre", "self_attention.linear_qkv"),
    "self_attention.linear_qkv": ("forward_pre", "self_attention.linear_qkv"),
    "self_attention.core_attention": ("forward", "self_attention.linear_proj"),
    "self_attention.linear_proj": ("forward_pre", "self_attention.linear_proj"),
    "pre_mlp_layernorm": ("forward", "mlp.linear_fc1"),
    "mlp": ("forward_pre", "mlp.linear_fc1"),
    "mlp.linear_fc1": ("forward_pre", "mlp.linear_fc1"),
    "mlp.linear_fc2": ("forward_pre", "mlp.linear_fc2"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_layers_multiply_values_that_hooks_write_in_place(device, name):
    """The GEMM multiplies the written values, as it does with values that a hook returns. Codes with the old
    magnitude would saturate."""
    where, reader = WRITTEN[name]

    def unseen(module, args, y=None):
        (args[0] if y is None else y).data.mul_(-8)

    def handed_on(module, args, y=None):
        return (-8 * args[0], *args[1:]) if y is None else -8 * y

    x, results = torch.randn(S, B, H, dtype=torch.bfloat16, device=device), []
    # attention saves other tensors than the one that the hook writes into
    activations = ActivationsConfig(attention_format="sqrt8")
    for hook in (unseen, handed_on):
        layer = build(coat_layer_spec, activations=activations).decoder.layers[0]
        getattr(layer.get_submodule(name), f"register_{where}_hook")(hook)
        y, _ = layer(x.clone().requires_grad_(), attention_mask=None)
        y.square().sum().backward()
        with torch.no_grad():
            # without gradients no GEMM is deferred
            evaluated, _ = layer(x.clone(), attention_mask=None)
        results.append((y.detach(), layer.get_submodule(reader).weight.grad, evaluated))
    for found, expected in zip(*results, strict=True):
        assert found.equal(expected)


def test_norm_keeps_notes_under_hooks_of_frameworks(device):
    norm = CoatNorm(config(), H).to(device)
    x = torch.randn(S, B, H, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        assert maxima_of(norm(x)) is not None
        # hooks of DeepSpeed and Megatron are recognized by the package that defines them
        for package, kept in (("deepspeed.runtime.zero", True), ("megatron.core", True), ("user", False)):

            def hook(*_):
                pass

            hook.__module__ = package
            handle = norm.register_forward_hook(hook)
            assert (maxima_of(norm(x)) is not None) == kept
            handle.remove()
        with torch.nn.modules.module.register_module_forward_hook(lambda *_: None):
            assert maxima_of(norm(x)) is None
