"""The COAT layer against Megatron's BF16 layer on the same weights: results, gradients, bytes, contracts."""

import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules

from coat_ds.config import ActivationsConfig
from coat_kernels.autograd.origin import origin_of, take_passthrough
from coat_kernels.fp8 import E4M3, E5M2
from megatron_ext.layer_specs import coat_layer_spec, sdpa_layer_spec
from megatron_ext.layers.attention import SDPACoreAttention
from megatron_ext.layers.mlp import CoatMLP
from megatron_ext.layers.norm import CoatNorm
from megatron_ext.saved_bytes import saved_bytes
from tests.megatron_ext.conftest import one_megatron_process
from tests.megatron_ext.layers import (
    FFN,
    GPT,
    HEADS,
    LINEARS,
    B,
    D,
    H,
    S,
    batch,
    build,
    cached_bytes,
    compared,
    config,
    loss_and_grads,
    rounding_error,
    shaken,
    small_input,
    without_rounding,
)
from tests.util import rel_rms, run_distributed

pytestmark = pytest.mark.usefixtures("megatron")


# The number of roundings to E4M3 and to E5M2 between exact arithmetic and a result. Their errors are
# independent, so squares add. GEMMs, norms, averages over keys and sums with the exact residual pass a
# relative error on without enlarging it. Scores this close to zero do not depend on the errors of q and k.
#   q, k, v: norm output, weight            2   attention (of v)                        2
#   projection: + attention, weight         4   residual and norm                       4
#   gate, up: + norm output, weight         6   product: of gate and up                12
# Saved values have one rounding more, and values that are rebuilt for a GEMM two. In backward each gradient
# is rounded to E5M2 before a GEMM:
#   fc2.weight: product 12 + 2 + 1                   15, 1
#   d product: weight                                 1, 1   d gate, d up: kept up, gate (6 + 1)        8, 1
#   fc1.weight: 8 + norm output (4 + 2)              14, 2   d norm: weight                             9, 2
#   norm weight: 9 + kept input (4 + 1)              14, 2   d residual                                14, 2
#   proj.weight: 14 + attention (2 + 1)              17, 3   d attention: weight                       15, 3
#   d q, k, v: 15 + k, v (2 each)                    19, 3   qkv.weight: 19 + norm output (0 + 2)      21, 4
#   d norm: weight                                   20, 4   norm weight, d x: + kept input            21, 4
ROUNDINGS = {
    "y": (14, 0),
    "mlp.linear_fc2.weight": (15, 1),
    "mlp.linear_fc1.weight": (14, 2),
    "pre_mlp_layernorm.weight": (14, 2),
    "self_attention.linear_proj.weight": (17, 3),
    "self_attention.linear_qkv.weight": (21, 4),
    "input_layernorm.weight": (21, 4),
    "dx": (21, 4),
}


@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_layer_gradients_against_bf16(device, seed, groups):
    models = [build(spec, groups, seed=seed) for spec in (coat_layer_spec, sdpa_layer_spec)]
    torch.manual_seed(seed)
    # far from 1, so that a result without the norms' weights differs visibly
    for norm in ("input_layernorm", "pre_mlp_layernorm"):
        weight = 1 + 0.5 * torch.randn(H)
        for model in models:
            getattr(model.decoder.layers[0], norm).weight.data.copy_(weight)
    coat, bf16 = compared(models, *small_input(device), rotary_pos_emb=lambda m: m.rotary_pos_emb(S))
    assert coat.keys() == ROUNDINGS.keys() and coat["y"].dtype == torch.bfloat16
    e4m3, e5m2 = (rounding_error(t, device) for t in (torch.float8_e4m3fn, torch.float8_e5m2))
    errors = {name: rel_rms(coat[name], bf16[name]) for name in ROUNDINGS}
    # the ratio of the root mean squares of two samples of size N spreads by 1 / sqrt(N): three times that
    bounds = {
        name: (n * e4m3**2 + m * e5m2**2) ** 0.5 * (1 + 3 / bf16[name].numel() ** 0.5)
        for name, (n, m) in ROUNDINGS.items()
    }
    assert all(errors[name] < bounds[name] for name in ROUNDINGS), (errors, bounds)
    # the layers did compute in FP8: each result has at least one rounding of one operand
    assert all(error > e4m3 / 2 for error in errors.values()), errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="other attention kernels keep more beside q, k, v")
