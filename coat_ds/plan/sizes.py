"""The sizes of a model, read from whatever describes it."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from coat_ds.layers.experts import MOST_EXPERTS
from coat_ds.plan import mixtures
from coat_ds.plan.errors import PlanError
from coat_ds.plan.experts import Experts

MAKERS = ("megatron", "transformers")
# what others call a size
_TRANSFORMERS = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "ffn": ("intermediate_size", "n_inner"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
}
_MEGATRON = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "ffn": "ffn_hidden_size",
    "heads": "num_attention_heads",
}
# which stages of a pipeline have more layers than others
_UNEVEN = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "num_moe_experts")
# mixtures whose layers are attention, a router and gated experts, as Mixtral's
_MIXTURES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "phimoe", "granitemoe"),
    *("glm4_moe", "minimax_m2", "solar_open", "gpt_oss"),
)
# whose experts have biases and gates of their own, which no FP8 product takes
_OWN_GATES = ("gpt_oss",)
# what a config calls experts that every token takes, by number and by channels
_SHARED, _SHARED_FFN = ("n_shared_experts", "num_shared_experts"), "shared_expert_intermediate_size"
# of what a config describes with such a name, these are not other parts of the model
_NO_PARTS = ("text_config", "quantization_config", "generation_config")
_ATTENTION = ("full_attention", "sliding_attention")
# model types of transformers whose feed-forward is one product, an activation, one product
_UNGATED = ("gpt2", "gpt_neox", "opt", "gptj", "phi")
# those whose saved activations tests count
_COUNTED = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
_HEAD_NORMS = ("qwen3", "qwen3_moe")
# Megatron's arguments for models with Mamba layers
_HYBRID = ("hybrid-override-pattern", "hybrid-layer-pattern", "is-hybrid-model")
# a model whose parameters are further than this from what its config's sizes give is of another kind
TOLERANCE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A decoder-only transformer.

    Raises PlanError for a size that is not a whole number above 0.
    """

    layers: int
    hidden: int
    """Channels of the residual stream."""
    ffn: int
    """Channels between the two products of a feed-forward layer."""
    heads: int
    """Query heads."""
    groups: int
    """Key and value heads."""
    head_dim: int
    vocabulary: int
    gated: bool = True
    """The feed-forward layer's first product has twice `ffn` columns, as SwiGLU's."""
    tied: bool = False
    """Embedding and head are one matrix."""
    head_norms: bool = False
    """Queries and keys are normed, head by head, by RMSNorm."""
    counted: bool = True
    """What layers of this kind save in BF16 was counted. Else they are taken for Llama's."""
    maker: str = "megatron"
    """Whose layers BF16 is: "megatron" (megatron-core's) or "transformers" (Hugging Face's)."""
    other_parameters: int = 0
    """Beside what the sizes above give: biases, positions, norms of queries and keys."""
    beside: tuple[str, ...] = ()
    """Other parts of the model, as its config calls them, which are not planned."""
    experts: Experts | None = None
    """In place of feed-forward layers of `ffn`, in the layers that have them."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if (
                field.type is int
                and field.name != "other_parameters"
                and (type(value) is not int or value < 1)
            ):
                raise PlanError(
                    f"{field.name}: expected a whole number above 0, found {value!r}. Correct it."
                )

    @property
    def queries(self) -> int:
        """Channels of all query heads, and of attention's output."""
        return self.heads * self.head_dim

    @property
    def qkv(self) -> int:
        """Channels of queries, keys and values together."""
        return (self.heads + 2 * self.groups) * self.head_dim

    @property
    def fc1(self) -> int:
        """Columns in front of the activation function."""
        return (1 + self.gated) * self.ffn

    @property
    def attention_matrices(self) -> int:
        """Elements of the matrices of a layer's attention."""
        return self.hidden * (self.qkv + self.queries)

    @property
    def feed_forward_matrices(self) -> int:
        """Of a feed-forward layer without experts."""
        return self.hidden * (self.fc1 + self.ffn)

    def mean(self, dense: float, sparse: float) -> float:
        """The mean over the layers of what is `dense` in one without experts, `sparse` in one with them."""
        if self.experts is None:
            return dense
        share = self.experts.layers / self.layers
        return (1 - share) * dense + share * sparse

    @property
    def attends_again(self) -> float:
        """The share of layers in which COAT can make attention again: fused blocks, which have no experts."""
        return self.mean(1, 0)

    def _of_a_layer(self, of_experts: Callable[[Experts, int], int]) -> float:
        """Elements of a layer's attention and feed-forward, mean over the layers."""
        sparse = of_experts(self.experts, self.hidden) if self.experts else 0
        return self.attention_matrices + self.mean(self.feed_forward_matrices, sparse)

    @property
    def layer_matrices(self) -> float:
        """Elements of a layer's matrices, mean over the layers."""
        return self._of_a_layer(Experts.matrices)

    @property
    def converted_matrices(self) -> float:
        """Those of them that COAT multiplies in FP8."""
        return self._of_a_layer(Experts.converted_matrices)

    @property
    def layer_products(self) -> float:
        """Those that a token is multiplied with."""
        return self._of_a_layer(Experts.products)

    @property
    def converted_products(self) -> float:
        """Those that a token is multiplied with in FP8, by COAT."""
        return self._of_a_layer(Experts.converted_products)

    def layer_on_gpu(self, tensor: int, expert_shares: int) -> tuple[float, float]:
        """Elements of a layer's matrices on a GPU, mean over the layers: of routed experts, of which
        `expert_shares` GPUs share a layer's, and of all else."""
        routed, router = self._of_experts(Experts.routed), self._of_experts(Experts.router)
        return routed / expert_shares, (self.layer_matrices - routed - router) / tensor + router

    def converted_on_gpu(self, tensor: int, expert_shares: int) -> float:
        """Those of them that COAT multiplies in FP8."""
        routed = self._of_experts(Experts.converted_routed)
        return routed / expert_shares + (self.converted_matrices - routed) / tensor

    def _of_experts(self, elements: Callable[[Experts, int], int]) -> float:
        return self.mean(0, elements(self.experts, self.hidden)) if self.experts else 0

    def part(self, layers: slice) -> "Sizes":
        """Of some of the layers, between the same embedding and head."""
        experts, count = self.experts, len(range(self.layers)[layers])
        if experts is not None:
            where = experts.where[layers]
            experts = dataclasses.replace(experts, where=where) if any(where) else None
        return dataclasses.replace(self, layers=count, experts=experts)

    @property
    def active_ffn(self) -> float:
        """Channels between the products of a feed-forward layer that a token takes."""
        sparse = self.experts.used * self.experts.ffn + self.experts.shared if self.experts else 0
        return self.mean(self.ffn, sparse)

    @property
    def widest_ffn(self) -> int:
        """Channels between the products of the widest feed-forward layer that all tokens take; 0 of none."""
        return max(self.ffn * bool(self.mean(1, 0)), self.experts.shared if self.experts else 0)

    @property
    def table(self) -> int:
        """Elements of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        tables = self.table * (1 if self.tied else 2)
        norms = (2 * self.layers + 1) * self.hidden
        return round(self.layers * self.layer_matrices) + tables + norms + self.other_parameters

    def stack(self) -> list[list[list[int]]]:
        """Elements of the parameters of each layer's modules, in the order in which forward uses them."""
        h = self.hidden
        if self.maker == "megatron":
            attention, first = [[h * self.qkv]], [[h * self.fc1]]
        else:
            kv = h * self.groups * self.head_dim
            attention, first = [[h * self.queries], [kv], [kv]], [[h * self.ffn]] * (1 + self.gated)
        front = [[h], *attention, [self.queries * h], [h]]
        dense = [*front, *first, [self.ffn * h]]
        if self.experts is None:
            return self.layers * [dense]
        sparse = [*front, *self.experts.modules(h)]
        return [sparse if has_experts else dense for has_experts in self.experts.where]


