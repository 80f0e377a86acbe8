"""Megatron's arguments that COAT does not support: one table for layers, one for the optimizer.

`check_layers` runs before Megatron builds a layer, and `check_optimizer` before it builds the optimizer: in a
user's own script no earlier code has the whole config. Modules of a layer check by themselves only what the
config does not determine: options of the "coat" block, the activation of a layer that has one, and the
arguments of a forward.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from megatron import core
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from packaging.version import Version

from coat_ds.config import CoatConfigError
from coat_kernels.fp8 import ALIGNMENT
from megatron_ext import options

# since megatron-core 0.19 also queries that are not compressed
NORMS_ALL_QUERIES = hasattr(MLASelfAttention, "_resolve_qk_norm_config")


class Unsupported(NamedTuple):
    """An argument of Megatron, alone or with another one."""

    argument: str
    """As the user writes it. `{c.name}` stands for the value of a field."""
    given: Callable[[Any], Any]
    """Whether a config `c` has it. Fields that this release of Megatron lacks are None."""
    reason: str = ""
    fix: str = "Remove it"


class _Fields:
    """The fields of several configs; None for a field that none of them has."""

    def __init__(self, *configs: Any):
        self._configs = configs

    def __getattr__(self, name: str) -> Any:
        return next((getattr(config, name) for config in self._configs if hasattr(config, name)), None)


def _check(where: str, rows: Iterable[Unsupported], *configs: Any) -> None:
    """Raises CoatConfigError, a ValueError, for the first argument that `configs` have."""
    c = _Fields(*configs)
    for argument, given, reason, fix in rows:
        if given(c):
            why = f": {reason.format(c=c)}" if reason else ""
            raise CoatConfigError(f"{where}: {argument.format(c=c)} is not supported{why}. {fix}.")


def _fields(*names: str, **text: str) -> tuple[Unsupported, ...]:
    """Rows for fields that are unsupported whenever they are set."""
    return tuple(
        Unsupported(f"--{name.replace('_', '-')}", lambda c, name=name: getattr(c, name), **text)
        for name in names
    )


def _recomputes(c, module: str) -> bool:
    return c.recompute_granularity == "selective" and module in c.recompute_modules


def _needs_flash(argument: str, given: Callable[[Any], Any]) -> tuple[Unsupported, Unsupported]:
    """Rows for an argument that needs torch's variable-length attention."""
    reason = "only FlashAttention can run it"
    others = AttnBackend.fused, AttnBackend.unfused
    return (
        Unsupported(
            f"{argument} with --attention-dropout {{c.attention_dropout}}",
            lambda c: given(c) and c.attention_dropout,
            f"{reason}, which has no dropout",
            "Set --attention-dropout to 0",
        ),
        Unsupported(
            f"{argument} with --attention-backend {{c.attention_backend.name}}",
            lambda c: given(c) and c.attention_backend in others,
            reason,
            "Take --attention-backend auto or flash",
        ),
    )


