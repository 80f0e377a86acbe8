"""Decides which modules are not converted, and why: output heads, adapters, and parts whose output is
compared or rounded to choose something discrete, where an FP8 error changes the choice."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FunctionType

from torch import nn

from coat_ds.layers.detection.probe import uses_interface

# the reason for modules whose forward accelerate calls
DISPATCHED = "a hook of accelerate's, as of device_map"
HEAD = "the output head"
ROUTER = "the router"
CHOOSES = "its output is used to choose"
CODES = "it makes discrete codes"
KEPT_IN_FP32 = "its class keeps it in FP32"
ADAPTER = "an adapter"

# functions of torch whose result is an index
_CHOICES = {"topk", "argmax", "argmin", "argsort", "gumbel_softmax", "multinomial"}
# classes whose own code only generates and loads
_FRAMEWORK_CLASSES = ("PreTrainedModel", "GenerationMixin", "object")
_ROUTER_NAME = re.compile(r"router|routing|indexer", re.IGNORECASE)
_CODEBOOK_CLASS = re.compile(r"(Quantizer|VectorQuanti[sz](e|ation)|ScalarQuanti[sz]ation|Codebook)$")
_CODEC_NAME = re.compile(
    r"(^|_)(codec|codebook|quantizer|vqvae|vqmodel|(audio|image|vision|speech)_tokenizer)(_|$)"
)
_SCORE_NAME = re.compile(r"^(shared_expert_)?gate$|router|score|index|^dt_proj$")
# names of heads in transformers' classes
_HEAD_NAME = re.compile(
    r"(?<!pos_)heads?$|classifier|predictions?$|^cls$|^score$|_outputs?$|^proj_out$|(class|bbox)_embed"
    r"|^(visual|vision|text|image|audio|speech|video)_projection$"
)
_INPUT_NAME = re.compile(
    r"projector|connector|adapter|adaptor|encoder$|decoder$|tower|embed|qformer|resampler"
)


def is_dispatched(module: nn.Module) -> bool:
    """Whether accelerate calls the module's forward and moves tensors between devices around it."""
    return "_hf_hook" in module.__dict__


def excluded_modules(model: nn.Module) -> dict[int, str]:
    """The reason why a module is not converted, by the module's id. The first reason found counts."""
    excluded: dict[int, str] = {}
    excluded |= {id(module): DISPATCHED for module in model.modules() if is_dispatched(module)}
    for rule in (_adapters, _kept_in_fp32, _codes, _heads, _choices):
        for module, reason in rule(model):
            excluded.setdefault(id(module), reason)
    return excluded


def _whole(module: nn.Module, reason: str) -> Iterator[tuple[nn.Module, str]]:
    return ((inside, reason) for inside in module.modules())


def _is_pretrained(module: nn.Module) -> bool:
    """Whether `module` is a model of transformers. transformers need not be installed."""
    return hasattr(module, "base_model_prefix") and hasattr(module, "config")