@pytest.mark.parametrize("groups", [HEADS, 2])
def test_layer_saved_bytes(device, groups):
    layers = 2
    models = [build(spec, groups, layers) for spec in (coat_layer_spec, sdpa_layer_spec)]
    coat, bf16 = (saved_bytes(model, lambda model=model: model(*batch(device))) for model in models)
    kv = groups * D
    expected = (
        # two norm inputs, gate and up: FP8, and one byte of exponent in groups of 16
        2 * 1.0625 * H
        + 2 * 1.0625 * FFN
        # q, the output, k and v in BF16
        + 2 * (2 * H + 2 * kv)
        # FP32: the reciprocal root of two norms, the log-sum-exp of each head
        + 2 * 4
        + HEADS * 4
        # cosines and sines in FP32, shared by the layers and the batch
        + 2 * D * 4 / B / layers
        # the FP32 largest magnitudes of four weights and of the inputs of their layers
        + 2 * 4 * 4 / (S * B)
    )
    if groups == HEADS:
        assert 2 * (2 * H + 2 * kv) + 2 * 1.0625 * H + 2 * 1.0625 * FFN == H * (2 * 1.0625 + 8) + 2.125 * FFN
    assert coat.per_token_and_layer == expected
    assert (coat.layers, coat.tokens) == (layers, S * B)
    # a BF16 layer saves at least two norm inputs, their outputs, gate, up, their product, q, k, v and the
    # attention output
    assert bf16.per_token_and_layer >= 2 * (4 * H + 3 * FFN + 2 * H + 2 * kv)


def test_layer_with_frozen_weights_saves_no_input_for_them(device):
    model = build(coat_layer_spec)
    _, grads = loss_and_grads(model, device)
    _, everything = model, saved_bytes(model, lambda: model(*batch(device)))
    layer = model.decoder.layers[0]
    frozen = {
        name: weight for name, weight in model.named_parameters() if weight.ndim == 2 and "layers.0" in name
    }
    assert len(frozen) == 4
    for weight in frozen.values():
        weight.requires_grad_(False)
    _, now = loss_and_grads(model, device)
    for name, grad in now.items():
        assert grad is None if name in frozen else torch.equal(grad, grads[name]), name
    # no additional tensors are saved, and a separate linear layer saves no input at all
    assert saved_bytes(model, lambda: model(*batch(device))).total <= everything.total
    x = torch.randn(S, B, H, dtype=torch.bfloat16, device=device, requires_grad=True)
    kept = saved_bytes([layer.self_attention.linear_qkv], lambda: layer.self_attention.linear_qkv(x))
    assert kept.total < H


def test_layer_frees_its_tensors_without_backward(device):
    layer = build(coat_layer_spec).decoder.layers[0]
    x = torch.randn(S, B, H, dtype=torch.bfloat16, device=device, requires_grad=True)
    kept = []
    norm = layer.input_layernorm
    forward = norm.forward

    def watched(x):
        y = forward(x)
        kept.append(weakref.ref(origin_of(y).tensors[0]))
        return y

    # a forward hook of a user would drop the origin
    norm.forward = watched
    layer(x, attention_mask=None)
    del norm.forward
    # neither the layer nor the input that its norm passed on keeps the tensors for backward alive
    assert len(kept) == 1 and kept[0]() is None
    with torch.no_grad():
        assert origin_of(norm(x)) is None and take_passthrough(x) is x


def test_layer_follows_the_activations_of_the_block(device):
    """8-bit attention saves less; gradients are quantized in the block's format."""
    kept, formats = [], []
    for activations in (None, ActivationsConfig(attention_format="sqrt8", backward_format="e4m3")):
        model = build(coat_layer_spec, activations=activations)
        kept.append(saved_bytes(model, lambda model=model: model(*batch(device))).per_token_and_layer)
        formats.append({m._gemm.grad_scale.fmt for m in model.modules() if hasattr(m, "_gemm")})
    # q, the output, and half the number of heads for k and v: two bytes an element, or one and a sixteenth
    assert formats == [{E5M2}, {E4M3}] and kept[0] - kept[1] == 3 * H * (2 - 17 / 16)


