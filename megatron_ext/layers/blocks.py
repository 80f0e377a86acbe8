"""Chooses the path of a COAT layer: the two fused blocks around attention, or its modules one by one.

The blocks compute the same as the modules, to the bit, in a fraction of the CPU time. They skip the forward
of the modules inside a layer, so they run only where nothing depends on these calls: `dense_parts` selects
the layers, `uses_blocks` the forwards.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from torch.nn.modules.module import _has_any_global_hook

from coat_ds.layers.log import say_once
from coat_kernels.attention import origin_in_groups
from coat_kernels.autograd.origin import origin_of
from coat_kernels.blocks import attention_block, mlp_block, qkv_block
from coat_kernels.graphs import gradient_leaves, graphed_work
from coat_kernels.groups import quantize_groups
from coat_kernels.linear import LinearOptions
from coat_kernels.parallel import agreed
from megatron_ext.layers.attention import CoatCoreAttention, NoCrossAttention
from megatron_ext.layers.linear import CoatColumnParallelLinear, CoatRowParallelLinear
from megatron_ext.layers.mlp import CoatMLP
from megatron_ext.layers.norm import CoatHeadNorm, CoatNorm, coat_bias_dropout_add
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
_ARGUMENTS = ("hidden_states", "attention_mask", "rotary_pos_emb")


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


def dense_parts(layer: torch.nn.Module) -> Parts | None:
    """The parts of a Megatron TransformerLayer, if they are COAT's own classes and no part of the layer is
    recomputed, offloaded or replayed by itself."""
    config, found = layer.config, layer._modules
    # plain loops, and no lookups by `__getattr__`: it runs for each layer in each forward
    for name, kind in _KINDS.items():
        if type(found.get(name)) is not kind:
            return None
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
    fits = (
        layer.self_attn_bda is layer.mlp_bda is coat_bias_dropout_add
        and type(parts.qkv) is type(parts.fc1) is CoatColumnParallelLinear
        and type(parts.proj) is type(parts.fc2) is CoatRowParallelLinear
        and config.recompute_granularity != "selective"
        and not config.fine_grained_activation_offloading
        and not config.fp32_residual_connection
    )
    if not fits:
        return None
    for linear in parts.linears:
        if not linear._in_fp8:
            return None
    return parts


def _waits(hook: Callable) -> bool:
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
    if own["_forward_pre_hooks"] and not all(map(_waits, own["_forward_pre_hooks"].values())):
        return False
    for parameter in own["_parameters"].values():
        if parameter is not None and not parameter.requires_grad:
            return False
    return True


def uses_blocks(layer: torch.nn.Module, parts: Parts, arguments: dict) -> bool:
    """Whether a forward of `layer` with these `arguments` runs as blocks.

    It does not in training without gradients, under autocast or torch.compile, with dropout, in inference or
    for packed sequences; if a module inside has hooks, as under ZeRO-3 unless the layer is one unit there; or
    if a parameter is frozen.
    """
    x = arguments["hidden_states"]
    if not torch.is_grad_enabled() and (
        layer.training or not all(linear.multiplies_in_fp8() for linear in parts.linears)
    ):
        return False
    usual = (
        not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(x.device.type)
        and not (layer.training and layer.hidden_dropout)
        and x.numel() > 0
        and not _has_any_global_hook()
    )
    if not usual:
        return False
    for name, value in arguments.items():
        if value is not None and name not in _ARGUMENTS:
            return False
    # last: where ZeRO-3 hooks single modules, reading a weight before its module runs would gather it
    return (
        all(map(_is_stock, (*parts[:-1], *parts.head_norms)))
        and x.dtype == parts.qkv._parameters["weight"].dtype
    )


def wait_for_parameters(module: torch.nn.Module) -> None:
    """Runs the hooks in which Megatron waits for gathered parameters, for a `module` that is not called."""
    for hook in module._forward_pre_hooks.values():
        if _waits(hook):
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


def forward_by_blocks(layer: torch.nn.Module, args: tuple, kwargs: dict) -> torch.Tensor | None:
    """The output [s, b, h] of a COAT layer called with `args` and `kwargs`; None if its modules have to
    compute it."""
    parts = dense_parts(layer)
    if parts is None or len(args) > 2:
        return None
    arguments = {**kwargs, **dict(zip(_ARGUMENTS, args, strict=False))}
    if not uses_blocks(layer, parts, arguments):
        return None
    tables = parts.attention.tables_of(arguments.get("rotary_pos_emb"))
    if tables is None:
        return None
    for module in (*parts[:-1], *parts.head_norms):
        if module._forward_pre_hooks:
            wait_for_parameters(module)
    x, (weights, options) = arguments["hidden_states"], _gathered(parts)
    compute = functools.partial(_compute, parts, options, arguments.get("attention_mask"))
    if not uses_graphs(parts, x):
        return compute(x, *tables, *weights)
    uses = functools.partial(_used, parts, options)
    under_way = layer.config.pipeline_model_parallel_size
    tensors, evaluates = (*tables, *weights), not layer.training
    return layer.graphs.call(
        compute,
        x,
        tensors,
        uses,
        under_way,
        evaluates=evaluates,
        written=functools.partial(_written, options),
        agree=_agree(parts.qkv.tp_group),
    )


def uses_graphs(parts: Parts, x: torch.Tensor) -> bool:
    """Whether a layer that runs as blocks runs as CUDA graphs, by the block's `cuda_graphs`.

    It does not where weights move, as under ZeRO-3, with dropout, windows or hooks on attention, or with an
    attention other than COAT's. None: only where the GPU would wait for the CPU, whose time for a layer
    does not depend on the layer's size.
    """
    wanted = parts.attention.activations.cuda_graphs
    if wanted is False:
        return False
    if (reason := _no_graph(parts, x)) is not None:
        if wanted is True:
            say_once(f"coat.activations.cuda_graphs: found True, of no effect {reason}. Drop the key.")
        return False
    return wanted is True or is_small(parts, x)


def is_small(parts: Parts, x: torch.Tensor) -> bool:
    """Whether the GPU would wait for the CPU to launch this layer's kernels."""
    ranks = parts.qkv.tp_group.size()
    # under sequence parallelism x holds this rank's tokens; the GEMMs take those of all ranks
    tokens = x.shape[0] * x.shape[1] * (ranks if parts.qkv.sequence_parallel else 1)
    most = graphed_work(ranks, gradient_leaves(parts.qkv.weight))
    return tokens * sum(linear.weight.numel() for linear in parts.linears) <= most