# for the layers of both specs; some releases lack some of the fields
_LAYERS = (
    Unsupported(
        "--fp8-format", lambda c: c.fp8, "coat_layer_spec has its own FP8, without Transformer Engine"
    ),
    Unsupported(
        "--normalization {c.normalization}",
        lambda c: c.normalization not in ("RMSNorm", "LayerNorm"),
        fix="Take RMSNorm or LayerNorm",
    ),
    *_fields("batch_invariant_mode", "mla_down_proj_fusion"),
    Unsupported("--fp4-format", lambda c: c.fp4),
    Unsupported("--kitchen-config-file or --kitchen-recipe-number", lambda c: c.use_kitchen),
    *_fields(
        "use_transformer_engine_op_fuser",
        "use_grouped_gemm_for_dense_mlp",
        "use_grouped_gemm_for_shared_expert",
        "moe_mlp_glu_interleave_size",
        "moe_shared_expert_glu_interleave_size",
        "overlap_dispatch_backward_with_experts_wgrad",
        reason="Transformer Engine's layers have it",
    ),
    *_fields("cache_mla_latents", reason="no cache is read, and decoding is not supported"),
    Unsupported(
        "--qk-layernorm without --q-lora-rank",
        lambda c: NORMS_ALL_QUERIES and c.multi_latent_attention and c.qk_layernorm and c.q_lora_rank is None,
        f"megatron-core {core.__version__} norms queries in a layer of Transformer Engine's",
        "Give --q-lora-rank, remove --qk-layernorm, or take megatron-core 0.18, which norms keys and values "
        "alone",
    ),
    Unsupported(
        "--context-parallel-size {c.context_parallel_size}",
        lambda c: c.context_parallel_size > 1 and not HAVE_TE,
        "attention is then Transformer Engine's, which could not be imported",
        "Remove it, or install Transformer Engine: pip install transformer-engine[pytorch]",
    ),
)
# for core attention on torch's functions: there is no context parallelism
_ATTENTION = (
    *_fields("qk_clip", "log_max_attention_logit", reason="no attention of torch returns its largest logit"),
    Unsupported(
        "--window-size {c.window_size[0]},{c.window_size[1]}",
        lambda c: c.window_size and (c.window_size[0] < 0 or c.window_size[1] != 0),
        "attention is causal, so a window has a number of earlier tokens and 0 later ones",
        "Write 128,0, for one",
    ),
    *_needs_flash("--window-size", lambda c: c.window_size),
    *_needs_flash("--reset-attention-mask", lambda c: c.reset_attention_mask),
    *_needs_flash("--softmax-type {c.softmax_type}", lambda c: c.softmax_type not in (None, "vanilla")),
    Unsupported(
        "--attention-backend flash",
        lambda c: (
            c.attention_backend == AttnBackend.flash
            and c.multi_latent_attention
            and c.qk_head_dim + c.qk_pos_emb_head_dim != c.v_head_dim
        ),
        "FlashAttention has heads of one width, and --qk-head-dim {c.qk_head_dim} and --qk-pos-emb-head-dim "
        "{c.qk_pos_emb_head_dim} differ from --v-head-dim {c.v_head_dim}",
        "Take --attention-backend auto or fused",
    ),
)
# for whole layers. In the hybrid stack the pattern chooses the layers
_WHOLE_LAYERS = (
    *_fields("experimental_attention_variant", reason="--spec builds layers of one kind"),
    Unsupported(
        "--heterogeneous-layers-config-path",
        lambda c: c.heterogeneous_block_specs,
        "--spec builds layers of one kind",
    ),
    Unsupported(
        "--sft with --pipeline-model-parallel-size above 2",
        lambda c: (
            c.sft and c.pipeline_model_parallel_size > 2 and Version(core.__version__) < Version("0.17")
        ),
        "middle stages get no documents before megatron-core 0.17, and would attend across them",
    ),
)
# for layers of the hybrid stack
_PARTS_OF_LAYERS = (
    Unsupported(
        "--multi-latent-attention with --hybrid-layer-pattern",
        lambda c: c.multi_latent_attention,
        "Megatron's hybrid stack builds it as another layer",
        "Remove one of them, or take pretrain_gpt.py with coat_layer_spec",
    ),
)
_SDPA = (
    Unsupported("--moe-grouped-gemm", lambda c: c.num_moe_experts and c.moe_grouped_gemm),
    Unsupported(
        "--tensor-model-parallel-size above 1 with --multi-latent-attention",
        lambda c: c.multi_latent_attention and c.tensor_model_parallel_size > 1,
        "Megatron's own layers then lose a part of the gradients; FP8 layers do not",
    ),
)


def _grouped(argument: str, given: Callable[[Any], Any], *text: str) -> Unsupported:
    """A row for the experts of `--moe-grouped-gemm`."""
    return Unsupported(
        f"{argument}{' and' if ' with ' in argument else ' with'} --moe-grouped-gemm",
        lambda c: c.num_moe_experts and c.moe_grouped_gemm and given(c),
        *text,
    )


