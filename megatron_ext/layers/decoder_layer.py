"""Megatron's dense decoder layer: the adapter to `coat_ds.layers.fused_layer`.

The fused layer computes the same as the modules, to the bit, in a fraction of the CPU time. It skips the
forward of the modules inside a layer, so it runs only where nothing depends on these calls: `dense_parts`
selects the layers, `why_not_fused` the forwards.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from torch.nn.modules.module import _has_any_global_hook

from coat_ds.layers import fused_layer
from coat_ds.layers.fused_layer import LayerOptions
from coat_kernels.attention import Documents
from coat_kernels.blocks import MlpOptions, QkvOptions
from coat_kernels.parallel import agreed
from megatron_ext.layers.attention import CoatCoreAttention, NoCrossAttention
from megatron_ext.layers.linear import CoatColumnParallelLinear, CoatRowParallelLinear
from megatron_ext.layers.mlp import CoatMLP
from megatron_ext.layers.norm import CoatHeadNorm, CoatNorm, coat_bias_dropout_add
from megatron_ext.layers.packed import Tables
from megatron_ext.layers.self_attention import CoatSelfAttention

_KINDS = {
    "input_layernorm": CoatNorm,
    "self_attention": CoatSelfAttention,
    "pre_cross_attn_layernorm": IdentityOp,
    "cross_attention": NoCrossAttention,
    "cross_attn_bda": IdentityFuncOp,
    "pre_mlp_layernorm": CoatNorm,
    "mlp": CoatMLP,
}

_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
# under --overlap-param-gather a hook on each module waits for the module's own parameters
_WAITS = f"{DistributedDataParallel._make_forward_pre_hook.__qualname__}.<locals>."
# arguments of the layer that may be given; callers give at most the first two by position
_ARGUMENTS = ("hidden_states", "attention_mask", "rotary_pos_emb", "packed_seq_params")
_NO_ARGUMENTS = dict.fromkeys(_ARGUMENTS)


class Parts(NamedTuple):
    """The modules of a dense layer that the blocks replace."""

    input_norm: CoatNorm
    attention: CoatSelfAttention
    qkv: CoatColumnParallelLinear
    proj: CoatRowParallelLinear
    mlp_norm: CoatNorm
    mlp: CoatMLP
    fc1: CoatColumnParallelLinear
    fc2: CoatRowParallelLinear
    # for queries and for keys, if the layer has them
    head_norms: tuple[CoatHeadNorm, ...]

    @property
    def linears(self) -> tuple:
        return self.qkv, self.proj, self.fc1, self.fc2


def dense_parts(layer: torch.nn.Module) -> Parts | str:
    """The parts of a Megatron TransformerLayer, if they are COAT's own classes and no part of the layer is
    recomputed, offloaded or replayed by itself; else why the layer cannot run fused."""
    config, found = layer.config, layer._modules
    # plain loops, and no lookups by `__getattr__`: it runs for each layer in each forward
    for name, kind in _KINDS.items():
        if type(found.get(name)) is not kind:
            return f"their {name} is a {type(found.get(name)).__name__}"
    attention, mlp = found["self_attention"], found["mlp"]
    in_attention, in_mlp = attention._modules, mlp._modules
    head_norms = ()
    if "q_layernorm" in in_attention and type(in_attention["q_layernorm"]) is CoatHeadNorm:
        head_norms = in_attention["q_layernorm"], in_attention["k_layernorm"]
    parts = Parts(
        found["input_layernorm"],
        attention,
        in_attention["linear_qkv"],
        in_attention["linear_proj"],
        found["pre_mlp_layernorm"],
        mlp,
        in_mlp["linear_fc1"],
        in_mlp["linear_fc2"],
        head_norms,
    )
    if not (layer.self_attn_bda is layer.mlp_bda is coat_bias_dropout_add):
        return "their residual addition was replaced"
    if not (
        type(parts.qkv) is type(parts.fc1) is CoatColumnParallelLinear
        and type(parts.proj) is type(parts.fc2) is CoatRowParallelLinear
    ):
        return "a linear layer was replaced"
    if (
        config.recompute_granularity == "selective"
        or config.fine_grained_activation_offloading
        or config.fp32_residual_connection
    ):
        return "--recompute-granularity selective, offloading or an FP32 residual treats parts by themselves"
    for linear in parts.linears:
        if not linear._in_fp8:
            return "a linear layer computes in BF16"
    return parts


def _waits_for_parameters(hook: Callable) -> bool:
    return getattr(hook, "__qualname__", "").startswith(_WAITS)


def _is_stock(module: torch.nn.Module) -> bool:
    """Whether calling `module` only runs the forward of its class and what `wait_for_parameters` does, and
    all its own parameters are trained."""
    own = module.__dict__
    if "forward" in own:
        return False
    for name in _HOOKS:
        if own[name]:
            return False
    if own["_forward_pre_hooks"] and not all(map(_waits_for_parameters, own["_forward_pre_hooks"].values())):
        return False
    for parameter in own["_parameters"].values():
        if parameter is not None and not parameter.requires_grad:
            return False
    return True


def why_not_fused(layer: torch.nn.Module, parts: Parts | str, arguments: dict) -> str | None:
    """Why a forward of `layer` with these `arguments` calls its modules one by one; None if it runs fused.
    `parts`: from `dense_parts`."""
    if type(parts) is str:
        return parts
    x = arguments["hidden_states"]
    if not torch.is_grad_enabled():
        if layer.training:
            return "this is the first pass of a checkpoint"
        if not all(linear.multiplies_in_fp8() for linear in parts.linears):
            return "they are evaluated in BF16"
    if torch.compiler.is_compiling():
        return "under torch.compile"
    if torch.is_autocast_enabled(x.device.type):
        return "under autocast"
    if layer.training and layer.hidden_dropout:
        return "they have dropout"
    if not x.numel():
        return "their input is empty"
    if _has_any_global_hook():
        return "they have hooks"
    for name, value in arguments.items():
        if value is not None and name not in _ARGUMENTS:
            return f"they are given {name}"
    # last: where ZeRO-3 hooks single modules, reading a weight before its module runs would gather it
    if not all(map(_is_stock, (*parts[:-1], *parts.head_norms))):
        return "they have hooks, replaced forwards or frozen weights"
    if x.dtype != parts.qkv._parameters["weight"].dtype:
        return "they have weights of another dtype than their input"
    return None


def wait_for_parameters(module: torch.nn.Module) -> None:
    """Runs the hooks in which Megatron waits for gathered parameters, for a `module` that is not called."""
    for hook in module._forward_pre_hooks.values():
        if _waits_for_parameters(hook):
            hook(module, ())


def _recomputes(core: torch.nn.Module) -> bool:
    """Whether backward recomputes attention: the config requests it, and there is no dropout and no hook on
    it."""
    return (
        type(core) is CoatCoreAttention
        and core.recomputes
        and not (core.training and core.dropout)
        and _is_stock(core)
    )


def fused_forward(layer: torch.nn.Module, args: tuple, kwargs: dict) -> torch.Tensor | None:
    """The output [s, b, h] of a COAT layer called with `args` and `kwargs`; None if its modules have to
    compute it."""
    if len(args) > 2:
        return None
    arguments = {**_NO_ARGUMENTS, **kwargs, **dict(zip(_ARGUMENTS, args, strict=False))}
    parts = dense_parts(layer)
    why, tables = why_not_fused(layer, parts, arguments), None
    if why is None:
        angles, params = arguments["rotary_pos_emb"], arguments["packed_seq_params"]
        tables = parts.attention.rotary_tables(angles, params, arguments["hidden_states"])
    if tables is None:
        if layer.training and torch.is_grad_enabled():
            fused_layer.log_why_not_fused(why or "their attention or its rotary positions are not plain")
        return None
    return _run_fused(layer, parts, tables, arguments)


def _run_fused(layer: torch.nn.Module, parts: Parts, tables: Tables, arguments: dict) -> torch.Tensor:
    """Runs the fused layer, eagerly or as CUDA graphs. `tables`: from `CoatSelfAttention.rotary_tables`."""
    for module in (*parts[:-1], *parts.head_norms):
        if module._forward_pre_hooks:
            wait_for_parameters(module)
    x, core = arguments["hidden_states"], parts.attention.core_attention
    weights, options = _weights_and_options(parts)
    attend, constants = _attention(parts, options, arguments)
    compute = functools.partial(fused_layer.fused_layer, options, attend, constants)
    tensors = (*tables, *weights)
    wanted = parts.attention.activations.cuda_graphs
    if wanted is False:
        return compute(x, *tensors)
    why_not = _no_graph(parts, arguments["packed_seq_params"] is not None)
    own_weights = [linear.weight for linear in parts.linears]
    ranks, token_ranks = ranks_of(parts)
    if not fused_layer.uses_graphs(wanted, x, own_weights, ranks, token_ranks, why_not):
        return compute(x, *tensors)
    return layer.graphs.call(
        compute,
        x,
        tensors,
        functools.partial(options.graph_key, [(weight,) for weight in own_weights], core.saved_format),
        layer.config.pipeline_model_parallel_size,
        evaluates=not layer.training,
        grad_buffers=options.grad_buffers,
        # how ranks that share the layer's collectives agree on whether its graphs are used
        agree=bool if ranks == 1 else functools.partial(agreed, group=parts.qkv.tp_group),
    )


def _attention(parts: Parts, options: LayerOptions, arguments: dict) -> tuple[Callable, tuple]:
    """Attention as a function of q, k, v and other tensors, and these other tensors."""
    core, mask = parts.attention.core_attention, arguments["attention_mask"]
    params = arguments["packed_seq_params"]
    if options.recompute_format is None:
        # a call of the module: a user's hooks on it have to run
        own = {"attn_mask_type": parts.attention.attn_mask_type}
        own |= {"attention_bias": None, "packed_seq_params": params}
        return functools.partial(core, **own), (mask,)
    wait_for_parameters(core)
    x = arguments["hidden_states"]
    tokens = x.shape[0] * ranks_of(parts)[1]
    cu_seqlens, *packed = core.documents(tokens, x.shape[1], mask, params) or (None,)
    constants = tuple(t for t in (cu_seqlens, core.softmax_offset) if t is not None)
    return functools.partial(_attend, core, packed), constants


def _attend(core: CoatCoreAttention, packed: list, q, k, v, *tensors: torch.Tensor) -> torch.Tensor:
    """Recomputed attention. `packed`: the fields of `Documents` after cu_seqlens, if there are documents.
    `tensors`: cu_seqlens and the sinks, if there are any."""
    given = iter(tensors)
    return core.attend(q, k, v, Documents(next(given), *packed) if packed else None, next(given, None))


def ranks_of(parts: Parts) -> tuple[int, int]:
    """The number of ranks that hold parts of the layer, and of the ranks that hold parts of its tokens, under
    sequence parallelism."""
    ranks = parts.qkv.tp_group.size()
    return ranks, ranks if parts.qkv.sequence_parallel else 1


def _no_graph(parts: Parts, packed: bool) -> str | None:
    """Why a layer with this attention cannot be recorded, or None. packed: the batch has borders of
    documents."""
    core = parts.attention.core_attention
    if packed:
        return "for packed sequences"
    # graphs hold no borders of documents
    if type(core) is not CoatCoreAttention or core.window is not None or core.resets:
        return "with windows or --reset-attention-mask, or with attention that is not COAT's"
    if core.softmax_offset is not None:
        return "with --softmax-type"
    if (core.training and core.dropout) or not _is_stock(core):
        return "with dropout of attention, or hooks on it"
    return None


def _weights_and_options(parts: Parts) -> tuple[tuple, LayerOptions]:
    """The parameters of a layer in the order of `fused_layer`, and its options."""
    weighted = [linear.weight_and_options() for linear in parts.linears]
    (w_qkv, qkv), (w_proj, proj), (w_fc1, fc1), (w_fc2, fc2) = weighted
    first, attention, second = parts.input_norm, parts.attention, parts.mlp_norm
    head_norms, weights_of_heads, core = (), (), attention.core_attention
    if parts.head_norms:
        of_q, of_k = parts.head_norms
        head_norms, weights_of_heads = (of_q.options, of_k.options), (of_q.weight, of_k.weight)
    heads = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
    options = LayerOptions(
        QkvOptions(first.options, qkv, *heads),
        MlpOptions(proj, second.options, fc1, parts.mlp.options, fc2),
        head_norms,
        recompute_format=core.saved_format if _recomputes(core) else None,
    )
    return (
        first.weight, first.bias, w_qkv, parts.qkv.bias,
        w_proj, parts.proj.bias, second.weight, second.bias, w_fc1, parts.fc1.bias, w_fc2, parts.fc2.bias,
        *weights_of_heads,
    ), options  # fmt: skip
