"""Arguments of Megatron's that its layers of both specs refuse, by name. More are in tests/mistakes."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch.nn.functional as F
from megatron import core
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from coat_ds.config import CoatConfigError
from megatron_ext import options
from megatron_ext.hybrid_specs import AttentionLayer, coat_parts
from megatron_ext.layer_specs import coat_layer_spec, sdpa_layer_spec
from tests.megatron_ext.experts import grouped_mixture
from tests.megatron_ext.layers import config

pytestmark = pytest.mark.usefixtures("megatron")

MLA = {"multi_latent_attention": True}
LOGITS = "qk_clip", "log_max_attention_logit"
TE_ALONE = pytest.mark.skipif(HAVE_TE, reason="Transformer Engine's attention supports it")
# fields of the config, and words of the error
BOTH = [
    ({"fp4": "e2m1"}, "--fp4-format is not supported"),
    ({"normalization": "L2Norm"}, "--normalization L2Norm is not supported. Take RMSNorm or LayerNorm"),
    (MLA | {"mla_down_proj_fusion": True}, "--mla-down-proj-fusion is not supported. Remove it"),
    *(
        ({name: 2}, f"--{name.replace('_', '-')} is not supported: Transformer Engine.*Remove it")
        for name in (
            "use_transformer_engine_op_fuser",
            "use_grouped_gemm_for_dense_mlp",
            "use_grouped_gemm_for_shared_expert",
            "moe_mlp_glu_interleave_size",
            "moe_shared_expert_glu_interleave_size",
            "overlap_dispatch_backward_with_experts_wgrad",
        )
    ),
    # without these errors Megatron's loop would end in an AttributeError after the first step
    *(({name: True}, f"--{name.replace('_', '-')} is not supported") for name in LOGITS),
    *(
        ({"window_size": window}, f"--window-size {window[0]},{window[1]}.*128,0")
        for window in ((8, 1), (-1, 0))
    ),
    *(
        (feature | other, f"{argument} with {text}.*FlashAttention")
        for feature, argument in (
            ({"window_size": (8, 0)}, "--window-size"),
            ({"softmax_type": "learnable"}, "--softmax-type learnable"),
        )
        for other, text in (
            ({"attention_dropout": 0.1}, "--attention-dropout 0.1"),
            ({"attention_dropout": 0.0, "attention_backend": AttnBackend.fused}, "--attention-backend fused"),
        )
    ),
    (
        MLA
        | {
            "attention_backend": AttnBackend.flash,
            "qk_head_dim": 24,
            "qk_pos_emb_head_dim": 16,
            "v_head_dim": 16,
        },
        "--attention-backend flash.*--qk-head-dim 24 and --qk-pos-emb-head-dim 16 differ from --v-head",
    ),
    pytest.param(
        {"context_parallel_size": 2},
        "--context-parallel-size 2 is not supported: attention is then Transformer Engine's",
        marks=TE_ALONE,
    ),
]
COAT = [
    ({"activation_func": F.relu}, "SiLU, GELU or squared ReLU.*--squared-relu"),
    ({"activation_func_clamp_value": 2.0}, "without activation_func_clamp_value .* 2.0"),
    ({"glu_linear_offset": 1.0}, "and glu_linear_offset, .* and 1.0"),
    ({"activation_func_fp8_input_store": True}, "--activation-func-fp8-input-store"),
    # FP32 parameters until Megatron's Float16Module wraps the model
    ({"fp16": True}, "--fp16"),
    ({"mlp_chunks_for_training": 2}, "--mlp-chunks-for-training above 1"),
    ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local is.*activations.cuda_graphs"),
    ({"defer_embedding_wgrad_compute": True}, "coat_layer_spec: --defer-embedding-wgrad-compute"),
    ({"delay_wgrad_compute": True}, "coat_layer_spec: --delay-wgrad-compute"),
    ({"gtp_weight_remat_size": 2}, "coat_layer_spec: --tensor-parallel-num-weight-shards"),
    ({"expert_gtp_weight_remat_size": 2}, "coat_layer_spec: --expert-tensor-parallel-num-weight-shards"),
    ({"num_moe_experts": 2, "moe_shared_expert_overlap": True}, "--moe-shared-expert-overlap"),
]
SDPA = [
    ({"num_moe_experts": 2, "moe_grouped_gemm": True}, "--moe-grouped-gemm is not supported"),
    # Megatron's own latent attention, whose gradients are wrong there
    (MLA | {"tensor_model_parallel_size": 2}, "--tensor-model-parallel-size"),
]


def cases(spec, refused):
    return [
        pytest.param(spec, *(c.values if hasattr(c, "values") else c), marks=getattr(c, "marks", ()))
        for c in refused
    ]


@pytest.mark.parametrize(
    ("spec", "fields", "text"), cases(coat_layer_spec, BOTH + COAT) + cases(sdpa_layer_spec, BOTH + SDPA)
)
def test_unsupported_arguments_are_refused(spec, fields, text):
    settings = config(kind=MLATransformerConfig) if "multi_latent_attention" in fields else config()
    for name, value in fields.items():
        # not through the constructor, which may need Transformer Engine; some releases lack the field
        setattr(settings, name, value)
    with pytest.raises(ValueError, match=text):
        spec.module(settings, layer_number=1)


@pytest.mark.parametrize("spec", [coat_layer_spec, sdpa_layer_spec], ids=["coat", "sdpa"])
def test_unsupported_arguments_of_megatron_lm_are_refused(spec, monkeypatch):
    args = SimpleNamespace(sft=True, reset_attention_mask=False)
    monkeypatch.setattr(options, "megatron_lm", lambda: SimpleNamespace(get_args=lambda: args))
    monkeypatch.setattr(core, "__version__", "0.16.1")
    settings = config()
    spec.module(settings, layer_number=1)
    # the default of Megatron's dropout is 0.1
    args.reset_attention_mask = True
    with pytest.raises(ValueError, match="--reset-attention-mask with --attention-dropout 0.1"):
        spec.module(settings, layer_number=1)
    settings.pipeline_model_parallel_size = 3
    with pytest.raises(ValueError, match="--sft with --pipeline-model-parallel-size above 2"):
        spec.module(settings, layer_number=1)


def test_hybrid_attention_ignores_experimental_attention_variant():
    """The hybrid stack builds variants for 'G'; '*' stays plain attention."""
    settings = config()
    settings.experimental_attention_variant = "gdn2"
    AttentionLayer(settings, parts=coat_parts)


_FIELDS = {field.name for field in dataclasses.fields(TransformerConfig)}


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
            "'moe_act' of --recompute-modules with --moe-grouped-gemm is not supported: ",
        ),
        (
            {
                "fine_grained_activation_offloading": True,
                "offload_modules": ["moe_act", "expert_fc1", "core_attn"],
            },
            "'expert_fc1' of --offload-modules with --moe-grouped-gemm is not supported",
        ),
        (
            {"moe_apply_probs_on_input": True},
            "--moe-router-topk above 1 and --moe-grouped-gemm is not supported",
        ),
        (
            {"moe_use_legacy_grouped_gemm": True},
            "--moe-use-legacy-grouped-gemm with --moe-grouped-gemm is not supported",
        ),
        ({"moe_mlp_glu_interleave_size": 16}, "--moe-mlp-glu-interleave-size is not supported"),
        (
            {"use_te_activation_func": True, "bias_activation_fusion": False},
            "--use-te-activation-func is not supported",
        ),
        ({"activation_func_fp8_input_store": True}, "--activation-func-fp8-input-store is not supported: "),
        ({"hidden_size": 72}, "--hidden-size 72 with --moe-grouped-gemm .* multiples of 16"),
        (
            {"moe_ffn_hidden_size": 40},
            "--moe-ffn-hidden-size 40 with --expert-tensor-parallel-size 1 and .* multiples of 16",
        ),
    ],
    ids=str,
)
def test_unsupported_arguments_with_grouped_experts_are_refused(megatron, overrides, text):
    if overrides.keys() - _FIELDS - {"activations"}:
        pytest.skip("megatron-core of this release has no such field")
    only_experts = {"moe_layer_freq": [1, 1], "moe_shared_expert_intermediate_size": None}
    with pytest.raises(ValueError, match=text):
        grouped_mixture(**only_experts, **overrides)


def test_grouped_experts_refuse_options_of_the_precision_file(megatron):
    _, experts = grouped_mixture()
    for block in (None, {}):
        config = {} if block is None else {"coat": block}
        experts.linear_fc1.finish_init(SimpleNamespace(config=config))
    place = SimpleNamespace(module_path="decoder.layers.1.mlp.experts.linear_fc1")
    for block in ({"backward_format": "e4m3"}, {"enabled": True}, {"enabled": False}):
        wide = SimpleNamespace(config={"coat": block}, config_key="wide", match_input=place)
        with pytest.raises(
            CoatConfigError, match="configs.wide.coat, for decoder.*linear_fc1.*multiply in E4M3"
        ):
            experts.linear_fc1.finish_init(wide)
