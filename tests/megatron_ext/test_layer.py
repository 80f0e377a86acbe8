"""The COAT layer against Megatron's BF16 layer on the same weights: results, gradients, bytes, contracts."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig

from coat_ds.config import ActivationsConfig
from coat_kernels.deferred import Deferred, Source
from coat_kernels.linear import LinearFormats
from coat_kernels.linear import op as linear_kernels
from coat_kernels.norm import is_deferred_sum, residual
from coat_kernels.origin import origin_of, take_stand_in
from megatron_ext.layer_specs import coat_layer_spec, coat_parts, sdpa_layer_spec
from megatron_ext.ledger import cached_weight_bytes, saved_bytes
from megatron_ext.linear import CoatColumnParallelLinear, CoatRowParallelLinear
from megatron_ext.model import ModelShape, build_gpt
from megatron_ext.norm import CoatNorm, coat_bias_dropout_add, deferred_bias_dropout_add
from megatron_ext.settings import set_activations
from megatron_ext.torch_norm import HAVE_TE
from tests.util import rel_rms

pytestmark = pytest.mark.usefixtures("megatron")

LINEARS = (CoatColumnParallelLinear, CoatRowParallelLinear)
S, B, VOCAB = 64, 2, 256
H, FFN, HEADS = 128, 352, 4
D = H // HEADS


def build(spec, groups=2, layers=1, **config):
    return build_gpt(
        ModelShape(layers, H, FFN, HEADS, groups), spec, seq_length=S, vocab_size=VOCAB, **config
    )


def batch(device):
    tokens = torch.randint(0, VOCAB, (B, S), generator=torch.Generator().manual_seed(5)).to(device)
    return tokens, torch.arange(S, device=device).expand(B, S), None


def rounding_error(dtype: torch.dtype, device) -> float:
    """Relative RMS error of a Gaussian rounded to an FP8 format with one scale: 0.026 and 0.053."""
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)).to(device)
    scale = x.abs().max() / torch.finfo(dtype).max
    return rel_rms((x / scale).to(dtype).float() * scale, x)


# How many roundings to E4M3 and to E5M2 lie between a result and exact arithmetic. Each adds its error
# independently, hence squares add; matrix products, norms, averages over keys and sums with the exact
# residual pass a relative error on without enlarging it, and scores this close to zero do not feel the errors
# of q and k.
#   q, k, v: norm output, weight            2   attention (of v)                        2
#   projection: + attention, weight         4   residual and norm                       4
#   gate, up: + norm output, weight         6   product: of gate and up                12
# kept values are one rounding further, and rebuilt ones that enter a product two; backward each gradient
# enters a product through E5M2:
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
def test_gradients_against_the_bf16_layer(device, seed, groups):
    models = [build(spec, groups, seed=seed) for spec in (coat_layer_spec, sdpa_layer_spec)]
    torch.manual_seed(seed)
    # far from 1, so that forgetting the norms' weights shows
    for norm in ("input_layernorm", "pre_mlp_layernorm"):
        weight = 1 + 0.5 * torch.randn(H)
        for model in models:
            getattr(model.decoder.layers[0], norm).weight.data.copy_(weight)
    # small next to what the branches add: their errors show and do not drown in BF16's of the residual
    x, grad = (0.01 * torch.randn(S, B, H)).bfloat16().to(device), torch.randn(S, B, H).bfloat16().to(device)
    results = []
    for model in models:
        layer, inputs = model.decoder.layers[0], x.clone().requires_grad_()
        y, _ = layer(inputs, attention_mask=None, rotary_pos_emb=model.rotary_pos_emb(S))
        assert y.dtype == torch.bfloat16
        y.backward(grad)
        results.append(
            {"y": y - x, "dx": inputs.grad - grad, **{n: p.grad for n, p in layer.named_parameters()}}
        )
    coat, bf16 = results
    assert coat.keys() == bf16.keys() == ROUNDINGS.keys()
    e4m3, e5m2 = (rounding_error(t, device) for t in (torch.float8_e4m3fn, torch.float8_e5m2))
    errors = {name: rel_rms(coat[name], bf16[name]) for name in ROUNDINGS}
    # the ratio of the root mean squares of two samples of size N spreads by 1 / sqrt(N): three times that
    bounds = {
        name: (n * e4m3**2 + m * e5m2**2) ** 0.5 * (1 + 3 / bf16[name].numel() ** 0.5)
        for name, (n, m) in ROUNDINGS.items()
    }
    assert all(errors[name] < bounds[name] for name in ROUNDINGS), (errors, bounds)
    # FP8 was at work: each result has at least one rounding of one operand in it
    assert all(error > e4m3 / 2 for error in errors.values()), errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="other attention kernels keep more beside q, k, v")
@pytest.mark.parametrize("groups", [HEADS, 2])
def test_saved_bytes_equal_the_arithmetic(device, groups):
    layers = 2
    models = [build(spec, groups, layers) for spec in (coat_layer_spec, sdpa_layer_spec)]
    coat, bf16 = (saved_bytes(model, lambda model=model: model(*batch(device))) for model in models)
    kv = groups * D
    expected = (
        # two norm inputs, gate and up: FP8 and one byte of exponent in groups of 16
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
    # a BF16 layer keeps at least two norm inputs, their outputs, gate, up, the product, q, k, v and the
    # attention output
    assert bf16.per_token_and_layer >= 2 * (4 * H + 3 * FFN + 2 * H + 2 * kv)


def loss_and_grads(model, device):
    model.zero_grad()
    loss = model(*batch(device), labels=batch(device)[0]).mean()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("recompute", "other"),
    [
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, None),
        # linear_proj then keeps attention's output in FP8: the codes it would make in backward
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, None),
        # linear_fc1 then sees the norm's output itself, and not what the norm's kept input gives
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, "mlp.linear_fc1.weight"),
    ],
    ids=["full", "core_attn", "mlp"],
)
def test_recompute_changes_nothing_else(device, recompute, other):
    loss, grads = loss_and_grads(build(coat_layer_spec), device)
    again, recomputed = loss_and_grads(build(coat_layer_spec, **recompute), device)
    assert torch.equal(again, loss)
    for name, grad in grads.items():
        if other is None or other not in name:
            assert torch.equal(recomputed[name], grad), name
        else:
            # one rounding of the kept input, and one of each result as it enters the product
            assert rel_rms(recomputed[name], grad) < 3**0.5 * rounding_error(torch.float8_e4m3fn, device)


def test_frozen_weights_get_no_gradient_and_keep_no_input(device):
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
    # nothing more is kept than before, and a linear layer by itself keeps no input at all
    assert saved_bytes(model, lambda: model(*batch(device))).total <= everything.total
    x = torch.randn(S, B, H, dtype=torch.bfloat16, device=device, requires_grad=True)
    kept = saved_bytes([layer.self_attention.linear_qkv], lambda: layer.self_attention.linear_qkv(x))
    assert kept.total < H


def test_layers_hold_on_to_nothing_after_forward(device):
    layer = build(coat_layer_spec).decoder.layers[0]
    x = torch.randn(S, B, H, dtype=torch.bfloat16, device=device, requires_grad=True)
    kept = []
    norm = layer.input_layernorm
    handle = norm.register_forward_hook(lambda *call: kept.append(weakref.ref(origin_of(call[2]).tensors[0])))
    layer(x, attention_mask=None)
    handle.remove()
    # neither the layer, nor the input that its norm handed on, holds what backward would have needed
    assert len(kept) == 1 and kept[0]() is None
    with torch.no_grad():
        assert origin_of(norm(x)) is None and take_stand_in(x) is x


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


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_go_into_megatrons_main_grad(device, overlap):
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
            # added once a pass, not once by us and again by Megatron
            assert torch.equal(parameter.main_grad, passes * expected[name].float()), name
        for module in (
            m for m in model.modules() if isinstance(m, CoatColumnParallelLinear | CoatRowParallelLinear)
        ):
            assert module.weight.grad_added_to_main_grad


@pytest.mark.parametrize("which", ["forward", "all", "none"])
def test_which_products_are_summed_with_fewer_bits(device, monkeypatch, which):
    multiply, fast = linear_kernels.scaled_matmul, []

    def noting(*operands):
        fast.append(operands[-1])
        return multiply(*operands)

    monkeypatch.setattr(linear_kernels, "scaled_matmul", noting)
    loss_and_grads(build(coat_layer_spec, activations=ActivationsConfig(fast_accumulation=which)), device)
    # qkv, proj, fc1, fc2; then from fc2 on the gradients of the input and the weight
    assert fast == [which != "none"] * 4 + [which == "all"] * 7 + [False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fast_sums_go_into_main_grad_unrounded(device, dtype):
    model = build(coat_layer_spec)
    weight = model.decoder.layers[0].mlp.linear_fc1.weight
    model.decoder.layers[0].mlp.linear_fc1._formats = LinearFormats(fast_weight_grad=True)
    _, expected = loss_and_grads(model, device)
    model.zero_grad()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight, dtype=dtype), False
    loss = model(*batch(device), labels=batch(device)[0]).mean()
    # Megatron may hand out other buffers between forward and backward
    first, weight.main_grad = weight.main_grad, torch.zeros_like(weight, dtype=dtype)
    loss.backward()
    (fc1,) = (grad for name, grad in expected.items() if name.endswith("linear_fc1.weight"))
    assert first.count_nonzero() == 0
    assert weight.main_grad.bfloat16().equal(fc1)
    # a GPU's kernel would be too large for this one
    unrounded = dtype == torch.float32 and device.type == "cpu"
    assert weight.main_grad.equal(fc1.to(dtype)) != unrounded
    assert weight.grad.shape == weight.shape and weight.grad.dtype == weight.dtype


def test_a_gradient_that_is_added_again_is_zero(device, monkeypatch):
    """Megatron adds what autograd returns as well where `zero_out_wgrad` is set."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **rest: empty_like(*args, **rest).fill_(1))
    model = build(coat_layer_spec)
    weight = model.decoder.layers[0].mlp.linear_fc1.weight
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, True
    loss_and_grads(model, device)
    assert weight.grad.count_nonzero() == 0
    assert weight.main_grad.count_nonzero() > 0 and weight.grad_added_to_main_grad