def _adapters(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """PEFT's adapters and prompt encoders, and torch's MultiheadAttention, which reads its weights itself."""
    for module in model.modules():
        children = module._modules
        if "base_layer" in children:
            for name, child in children.items():
                if name != "base_layer" and child is not None:
                    yield from _whole(child, ADAPTER)
        prompts = children.get("prompt_encoder")
        if prompts is not None and hasattr(module, "peft_config"):
            yield from _whole(prompts, ADAPTER)
        if isinstance(module, nn.MultiheadAttention):
            yield from _whole(module, "torch's MultiheadAttention multiplies by itself")


def _heads(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Output embeddings, linear layers that share an embedding's weight, the only linear layer with the sizes
    of an embedding, and the heads that a class of transformers adds to its base model. These are found by
    their place in the class or by the usual names."""
    # in some layers, such as those of compressed-tensors, the weight is no parameter
    embeddings = {id(m._parameters.get("weight")) for m in model.modules() if isinstance(m, nn.Embedding)}
    embeddings.discard(id(None))
    yield from ((module, HEAD) for module in _sized_like_embeddings(model))
    for module in model.modules():
        get_head = getattr(module, "get_output_embeddings", None)
        if callable(get_head) and isinstance(head := _quietly(get_head), nn.Module):
            # including PEFT's wrapper around it
            yield from _whole(head, HEAD)
        if isinstance(module, nn.Linear) and id(module._parameters.get("weight")) in embeddings:
            yield module, HEAD
        if _is_pretrained(module):
            for child in _on_top(module):
                yield from _whole(child, HEAD)


def _sized_like_embeddings(model: nn.Module) -> Iterator[nn.Linear]:
    """Output heads by their sizes. Layers inside a model repeat, so several of one size are no heads."""
    sizes = {(m.num_embeddings, m.embedding_dim) for m in model.modules() if isinstance(m, nn.Embedding)}
    found: dict[tuple[int, int], list[nn.Linear]] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear) and (module.out_features, module.in_features) in sizes:
            found.setdefault((module.out_features, module.in_features), []).append(module)
    return (layers[0] for layers in found.values() if len(layers) == 1)


def _on_top(module: nn.Module) -> Iterator[nn.Module]:
    """The children of a model of transformers that are heads: not models, and without attention."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    has_base = module.base_model_prefix in children or "classifier" in children
    joins = sum(map(_is_pretrained, children.values())) > 1
    for name, child in children.items():
        # a model, or with attention
        is_body = any(_is_pretrained(m) or uses_interface(m) for m in child.modules())
        if name == module.base_model_prefix or is_body:
            continue
        above = has_base and not (_INPUT_NAME.search(name) and (joins or not _is_linear(child)))
        if above or _HEAD_NAME.search(name):
            yield child


def _kept_in_fp32(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules that a class of transformers keeps in FP32 even in a BF16 model. (`_keep_in_fp32_modules` is
    for the range of FP16.)"""
    for module in model.modules():
        if patterns := getattr(module, "_keep_in_fp32_modules_strict", None):
            kept = re.compile("|".join(rf"(^|\.){pattern}($|\.)" for pattern in sorted(patterns)))
            for name, inside in module.named_modules():
                names = (name, *(f"{name}.{own}" for own in inside._parameters))
                if any(map(kept.search, names)):
                    yield inside, KEPT_IN_FP32


def _codes(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Vector quantizers, and codecs and tokenizers: the models around quantizers inside a larger model."""
    seen_model = False

    def visit(module: nn.Module, name: str, codec: nn.Module | None) -> Iterator[tuple[nn.Module, str]]:
        nonlocal seen_model
        if _is_pretrained(module):
            codec, seen_model = (module if seen_model else None), True
        own = not type(module).__module__.startswith("torch.")
        if own and (_CODEBOOK_CLASS.search(type(module).__name__) or _CODEC_NAME.search(name)):
            yield from _whole(module if codec is None else codec, CODES)
            return
        for child_name, child in module._modules.items():
            if child is not None:
                yield from visit(child, child_name, codec)

    return visit(model, "", None)


def _choices(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Routers, indexers of sparse attention, and other modules that choose by the output of linear layers, in
    PEFT's wrappers too."""
    adapters = {id(module) for module, _ in _adapters(model)}
    for name, module in model.named_modules():
        children = {n: m for n, m in module._modules.items() if m is not None}
        named = f"{name.rpartition('.')[2]} {type(module).__name__}"
        inner = any(uses_interface(m) or "experts" in m._modules for m in module.modules())
        if _ROUTER_NAME.search(named) and not inner:
            yield from _whole(module, ROUTER)
        if (experts := children.get("experts")) is not None:
            for child in children.values():
                # the router may be a linear layer, or a module with nothing but its copies
                own = (m for m in child.modules() if isinstance(m, nn.Linear) and id(m) not in adapters)
                linears = [] if child is experts else list(own)
                numbers = len(experts._modules), getattr(experts, "num_experts", None)
                if linears and all(linear.out_features in numbers for linear in linears):
                    yield from ((linear, ROUTER) for linear in linears)
        if not children or not _chooses(type(module)):
            continue
        if _is_pretrained(module):
            chosen = [m for m in children.values() if _is_linear(m)]
        elif inner or len(children) > 3:
            # the module also does other work
            chosen = [m for n, m in children.items() if _is_linear(m) and _SCORE_NAME.search(n)]
        else:
            chosen = [module]
        for inside in chosen:
            yield from _whole(inside, CHOOSES)


@cache
def _chooses(kind: type) -> bool:
    """Whether the code of a class, except for generation, calls a function that returns indices."""
    for base in kind.__mro__:
        if base.__module__.startswith("torch.") or base.__name__ in _FRAMEWORK_CLASSES:
            continue
        for name, value in vars(base).items():
            function = getattr(value, "__wrapped__", value)
            skipped = name.startswith(("__", "generate", "_sample"))
            if isinstance(function, FunctionType) and not skipped and _CHOICES & _names_in(function.__code__):
                return True
    return False


def _names_in(code: CodeType) -> set[str]:
    nested = (_names_in(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*nested)


def _is_linear(module: nn.Module) -> bool:
    """Whether `module` is a linear layer, or PEFT's wrapper around one."""
    inside = module._modules
    return isinstance(inside.get("original_module") or inside.get("base_layer") or module, nn.Linear)


def _quietly(get: Callable) -> nn.Module | None:
    try:
        return get()
    # transformers' models without a head have the method too, and raise one of the two
    except (AttributeError, NotImplementedError):
        return None
