"""Layer specs, for `megatron_ext.spec` and for scripts with `GPTModel(config, <spec>, ...)`.

`coat_layer_spec`: linear layers compute in FP8, and tensors saved for backward have 8 bits, except
attention's.
`sdpa_layer_spec`: Megatron's own layer on scaled_dot_product_attention: the BF16 baseline.

Each is one module-level ModuleSpec, the only form that every supported Megatron accepts. Its layer class
derives the parts from `config` by rewriting Megatron's own local spec. So both follow Megatron's arguments
and versions, and one spec builds dense layers and layers with experts. The final norm stays Megatron's,
patched where it would fail (`torch_norm.py`). Under context parallelism core attention is Transformer
Engine's, which saves BF16.
"""

from dataclasses import replace

import torch

from coat_ds.log import log_once
from coat_ds.versions import MEGATRON_CORE
from coat_kernels import libraries
from coat_kernels.graphs import Graphs

try:
    from megatron import core
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
        get_transformer_layer_offset,
    )
    from packaging.version import Version

    from megatron_ext import options
    from megatron_ext.layers.attention import (
        CoatCoreAttention,
        NoCrossAttention,
        SDPACoreAttention,
        core_attention_of,
    )
    from megatron_ext.layers.decoder_layer import fused_forward
    from megatron_ext.layers.latent import (
        CoatMLASelfAttention,
        check_latent_attention,
        latent_parts,
        repair_latent_attention,
    )
    from megatron_ext.layers.linear import CoatColumnParallelLinear, CoatRowParallelLinear, check_arguments
    from megatron_ext.layers.mlp import CoatMLP
    from megatron_ext.layers.moe import CoatMoELayer, is_moe_layer, repair_router
    from megatron_ext.layers.norm import CoatHeadNorm, CoatNorm, coat_bias_dropout_add
    from megatron_ext.layers.process_groups import end_graphs_first
    from megatron_ext.layers.self_attention import CoatSelfAttention
    from megatron_ext.layers.torch_norm import OF_BLOCKS, local_norm, replace_final_norm
    from megatron_ext.optimizer import seam
except ImportError as error:
    # Megatron 0.16 logs an ImportError of a spec's module and continues without the spec
    raise RuntimeError(
        f"megatron_ext.layer_specs could not be imported: {error}. It needs megatron-core "
        f"{MEGATRON_CORE.oldest} or newer "
        'and this project installed in the same environment: pip install "coat-train[megatron]".'
    ) from error
if not Version(MEGATRON_CORE.oldest) <= Version(core.__version__) < Version(MEGATRON_CORE.untried):
    raise RuntimeError(
        f"megatron_ext.layer_specs needs megatron-core {MEGATRON_CORE.oldest} or newer and older than "
        f'{MEGATRON_CORE.untried}, found {core.__version__}. pip install "coat-train[megatron]" brings one.'
    )


# Transformer Engine's layers; some releases lack some of them
_TRANSFORMER_ENGINES = (
    "use_transformer_engine_op_fuser",
    "use_grouped_gemm_for_dense_mlp",
    "use_grouped_gemm_for_shared_expert",
    "moe_mlp_glu_interleave_size",
    "moe_shared_expert_glu_interleave_size",
    "overlap_dispatch_backward_with_experts_wgrad",
)


def _local_parts(config, experts: bool) -> TransformerLayerSubmodules:
    """The parts of Megatron's own layer for `config`, dense or with experts, with attention on SDPA."""
    options.refuse(
        __name__,
        {
            "--fp8-format (coat_layer_spec brings its own FP8, without Transformer Engine)": config.fp8,
            "--fp4-format": getattr(config, "fp4", None),
            "--kitchen-config-file or --kitchen-recipe-number": config.use_kitchen,
            "--batch-invariant-mode": config.batch_invariant_mode,
            **{f"--{name.replace('_', '-')}": getattr(config, name, None) for name in _TRANSFORMER_ENGINES},
        },
    )
    if config.multi_latent_attention:
        check_latent_attention(config)
        repair_latent_attention()
    parts = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if experts else None,
        multi_latent_attention=config.multi_latent_attention,
        qk_layernorm=config.qk_layernorm,
        qk_l2_norm=config.qk_l2_norm,
        normalization=config.normalization,
    ).submodules
    inner = vars(parts.self_attention.submodules)
    norms = {name: local_norm(found) for name, found in inner.items() if name.endswith("_layernorm")}
    parts = _with_attention(parts, core_attention=core_attention_of(config, SDPACoreAttention), **norms)
    return replace(
        parts,
        input_layernorm=local_norm(parts.input_layernorm),
        cross_attention=NoCrossAttention,
        pre_mlp_layernorm=local_norm(parts.pre_mlp_layernorm),
    )


def _with_attention(parts: TransformerLayerSubmodules, **modules) -> TransformerLayerSubmodules:
    """`parts` with other modules inside self-attention."""
    attention = parts.self_attention
    return replace(
        parts, self_attention=replace(attention, submodules=replace(attention.submodules, **modules))
    )


def _has_experts(
    config,
    layer_number: int = 1,
    *_,
    vp_stage=None,
    pg_collection=None,
    is_mtp_layer: bool = False,
    add_layer_offset: bool = True,
    **__,
) -> bool:
    """Whether the layer that `TransformerLayer` builds from these arguments has experts.

    Layers of multi-token prediction are like the decoder's last. megatron-core 0.16 continues the numbering
    for them.
    """
    last = config.num_layers - 1
    if is_mtp_layer:
        return is_moe_layer(config, last)
    offset = 0
    if add_layer_offset:
        rank = None if pg_collection is None else pg_collection.pp.rank()
        offset = get_transformer_layer_offset(config, vp_stage, rank)
    return is_moe_layer(config, min(layer_number - 1 + offset, last))