def test_gradient_accumulation_fusion_needs_no_apex(device):
    results = []
    for fused in (False, True):
        settings = config(gradient_accumulation_fusion=fused, hidden_dropout=0.0, attention_dropout=0.0)
        torch.manual_seed(0)
        layer = coat_layer_spec.module(settings, layer_number=1).to(device)
        x, grad = torch.randn(2, S, B, H, dtype=torch.bfloat16, device=device)
        weights = {n: p for n, p in layer.named_parameters() if "linear" in n}
        for weight in weights.values() if fused else ():
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
            weight.grad_added_to_main_grad = False
        for _ in range(2):
            layer.zero_grad()
            layer(x.requires_grad_(), attention_mask=None)[0].backward(grad)
        results.append({n: p.main_grad if fused else p.grad for n, p in weights.items()})
        assert layer.mlp.linear_fc1.config is settings
    once, twice = results
    assert len(twice) == 4 and all(torch.equal(twice[n], 2 * once[n].float()) for n in twice)


def config(**overrides) -> TransformerConfig:
    settings = dict(
        num_layers=1,
        hidden_size=H,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
    )
    return TransformerConfig(**(settings | overrides))


def test_block_reaches_the_layers(device):
    """Larger groups keep fewer exponents; E4M3 gradients have half the rounding error of E5M2."""
    models = {
        name: build(coat_layer_spec, activations=activations)
        for name, activations in (
            ("default", None),
            ("groups", ActivationsConfig(group_size=32)),
            ("formats", ActivationsConfig(backward_format="e4m3")),
        )
    }
    kept = {name: saved_bytes(m, lambda m=m: m(*batch(device))) for name, m in models.items()}
    fewer = kept["default"].per_token_and_layer - kept["groups"].per_token_and_layer
    assert fewer == 2 * H / 32 + 2 * FFN / 32
    exact = build(sdpa_layer_spec)
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    grads = {}
    for key, model in (models | {"exact": exact}).items():
        tokens, positions, mask = batch(device)
        model(tokens, positions, mask, labels=tokens).mean().backward()
        grads[key] = dict(model.named_parameters())[name].grad
    errors = {key: rel_rms(grads[key], grads["exact"]) for key in ("default", "formats")}
    assert errors["formats"] < errors["default"]