_OFFLOADED = "expert_fc1", "moe_act", "fused_group_mlp"
_COAT = (
    Unsupported(
        "'layernorm' of --recompute-modules",
        lambda c: _recomputes(c, "layernorm"),
        "outputs of norms are not kept",
    ),
    *_fields(
        "first_last_layers_bf16",
        fix='Remove it, and name the layers in --te-precision-config-file with {"coat": {"enabled": false}}',
    ),
    Unsupported(
        "--fp16",
        # in a user's own script parameters may be FP32 until Megatron's Float16Module wraps the model
        lambda c: c.fp16 or c.params_dtype == torch.float16,
        fix='Take --bf16, or "activations": false for Megatron\'s own layers',
    ),
    Unsupported("--mlp-chunks-for-training above 1", lambda c: (c.mlp_chunks_for_training or 1) > 1),
    Unsupported("--tensor-parallel-num-weight-shards above 1", lambda c: (c.gtp_weight_remat_size or 1) > 1),
    Unsupported(
        "--expert-tensor-parallel-num-weight-shards above 1",
        lambda c: (c.expert_gtp_weight_remat_size or 1) > 1,
    ),
    *_fields("defer_embedding_wgrad_compute", "delay_wgrad_compute", "use_te_activation_func"),
    Unsupported(
        "--cuda-graph-impl {c.cuda_graph_impl}",
        # a replay does not mark the gradients that are in main_grad already, which Megatron's data parallel
        # hooks check
        lambda c: c.cuda_graph_impl not in (None, "none"),
        "COAT layers record CUDA graphs of their own, by coat.activations.cuda_graphs",
    ),
    *_fields("activation_func_fp8_input_store", reason="the activation's input is saved in 8 bits anyway"),
    *_fields("moe_shared_expert_overlap", reason="it runs Megatron's own shared experts, which save BF16"),
    _grouped(
        "--moe-apply-probs-on-input with --moe-router-topk above 1",
        lambda c: c.moe_apply_probs_on_input and c.moe_router_topk > 1,
    ),
    _grouped(
        "'moe_act' of --recompute-modules",
        lambda c: _recomputes(c, "moe_act"),
        "the activation's output is not kept",
    ),
    *(
        _grouped(
            f"'{name}' of --offload-modules",
            lambda c, name=name: c.fine_grained_activation_offloading and name in (c.offload_modules or ()),
        )
        for name in _OFFLOADED
    ),
    *(
        _grouped(row.argument, row.given)
        for row in _fields(
            "moe_use_legacy_grouped_gemm",
            "moe_single_grouped_weight",
            "moe_single_grouped_bias",
            "moe_expert_rank_capacity_factor",
            "moe_ncclep_static_shape",
        )
    ),
    _grouped(
        "--hidden-size {c.hidden_size}",
        lambda c: c.hidden_size % ALIGNMENT,
        f"the grouped GEMM has sizes that are multiples of {ALIGNMENT}",
        "Change it, or remove --moe-grouped-gemm",
    ),
    _grouped(
        "--moe-ffn-hidden-size {c.moe_ffn_hidden_size} with --expert-tensor-parallel-size "
        "{c.expert_tensor_parallel_size}",
        lambda c: c.moe_ffn_hidden_size // c.expert_tensor_parallel_size % ALIGNMENT,
        f"the grouped GEMM has sizes of each rank that are multiples of {ALIGNMENT}",
        "Change it or --expert-tensor-parallel-size, or remove --moe-grouped-gemm",
    ),
)
_OPTIMIZER = (
    Unsupported("--optimizer {c.optimizer}", lambda c: c.optimizer != "adam"),
    *_fields("optimizer_cpu_offload", "use_megatron_fsdp"),
    Unsupported("--no-decoupled-weight-decay", lambda c: not c.decoupled_weight_decay),
    *(
        Unsupported(
            f"--{name.replace('_', '-')}-dtype {{c.{name}_dtype}}",
            lambda c, name=name: getattr(c, f"{name}_dtype") not in (torch.float32, torch.uint8),
            "it is fp32 or fp8",
            f"Remove it, and set coat.optimizer.{name}_format",
        )
        for name in ("exp_avg", "exp_avg_sq")
    ),
    Unsupported(
        "--main-params-dtype {c.main_params_dtype}",
        lambda c: c.main_params_dtype != torch.float32,
        "master weights are fp32",
    ),
)
OPTIMIZER_OFF = 'or write "optimizer": {"enabled": false} in the file of COAT_CONFIG'


def check_layers(config, fp8: bool, *, whole: bool) -> None:
    """Raises CoatConfigError for an argument that the layers of a spec do not support.

    config: Megatron's TransformerConfig. fp8: layers of `coat_layer_spec`, else of `sdpa_layer_spec`.
    whole: of a GPT model, not of the hybrid stack.
    """
    rows = (*(_WHOLE_LAYERS if whole else _PARTS_OF_LAYERS), *(_COAT if fp8 else _SDPA), *_LAYERS)
    if config.context_parallel_size == 1:
        rows += _ATTENTION
    # some arguments of Megatron-LM's script are in no config
    running = options.megatron_lm()
    sources = (config,) if running is None else (config, running.get_args())
    _check("coat_layer_spec" if fp8 else 'sdpa_layer_spec ("activations": false)', rows, *sources)


def check_optimizer(config, model_chunks: Iterable[torch.nn.Module]) -> None:
    """Raises CoatConfigError for an argument that 8-bit optimizer states do not support.

    config: Megatron's OptimizerConfig.
    """
    rows = [row._replace(fix=f"{row.fix}, {OPTIMIZER_OFF}") for row in _OPTIMIZER]
    _check("8-bit optimizer states", rows, config, *(chunk.ddp_config for chunk in model_chunks))
