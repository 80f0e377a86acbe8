"""The forward of a decoder layer of transformers, such as Llama's: the adapter to `fused_layer`.

The fused layer bypasses the forwards of the modules inside. `why_not_fused` allows it only if no hook,
adapter or replaced forward would be skipped; otherwise the layer's own forward calls its converted modules.

A forward, from top to bottom:

    Fp8DecoderLayer.compute      calls `why_not_fused`, finds packed documents, opens a checkpoint
    Fp8DecoderLayer.run_fused    gathers parameters, options and the mask, and chooses CUDA graphs or not
    LayerCall                    joins the parameters of each GEMM; a CUDA graph records or replays this call
    fused_layer.fused_layer      norm, qkv and rotation; attention; projection, norm and feed-forward
    LayerCall.attend             attention, between two blocks

A layer with another feed-forward than Llama's, such as experts, is fused up to attention's output. Its second
norm and its feed-forward are called as modules.
"""

import inspect
import itertools
import logging
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from coat_ds.config import ActivationsConfig
from coat_ds.layers import fused_layer
from coat_ds.layers.detection.excluded import is_dispatched
from coat_ds.layers.fused_layer import LayerOptions, LayerWeights
from coat_ds.layers.modules.attention import SAVING, any_attention, is_flash, is_transformers_own
from coat_ds.layers.modules.converted_forward import (
    ConvertedForward,
    autocast_dtype,
    can_be_read,
    converted_forward,
    is_evaluated,
)
from coat_ds.layers.modules.decoder_parts import (
    PROJECTIONS,
    DecoderParts,
    dropout_names,
    head_norms_of,
    is_gated,
)
from coat_ds.layers.modules.hooks import is_hooked
from coat_ds.layers.modules.linear import Gemm, can_fuse, joined, parameters_of
from coat_ds.layers.modules.norm import Fp8Norm
from coat_ds.layers.modules.packed import GraphPadding, PackedMask, documents_of, packed_mask
from coat_ds.log import log_once
from coat_kernels.attention import (
    Documents,
    additive_mask,
    causal_attention,
    packed_attention,
    takes_packed,
)
from coat_kernels.autograd.origin import TABLES, note, noted
from coat_kernels.blocks import MlpOptions, QkvOptions
from coat_kernels.graphs import Graphs

# arguments that a layer may get and that the blocks do not need: the angles contain the positions, Trainer's
# number of tokens is for the loss, and router logits come from layers with experts
ARGUMENTS = (
    "position_embeddings",
    "attention_mask",
    "position_ids",
    "cache_position",
    "use_cache",
    "num_items_in_batch",
    "output_router_logits",
    # some models pass these to all layers, and no layer reads them
    "logits_to_keep",
    "labels",
    "return_dict",
    # borders of packed documents
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    # the number of each token's document, which only layers without attention read
    "seq_idx",
)
# the name since transformers 5.24, and before
CACHES = ("cache", "past_key_values")
# Liger's forward of a model passes these as False
FLAGS = ("output_attentions", "output_hidden_states")
# the attribute in which transformers stores a layer's checkpointing function
CHECKPOINT = "_gradient_checkpointing_func"