def test_norm_is_megatrons_rms_norm(device):
    torch.manual_seed(0)
    x = torch.randn(5, 2, 48, device=device, dtype=torch.bfloat16, requires_grad=True)
    gamma = torch.randn(48, device=device)
    for zero_centered in (False, True):
        norm = CoatNorm(config(layernorm_zero_centered_gamma=zero_centered), 48, eps=1e-3).to(device)
        # as built it multiplies by 1
        expected = F.rms_norm(x.float(), (48,), None, 1e-3)
        # BF16 rounds to half a step of 2^-8 of the value
        assert rel_rms(norm(x), expected) < 2**-8 / 3**0.5
        norm.weight.data.copy_(gamma - 1 if zero_centered else gamma)
        weight = norm.weight.detach().float() + zero_centered
        assert rel_rms(norm(x), expected * weight) < 2**-8 / 3**0.5
        assert norm.weight.sequence_parallel is False
        assert list(norm.state_dict()) == ["weight"]


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
    # two operands rounded to E4M3, and the result to BF16; three deviations of so many samples on top
    bound = (2 * rounding_error(torch.float8_e4m3fn, device) ** 2 + 2**-16) ** 0.5
    assert rel_rms(y, expected) < bound * (1 + 3 / y.numel() ** 0.5)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"activation_func": F.relu, "bias_activation_fusion": False}, "--squared-relu"),
        ({"activation_func_fp8_input_store": True}, "--activation-func-fp8-input-store"),
        pytest.param(
            {"context_parallel_size": 2},
            "--context-parallel-size",
            marks=pytest.mark.skipif(HAVE_TE, reason="Transformer Engine's attention supports it"),
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_unsupported_options_are_named(overrides, text):
    with pytest.raises(ValueError, match=text):
        build(coat_layer_spec, **overrides)


def test_megatrons_own_graphs_are_refused():
    settings = config()
    for implementation in ("local", "transformer_engine"):
        # Megatron records graphs with Transformer Engine's random states or on a GPU only
        settings.cuda_graph_impl = implementation
        with pytest.raises(ValueError, match=f"--cuda-graph-impl {implementation} .*activations.cuda_graphs"):
            linear(CoatColumnParallelLinear, outputs=32, settings=settings)


GPT = {
    "normalization": "LayerNorm",
    "activation_func": F.gelu,
    "gated_linear_unit": False,
    "add_bias_linear": True,
}
VARIANTS = {
    "gpt": GPT,
    "gpt-exact-gelu": GPT | {"bias_activation_fusion": False},
    "geglu": {"activation_func": F.gelu},
    "squared-relu": {
        "activation_func": squared_relu,
        "gated_linear_unit": False,
        "bias_activation_fusion": False,
    },
    "qk-norm": {"qk_layernorm": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_layers_against_bf16(device, variant):
    models = [build(spec, **VARIANTS[variant]) for spec in (coat_layer_spec, sdpa_layer_spec)]
    torch.manual_seed(0)
    for name, parameter in models[0].decoder.layers[0].named_parameters():
        if parameter.ndim == 1:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
            models[1].decoder.layers[0].get_parameter(name).data.copy_(parameter)
    x, grad = (0.01 * torch.randn(S, B, H)).bfloat16().to(device), torch.randn(S, B, H).bfloat16().to(device)
    results = []
    for model in models:
        layer, inputs = model.decoder.layers[0], x.clone().requires_grad_()
        y, _ = layer(inputs, attention_mask=None, rotary_pos_emb=model.rotary_pos_emb(S))
        y.backward(grad)
        results.append(
            {"y": y - x, "dx": inputs.grad - grad, **{n: p.grad for n, p in layer.named_parameters()}}
        )
    coat, bf16 = results
    assert coat.keys() == bf16.keys()
    e4m3, e5m2 = (rounding_error(t, device) for t in (torch.float8_e4m3fn, torch.float8_e5m2))
    for name, exact in bf16.items():
        # no longer way than in the table above: at most 21 roundings to E4M3 and 4 to E5M2, and twice that
        # where the derivative of an activation, of which the inputs are rounded, enlarges them
        assert rel_rms(coat[name], exact) < 2 * (21 * e4m3**2 + 4 * e5m2**2) ** 0.5, name


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


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("defer_embedding_wgrad_compute", True, "fc1: --defer-embedding-wgrad-compute"),
        ("gtp_weight_remat_size", 2, "fc1: --tensor-parallel-num-weight-shards"),
    ],
)
def test_unsupported_linear_options_are_named(field, value, text):
    settings = config()
    setattr(settings, field, value)
    with pytest.raises(ValueError, match=text):
        linear(CoatColumnParallelLinear, name="fc1", settings=settings)


def test_sizes_a_gpu_cannot_multiply_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    linear(CoatColumnParallelLinear, outputs=24)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, argument in (
        ("fc1", "--ffn-hidden-size"),
        ("qkv", "--num-query-groups"),
        ("proj", "--kv-channels"),
    ):
        with pytest.raises(ValueError, match=f"{name}: .*multiples of 16, found 128 -> 24.*{argument}"):
            linear(CoatColumnParallelLinear, outputs=24, name=name)
    with pytest.raises(ValueError, match="fc2: .*found 40 -> 128.*--ffn-hidden-size"):
        linear(CoatRowParallelLinear, inputs=40, name="fc2")


def test_fallback_keeps_such_a_layer_as_megatron_has_it(device, caplog):
    settings = config()
    set_activations(settings, ActivationsConfig(fallback=True))
    module = linear(CoatRowParallelLinear, inputs=40, name="fc2", settings=settings).to(device)
    assert "fc2: FP8 matrix products need sizes that are multiples of 16, found 40 -> 128" in caplog.text
    x = torch.randn(4, 2, 40, dtype=torch.bfloat16, device=device, requires_grad=True)
    y, _ = module(x)
    torch.testing.assert_close(y, F.linear(x, module.weight), rtol=0, atol=0)
    y.sum().backward()
    assert module.weight.grad is not None


def test_attention_in_fp8_keeps_fewer_bytes(device):
    kept = {}
    for form in ("bf16", "sqrt8"):
        model = build(coat_layer_spec, activations=ActivationsConfig(attention_format=form))
        kept[form] = saved_bytes(model, lambda model=model: model(*batch(device))).per_token_and_layer
        loss_and_grads(model, device)
    # q and the output have H channels, k and v half as many
    assert kept["bf16"] - kept["sqrt8"] == (2 - 1.0625) * (2 * H + 2 * H // 2)


def test_weight_cache_changes_nothing_else(device):
    plain = build(coat_layer_spec)
    loss, grads = loss_and_grads(plain, device)
    model = build(coat_layer_spec, activations=ActivationsConfig(weight_cache="fp8"))
    assert cached_weight_bytes(model) == 0
    again, cached = loss_and_grads(model, device)
    assert again.equal(loss) and all(cached[name].equal(grads[name]) for name in grads)
    # the largest magnitude, and beside the codes in two layouts the scale
    linears = [m.weight.numel() for m in model.modules() if isinstance(m, LINEARS)]
    assert len(linears) == 4
    assert cached_weight_bytes(model) == sum(2 * n + 8 for n in linears)
    assert cached_weight_bytes(plain) == 0
