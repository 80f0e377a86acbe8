"""`coat plan`: models as they are read, compared with the real ones, and what cannot be planned."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from coat_ds import cli, convert, plan
from coat_ds.plan import PlanError, all_systems, from_deepspeed, sizes
from coat_ds.plan.read import from_values, meta_model
from coat_ds.plan.saved import saved_per_token
from coat_ds.plan.systems import coat
from tests.coat_ds.layers.measures import saved_bytes
from tests.coat_ds.planned import SMALL

ROOT = Path(__file__).parents[2]

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def test_plan_sizes_of_json_files():
    from_file = sizes.from_shape(json.loads((ROOT / "configs/model_llama2_7b.json").read_text()), 32000)
    assert from_file.parameters == 6_738_415_616
    llama3 = json.loads((ROOT / "configs/model_llama3_8b.json").read_text())
    assert sizes.from_shape(llama3, 128256).parameters == 8_030_261_248
    llama3["untie_embeddings_and_output_weights"] = False
    assert sizes.from_shape(llama3, 128256).parameters == 8_030_261_248 - 128256 * 4096
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    assert from_values(gpt2).tied and not from_values(gpt2).gated and from_values(gpt2).ffn == 3072
    assert from_values({**gpt2, "n_inner": 1024}).ffn == 1024


@pytest.mark.parametrize(
    "given",
    [
        {"moe_layer_freq": 0},
        {"moe_layer_freq": None},
        {"moe_layer_freq": [1, 0]},
        {"moe_layer_freq": "([0]*1+[1]*31)"},
        {"num_experts": "8"},
        {"num_experts": -8},
        {"num_experts": True},
        {"moe_router_topk": 9},
        {"moe_ffn_hidden_size": "x"},
        {"moe_shared_expert_intermediate_size": -1},
    ],
    ids=str,
)
def test_plan_refuses_impossible_experts_of_megatron(given):
    (key,) = given
    shape = json.loads((ROOT / "configs/model_llama2_7b.json").read_text()) | {"num_experts": 8} | given
    with pytest.raises(PlanError, match=key):
        sizes.from_shape(shape, 32000)


def test_plan_from_module_on_the_meta_device():
    config = transformers.Qwen2Config(**SIZES)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    found = plan.from_module(model)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    # biases of queries, keys and values
    assert found.other_parameters == 2 * (64 + 2 * 32)
    # as the package's description has it
    spread = from_deepspeed({"zero_optimization": {"stage": 2}}, found, gpus=8, sequence=4096)
    assert plan.predict(found, spread, all_systems()["COAT"]).peak.total > 2 * found.parameters
    with pytest.raises(PlanError, match='Linear: expected a model .* in "config"'):
        plan.from_module(torch.nn.Linear(2, 2))


FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "llama without groups": ("LlamaConfig", {"num_key_value_heads": 4}),
    "mistral": ("MistralConfig", {"head_dim": 64}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 64}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    # more than COAT converts
    "qwen3 with experts": (
        "Qwen3MoeConfig",
        {"num_experts": 20, "num_experts_per_tok": 3, "moe_intermediate_size": 128, "head_dim": 64},
    ),
    "every other layer with experts": (
        "Qwen3MoeConfig",
        {"num_experts": 8, "moe_intermediate_size": 128, "decoder_sparse_step": 2, "head_dim": 64},
    ),
}


# Every family in BF16 and in FP8. Formats of attention change what heads save: heads of two widths.
ACTIVATIONS = {
    **{"BF16": (None, FAMILIES), "COAT": ({}, FAMILIES)},
    **{fmt: ({"attention_format": fmt}, ("llama", "mistral", "mixtral")) for fmt in ("sqrt8", "recompute")},
}


@pytest.mark.parametrize(
    "name, activations",
    [
        pytest.param(name, activations, id=f"{kind}-{name}")
        for kind, (activations, names) in ACTIVATIONS.items()
        for name in names
    ],
)
def test_plan_saved_bytes_are_what_autograd_saves(name, activations):
    """A layer's, a token: what two layers add to what two save."""
    tokens = torch.randint(512, (2, TOKENS // 2))
    batch, saved = {"input_ids": tokens, "labels": tokens, "use_cache": False}, []
    for layers in (2, 4):
        model = small_model(name, layers)
        if activations is not None:
            convert(model, activations)
        saved.append(saved_bytes(model, batch))
    found = plan.from_module(model)
    assert found.counted
    if activations is None:
        system = all_systems()["BF16"]
    else:
        system = coat("COAT", {"activations": activations})
    predicted = saved_per_token(found, system)
    # a layer's scales and joined biases are a few more bytes
    assert abs((saved[1] - saved[0]) / TOKENS / 2 - predicted) < 0.005 * predicted


TOKENS = 128


def small_model(name: str, layers: int):
    kind, fields = FAMILIES[name]
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers}
    config = getattr(transformers, kind)(**SIZES | sizes | fields)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


MIXTURES = {
    "Mixtral": {},
    "Qwen2Moe": {},
    "Qwen3Moe": {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
    "Olmoe": {},
    "FlexOlmo": {},
    "Phimoe": {},
    "GraniteMoe": {},
    "Glm4Moe": {"first_k_dense_replace": 2, "head_dim": 128},
    "MiniMaxM2": {},
    "SolarOpen": {},
    "GptOss": {},
}


@pytest.mark.parametrize("name", MIXTURES)
def test_plan_counts_the_parameters_of_a_mixture(name):
    config = getattr(transformers, f"{name}Config")(num_hidden_layers=4, **MIXTURES[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    found, exact = plan.from_module(model), sum(p.numel() for p in model.parameters())
    # biases and norms of queries and keys
    assert 0 <= found.other_parameters < 2e-3 * exact and found.parameters == exact
    layers = model.model.layers
    in_layers = found.layers * found.layer_matrices
    assert in_layers == pytest.approx(sum(p.numel() for p in layers.parameters()), rel=2e-3)
    sparse = [any(n.endswith("gate_up_proj") for n, _ in layer.named_parameters()) for layer in layers]
    assert found.experts.layers == sum(sparse)


def test_plan_command_with_a_mixture(tmp_path, capsys):
    config = transformers.MixtralConfig(architectures=["MixtralForCausalLM"])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    words = ["plan", str(tmp_path / "config.json"), "--gpus", "16", "--gpu", "h200", "--stage", "3"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("46.70B parameters, 16 x H200, ZeRO-3")
    assert "experts: 8 in a layer, 2 for a token; under COAT they multiply in FP8" in out
    megatron = [*words[:-2], "--megatron"]
    assert cli.main([*megatron, "--expert", "8", "--pipeline", "2", "--fit", "140GB"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("46.70B parameters, 16 x H200, Megatron, pipeline 2, expert 8")
    assert "--moe-grouped-gemm --spec megatron_ext.spec coat_layer_spec" in out
    for more, found in (
        (["--expert", "16"], "--expert: 16 does not divide the 8 experts"),
        (["--expert", "3"], "--expert: 3 does not divide the data parallel size, 16"),
        (["--tensor", "2"], "--tensor: not planned with Megatron's experts"),
    ):
        assert cli.main([*megatron, *more]) == 2 and found in capsys.readouterr().err
    assert cli.main([*words, "--expert", "2"]) == 2
    assert "--expert: planned with --megatron alone" in capsys.readouterr().err


def test_plan_names_parts_that_it_does_not_plan(tmp_path, capsys):
    vision = {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8}
    whole = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": SIZES | {"model_type": "llama"},
        "vision_config": vision | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert cli.main(["plan", str(tmp_path / "config.json")]) == 0
    exact = plan.from_module(meta_model(whole)).outside
    assert f"not planned: {exact:,} parameters outside of the decoder" in capsys.readouterr().out
    assert exact > 64 * 64


STAGE_2 = {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    "config, key",
    [
        ({}, "stage"),
        ({"zero_optimization": {"stage": "two"}}, "zero_optimization.stage"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}}, "zero_optimization"),
        (STAGE_2 | {"train_batch_size": 6}, "global batch"),
        (STAGE_2 | {"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size"),
        (STAGE_2 | {"sequence_parallel_size": 4}, "sequence_parallel_size"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_plan_names_keys_that_it_does_not_plan(config, key):
    with pytest.raises(PlanError, match=f"^{key}"):
        from_deepspeed(config, SMALL, gpus=4)


@pytest.mark.parametrize(
    "kind, name, message",
    [
        ("bert", "BertForMaskedLM", "BertForMaskedLM: is an encoder"),
        ("t5", "T5ForConditionalGeneration", "has an encoder and a decoder"),
        ("qwen3_next", "Qwen3NextForCausalLM", "Qwen3NextDecoderLayer: is a layer without"),
        ("deepseek_v3", "DeepseekV3ForCausalLM", "DeepseekV3Attention: is not attention of queries"),
        ("mamba", "MambaForCausalLM", "MambaBlock: is a layer without attention"),
        ("jetmoe", "JetMoeForCausalLM", "JetMoe"),
    ],
)
def test_plan_refuses_models(kind, name, message):
    with pytest.raises(PlanError, match=message):
        from_values({"model_type": kind, "architectures": [name]})


def test_plan_refuses_files_without_a_model():
    with pytest.raises(PlanError, match="model_type: found none"):
        from_values(SIZES)
    with pytest.raises(PlanError, match="cannot build it .*num_experts"):
        from_values(SIZES | {"model_type": "qwen3_moe", "num_experts": "8"})
    with pytest.raises(PlanError, match="hidden_size: expected a whole number above 0, found None"):
        from_values({"num_layers": 2, "num_query_groups": 2}, 100)


GEMMA = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "head_dim": 32, "vocab_size": 4096}
UNGATED = {"model_type": "starcoder2", "architectures": ["Starcoder2ForCausalLM"]}
TOWER = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64}
PICTURES = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "tie_word_embeddings": False,
    "vision_config": TOWER,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
}


@pytest.mark.parametrize("config", [GEMMA, UNGATED, PICTURES], ids=lambda c: c["model_type"])
def test_plan_from_values_is_of_the_model_that_transformers_builds(config):
    """A head that the class ties by default, layers without a gate, a tower that reads pictures."""
    exact = sum(p.numel() for p in meta_model(SIZES | config).parameters())
    found = from_values(SIZES | config, None)
    assert abs(found.parameters - exact) <= 0.02 * exact
    assert found.gated == (config is not UNGATED) and found.tied == (config is not PICTURES)
