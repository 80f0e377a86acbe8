"""Undocumented parts of megatron-core that `megatron_ext` uses, by name: a version that changes one of these
fails here first. `make test-megatron-main` runs this against a checkout."""

import dataclasses
import inspect
import pkgutil

import pytest
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from megatron_ext.layer_specs import sdpa_layer_spec
from megatron_ext.model import ModelShape, build_gpt

# what is called, and the parameters that are passed by name. Imports find the other names
NAMES: dict[str, str] = {
    "dist_checkpointing.ShardedTensor.from_rank_offsets": "key data rank_offsets replica_id prepend_axis_num",
    "dist_checkpointing.mapping.ShardedTensorFactory": "key data build_fn merge_fn replica_id",
    "fusions.fused_bias_dropout.get_bias_dropout_add": "training fused",
    "fusions.fused_layer_norm.FusedLayerNorm.__init__": "self config hidden_size eps",
    "models.gpt.gpt_layer_specs.get_gpt_layer_local_spec": "num_experts qk_layernorm qk_l2_norm "
    "normalization multi_latent_attention",
    "parallel_state.get_data_parallel_group": "with_context_parallel",
    "parallel_state.is_pipeline_first_stage": "ignore_virtual vp_stage",
    "parallel_state.is_pipeline_last_stage": "ignore_virtual vp_stage",
    "ssm.mlp_layer.MLPLayer.__init__": "self config submodules",
    "tensor_parallel.layers.ColumnParallelLinear.__init__": "self input_size output_size config init_method "
    "bias gather_output stride skip_bias_add is_expert tp_comm_buffer_name tp_group",
    "tensor_parallel.layers.ColumnParallelLinear._forward_impl": "self input weight",
    "tensor_parallel.layers.RowParallelLinear.__init__": "self input_size output_size config init_method "
    "bias input_is_parallel skip_bias_add is_expert tp_comm_buffer_name tp_group",
    "tensor_parallel.layers.RowParallelLinear._forward_impl": "self input weight",
    "tensor_parallel.mappings.gather_from_tensor_model_parallel_region": "group",
    "tensor_parallel.mappings.scatter_to_sequence_parallel_region": "group",
    "transformer.attention.SelfAttention.forward": "self hidden_states attention_mask rotary_pos_emb",
    "transformer.attention.SelfAttention.get_query_key_value_tensors": "self hidden_states",
    "transformer.mlp.MLP.__init__": "self config submodules is_expert ffn_hidden_size tp_group",
    "transformer.mlp.MLP.forward": "self hidden_states per_token_scale",
    "transformer.mlp.apply_swiglu_sharded_factory": "original_sh_ten sharded_offsets singleton_local_shards",
    "transformer.moe.experts.SequentialMLP.__init__": "self num_local_experts config submodules "
    "pg_collection",
    "transformer.moe.experts.SequentialMLP.forward": "self permuted_local_hidden_states tokens_per_expert "
    "permuted_probs",
    "transformer.moe.moe_layer.MoELayer.__init__": "self config submodules layer_number pg_collection",
    "transformer.moe.shared_experts.SharedExpertMLP.__init__": "self config submodules gate pg_collection",
    "transformer.multi_latent_attention.MLASelfAttention.forward": "self hidden_states",
    "transformer.transformer_layer.TransformerLayer.__init__": "self config submodules layer_number vp_stage "
    "pg_collection",
    "transformer.transformer_layer.get_transformer_layer_offset": "config vp_stage pp_rank",
    "transformer.utils.make_sharded_object_for_checkpoint": "obj key sharded_offsets replica_id",
}
# fields of dataclasses that are replaced
FIELDS: dict[str, str] = {
    "transformer.attention.SelfAttentionSubmodules": "linear_qkv core_attention linear_proj q_layernorm "
    "k_layernorm",
    "transformer.mlp.MLPSubmodules": "linear_fc1 linear_fc2",
    "transformer.moe.moe_layer.MoESubmodules": "experts shared_experts router",
    "transformer.multi_latent_attention.MLASelfAttentionSubmodules": "linear_q_proj linear_q_down_proj "
    "linear_q_up_proj linear_kv_down_proj linear_kv_up_proj core_attention linear_proj q_layernorm "
    "kv_layernorm",
    "transformer.spec_utils.ModuleSpec": "module params submodules",
    "transformer.transformer_layer.TransformerLayerSubmodules": "input_layernorm self_attention "
    "self_attn_bda pre_mlp_layernorm mlp mlp_bda sharded_state_dict_keys_map",
}
CONFIG = (
    "activation_func activation_func_clamp_value activation_func_fp8_input_store add_bias_linear "
    "attention_backend attention_dropout attention_output_gate batch_invariant_mode bias_activation_fusion "
    "context_parallel_size cuda_graph_impl defer_embedding_wgrad_compute delay_wgrad_compute "
    "experimental_attention_variant ffn_hidden_size fine_grained_activation_offloading "
    "first_last_layers_bf16 fp8 gated_linear_unit glu_linear_offset heterogeneous_block_specs hidden_size "
    "layernorm_epsilon layernorm_zero_centered_gamma moe_apply_probs_on_input moe_ffn_hidden_size "
    "moe_grouped_gemm moe_layer_freq moe_shared_expert_overlap mrope_section multi_latent_attention "
    "no_rope_freq normalization num_moe_experts num_query_groups params_dtype qk_l2_norm qk_layernorm "
    "recompute_granularity recompute_modules rotary_interleaved sequence_parallel use_cpu_initialization "
    "use_kitchen use_te_activation_func"
)