def from_shape(values: Mapping, vocabulary: int | None) -> Sizes:
    """Of a file of configs/ (`num_layers`, `hidden_size`, ...), which names no vocabulary."""
    if vocabulary is None:
        raise PlanError("vocabulary: a file of sizes names none. Give --vocabulary, 32000 for Llama-2.")
    sizes = {name: _whole(values, key) for name, key in _MEGATRON.items()}
    untied = values.get("untie_embeddings_and_output_weights", True)
    groups = values.get("num_query_groups") or sizes["heads"]
    return _checked(**sizes, groups=groups, head_dim=None, vocabulary=vocabulary, tied=not untied)


def from_transformers(config: Mapping) -> Sizes:
    """Of a config.json of Hugging Face's."""
    beside: tuple[str, ...] = ()
    if "text_config" in config:
        beside = tuple(name for name in config if name.endswith("_config") and name not in _NO_PARTS)
        config = config["text_config"]
        if not isinstance(config, Mapping):
            raise PlanError(
                f"text_config: expected an object, found {config!r}. Take the model's config.json."
            )
    _refuse_layers(config)
    found = {}
    for name, keys in _TRANSFORMERS.items():
        key = next((k for k in keys if config.get(k) is not None), keys[0])
        if key == "n_inner" or name == "ffn" and config.get(key) is None and "n_embd" in config:
            found[name] = _whole_or(4 * found["hidden"], config, "n_inner")
        elif name == "ffn" and config.get(key) is None and "moe_intermediate_size" in config:
            # all layers have experts
            found[name] = _whole(config, "moe_intermediate_size")
        else:
            found[name] = _whole(config, key)
    return _checked(
        **found,
        experts=_experts(config, found["layers"]),
        groups=_whole_or(found["heads"], config, "num_key_value_heads"),
        head_dim=_whole_or(0, config, "head_dim") or None,
        gated=config.get("model_type") not in _UNGATED,
        head_norms=config.get("model_type") in _HEAD_NORMS,
        counted=config.get("model_type", "llama") in _COUNTED,
        tied=bool(config.get("tie_word_embeddings", "n_embd" in config)),
        maker="transformers",
        beside=beside,
    )