def _no_graph(parts: Parts, x: torch.Tensor) -> str | None:
    """Why a layer cannot be recorded, or None."""
    if not x.is_cuda:
        return "on a CPU"
    if hasattr(parts.qkv.weight, "ds_id"):
        return "under ZeRO-3, where weights move"
    core = parts.attention.core_attention
    # a graph would not hold the mask of a window
    if type(core) is not CoatCoreAttention or core.window is not None:
        return "with windows, or with attention that is not COAT's"
    if (core.training and core.dropout) or not _is_stock(core):
        return "with dropout of attention, or hooks on it"
    return None


def _used(parts: Parts, options: tuple[LinearOptions, ...]) -> tuple:
    """What a graph of the layer depends on, except its tensors. A change leads to a new recording."""
    core = parts.attention.core_attention
    found = [parts.input_norm.options, parts.mlp_norm.options, parts.mlp.options]
    for norm in parts.head_norms:
        found.append(norm.options)
    found += core.group_size, core.saved_format, core.recomputes
    for linear, how in zip(parts.linears, options, strict=True):
        found += how.uses(linear.weight)
    return tuple(found)


def _agree(group: dist.ProcessGroup) -> Callable[[bool], bool]:
    """How ranks that share a layer's collectives agree on whether its graphs are used."""
    return bool if group.size() == 1 else functools.partial(agreed, group=group)


def _written(options: tuple[LinearOptions, ...]) -> list[torch.Tensor]:
    """The tensors that backward adds weight gradients to, such as Megatron's main_grad."""
    return [how.weight_grad_into() for how in options if how.weight_grad_into is not None]


def _gathered(parts: Parts) -> tuple[tuple, tuple]:
    """The parameters of a layer in the order of `_compute`, and the options of its linears."""
    (w_qkv, qkv), (w_proj, proj), (w_fc1, fc1), (w_fc2, fc2) = (linear.options() for linear in parts.linears)
    first, second = parts.input_norm, parts.mlp_norm
    weights_of_heads = ()
    if parts.head_norms:
        weights_of_heads = parts.head_norms[0].weight, parts.head_norms[1].weight
    return (
        first.weight, first.bias, w_qkv, parts.qkv.bias,
        w_proj, parts.proj.bias, second.weight, second.bias, w_fc1, parts.fc1.bias, w_fc2, parts.fc2.bias,
        *weights_of_heads,
    ), (qkv, proj, fc1, fc2)  # fmt: skip


def _compute(
    parts: Parts,
    options: tuple[LinearOptions, ...],
    attention_mask: torch.Tensor | None,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *weights: torch.Tensor | None,
) -> torch.Tensor:
    """The layer's output [s, b, h] from its input and `weights`, in the order of `_gathered`."""
    attention, core = parts.attention, parts.attention.core_attention
    qkv, proj, fc1, fc2 = options
    beside = ()
    if parts.head_norms:
        # norms of heads come before the angles
        beside = cos, sin, *weights[12:]
        cos, sin = cos[:, :0], sin[:, :0]
    inputs = x, *weights[:4], cos, sin
    how = {
        "norm": parts.input_norm.options,
        "linear": qkv,
        "groups": attention.num_query_groups_per_partition,
        "d": attention.hidden_size_per_attention_head,
    }
    if _recomputes(core):

        def attend(q, k, v, *beside):
            if beside:
                q, k = _normed(parts, q, k, *beside)
            return core.attend(q, k, v)

        o, residual = attention_block(*inputs, **how, attend=attend, beside=beside)
        kept = quantize_groups(o.detach().flatten(0, 1), core.group_size, core.saved_format)
        origin = origin_in_groups(kept, core.group_size, o.dtype)
    else:
        q, k, v, residual = qkv_block(*inputs, **how)
        if beside:
            q, k = _normed(parts, q, k, *beside)
        o = core(
            q,
            k,
            v,
            attention_mask,
            attn_mask_type=attention.attn_mask_type,
            attention_bias=None,
            packed_seq_params=None,
        )
        origin = origin_of(o)
    return mlp_block(
        o,
        residual,
        *weights[4:12],
        origin=origin,
        proj=proj,
        norm=parts.mlp_norm.options,
        fc1=fc1,
        activation=parts.mlp.options,
        fc2=fc2,
    )


def _normed(parts: Parts, q, k, cos, sin, w_q, w_k) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, normed with these weights and rotated."""
    q_norm, k_norm = parts.head_norms
    return q_norm.turned(q, w_q, cos, sin), k_norm.turned(k, w_k, cos, sin)
