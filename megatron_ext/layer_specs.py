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

from coat_ds.config import ActivationsConfig
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

    from megatron_ext import options, unsupported
    from megatron_ext.layers.attention import (
        CoatCoreAttention,
        NoCrossAttention,
        SDPACoreAttention,
        core_attention_of,
    )
    from megatron_ext.layers.decoder_layer import fused_forward
    from megatron_ext.layers.latent import (
        CoatMLASelfAttention,
        latent_parts,
        repair_latent_attention,
    )
    from megatron_ext.layers.linear import CoatColumnParallelLinear, CoatRowParallelLinear
    from megatron_ext.layers.mlp import CoatMLP
    from megatron_ext.layers.moe import CoatMoELayer, is_moe_layer, repair_router
    from megatron_ext.layers.norm import CoatHeadNorm, CoatNorm, coat_bias_dropout_add
    from megatron_ext.layers.process_groups import end_graphs_first
    from megatron_ext.layers.self_attention import CoatSelfAttention
    from megatron_ext.layers.settings import set_activations
    from megatron_ext.layers.torch_norm import OF_BLOCKS, local_norm, replace_final_norm
    from megatron_ext.optimizer import patches
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


def _local_parts(config, experts: bool) -> TransformerLayerSubmodules:
    """The parts of Megatron's own layer for `config`, dense or with experts, with attention on SDPA."""
    if config.multi_latent_attention:
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


class SDPATransformerLayer(TransformerLayer):
    """Megatron's own local layer with `SDPACoreAttention` as its core attention."""

    def __init__(self, config, submodules=None, *args, **kwargs):
        unsupported.check_layers(config, fp8=False, whole=True)
        super().__init__(config, sdpa_parts(config, _has_experts(config, *args, **kwargs)), *args, **kwargs)


class CoatTransformerLayer(TransformerLayer):
    """Megatron's own local layer with FP8 linears, norms and feed-forward.

    activations, source: as of `configure_layer`.
    Raises ValueError at construction for arguments of Megatron that it does not support
    (`megatron_ext.unsupported`), naming the argument to change.
    """

    def __init__(self, config, submodules=None, *args, activations=None, source=None, **kwargs):
        unsupported.check_layers(config, fp8=True, whole=True)
        super().__init__(config, coat_parts(config, _has_experts(config, *args, **kwargs)), *args, **kwargs)
        configure_layer(self, activations, source)
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


def configure_layer(
    layer: torch.nn.Module, activations: ActivationsConfig | None, source: str | None
) -> None:
    """Ends the construction of a layer of COAT modules.

    activations: settings of the spec; None for the defaults. source: where they come from, for messages.
    Raises CoatConfigError without settings if `COAT_CONFIG` names a file, and ValueError for settings that a
    module does not support.
    """
    # under DeepSpeed's ZeRO-3 (`coat_ds.zero.layer_units`)
    layer.zero3_unit = False  # type: ignore[assignment]
    if activations is None:
        options.check_unread()
    else:
        set_activations(layer, activations, source)


def sdpa_parts(config, experts: bool) -> TransformerLayerSubmodules:
    """The parts of Megatron's own layer on SDPA for `config`, dense or with experts."""
    if experts:
        repair_router()
    return _local_parts(config, experts)


def coat_parts(config, experts: bool) -> TransformerLayerSubmodules:
    """The parts of a COAT layer for `config`, dense or with experts."""
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
patches.watch()
coat_layer_spec = ModuleSpec(module=CoatTransformerLayer, submodules=TransformerLayerSubmodules())
sdpa_layer_spec = ModuleSpec(module=SDPATransformerLayer, submodules=TransformerLayerSubmodules())