def from_megatron(arguments: Sequence[str]) -> tuple[Sizes, dict]:
    """Of Megatron-LM's arguments, as its scripts take them; the sizes, and what they say of the layout.

    Raises PlanError for arguments without which nothing can be said. Those that do not matter are passed.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in (
        *("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups"),
        *("kv-channels", "vocab-size", "make-vocab-size-divisible-by", "seq-length", "micro-batch-size"),
        *("global-batch-size", "tensor-model-parallel-size", "pipeline-model-parallel-size"),
        *("padded-vocab-size",),
    ):
        parser.add_argument(f"--{name}", type=int)
    for name in (
        "swiglu",
        "untie-embeddings-and-output-weights",
        "sequence-parallel",
        "multi-latent-attention",
        "qk-layernorm",
    ):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("use-distributed-optimizer", "grad-reduce-in-bf16"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in _UNEVEN:
        parser.add_argument(f"--{name.replace('_', '-')}")
    for name in _HYBRID:
        parser.add_argument(f"--{name}", nargs="?", const=True)
    mixtures.add_arguments(parser)
    try:
        found, _ = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise PlanError(f"Megatron's arguments: {error}. Correct it.") from None
    values = vars(found)
    _refuse_latent_attention(values)
    for name in _HYBRID:
        if values[name.replace("-", "_")] is not None:
            raise PlanError(
                f"--{name}: hybrid models are not planned, only layers of attention and feed-forward. "
                "Drop it for a plan of such layers."
            )
    for name in _UNEVEN:
        if values[name] is not None:
            raise PlanError(
                f"--{name.replace('_', '-')}: found {values[name]}, and only stages of as many layers are "
                "planned. Drop it for a plan of even ones."
            )
    vocabulary = found.padded_vocab_size or found.vocab_size
    if vocabulary is None:
        raise PlanError("--vocab-size: not among Megatron's arguments. Add it: the tokenizer's, padded.")
    if found.padded_vocab_size is None:
        multiple = (found.make_vocab_size_divisible_by or 128) * (found.tensor_model_parallel_size or 1)
        vocabulary = -(-vocabulary // multiple) * multiple
    # Megatron's own default
    if found.ffn_hidden_size is None and found.hidden_size is not None:
        values["ffn_hidden_size"] = 4 * found.hidden_size
    sizes = {}
    for name, key in _MEGATRON.items():
        if values[key] is None:
            raise PlanError(f"--{key.replace('_', '-')}: not among Megatron's arguments. Add it.")
        sizes[name] = values[key]
    gated, biases = found.swiglu or found.quick_geglu, not found.disable_bias_linear
    model = _checked(
        **sizes,
        groups=found.num_query_groups or found.num_attention_heads,
        head_dim=found.kv_channels,
        head_norms=found.qk_layernorm,
        vocabulary=vocabulary,
        gated=gated,
        experts=mixtures.experts_of(values, sizes["layers"], sizes["ffn"], gated, biases),
        tied=not found.untie_embeddings_and_output_weights,
    )
    tensor, pipeline = found.tensor_model_parallel_size or 1, found.pipeline_model_parallel_size or 1
    if pipeline > model.layers:
        raise PlanError(
            f"--pipeline-model-parallel-size: expected at most {model.layers}, --num-layers, found "
            f"{pipeline}. Correct it."
        )
    layout = {
        "host": "megatron",
        "stage": 1 if found.use_distributed_optimizer else 0,
        "tensor": tensor,
        "pipeline": pipeline,
        "sequence_parallel": found.sequence_parallel,
        "fp32_gradients": not found.grad_reduce_in_bf16,
        "micro_batch": found.micro_batch_size,
        "sequence": found.seq_length,
        "global_batch": found.global_batch_size,
        **mixtures.spread_of(found, tensor),
    }
    return model, {name: value for name, value in layout.items() if value is not None}


def from_module(model) -> Sizes:
    """Of a model that was built, on the meta device for one: transformers' or megatron-core's.

    What its config does not say, biases for one, is what its parameters are more. Raises PlanError for a
    model without a config, or of another kind than its config's sizes give.
    """
    config = getattr(model, "config", None)
    numel = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    if hasattr(config, "to_dict"):
        return _from_pretrained(model, numel)
    if hasattr(config, "num_layers"):
        # Megatron's argument for this function
        quick = getattr(config.activation_func, "__name__", None) == "quick_gelu"
        values = {**vars(config), "num_experts": config.num_moe_experts, "quick_geglu": quick}
        _refuse_latent_attention(values)
        layers, ffn, gated = config.num_layers, config.ffn_hidden_size, config.gated_linear_unit
        sizes = _checked(
            **{name: getattr(config, key) for name, key in _MEGATRON.items()},
            experts=mixtures.experts_of(values, layers, ffn, gated, config.add_bias_linear),
            groups=config.num_query_groups,
            head_dim=config.kv_channels,
            head_norms=config.qk_layernorm,
            vocabulary=getattr(model, "vocab_size", None),
            gated=gated,
            tied=getattr(model, "share_embeddings_and_output_weights", False),
        )
    else:
        raise PlanError(
            f"{type(model).__name__}: expected a model of transformers or megatron-core, which has its sizes "
            'in "config". Hand over a Sizes instead.'
        )
    return _matched(type(model).__name__, [sizes], numel, numel)


def _from_pretrained(model, numel: int) -> Sizes:
    """Of a model of transformers. What its config does not say is read from its modules: whether the head is
    tied, and by the number of parameters whether layers are gated and share one key and value head."""
    read = from_transformers(model.config.to_dict())
    decoder, head = model.get_decoder() or model, model.get_output_embeddings()
    tied = head is None or head.weight is model.get_input_embeddings().weight
    read = dataclasses.replace(read, tied=tied)
    variants = [
        dataclasses.replace(read, gated=gated, groups=groups)
        for gated in (read.gated, not read.gated)
        for groups in dict.fromkeys((read.groups, 1))
    ]
    own = {id(p): getattr(p, "ds_numel", p.numel()) for p in decoder.parameters()}
    if head is not None:
        own |= {id(p): getattr(p, "ds_numel", p.numel()) for p in head.parameters()}
    return _matched(type(model).__name__, variants, sum(own.values()), numel)


def _matched(name: str, variants: Sequence[Sizes], of_decoder: int, numel: int) -> Sizes:
    """The first of `variants` that has `of_decoder` parameters, for a model that has `numel` in all. Raises
    PlanError if none has."""
    for sizes in variants:
        if abs(of_decoder - sizes.parameters) <= TOLERANCE * of_decoder:
            return dataclasses.replace(sizes, other_parameters=max(0, numel - sizes.parameters))
    raise PlanError(
        f"{name}: has {numel:,} parameters, {of_decoder:,} of them in its decoder; a decoder of its config's "
        f"sizes has {variants[0].parameters:,}. It has layers that are not planned: hand over a Sizes."
    )


def _checked(*, head_dim: int | None, heads: int, hidden: int, **sizes) -> Sizes:
    if head_dim is None:
        if hidden % heads:
            raise PlanError(f"heads: {heads} does not divide hidden, {hidden}. Correct one of the two.")
        head_dim = hidden // heads
    return Sizes(head_dim=head_dim, heads=heads, hidden=hidden, **sizes)


def _experts(config: Mapping, layers: int) -> Experts | None:
    """Of a config.json; None for a dense model."""
    key = next((key for key in _EXPERTS if _whole_or(1, config, key) > 1), None)
    if key is None:
        return None
    kind = config.get("model_type")
    if kind not in _MIXTURES:
        raise PlanError(
            f"{key}: found {config[key]} in a config of model_type {kind!r}, and of mixtures of experts only "
            f"{', '.join(_MIXTURES)} are planned. Hand over a Sizes with Experts."
        )
    count, used = _whole(config, key), _whole(config, "num_experts_per_tok")
    if used > count:
        raise PlanError(f"num_experts_per_tok: expected at most {count}, found {used}. Correct it.")
    ffn = _whole(
        config, "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    )
    shared = next((_whole(config, name) * ffn for name in _SHARED if config.get(name)), 0)
    shared = _whole_or(shared, config, _SHARED_FFN)
    # every so manieth layer has experts, and some are named that have none
    step, named = _whole_or(1, config, "decoder_sparse_step"), config.get("mlp_only_layers") or []
    if not isinstance(named, list | tuple):
        raise PlanError(f"mlp_only_layers: expected a list of layers, found {named!r}. Correct it.")
    first = _whole_or(0, config, "first_k_dense_replace")
    dense = {i for i in range(layers) if i < first or (i + 1) % step}
    return Experts(
        count=count,
        used=used,
        ffn=ffn,
        where=tuple(i not in dense and i not in named for i in range(layers)),
        shared=shared,
        grouped=count > MOST_EXPERTS or kind in _OWN_GATES,
    )


def _refuse_layers(config: Mapping) -> None:
    """Raises PlanError for what is no decoder, or has layers beside attention and feed-forward."""
    if config.get("is_encoder_decoder"):
        raise PlanError("is_encoder_decoder: found true, and only decoders are planned. Name one's config.")
    kinds = set(config.get("layer_types") or ()) - set(_ATTENTION)
    if kinds:
        raise PlanError(
            f"layer_types: found {min(kinds)!r}, and only layers with {' or '.join(_ATTENTION)} are planned."
        )
    if config.get("kv_lora_rank"):
        raise PlanError(
            f"kv_lora_rank: found {config['kv_lora_rank']}, and multi-latent attention is not planned."
        )


def _whole(values: Mapping, key: str) -> int:
    value = values.get(key)
    if value is None and "model_type" in values:
        raise PlanError(
            f"{key}: found none in a config of model_type {values['model_type']!r}. Only decoders can be "
            "planned, whose config names its sizes as Llama's or GPT-2's does."
        )
    if type(value) is not int or value < 1:
        found = "none" if value is None else repr(value)
        raise PlanError(f"{key}: expected a whole number above 0, found {found}. Add it to the model's file.")
    return value


def _whole_or(default: int, values: Mapping, key: str) -> int:
    """`default` where there is none, or 0."""
    return _whole(values, key) if values.get(key) else default


def _refuse_latent_attention(values: Mapping) -> None:
    """Raises PlanError for Megatron's multi-latent attention, which is not planned."""
    if values.get("multi_latent_attention"):
        raise PlanError(
            "multi_latent_attention: found true, and multi-latent attention is not planned. Leave it out for "
            "a plan of the same model with ordinary attention."
        )
