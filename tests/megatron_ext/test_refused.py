"""Arguments of Megatron's that its layers of both specs refuse, by name. More are in tests/mistakes."""

from types import SimpleNamespace

import pytest
import torch.nn.functional as F
from megatron import core
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer import MLATransformerConfig

from megatron_ext import options
from megatron_ext.hybrid_specs import coat_parts
from megatron_ext.layer_specs import _TRANSFORMER_ENGINES, coat_layer_spec, sdpa_layer_spec
from tests.megatron_ext.layers import config

pytestmark = pytest.mark.usefixtures("megatron")

TE_ALONE = pytest.mark.skipif(HAVE_TE, reason="Transformer Engine's attention supports it")
# fields of the config, and words of the error
BOTH = [
    ({"fp4": "e2m1"}, "--fp4-format is not supported"),
    ({"multi_latent_attention": True, "mla_down_proj_fusion": True}, "--mla-down-proj-fusion.*remove it"),
    ({"multi_latent_attention": True, "tensor_model_parallel_size": 2}, "--tensor-model-parallel-size"),
    *(
        ({name: 2}, f"--{name.replace('_', '-')} is not supported.*remove it")
        for name in _TRANSFORMER_ENGINES
    ),
    pytest.param(
        {"context_parallel_size": 2},
        "--context-parallel-size is 2, for which attention is Transformer",
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
    ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local .*activations.cuda_graphs"),
    ({"defer_embedding_wgrad_compute": True}, "coat_layer_spec: --defer-embedding-wgrad-compute"),
    ({"delay_wgrad_compute": True}, "coat_layer_spec: --delay-wgrad-compute"),
    ({"gtp_weight_remat_size": 2}, "coat_layer_spec: --tensor-parallel-num-weight-shards"),
    ({"expert_gtp_weight_remat_size": 2}, "coat_layer_spec: --expert-tensor-parallel-num-weight-shards"),
    ({"num_moe_experts": 2, "moe_shared_expert_overlap": True}, "--moe-shared-expert-overlap"),
]
SDPA = [
    ({"num_moe_experts": 2, "moe_grouped_gemm": True}, "--moe-grouped-gemm is not supported"),
]


def cases(spec, refused):
    return [
        pytest.param(spec, *(c.values if hasattr(c, "values") else c), marks=getattr(c, "marks", ()))
        for c in refused
    ]


@pytest.mark.parametrize(
    ("spec", "fields", "text"), cases(coat_layer_spec, BOTH + COAT) + cases(sdpa_layer_spec, BOTH + SDPA)
)
def test_refused(spec, fields, text):
    settings = config(kind=MLATransformerConfig) if "multi_latent_attention" in fields else config()
    for name, value in fields.items():
        # not through the constructor, which may need Transformer Engine; some releases lack the field
        setattr(settings, name, value)
    with pytest.raises(ValueError, match=text):
        spec.module(settings, layer_number=1)


@pytest.mark.parametrize("spec", [coat_layer_spec, sdpa_layer_spec], ids=["coat", "sdpa"])
def test_middle_stages_that_get_no_documents(spec, monkeypatch):
    args = SimpleNamespace(sft=True, reset_attention_mask=False)
    monkeypatch.setattr(options, "megatron_lm", lambda: SimpleNamespace(get_args=lambda: args))
    monkeypatch.setattr(core, "__version__", "0.16.1")
    settings = config()
    spec.module(settings, layer_number=1)
    settings.pipeline_model_parallel_size = 3
    with pytest.raises(ValueError, match="--sft with --pipeline-model-parallel-size above 2"):
        spec.module(settings, layer_number=1)


def test_a_variant_of_attention_is_another_letter():
    """The hybrid stack builds variants for 'G'; '*' stays plain attention."""
    settings = config()
    settings.experimental_attention_variant = "gdn2"
    assert coat_parts(settings, experts=False).self_attention
