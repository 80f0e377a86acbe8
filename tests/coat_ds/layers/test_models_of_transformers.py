"""Modules of transformers' models that look like those that are converted, and are not."""

import copy
import inspect

import pytest
import torch

import coat_ds
from tests.coat_ds.layers.measures import fp8_bound, fp8_forward_bound
from tests.kernels.agreement import EXPERTS_FORWARD
from tests.util import rel_rms

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "use_cache": False,
}


def build(family, **fields):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | fields)
    return getattr(transformers, f"{family}ForCausalLM")(config).bfloat16().train()


class Gated(torch.nn.Module):
    """As the layers of Mamba-2, Zamba 2, Bamba, Falcon-H1, Granite 4 and Nemotron-H do."""

    def __init__(self):
        super().__init__()
        from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated

        self.norm = FalconH1RMSNormGated(64)
        self.out_proj = torch.nn.Linear(64, 64)

    def forward(self, x, gate):
        return self.out_proj(self.norm(x, gate))


def test_convert_leaves_a_norm_that_takes_a_gate():
    """Without its gate it is RMSNorm."""
    torch.manual_seed(0)
    model, inputs = Gated().bfloat16(), torch.randn(2, 4, 8, 64).bfloat16()
    expected = model(*inputs)
    conversion = coat_ds.conversion_of(coat_ds.convert(model))
    assert conversion.left == {"norm": "FalconH1RMSNormGated is neither RMSNorm nor LayerNorm"}
    assert rel_rms(model(*inputs), expected) < fp8_forward_bound(1)


def test_experts_of_gpt_oss_with_biases_and_own_gate():
    """GPT-OSS's, interleaved, clamped and transposed; also in a copy, and where they are compiled with their
    router."""
    ids = torch.arange(128).view(2, 64) % 61

    def run(model):
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if "experts" in n}

    # all experts of a token, so that no rounding chooses others
    model = build("GptOss", num_local_experts=4, num_experts_per_tok=4)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "experts" in name:
                p.normal_(std=0.1)
    loss, expected = run(model)
    assert len(expected) == 4
    coat_ds.convert(model)
    conversion = coat_ds.conversion_of(model)
    assert conversion.converted["feed_forward"] == ["model.layers.0.mlp.experts"]
    compiled = copy.deepcopy(model)
    compiled.model.layers[0].mlp.compile(backend="eager")
    for found_loss, found in (run(model), run(copy.deepcopy(model)), run(compiled)):
        assert abs(found_loss - loss) < 0.01 * loss
        for (name, gradient), own in zip(expected.items(), found.values(), strict=True):
            assert rel_rms(own, gradient) < fp8_bound(4), name


def test_experts_of_models_save_as_the_block_says():
    def gradient(**activations):
        config = {"num_local_experts": 4, "num_experts_per_tok": 2}
        experts = coat_ds.convert(build("Mixtral", **config), activations).model.layers[0].mlp.experts
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        chosen = torch.stack((torch.arange(64) % 4, torch.arange(1, 65) % 4), 1)
        experts(x, chosen, torch.full((64, 2), 0.5)).float().square().sum().backward()
        return experts.down_proj.grad

    first = gradient()
    assert 1e-4 < rel_rms(gradient(saved_format="e4m3"), first) < fp8_bound(2)


def mixtral():
    return build("Mixtral", num_local_experts=4).model.layers[0].mlp.experts


