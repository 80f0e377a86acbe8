"""COAT layers that call their modules: what a user changed in them or hooks, and what blocks do not
compute."""

import pytest
import torch

from megatron_ext.layers import decoder_layer
from tests.megatron_ext.blocks import HEADS, VARIANTS, B, H, S, build, node
from tests.megatron_ext.layers import GPT

pytestmark = pytest.mark.usefixtures("megatron")


def noting(cls, seen):
    """A subclass of `cls`, as torch makes one if a parameter is parametrized or sharded."""

    def forward(self, *args, **kwargs):
        seen.append(cls)
        return cls.forward(self, *args, **kwargs)

    return type("Noting", (cls,), {"forward": forward})


def replaced_forward(layer):
    linear = layer.mlp.linear_fc1
    linear.forward = type(linear).forward.__get__(linear)


def in_bf16(layer):
    layer.mlp.linear_fc1._in_fp8 = False


def hooked(kind):
    return lambda layer: getattr(layer.self_attention.linear_proj, f"register_{kind}_hook")(lambda *_: None)


def of_another_class(name):
    def change(layer):
        part = layer.get_submodule(name)
        part.__class__ = noting(type(part), [])

    return change


def with_another_addition(name):
    def change(layer):
        stock = getattr(layer, name)
        setattr(layer, name, lambda *args: stock(*args))

    return change


INSIDE = {"self_attention": "linear_qkv linear_proj q_layernorm k_layernorm", "mlp": "linear_fc1 linear_fc2"}
PARTS = [
    *decoder_layer._KINDS,
    *(f"{part}.{name}" for part, names in INSIDE.items() for name in names.split()),
]
HOOKS = ("forward", "forward_pre", "full_backward", "full_backward_pre")
CHANGES = {
    "forward": replaced_forward,
    "BF16": in_bf16,
    **{f"{kind} hook": hooked(kind) for kind in HOOKS},
    **{f"class of {name}": of_another_class(name) for name in PARTS},
    **{name: with_another_addition(name) for name in ("self_attn_bda", "mlp_bda")},
}


@pytest.mark.parametrize("change", CHANGES)
def test_layer_with_a_changed_part_is_not_fused(change, device):
    layer = build({"qk_layernorm": True}, layers=1).decoder.layers[0]
    assert "MlpBlock" in node(layer, device)
    CHANGES[change](layer)
    assert "MlpBlock" not in node(layer, device)


@pytest.mark.parametrize("variant", ["gpt", "head norms"])
def test_layer_with_a_frozen_parameter_is_not_fused(variant, device):
    layer = build(*VARIANTS[variant], layers=1).decoder.layers[0]
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(False)
        assert "MlpBlock" not in node(layer, device), name
        parameter.requires_grad_(True)
    assert "MlpBlock" in node(layer, device)


def test_forwards_that_are_not_fused(device):
    layer = build(layers=1).decoder.layers[0]
    with torch.autocast(device.type, torch.bfloat16):
        assert "MlpBlock" not in node(layer, device)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert "MlpBlock" not in node(layer, device)
    handle.remove()
    x = torch.randn(S, B, H, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        y, _ = layer(x, attention_mask=None)
    trained, context = layer(x, attention_mask=None)
    assert "MlpBlock" in type(trained.grad_fn).__name__ and context is None
    assert torch.equal(y, trained)
    # also with positional arguments, as a ZeRO-3 unit is called
    assert torch.equal(layer(x, None)[0], trained)
    # Megatron's argument after the mask is not rotary positions
    with pytest.raises(ValueError, match=r"an encoder's output \(context\)"):
        layer(x, None, torch.zeros(S, 1, 1, H // HEADS, device=device))
    for other in (x.float(), x[:0]):
        assert "MlpBlock" not in type(layer(other, None)[0].grad_fn).__name__
    dropping = build({"hidden_dropout": 0.5}, layers=1).decoder.layers[0]
    assert "MlpBlock" not in node(dropping, device)
    assert "MlpBlock" in node(dropping.eval(), device)
    # attention with dropout gives another result in a recompute
    config, activations = {"attention_dropout": 0.5}, {"attention_format": "recompute"}
    dropping = build(config, activations, layers=1).decoder.layers[0]
    for recomputes in (False, True):
        # a node is freed with its output
        y, _ = dropping.train(not recomputes)(x, attention_mask=None)
        behind = y.grad_fn.next_functions
        # of the residual, and of attention's output if the block contains attention
        assert sum("QkvBlock" in type(f).__name__ for f, _ in behind) == 1 + recomputes
    # Megatron applies partial rotary positions
    half = torch.zeros(S, 1, 1, H // HEADS // 2, device=device)
    assert "MlpBlock" not in node(layer, device, rotary_pos_emb=half)
    recomputed = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    for other in (
        {"rotary_interleaved": True},
        GPT | {"qk_layernorm": True},
        {"fp32_residual_connection": True},
        recomputed,
    ):
        assert "MlpBlock" not in node(build(other, layers=1).decoder.layers[0], device), other
    # modules do the offloading of saved tensors
    assert isinstance(decoder_layer.dense_parts(layer), decoder_layer.Parts)
    layer.config.fine_grained_activation_offloading = True
    assert isinstance(decoder_layer.dense_parts(layer), str)
    normed = build({"qk_layernorm": True}, layers=1).decoder.layers[0]
    assert "MlpBlock" in node(normed, device)
    normed.self_attention.k_layernorm.register_forward_hook(lambda *_: None)
    assert "MlpBlock" not in node(normed, device)


@pytest.mark.parametrize("by_hook", [True, False], ids=["hook", "class"])
def test_attention_with_a_hook_is_not_recomputed(by_hook, device):
    layer, seen = build({}, {"attention_format": "recompute"}, layers=1).decoder.layers[0], []
    core = layer.self_attention.core_attention
    if by_hook:
        core.register_forward_hook(lambda *_: seen.append(1))
    else:
        core.__class__ = noting(type(core), seen)
    assert "MlpBlock" in node(layer, device) and len(seen) == 1