def test_norm_equals_rms_norm(device):
    torch.manual_seed(0)
    x = torch.randn(5, 2, 48, device=device, dtype=torch.bfloat16, requires_grad=True)
    gamma = torch.randn(48, device=device)
    for zero_centered in (False, True):
        norm = CoatNorm(config(layernorm_zero_centered_gamma=zero_centered), 48, eps=1e-3).to(device)
        # the weight is 1 after the build
        expected = F.rms_norm(x.float(), (48,), None, 1e-3)
        # BF16 rounds to half a step of 2^-8 of the value
        assert rel_rms(norm(x), expected) < 2**-8 / 3**0.5
        norm.weight.data.copy_(gamma - 1 if zero_centered else gamma)
        weight = norm.weight.detach().float() + zero_centered
        assert rel_rms(norm(x), expected * weight) < 2**-8 / 3**0.5
        assert norm.weight.sequence_parallel is False
        assert list(norm.state_dict()) == ["weight"]


VARIANTS = {
    "gpt": GPT,
    "gpt-exact-gelu": GPT | {"bias_activation_fusion": False},
    "geglu": {"activation_func": F.gelu},
    "squared-relu": {
        "activation_func": squared_relu,
        "gated_linear_unit": False,
        "bias_activation_fusion": False,
    },
    # epsilon is large compared with the mean square, so that another epsilon changes the result
    "qk-norm": {"qk_layernorm": True, "layernorm_epsilon": 0.1},
    "qk-norm-turned-by-megatron": {"qk_layernorm": True, "rotary_interleaved": True},
    "qk-norm-gpt": GPT | {"qk_layernorm": True},
    "windows": {"window_size": (S // 4, 0)},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_layer_variants_against_bf16(device, variant):
    models = [build(spec, **VARIANTS[variant]) for spec in (coat_layer_spec, sdpa_layer_spec)]
    shaken(*models)
    coat, bf16 = compared(models, *small_input(device), rotary_pos_emb=lambda m: m.rotary_pos_emb(S))
    e4m3, e5m2 = (rounding_error(t, device) for t in (torch.float8_e4m3fn, torch.float8_e5m2))
    for name, exact in bf16.items():
        # no more roundings than in the table above: at most 21 to E4M3 and 4 to E5M2, and twice that because
        # the derivative of an activation at rounded inputs enlarges them
        assert rel_rms(coat[name], exact) < 2 * (21 * e4m3**2 + 4 * e5m2**2) ** 0.5, name


# cases that take Megatron's own path, or a path of ours that must give the same: options and angles
POSITIONS = {
    "plain": ({}, lambda angles: angles),
    "behind norms": ({"qk_layernorm": True}, lambda angles: angles),
    "behind L2 norms": ({"qk_layernorm": True, "qk_l2_norm": True}, lambda angles: angles),
    "none": ({}, lambda angles: None),
    "none in some layers": ({"no_rope_freq": [1]}, lambda angles: angles),
    "of some channels": ({}, lambda angles: angles[..., : D // 2]),
    "of each sequence": ({}, lambda angles: torch.cat([angles, angles.flip(0)], 1)),
    "interleaved": ({"rotary_interleaved": True}, lambda angles: angles),
    "scaled": ({}, lambda angles: angles),
    "gated queries": ({"attention_output_gate": True}, lambda angles: angles),
}


@pytest.mark.parametrize("kind", POSITIONS)
def test_layer_rotates_queries_and_keys_as_megatrons(device, kind):
    options, angles_of = POSITIONS[kind]
    norms = {name: options.get(name, False) for name in ("qk_layernorm", "qk_l2_norm")}
    stock = get_gpt_layer_local_spec(normalization="RMSNorm", **norms)
    # Megatron's own attention makes its mask on the GPU
    stock.submodules.self_attention.submodules.core_attention = SDPACoreAttention
    x, seen = torch.randn(S, B, H, generator=torch.Generator().manual_seed(0)).bfloat16().to(device), []
    for spec in (coat_layer_spec, sdpa_layer_spec, stock):
        model = build(spec, **options)
        attention = model.decoder.layers[0].self_attention
        torch.manual_seed(0)
        # megatron-core 0.19 has these norms only with the option for them
        for norm in filter(None, (attention.q_layernorm, attention.k_layernorm)):
            for weight in norm.parameters():
                weight.data.add_(0.3 * torch.randn(D).to(weight))
        if kind == "scaled":
            # pretrain_gpt.py sets this for --position-embedding-type yarn
            attention.config.yarn_rotary_scaling_factor = 8.0
        attention.core_attention.register_forward_pre_hook(lambda _, args: seen.append(args[:2]))
        attention(x, None, rotary_pos_emb=angles_of(model.rotary_pos_emb(S)))
    # the input and the weight are rounded, to E4M3 and to BF16
    bound = 2**0.5 * rounding_error(torch.float8_e4m3fn, device) + 2**-8
    *ours, megatrons = seen
    for queries_and_keys in ours:
        for found, expected in zip(queries_and_keys, megatrons, strict=True):
            assert rel_rms(found, expected) < bound


def test_layer_with_weight_cache_gives_the_same_bits(device):
    plain = build(coat_layer_spec)
    loss, grads = loss_and_grads(plain, device)
    model = build(coat_layer_spec, activations=ActivationsConfig(weight_cache="fp8"))
    assert cached_bytes(model) == 0
    again, cached = loss_and_grads(model, device)
    assert again.equal(loss) and all(cached[name].equal(grads[name]) for name in grads)
    # codes in two layouts, the largest magnitude and the scale
    linears = [m.weight.numel() for m in model.modules() if isinstance(m, LINEARS)]
    assert len(linears) == 4
    assert cached_bytes(model) == sum(2 * n + 8 for n in linears)
    assert cached_bytes(plain) == 0


def test_mlp_takes_megatrons_arguments():
    one, other = (dist.new_group([0]) for _ in range(2))
    collection = ProcessGroupCollection(tp=one)
    mlp = CoatMLP(config(), ffn_hidden_size=64, pg_collection=collection)
    assert mlp.linear_fc1.weight.shape == (2 * 64, H)
    assert mlp.linear_fc1.tp_group is mlp.linear_fc2.tp_group is one
    assert CoatMLP(config(), pg_collection=collection, tp_group=other).linear_fc1.tp_group is other
    stock = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    assert type(CoatMLP(config(), stock).linear_fc1) is ColumnParallelLinear


def both_gelus(fused):
    """The outputs of the feed-forward layers of COAT and of Megatron for the same input, without rounding."""
    config = GPT | {"bias_activation_fusion": fused, "bf16": False}
    x = 4 * torch.randn(S, B, H, generator=torch.Generator().manual_seed(1))
    ys = []
    with one_megatron_process(), without_rounding(), torch.no_grad():
        for spec in (coat_layer_spec, sdpa_layer_spec):
            mlp = build(spec, **config).decoder.layers[0].mlp
            mlp.linear_fc1.weight.mul_(8)
            ys.append(mlp(x)[0])
    return ys


@pytest.mark.parametrize("fused", [False, True])
def test_mlp_gelu_equals_megatrons(fused):
    """Megatron's fused GELU is the approximation by tanh, its other GELU is exact; they differ by 3e-5 here.

    In a process that sees no GPU: FP8 GEMMs of a GPU accept no FP32 numbers as codes.
    """
    (ys,) = run_distributed(both_gelus, 1, fused)
    # sums of at most FFN FP32 terms in another order
    assert rel_rms(*ys) < 1e-6


def test_layer_with_dropout_saves_attention_in_8_bits(device):
    kept = {}
    for form in ("bf16", "sqrt8"):
        activations = ActivationsConfig(attention_format=form)
        model = build(coat_layer_spec, activations=activations, attention_dropout=0.5)
        kept[form] = saved_bytes(model, lambda model=model: model(*batch(device))).total
        loss_and_grads(model, device)
    # CPUs also save the scores
    assert kept["sqrt8"] < kept["bf16"]
