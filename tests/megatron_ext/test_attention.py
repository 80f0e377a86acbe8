"""SDPACoreAttention against Megatron's own core attention, and its saved tensors."""

import itertools

import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from coat_kernels.autograd.origin import origin_of
from megatron_ext import cpu
from megatron_ext.layers.attention import SDPACoreAttention
from tests.megatron_ext.attended import HEADS, B, D, S, attention, qkv
from tests.util import rel_rms

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize(
    "scaling", [{}, {"softmax_scale": 0.7}, {"apply_query_key_layer_scaling": True}], ids=str
)
@pytest.mark.parametrize("groups", [HEADS, 2, 1])
def test_sdpa_attention_equals_megatrons(device, groups, scaling):
    results = []
    # Megatron's own attention makes its mask on the GPU if none is given
    mask = torch.ones(S, S, dtype=torch.bool, device=device).triu(1)[None, None]
    for cls in (SDPACoreAttention, DotProductAttention):
        fused, q, k, v = qkv(device, groups)
        output = attention(cls, num_query_groups=groups, **scaling)(q, k, v, mask)
        assert output.shape == (S, B, HEADS * D)
        output.backward(torch.linspace(-1, 1, output.numel(), device=device).view_as(output))
        results.append((output, fused.grad))
    for ours, theirs in zip(*results, strict=True):
        # both sum at most S + D FP32 terms in another order: sqrt(S + D) roundings of 2^-24 each, over the
        # three GEMMs of forward and backward, with a factor of 4 for cancellation in softmax's gradient
        assert rel_rms(ours, theirs) < 4 * 3 * (S + D) ** 0.5 * 2**-24


@pytest.mark.parametrize("window", [0, 1, 8, S - 2])
@pytest.mark.parametrize("groups", [HEADS, 2])
def test_sdpa_attention_windows_equal_megatrons(device, groups, window):
    if device.type == "cuda":
        pytest.skip("FlashAttention takes no FP32")
    options = {"num_query_groups": groups, "window_size": (window, 0)}
    mask = torch.ones(S, S, dtype=torch.bool, device=device).triu(1)[None, None]
    results = []
    for cls in (SDPACoreAttention, DotProductAttention):
        fused, q, k, v = qkv(device, groups)
        # Megatron makes the mask of a window on a GPU
        with cpu.no_cuda():
            output = attention(cls, **options)(q, k, v, mask)
        output.backward(torch.linspace(-1, 1, output.numel(), device=device).view_as(output))
        results.append((output, fused.grad))
    for ours, theirs in zip(*results, strict=True):
        # as above
        assert rel_rms(ours, theirs) < 4 * 3 * (S + D) ** 0.5 * 2**-24


def test_sdpa_attention_without_a_window_in_some_layers(device):
    _, q, k, v = qkv(device, dtype=torch.bfloat16)
    everything = attention()(q, k, v)
    # the module belongs to layer 2
    for options in ({"window_attn_skip_freq": 2}, {"window_attn_skip_freq": [1, 0]}):
        assert attention(window_size=(8, 0), **options)(q, k, v).equal(everything)
    for options in ({}, {"window_attn_skip_freq": 3}, {"window_attn_skip_freq": [0, 1]}):
        assert rel_rms(attention(window_size=(8, 0), **options)(q, k, v), everything) > 0.01
    assert attention(window_size=(S - 1, 0))(q, k, v).equal(everything)


def test_sdpa_attention_saves_neither_the_fused_buffer_nor_a_second_output(device):
    _, q, k, v = qkv(device, groups=2, dtype=torch.bfloat16)
    assert v.untyped_storage().nbytes() > v.nbytes
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = attention(num_query_groups=2)(q, k, v)
    origin = origin_of(output)
    (tensor,) = origin.tensors
    assert tensor.untyped_storage().data_ptr() in kept
    assert not tensor.requires_grad
    torch.testing.assert_close(
        origin.tensors[0].permute(2, 0, 1, 3).flatten(2), output.detach(), rtol=0, atol=0
    )
    large = sum(storage.nbytes() for storage in kept.values() if storage.nbytes() >= v.nbytes)
    # q and the output have HEADS heads, k and v have 2, all BF16
    assert large == 2 * S * B * D * (2 * HEADS + 2 * 2)


def test_sdpa_attention_drops_out_only_in_training(device):
    _, q, k, v = qkv(device)
    exact = attention()(q, k, v)
    module = attention(attention_dropout=0.5)
    assert rel_rms(module(q, k, v), exact) > 0.1
    torch.testing.assert_close(module.eval()(q, k, v), exact, rtol=0, atol=0)
    # the caller's argument overrides the config, as with Megatron's own attention
    assert attention(given={"attention_dropout": 0.0}, attention_dropout=0.5)(q, k, v).equal(exact)
    assert rel_rms(attention(given={"attention_dropout": 0.5})(q, k, v), exact) > 0.1


def test_sdpa_attention_dropout_uses_the_random_state_of_the_rank(device):
    # tensor-parallel ranks share the other state: with it they would drop the same scores of different heads
    mask = torch.ones(S, S, dtype=torch.bool, device=device).triu(1)[None, None]
    random = torch.cuda.get_rng_state if device.type == "cuda" else torch.get_rng_state
    # under sequence parallelism Megatron's block has already switched to the rank's own state
    split = {"sequence_parallel": True, "tensor_model_parallel_size": 2}
    for cls, options in itertools.product((SDPACoreAttention, DotProductAttention), ({}, split)):
        _, q, k, v = qkv(device)
        module, before = attention(cls, attention_dropout=0.5, **options), random()
        assert not module(q, k, v, mask).equal(module(q, k, v, mask))
        assert random().equal(before) == (not options), cls


def test_sdpa_attention_refuses_unsupported_forwards(device):
    _, q, k, v = qkv(device)
    module = attention()
    for kwargs, text in (
        ({"attention_bias": q}, "attention_bias"),
        ({"attn_mask_type": AttnMaskType.no_mask}, "attn_mask_type must be causal, found no_mask"),
    ):
        with pytest.raises(ValueError, match=text):
            module(q, k, v, **kwargs)
    with pytest.raises(ValueError, match="1 queries and 24 keys"):
        module(q[:1], k, v)