def _find(name: str):
    return pkgutil.resolve_name(f"megatron.core.{name}")


@pytest.mark.parametrize("name", NAMES)
def test_megatron_has_the_parameters(name):
    assert not set(NAMES[name].split()) - inspect.signature(_find(name)).parameters.keys()


@pytest.mark.parametrize("name", FIELDS)
def test_megatron_has_the_fields(name):
    assert not set(FIELDS[name].split()) - {field.name for field in dataclasses.fields(_find(name))}


# fields of latent attention
LATENT = "cache_mla_latents q_lora_rank qk_pos_emb_head_dim"


def test_megatron_config_has_the_fields():
    assert not set(CONFIG.split()) - {field.name for field in dataclasses.fields(TransformerConfig)}
    assert not set(LATENT.split()) - {field.name for field in dataclasses.fields(MLATransformerConfig)}


# attributes of modules that Megatron builds
BUILT: dict[str, str] = {
    "self_attention": "hidden_size_per_attention_head linear_proj linear_qkv num_query_groups_per_partition "
    "world_size",
    "self_attention.linear_qkv": "allreduce_dgrad explicit_expert_comm output_size_per_partition "
    "sequence_parallel skip_bias_add tp_group",
    "self_attention.linear_proj": "bias explicit_expert_comm input_size_per_partition sequence_parallel "
    "skip_bias_add tp_group",
    "mlp.router": "weight",
    "mlp.experts": "dp_group ep_group local_experts num_local_experts tp_group",
    "mlp.experts.local_experts.0": "config linear_fc1 linear_fc2",
}


@pytest.fixture(scope="module")
def layer(megatron):
    """A layer of Megatron's own with experts."""
    model = build_gpt(
        ModelShape(1, 32, 48, 4, 2),
        sdpa_layer_spec,
        seq_length=16,
        vocab_size=64,
        num_moe_experts=2,
        moe_token_dispatcher_type="allgather",
    )
    return model.decoder.layers[0]


@pytest.mark.parametrize("name", BUILT)
def test_megatron_modules_have_the_attributes(layer, name):
    module = layer.get_submodule(name)
    assert not [attribute for attribute in BUILT[name].split() if not hasattr(module, attribute)]
