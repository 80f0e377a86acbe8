"""`coat_ds.convert`: FP8 linear layers and 8-bit saved activations for any model."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from coat_ds.config import ActivationsConfig
from coat_ds.layers.conversion import CONVERSION, Conversion, conversion_of
from coat_ds.layers.detection import probe
from coat_ds.layers.detection.excluded import DISPATCHED, excluded_modules
from coat_ds.layers.inventory import layers_of
from coat_ds.layers.modules import attention, decoder_layer, decoder_parts, experts, packed
from coat_ds.layers.modules.converted_forward import (
    DTYPES,
    ConvertedForward,
    converted_forward,
)
from coat_ds.layers.modules.feed_forward import Fp8Activation, Fp8GatedFeedForward
from coat_ds.layers.modules.linear import Fp8Linear
from coat_ds.layers.modules.norm import Fp8Norm
from coat_ds.layers.parallel import autoep, autotp, transformers_ep, transformers_tp
from coat_ds.log import forget_logged, listed, log_once
from coat_ds.optim.shards import shape_of
from coat_kernels import libraries
from coat_kernels.fp8 import ALIGNMENT

__all__ = ["convert", "conversion_of", "unconvert"]

# with fewer rows or columns in a weight, quantizing the input takes longer than the GEMM
MIN_SIZE = 32


def convert(
    model: nn.Module,
    activations: ActivationsConfig | Mapping | None = None,
    filter: Callable[[str, nn.Module], bool] | None = None,
) -> nn.Module:
    """Makes `model` compute its GEMMs in FP8 and save its activations in 8 bits, in place; returns it.

    Rank 0 logs what was converted.

    Linear layers, norms, feed-forward layers, experts and decoder layers each get another forward, set on the
    instance. The model's config selects attention, which it then names "coat". Classes, parameters, buffers
    and their names are unchanged, so checkpoints are those of the stock model.
    `conversion_of(model)` lists what was not converted (heads, routers, sizes that FP8 GEMMs do not support).
    Evaluation runs in FP8 too, unless `activations.evaluation` is "stock". A model that was converted before,
    as a whole or in part, is converted again. `unconvert` restores the stock model.

    Args:
        model: any module with parameters in BF16 or FP32; for FP32, best under autocast to BF16.
        activations: the block `coat.activations`, as an object or a mapping; None for the defaults.
            `attention_format` applies to attention that transformers' AttentionInterface chooses; a warning
            is logged if there is none. `cuda_graphs` applies to layers that run as fused blocks.
        filter: filter(name, module) returns whether a module may be converted.

    Raises ValueError for a compiled model and for parameters in FP16. Raises CoatConfigError for invalid
    options. Raises RuntimeError if other code has replaced a converted forward since.
    """
    convert_without_log(model, activations, filter)
    done = conversion_of(model)
    if done is not None:
        layers = layers_of(model, "")
        if any(done.converted.values()):
            log_once(
                listed("layers converted; coat_ds.unconvert restores them", layers.lines()), logging.INFO
            )
        else:
            log_once(f"nothing was converted: {layers.summary()}")
    return model


def convert_without_log(
    model: nn.Module,
    activations: ActivationsConfig | Mapping | None = None,
    filter: Callable[[str, nn.Module], bool] | None = None,
) -> nn.Module:
    """`convert` without its log line, for an engine that reports the layers itself."""
    may_convert = filter or (lambda name, module: True)
    if not isinstance(activations, ActivationsConfig):
        activations = ActivationsConfig.from_dict({} if activations is None else activations)
    if activations.enabled and "_orig_mod" in model._modules:
        raise ValueError("coat_ds.convert: found a compiled model. Convert it first, then torch.compile it.")
    unconvert(model)
    if not activations.enabled:
        return model
    conversion = Conversion(activations)
    forwards = list(_forwards(model, conversion, may_convert))
    # nothing is changed until all forwards are built without an error
    for forward in forwards:
        forward.install()
    _convert_attention(model, conversion, may_convert)
    for name, module in model.named_modules():
        may_run_fused = converted_forward(module) is None and may_convert(name, module)
        if may_run_fused and (parts := decoder_parts.parts_of(module)) is not None:
            layer = decoder_layer.Fp8DecoderLayer(module, activations, parts)
            layer.install()
            kind = "layer" if layer.whole else "attention_block"
            if reason := decoder_parts.why_never_fused(parts):
                conversion.add_left(kind, name, reason)
            else:
                conversion.add_converted(kind, name)
    _add_hooks(model)
    model.__dict__[CONVERSION] = conversion
    forget_logged()
    if dispatched := sum(why == DISPATCHED for why in conversion.left.values()):
        log_once(
            f"{dispatched} modules are not converted, since accelerate has spread the model over devices, as "
            "device_map does. Load it without, convert it, and call accelerate.dispatch_model then."
        )
    for line in (*conversion.idle_keys(), *libraries.conflicts()):
        log_once(line)
    return model


def unconvert(model: nn.Module) -> nn.Module:
    """Restores the stock model, in place. A model that was not converted is unchanged.

    `model` may also contain converted models, or be a part of one, as PEFT's `merge_and_unload` returns it.
    Raises RuntimeError, before anything is changed, if other code has replaced a converted forward since.
    """
    holders = [m for m in model.modules() if CONVERSION in m.__dict__]
    for holder in holders:
        _check_forwards(holder)
    _restore(model)
    return model


def reconvert(model: nn.Module) -> None:
    """Converts a model a second time, after AutoTP or AutoEP has replaced modules. All ranks must call it: a
    module that one rank cannot convert, for example because its part is too small, is converted on none."""
    conversion: Any = conversion_of(model)
    _restore(model)
    convert_without_log(model, conversion.activations)
    conversion = conversion_of(model)
    linears = {name: converted_forward(model.get_submodule(name)) for name in conversion.converted["linear"]}
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, list(linears))
    for name, forward in linears.items():
        if forward is not None and not all(name in names for names in found):
            forward.remove()
            conversion.converted["linear"].remove(name)
            conversion.left[name] = "another rank's part is not converted"


_HOOKS = decoder_layer.drop_unwanted_cache, packed.cu_seqlens_of_numbers


def _add_hooks(model: nn.Module) -> None:
    """Adds hooks to the innermost models that can fill a KV cache: around fused layers a training forward
    makes none unless its caller requests one, and attention that was FlashAttention gets borders of documents
    in the place of their numbers."""
    for module in model.modules():
        inside = list(module.modules())
        if not decoder_layer.makes_cache(module) or any(map(decoder_layer.makes_cache, inside[1:])):
            continue
        fused = any(type(converted_forward(m)) is decoder_layer.Fp8DecoderLayer for m in inside)
        saving = [m.__dict__[attention.SAVING] for m in inside if attention.SAVING in m.__dict__]
        flash = any(attention.is_flash(how.loaded) for how in saving)
        for hook, wanted in zip(_HOOKS, (fused, flash), strict=True):
            if wanted:
                module.register_forward_pre_hook(hook, with_kwargs=True)


def _restore(model: nn.Module) -> None:
    for module in model.modules():
        hooks = module._forward_pre_hooks
        for key in [k for k, hook in hooks.items() if hook in _HOOKS]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
        module.__dict__.pop(CONVERSION, None)
        if (forward := converted_forward(module)) is not None:
            forward.remove()
        module.__dict__.pop(attention.NOT_CONVERTED, None)
        if (saving := module.__dict__.pop(attention.SAVING, None)) is not None:
            config: Any = module.config
            if config._attn_implementation == attention.NAME:
                config._attn_implementation_internal = saving.loaded


# the attribute that holds the module inside PEFT's wrappers, torch's checkpoint wrapper and torch.compile's
_WRAPPED = {"base_layer", "original_module", "_checkpoint_wrapped_module", "_orig_mod"}


def _check_forwards(holder: nn.Module) -> None:
    """Raises RuntimeError if other code has replaced a forward that convert installed. Modules that were
    unconverted or added since have no forward on the instance."""
    modules = dict(holder.named_modules())
    for kind, names in holder.__dict__[CONVERSION].converted.items():
        for name in names:
            module = modules.get(name)
            while module is not None and (wrapped := module._modules.keys() & _WRAPPED):
                module = module._modules[wrapped.pop()]
            found = None if module is None else module.__dict__.get("forward")
            if kind != "attention" and found is not None and not isinstance(found, ConvertedForward):
                raise RuntimeError(
                    f"coat_ds.unconvert: {name}: expected the forward that convert put there, found "
                    f"{found!r}. Undo what replaced it first."
                )


def _forwards(model: nn.Module, conversion: Conversion, may_convert: Callable) -> Iterator[ConvertedForward]:
    """The forwards to install; records in `conversion` which modules are converted and which are not."""
    activations, excluded = conversion.activations, excluded_modules(model)
    projections = {id(child) for m in model.modules() if probe.uses_interface(m) for child in m.children()}
    taken: set[int] = set()
    for name, module in model.named_modules():
        kind = None if id(module) in taken else _kind_of(module)
        if kind is None:
            continue
        if kind == "linear":
            built = _build_linear(module, activations, precise_wgrad=id(module) in projections)
        else:
            built = _BUILDERS[kind](module, activations)
        if built is None:
            continue
        if kind in ("gated", "experts"):
            # the activation needs no conversion: this forward calls it, or a replaced forward does not
            taken.update(id(m) for m in module.children() if _looks_elementwise(m))
        reason = excluded.get(id(module)) or (None if may_convert(name, module) else "the filter")
        if isinstance(built, str):
            reason = reason or built
        elif reason is None:
            _require_dtype(name, module)
            yield built
        for counted in _COUNTED.get(kind, (kind,)):
            if reason is None:
                conversion.add_converted(counted, name)
            else:
                conversion.add_left(counted, name, reason)


_COUNTED = {
    "experts": ("feed_forward", "linear"),
    "activation": ("feed_forward",),
    "gated": ("feed_forward",),
}


def _kind_of(module: nn.Module) -> str | None:
    """The kind that the module looks like. Its builder then checks what the module computes."""
    parameters, children = module._parameters, module._modules
    if experts.is_experts(module) or autoep.is_autoep(module):
        return "experts"
    if isinstance(module, nn.Linear):
        return "linear"
    weight = parameters.get("weight")
    if weight is not None and not children and not is_lazy(weight):
        dims = len(shape_of(weight))
        if dims == 2 and (type(module).__name__ == "Conv1D" or autotp.is_autotp(module)):
            return "linear"
        if dims == 1 and any(hasattr(module, eps) for eps in probe.EPS_NAMES):
            return "norm"
    elif children and not parameters:
        return "gated"
    elif _looks_elementwise(module):
        return "activation"
    return None


def _looks_elementwise(module: nn.Module) -> bool:
    empty = not (module._modules or module._parameters or module._buffers)
    return empty and "Dropout" not in type(module).__name__


def _require_dtype(name: str, module: nn.Module) -> None:
    if any(p.dtype == torch.float16 for p in module.parameters(recurse=False)):
        raise ValueError(
            f"coat_ds.convert: {name} holds FP16 parameters; converted layers compute in BF16 or FP32. Call "
            "model.bfloat16(), or model.float() and autocast to torch.bfloat16."
        )


# A builder returns the forward of a module of its kind, or the reason why the module keeps its own. None: the
# module only looked like one of this kind.
_Built = ConvertedForward | str | None


def _build_linear(module: nn.Module, activations: ActivationsConfig, precise_wgrad: bool) -> _Built:
    weight = module._parameters.get("weight")
    if weight is None:
        return "a weight that each forward recomputes from other parameters"
    if is_lazy(weight):
        return "a weight that has no shape before its first forward"
    if module._modules or set(module._parameters) - {"weight", "bias"}:
        return "more than a weight and a bias"
    if weight.dtype not in (*DTYPES, torch.float16):
        return f"a weight in {str(weight.dtype).removeprefix('torch.')}"
    sizes = shape_of(weight)
    if any(size % ALIGNMENT for size in sizes):
        return f"{' x '.join(map(str, sizes))}, not multiples of {ALIGNMENT}"
    if min(sizes) < MIN_SIZE:
        return f"{' x '.join(map(str, sizes))}, too small to gain by FP8"
    if autotp.is_autotp(module):
        return autotp.why_not(module) or autotp.AutoTPLinear(module, activations, precise_wgrad=precise_wgrad)
    if "forward" not in module.__dict__ and type(module).forward is nn.Linear.forward:
        return Fp8Linear(module, activations, precise_wgrad=precise_wgrad)
    if (split := transformers_tp.split_of(module)) is not None:
        reason = transformers_tp.why_not(module, split)
        return reason or transformers_tp.TransformersTPLinear(module, activations, split, precise_wgrad)
    transposed = not isinstance(module, nn.Linear)
    if not probe.is_linear(module, transposed):
        return f"{type(module).__name__} computes something else than a linear layer"
    return Fp8Linear(module, activations, transposed, precise_wgrad)


def _build_norm(module: nn.Module, activations: ActivationsConfig) -> _Built:
    if module.weight.dtype not in (*DTYPES, torch.float16):
        return f"a weight in {str(module.weight.dtype).removeprefix('torch.')}"
    form = probe.norm_form(module)
    if form is None:
        return f"{type(module).__name__} is neither RMSNorm nor LayerNorm"
    return Fp8Norm(module, activations, form)


def _build_gated(module: nn.Module, activations: ActivationsConfig) -> _Built:
    form = probe.gated_form(module)
    if form is not None:
        return Fp8GatedFeedForward(module, activations, form)
    if "forward" in module.__dict__ and any(map(_looks_elementwise, module.children())):
        return "its forward was replaced by one that computes something else"
    return None


def _build_activation(module: nn.Module, activations: ActivationsConfig) -> _Built:
    kind = probe.activation_kind(module)
    if kind is None:
        return None
    if probe.writes_into_its_input(module):
        return "it works in place"
    return Fp8Activation(module, activations, kind)


def _build_experts(module: nn.Module, activations: ActivationsConfig) -> _Built:
    if autoep.is_autoep(module):
        return autoep.why_not(module) or autoep.AutoEPExperts(module, activations)
    dispatch = transformers_ep.dispatch_of(module)
    reason = experts.why_not(module, dispatched=dispatch is not None)
    if dispatch is None:
        return reason or experts.Fp8Experts(module, activations)
    reason = reason or transformers_ep.why_not(dispatch)
    return reason or transformers_ep.TransformersEPExperts(module, activations, dispatch)


_BUILDERS = {
    "norm": _build_norm,
    "gated": _build_gated,
    "activation": _build_activation,
    "experts": _build_experts,
}


def _convert_attention(model: nn.Module, conversion: Conversion, may_convert: Callable) -> None:
    """Makes modules that use transformers' AttentionInterface choose "coat" instead of "sdpa" or
    FlashAttention, and with sinks instead of "eager"."""
    saving = attention.attention_saving(conversion.activations)
    configs: dict[int, Any] = {}
    found = [
        (name, module, getattr(module, "config", None))
        for name, module in model.named_modules()
        if probe.uses_interface(module)
    ]
    # modules with one config have one implementation
    flash = {id(config): why for _, module, config in found if (why := attention.why_keep_flash(module))}
    for name, module, config in found:
        implementation: Any = getattr(config, "_attn_implementation", None)
        if not may_convert(name, module):
            why = "the filter"
        elif attention.is_flash(implementation):
            why = flash.get(id(config))
        else:
            why = attention.why_not(module, implementation)
        if why is not None:
            module.__dict__[attention.NOT_CONVERTED] = True
            conversion.add_left("attention", name, why)
        else:
            # another part of the model may have set it
            loaded = saving.loaded if implementation == attention.NAME else implementation
            module.__dict__[attention.SAVING] = replace(saving, loaded=loaded)
            conversion.add_converted("attention", name)
            configs[id(config)] = config
    if configs:
        attention.register()
    # masks depend on the implementation in the models' configs, which are the same objects
    for config in configs.values():
        config._attn_implementation_internal = attention.NAME