class Fp8DecoderLayer(ConvertedForward):
    """The forward of a decoder layer whose `parts` are already converted.

    whole: whether the feed-forward is fused, too.
    """

    def __init__(self, module: nn.Module, activations: ActivationsConfig, parts: DecoderParts):
        super().__init__(module, activations)
        self.parts, self.recomputes = parts, activations.attention_format == "recompute"
        self.whole = is_gated(parts.mlp)
        self.bypassed = parts if self.whole else (parts.input_norm, parts.attention)
        # dropout rates may be set later, and each class has its own names for them
        self.rates = [(m, n) for m in (module, *self.bypassed) for n in dropout_names(m)]
        self.qkv = Gemm(activations, precise_wgrad=True)
        self.cuda_graphs = activations.cuda_graphs
        # batches may change their shape at any time: hold graphs of one shape at a time
        self.graphs, self.padding = Graphs(one_shape=True), GraphPadding()

    def compute(self, hidden_states: torch.Tensor, *args, **kwargs):
        if (why := why_not_fused(self, hidden_states, args, kwargs)) is not None:
            if can_be_read(hidden_states):
                self._log(why, hidden_states, kwargs)
            return self.stock(hidden_states, *args, **kwargs)
        flash = is_flash(self.parts.attention.__dict__[SAVING].loaded)
        mask = packed_mask(kwargs.get("attention_mask"), kwargs, *hidden_states.shape[:2], flash)
        cos, sin = kwargs["position_embeddings"]

        # reentrant checkpoints copy tensor arguments, without notes: only x is one
        def run(x: torch.Tensor) -> torch.Tensor:
            return self.run_fused(x, cos, sin, mask)

        if checkpoints_in_forward(self.module):
            return getattr(self.module, CHECKPOINT)(run, hidden_states)
        return run(hidden_states)

    def _log(self, why: str, x: torch.Tensor, kwargs: dict) -> None:
        generates = x.shape[1:2] == (1,) and any(kwargs.get(name) is not None for name in CACHES)
        if self.module.training and torch.is_grad_enabled():
            fused_layer.log_why_not_fused(why)
        elif generates and not torch.is_grad_enabled():
            log_once(
                "tokens are generated one by one in FP8, which quantizes the weights for each and is slower "
                'than BF16. To generate in BF16, set coat.activations.evaluation to "stock" and call '
                "model.eval().",
                logging.INFO,
            )

    def shown(self) -> str:
        return "coat=fused blocks"

    @property
    def head_norms(self) -> list[nn.Module]:
        return head_norms_of(self.parts.attention)

    @property
    def gemms(self) -> tuple[tuple[nn.Module, ...], ...]:
        """The linear layers, grouped by GEMM: qkv and o; of a whole layer also gate and up, and down."""
        *qkv, o = [self.parts.attention._modules[name] for name in PROJECTIONS]
        if not self.whole:
            return tuple(qkv), (o,)
        feed_forward = converted_forward(self.parts.mlp)
        return tuple(qkv), (o,), feed_forward.linears, (feed_forward.down,)

    def run_fused(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """x [b, s, h], cos and sin [1 or b, s, d], a mask, `PackedMask` or None -> [b, s, h]."""
        attention, gemms = self.parts.attention, self.gemms
        weights, options = self.weights(*gemms), self.options(*gemms)
        parameters = [p for parts in weights if parts is not None for p in parts]
        # the blocks take [tokens, 1, h], so that each token needs its own row of angles
        constants, packed = [_by_token(cos, len(x)), _by_token(sin, len(x))], None
        reads_borders = takes_packed(x.dtype, x.device, attention.head_dim, attention.head_dim)
        documents, mask = documents_of(mask, reads_borders)
        graphed = False
        if self.whole:
            own_weights = [*weights.qkv, *weights.proj, *weights.fc1, *weights.fc2]
            why_not = None if documents is None else self.padding.why_not(documents, len(x))
            graphed = fused_layer.uses_graphs(self.cuda_graphs, x, own_weights, why_not=why_not)
        if documents is not None:
            cu_seqlens, *packed = self.padding.pad(documents, *x.shape[:2]) if graphed else documents
            constants.append(cu_seqlens)
        elif mask is not None:
            constants.append(additive_mask(mask, x.dtype))
        saving = attention.__dict__[SAVING]
        call = LayerCall(
            options,
            attention,
            None if self.recomputes else saving.saved_format,
            None if packed is None else tuple(packed),
            tuple([len(parts) for parts in weights if parts is not None]),
        )
        if not self.whole:
            o, residual, origin = call(x, *constants, *parameters)
            (proj,) = gemms[1]
            y = converted_forward(proj).multiply(o, proj.weight, proj.bias, origin)
            x = residual.view(x.shape) + y
            return x + self.parts.mlp(self.parts.mlp_norm(x))
        if not graphed:
            return call(x, *constants, *parameters)
        gemms = tuple(weights.qkv), tuple(weights.proj), tuple(weights.fc1), tuple(weights.fc2)
        dependencies = partial(options.graph_key, gemms, saving, attention.scaling, call.packed)
        evaluates = not self.module.training
        return self.graphs.call(call, x, parameters, dependencies, constants=constants, evaluates=evaluates)

    def weights(self, qkv, o, *of_mlp) -> LayerWeights:
        """The parameters of the layer with these `gemms`. Each field is a list of parts, which the layer
        joins."""
        mlp = [[None]] * 6
        if of_mlp:
            gate_up, down = of_mlp
            mlp = [*_of_norm(self.parts.mlp_norm), *parameters_of(gate_up), *parameters_of(down)]
        return LayerWeights(
            *_of_norm(self.parts.input_norm),
            *parameters_of(qkv),
            *parameters_of(o),
            *mlp,
            *([norm.weight] for norm in self.head_norms),
        )

    def options(self, qkv, o, *of_mlp) -> LayerOptions:
        """The options of the layer with these `gemms`."""
        input_norm, attention, mlp_norm, mlp = self.parts
        saving, d, mlp_options = attention.__dict__[SAVING], attention.head_dim, None
        if of_mlp:
            feed_forward, (_, (down,)) = converted_forward(mlp), of_mlp
            mlp_options = MlpOptions(
                converted_forward(o[0]).options(o[0].weight),
                converted_forward(mlp_norm).options,
                feed_forward.gate_up_options(),
                feed_forward.options,
                converted_forward(down).options(down.weight),
            )
        return LayerOptions(
            QkvOptions(
                converted_forward(input_norm).options,
                self.qkv.options(tuple([linear.weight for linear in qkv])),
                kv_groups=qkv[1].weight.shape[0] // d,
                d=d,
                stacked=True,
            ),
            mlp_options,
            head_norms=tuple([converted_forward(norm).options for norm in self.head_norms]),
            recompute_format=saving.saved_format if self.recomputes else None,
            batch_first=True,
        )


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One forward of a fused layer, or of its attention if the options have no feed-forward, without its
    tensors, which are arguments: a CUDA graph can record it.

    saved_format: how attention saves its tensors; None if it saves them unchanged or is recomputed. packed:
    the fields of `Documents` after cu_seqlens; None for attention without documents. parts: for each weight,
    the number of parameters that are joined to it.
    """

    options: LayerOptions
    attention: nn.Module
    saved_format: str | None
    packed: tuple | None
    parts: tuple[int, ...]

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *tensors: torch.Tensor | None
    ) -> torch.Tensor | tuple:
        """The result of `fused_layer` or `fused_attention`. `tensors`: the mask, or cu_seqlens, if there is
        one of them; then the parameters in the order of `LayerWeights`."""
        given, masks = iter(tensors), len(tensors) - sum(self.parts)
        mask = tuple(itertools.islice(given, masks))
        weights = [joined(tuple(itertools.islice(given, number))) for number in self.parts]
        inputs = self.options, self.attend, mask, x, cos, sin
        if self.options.mlp is None:
            return fused_layer.fused_attention(*inputs, LayerWeights(*weights))
        return fused_layer.fused_layer(*inputs, *weights)

    def attend(self, q, k, v, *mask: torch.Tensor) -> torch.Tensor:
        """Attention of heads [b, s, n, d]: [b, s, n * d]. mask: the mask, or cu_seqlens."""
        how = {"scale": self.attention.scaling, "saved_format": self.saved_format, "batch_first": True}
        if self.packed is not None:
            return packed_attention(q, k, v, Documents(*mask, *self.packed), **how)
        if not mask:
            return causal_attention(q, k, v, **how)
        heads = [t.transpose(1, 2) for t in (q, k, v)]
        scaling = {"scaling": self.attention.scaling}
        return any_attention(self.attention, *heads, *mask, scaling, saved_format=self.saved_format)


def _of_norm(norm: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    return [norm.weight], [norm._parameters.get("bias")]


def drop_unwanted_cache(model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """A forward pre-hook of a text model with fused layers: a training forward makes no KV cache unless the
    caller passes one, or `use_cache`."""
    given = len(args) > 3 or any(kwargs.get(name) is not None for name in ("use_cache", *CACHES))
    if given or not (model.training and torch.is_grad_enabled()):
        return None
    return args, {**kwargs, "use_cache": False}


def makes_cache(model: nn.Module) -> bool:
    """Whether `model` is a model of transformers whose forward takes `use_cache`."""
    return hasattr(model, "base_model_prefix") and "use_cache" in inspect.signature(model.forward).parameters


def checkpoints_in_forward(layer: nn.Module) -> bool:
    """Whether the layer's own forward, which the blocks replace, would checkpoint itself. Older versions of
    transformers checkpoint in `__call__`, so that the checkpoint is already open here."""
    is_on = layer.training and torch.is_grad_enabled() and getattr(layer, "gradient_checkpointing", False)
    return is_on and type(layer).__call__ is nn.Module.__call__ and hasattr(layer, CHECKPOINT)


def _by_token(angles: torch.Tensor, batch: int) -> torch.Tensor:
    """Cosines or sines [1 or b, s, d] as FP32 [b * s, d], computed once for all layers of a forward."""
    name = TABLES, batch
    found = noted(angles, name)
    if found is None:
        found = angles.detach().float().expand(batch, -1, -1).reshape(-1, angles.shape[-1])
        note(angles, name, found)
    return found


def why_not_fused(layer: Fp8DecoderLayer, x: torch.Tensor, args: tuple, kwargs: dict) -> str | None:
    """Why a forward of `layer` calls its modules one by one; None if it takes the fused blocks. If the user
    can remove the reason, a second sentence says how.

    Frozen parameters are no reason in a layer that is only evaluated: a reference model has to compute as its
    policy does. In training the answer must not depend on grad mode, since reentrant checkpoints run the
    forward without gradients. This function runs for each layer in each forward.
    """
    parts, attention = layer.parts, layer.parts.attention
    if torch.compiler.is_compiling():
        return "under torch.compile"
    if is_dispatched(parts.mlp):
        return "accelerate has spread the model over devices, as dispatch_model does"
    head_norms, feed_forward = layer.head_norms, converted_forward(parts.mlp)
    if layer.whole and not is_gated(parts.mlp):
        return _taken_over(parts.mlp)
    for norm in (parts.input_norm, *head_norms, *([parts.mlp_norm] if layer.whole else [])):
        if type(norm.__dict__.get("forward")) is not Fp8Norm:
            return _taken_over(norm)
    if not x.numel() or not layer.check_tensor(x):
        return f"their input is {x.dtype} of {x.numel()} elements"
    if autocast_dtype(x) not in (None, x.dtype):
        return f"their input is {x.dtype} under autocast to {autocast_dtype(x)}"
    for name, value in kwargs.items():
        if _is_foreign(name, value):
            if name in CACHES:
                return (
                    "the model was called with use_cache=True or a cache while it trains. Drop that argument"
                )
            return f"the fused block has no argument {name!r}, with which they were called"
    if not _is_mask(kwargs.get("attention_mask"), x):
        return f"their attention_mask is no constant tensor [b, n, s, s] of torch.bool or {x.dtype}"
    angles = kwargs.get("position_embeddings")
    if args or not isinstance(angles, tuple) or angles[0].shape[-1] != attention.head_dim:
        return "they were called without position_embeddings of whole heads, by name"
    own = SAVING in attention.__dict__ and "forward" not in attention.__dict__ and is_transformers_own()
    if not own or not getattr(attention, "is_causal", True):
        return "their attention is not the one that was converted"
    if layer.module.training and any(getattr(m, name, 0) for m, name in layer.rates):
        return "they have dropout"
    if _has_any_global_hook() or (layer.whole and feed_forward.calls_between()):
        return "they have hooks, or dropout in the feed-forward"
    qkv, _, *of_mlp = gemms = layer.gemms
    linears = tuple(itertools.chain(*gemms))
    children = layer.module._modules.values()
    # plain loops, which take less time than generators
    for part in parts:
        if part not in children:
            return f"{type(part).__name__} was replaced"
    for linear in linears:
        if not can_fuse(linear.__dict__.get("forward")):
            return "a linear layer has an adapter or was replaced"
    evaluated = is_evaluated(layer.module)
    for module in (*layer.bypassed, *head_norms, *linears):
        if (why := _why_foreign(module, x.dtype, evaluated)) is not None:
            return why
    for merged in (qkv, *of_mlp[:1]):
        if len({linear._parameters["bias"] is None for linear in merged}) == 2:
            return "some of the linear layers that are multiplied together have biases"
    return None


def _taken_over(module: nn.Module) -> str:
    name = type(module).__name__
    return (
        f"the forward of {name} was replaced after coat_ds.convert. Convert after Liger's kernels or others"
    )


def _is_foreign(name: str, value: object) -> bool:
    """Whether an argument requests something that the blocks do not support."""
    return value is not None and name not in ARGUMENTS and not (value is False and name in FLAGS)


def _is_mask(mask: object, x: torch.Tensor) -> bool:
    """Whether `mask` is None, or a constant that torch's attention takes with heads of dtype `x.dtype`."""
    return mask is None or (
        type(mask) in (torch.Tensor, PackedMask)
        and mask.dim() == 4
        and mask.dtype in (torch.bool, x.dtype)
        and not mask.requires_grad
    )


def _why_foreign(module: nn.Module, dtype: torch.dtype, evaluated: bool) -> str | None:
    """Why the blocks may not bypass `module`: a hook, or a parameter that is not plain, of another dtype, or
    frozen although the layer trains. None if they may."""
    if is_hooked(module):
        return "they have hooks"
    for p in module._parameters.values():
        if p is None:
            continue
        if type(p) is not nn.Parameter or p.dtype != dtype:
            return "they have weights of another dtype than their input, or sharded ones"
        if not (p.requires_grad or evaluated):
            return "they have frozen weights"
    return None