def _check_layers(config) -> None:
    """Raises ValueError for arguments that make Megatron choose other kinds of layers, which `--spec`
    replaces. In the hybrid stack the pattern chooses the layers.
    """
    host = options.megatron_lm()
    sft = host is not None and getattr(host.get_args(), "sft", False)
    middle_stages = sft and config.pipeline_model_parallel_size > 2
    options.refuse(
        __name__,
        {
            "--experimental-attention-variant": config.experimental_attention_variant,
            "--heterogeneous-layers-config-path": config.heterogeneous_block_specs,
            "--sft with --pipeline-model-parallel-size above 2 (middle stages get no documents before "
            "megatron-core 0.17, and would attend across them)": (
                middle_stages and Version(core.__version__) < Version("0.17")
            ),
        },
    )


class SDPATransformerLayer(TransformerLayer):
    """Megatron's own local layer with `SDPACoreAttention` as its core attention."""

    def __init__(self, config, submodules=None, *args, **kwargs):
        _check_layers(config)
        super().__init__(config, sdpa_parts(config, _has_experts(config, *args, **kwargs)), *args, **kwargs)


class CoatTransformerLayer(TransformerLayer):
    """Megatron's own local layer with FP8 linears, norms and feed-forward.

    Raises ValueError at construction for options that its parts do not support, naming the argument to
    change.
    """

    # under DeepSpeed's ZeRO-3 (`coat_ds.zero.layer_units`)
    zero3_unit = False

    def __init__(self, config, submodules=None, *args, **kwargs):
        _check_layers(config)
        super().__init__(config, coat_parts(config, _has_experts(config, *args, **kwargs)), *args, **kwargs)
        self.graphs = Graphs()
        for line in libraries.conflicts():
            log_once(line)
        if config.tensor_model_parallel_size > 1:
            end_graphs_first()

    def forward(self, *args, **kwargs):
        y = fused_forward(self, args, kwargs)
        if y is not None:
            return y, None
        return super().forward(*args, **kwargs)


def sdpa_parts(config, experts: bool) -> TransformerLayerSubmodules:
    """The parts of Megatron's own layer on SDPA for `config`, dense or with experts.

    Raises ValueError for unsupported arguments, naming the argument to change.
    """
    if experts:
        repair_router()
    latent = config.multi_latent_attention and config.tensor_model_parallel_size > 1
    options.refuse(
        'sdpa_layer_spec ("activations": false)',
        {
            "--moe-grouped-gemm": experts and config.moe_grouped_gemm,
            "--tensor-model-parallel-size above 1 (Megatron's own --multi-latent-attention then loses a part "
            "of the gradients; FP8 layers do not)": latent,
        },
    )
    return _local_parts(config, experts)


def coat_parts(config, experts: bool) -> TransformerLayerSubmodules:
    """The parts of a COAT layer for `config`, dense or with experts."""
    recomputed = config.recompute_modules if config.recompute_granularity == "selective" else ()
    options.refuse(
        "coat_layer_spec",
        {
            "'layernorm' of --recompute-modules (outputs of norms are not kept)": "layernorm" in recomputed,
            "--first-last-layers-bf16 (name the layers in --te-precision-config-file, with "
            '{"coat": {"enabled": false}})': config.first_last_layers_bf16,
            # in a user's own script parameters may be FP32 until Megatron's Float16Module wraps the model
            '--fp16 (take --bf16, or "activations": false for Megatron\'s own layers)': (
                config.fp16 or config.params_dtype == torch.float16
            ),
            "--mlp-chunks-for-training above 1": getattr(config, "mlp_chunks_for_training", 1) > 1,
        },
    )
    check_arguments(config, "coat_layer_spec")
    parts = _local_parts(config, experts)
    if config.multi_latent_attention:
        attention, linears = CoatMLASelfAttention, latent_parts(parts.self_attention.submodules)
    else:
        attention = CoatSelfAttention
        linears = {"linear_qkv": CoatColumnParallelLinear, "linear_proj": CoatRowParallelLinear}
        linears |= _head_norms(config)
    parts = _with_attention(parts, core_attention=core_attention_of(config, CoatCoreAttention), **linears)
    return replace(
        parts,
        input_layernorm=CoatNorm,
        pre_mlp_layernorm=CoatNorm,
        self_attention=replace(parts.self_attention, module=attention),
        self_attn_bda=coat_bias_dropout_add,
        mlp=CoatMoELayer if experts else CoatMLP,
        mlp_bda=coat_bias_dropout_add,
    )


def _head_norms(config) -> dict[str, type]:
    """The norms of queries and of keys. LayerNorms, and norms without a weight, stay Megatron's."""
    if not config.qk_layernorm or config.qk_l2_norm or config.normalization != "RMSNorm":
        return {}
    return {"q_layernorm": CoatHeadNorm, "k_layernorm": CoatHeadNorm}


replace_final_norm(OF_BLOCKS)
seam.watch()
coat_layer_spec = ModuleSpec(module=CoatTransformerLayer, submodules=TransformerLayerSubmodules())
sdpa_layer_spec = ModuleSpec(module=SDPATransformerLayer, submodules=TransformerLayerSubmodules())