def tokens_of():
    """Tokens, the expert of each, and its weight."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    return x, torch.arange(64).view(64, 1) % 4, torch.ones(64, 1, dtype=torch.bfloat16)


def test_experts_of_models_take_no_tokens(device):
    experts = coat_ds.convert(mixtral().to(device))
    x = torch.zeros(0, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    weights = torch.zeros(0, 2, dtype=torch.bfloat16, device=device, requires_grad=True)
    y = experts(x, torch.zeros(0, 2, dtype=torch.int64, device=device), weights)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape and y.dtype == x.dtype and weights.grad.shape == weights.shape
    assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())


# what gives zeros, put in place after convert
ZEROS = {
    "hook": lambda experts: experts.act_fn.register_forward_hook(lambda module, args, y: torch.zeros_like(y)),
    "activation": lambda experts: setattr(experts, "act_fn", torch.nn.Threshold(1e9, 0.0)),
    "gate": lambda experts: setattr(experts, "_apply_gate", lambda both: torch.zeros_like(both[:, ::2])),
}


@pytest.mark.parametrize("change", ZEROS)
def test_experts_of_models_call_what_is_put_into_them_later(change):
    experts = coat_ds.convert(mixtral())
    for copied in (copy.deepcopy(experts), experts):
        assert copied(*tokens_of()).any()
        ZEROS[change](copied)
        assert not copied(*tokens_of()).any()


def clamped(experts):
    class Clamped(type(experts)):
        def _apply_gate(self, both):
            gate, up = both.chunk(2, -1)
            return self.act_fn(gate) * up.clamp(-0.1, 0.1)

    experts.__class__ = Clamped


def in_fp32(experts):
    class Wide(type(experts)):
        def _apply_gate(self, both):
            gate, up = both.float().chunk(2, -1)
            return self.act_fn(gate) * up

    experts.__class__ = Wide


def with_biases(experts):
    experts.has_bias, experts.config._experts_implementation = True, "batched_mm"
    for name in ("gate_up_proj", "down_proj"):
        bias = torch.randn(getattr(experts, name).shape[:2], generator=torch.Generator().manual_seed(1))
        experts.register_parameter(f"{name}_bias", torch.nn.Parameter(bias.bfloat16()))


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    "change, autocast",
    [(clamped, False), (with_biases, False), (in_fp32, True)],
)
def test_experts_of_models_with_own_gate_or_biases(change, autocast, trains):
    experts = mixtral()
    change(experts)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.set_grad_enabled(trains):
        expected = experts(*tokens_of())
        found = coat_ds.convert(experts)(*tokens_of())
    assert coat_ds.conversion_of(experts).converted["feed_forward"] == [""]
    assert expected.any() and rel_rms(found, expected) < EXPERTS_FORWARD


@pytest.mark.parametrize("autocast", [False, True])
def test_experts_of_an_fp32_model_multiply_in_bf16(autocast):
    def run(model):
        ids = torch.arange(128).view(2, 64) % 61
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.item(), model.model.layers[0].mlp.experts.gate_up_proj.grad.clone()

    # all experts of a token, so that no rounding chooses others
    model = build("Qwen3Moe", num_experts=20, num_experts_per_tok=20, moe_intermediate_size=32).float()
    loss, expected = run(model)
    model.zero_grad()
    coat_ds.convert(model)
    found_loss, found = run(model)
    assert found.dtype == torch.float32 and 1e-3 < rel_rms(found, expected) < fp8_bound(4)
    chosen, weights = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    assert model.model.layers[0].mlp.experts(torch.randn(4, 64), chosen, weights).dtype == torch.float32
    assert abs(found_loss - loss) < 0.01 * loss


def test_convert_counts_experts_that_it_leaves_as_a_linear_layer():
    """As those do that are converted: most weights of the model are theirs."""
    model = build("GptOss", num_local_experts=4, intermediate_size=40)
    conversion = coat_ds.conversion_of(coat_ds.convert(model))
    assert conversion.left["model.layers.0.mlp.experts"] == "experts of 64 x 40, not multiples of 16"
    assert conversion.summary().startswith("4 of 6 linear layers in FP8")
    assert conversion.found["feed_forward"] == 1


def test_convert_leaves_experts_of_other_ranks_to_transformers():
    """Under expert parallelism a token may have one that this rank does not hold."""
    experts = mixtral()
    experts._is_expert_parallel = True
    chosen, x = torch.arange(64).view(64, 1) % 5, torch.randn(64, 64).bfloat16()
    weights = (chosen < 4).bfloat16()
    expected = experts(x, chosen, weights)
    assert coat_ds.convert(experts)(x, chosen, weights).equal(expected)


def test_convert_leaves_experts_of_other_forms():
    for fields in (
        {"down_scale": torch.nn.Parameter(torch.ones(4))},
        {"gate_up_proj": torch.nn.Parameter(torch.zeros(4, 192, 64))},
        # not multiples of 16
        {"gate_up_proj": torch.zeros(4, 128, 72), "down_proj": torch.zeros(4, 72, 64)},
        {"has_post_expert_norm": True},
    ):
        experts = mixtral()
        for name, value in fields.items():
            setattr(experts, name, torch.nn.Parameter(value) if torch.is_tensor(value) else value)
        conversion = coat_ds.conversion_of(coat_ds.convert(experts))
        assert list(conversion.left) == [""] and not any(conversion.converted.values()), fields


def test_convert_leaves_a_router_in_a_module_of_its_own():
    model = coat_ds.convert(build("HunYuanMoEV1", num_experts=32, moe_topk=2))
    conversion = coat_ds.conversion_of(model)
    assert conversion.left["model.layers.0.mlp.gate.wg"] == "the router"
    # the shared expert's
    assert "model.layers.0.mlp.shared_mlp.down_proj" in conversion.converted["linear"]


def test_converted_model_takes_one_token_without_a_batch():
    linear = torch.nn.Linear(64, 64).bfloat16()
    tokens = torch.randn(2, 64).bfloat16()
    model = coat_ds.convert(torch.nn.Sequential(linear))
    alone = tokens[0].clone().requires_grad_()
    y = model(alone)
    assert y.shape == (64,) and y.equal(model(tokens[:1])[0])
    y.sum().backward()
    assert alone.grad.shape == (64,) and linear.bias.grad.equal(torch.ones_like(linear.bias))


def test_convert_leaves_attention_that_a_model_names():
    """Gemma 4 computes the last tokens alone in layers that share keys, but not with "sdpa".

    In older releases of transformers it computes all tokens, and asks for no name.
    """
    from transformers.models.gemma4 import modeling_gemma4

    asks = '_attn_implementation == "sdpa"' in inspect.getsource(modeling_gemma4)
    shared = {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2, "global_head_dim": 32}
    per_layer = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 32}
    config = transformers.Gemma4TextConfig(**{**SIZES, "num_hidden_layers": 2}, **shared, **per_layer)
    torch.manual_seed(0)
    model, ids = transformers.Gemma4ForCausalLM(config).bfloat16().eval(), torch.arange(3, 27)[None]
    conversion = coat_ds.conversion_of(coat_ds.convert(model))
    left = conversion.left.get("model.layers.0.self_attn")
    assert left == ("its model asks for 'sdpa' by name" if asks else None)
    assert ("model.layers.0.self_attn" in conversion.converted.get("attention", [])) != asks
    assert len(conversion.converted["linear"]) > 14
    with torch.no_grad():
        every, last = (model(input_ids=ids, use_cache=True, logits_to_keep=n).logits for n in (0, 4))
    assert rel_rms(last, every[:, -4:]) < fp8_forward_bound(2)


def test_convert_leaves_attention_that_changes_the_mask_of_eager():
    """DeepSeek-V4 adds scores of compressed keys; "sdpa" has boolean masks, or none."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = transformers.DeepseekV4Config(num_attention_heads=4, head_dim=16, hidden_size=64)
    with torch.device("meta"):
        attention = modeling.DeepseekV4Attention(config, layer_idx=0)
    attention.config._attn_implementation = "eager"
    conversion = coat_ds.conversion_of(coat_ds.convert(attention))
    assert conversion.left[""] == "its forward may change the attention mask"


def test_experts_of_models_give_the_dtype_of_their_input_whatever_a_routers_is():
    x, chosen, weights = tokens_of()
    assert coat_ds.convert(mixtral())(x, chosen, weights.float()).dtype == torch.bfloat16
