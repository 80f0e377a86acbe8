"""The sizes of a model of Megatron's: of its command line, or of a model that was built."""

import argparse
import ast
from collections.abc import Mapping, Sequence

from coat_ds.plan.errors import PlanError
from coat_ds.plan.experts import Experts
from coat_ds.plan.sizes import MEGATRON, Sizes, check_parameters, with_head_dim

# which stages of a pipeline have more layers than others
_UNEVEN = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
)
# arguments for models with Mamba layers
_HYBRID = ("hybrid-override-pattern", "hybrid-layer-pattern", "is-hybrid-model")
_NUMBERS = (
    *("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
)
_FLAGS = ("moe_grouped_gemm", "moe_shared_expert_gate", "quick_geglu", "disable_bias_linear")
# why these are not planned
_REFUSED_NUMBERS = {
    "moe_expert_capacity_factor": "tokens that are dropped are not planned",
    "moe_latent_size": "experts of fewer channels than the model's are not planned",
}
_REFUSED_FLAGS = {
    "moe_pad_expert_input_to_capacity": "rows that are padded are not planned",
    "moe_shared_expert_overlap": "COAT's layers refuse it",
    "moe_use_legacy_grouped_gemm": "COAT's layers refuse it",
    "moe_apply_probs_on_input": "what it keeps is not planned",
}
# activations that have no kernel, which grouped experts alone take under COAT
_OWN_GATES = ("quick_geglu", "activation_func_clamp_value", "glu_linear_offset")
_NO_GATE = (
    "COAT has it in experts of --moe-grouped-gemm alone, and this model has other feed-forward layers. "
    "Plan it with --swiglu."
)


def from_arguments(arguments: Sequence[str]) -> tuple[Sizes, dict]:
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
    _add_arguments_of_experts(parser)
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
                f"--{name.replace('_', '-')}: found {values[name]}, and only stages "
                "with equal numbers of layers are planned. Drop it for such a plan."
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
    for name, key in MEGATRON.items():
        if values[key] is None:
            raise PlanError(f"--{key.replace('_', '-')}: not among Megatron's arguments. Add it.")
        sizes[name] = values[key]
    gated, biases = found.swiglu or found.quick_geglu, not found.disable_bias_linear
    model = with_head_dim(
        **sizes,
        groups=found.num_query_groups or found.num_attention_heads,
        head_dim=found.kv_channels,
        head_norms=found.qk_layernorm,
        vocabulary=vocabulary,
        gated=gated,
        experts=experts_of(values, sizes["layers"], sizes["ffn"], gated, biases),
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
        **spread_of(found, tensor),
    }
    return model, {name: value for name, value in layout.items() if value is not None}


def read(model) -> Sizes:
    """The sizes of a model of megatron-core that was built, on the meta device for one.

    Raises PlanError for layers that cannot be planned.
    """
    config = model.config
    # Megatron's argument for this function
    quick = getattr(config.activation_func, "__name__", None) == "quick_gelu"
    values = {**vars(config), "num_experts": config.num_moe_experts, "quick_geglu": quick}
    _refuse_latent_attention(values)
    layers, ffn, gated = config.num_layers, config.ffn_hidden_size, config.gated_linear_unit
    sizes = with_head_dim(
        **{name: getattr(config, key) for name, key in MEGATRON.items()},
        experts=experts_of(values, layers, ffn, gated, config.add_bias_linear),
        groups=config.num_query_groups,
        head_dim=config.kv_channels,
        head_norms=config.qk_layernorm,
        vocabulary=getattr(model, "vocab_size", None),
        gated=gated,
        tied=getattr(model, "share_embeddings_and_output_weights", False),
    )
    check_parameters(type(model).__name__, sum(p.numel() for p in model.parameters()), sizes)
    return sizes


def _add_arguments_of_experts(parser: argparse.ArgumentParser) -> None:
    """Those of Megatron's arguments that are about experts, and what an expert's activation is."""
    for name in _NUMBERS:
        parser.add_argument(_argument(name), type=int)
    for name in (*_REFUSED_NUMBERS, "activation_func_clamp_value", "glu_linear_offset"):
        parser.add_argument(_argument(name), type=float)
    for name in (*_REFUSED_FLAGS, *_FLAGS):
        parser.add_argument(_argument(name), action="store_true")
    parser.add_argument("--moe-layer-freq", type=_frequency, default=1)
    dispatchers = ("allgather", "alltoall", "flex")
    parser.add_argument("--moe-token-dispatcher-type", choices=dispatchers, default="allgather")


def experts_of(values: Mapping, layers: int, ffn: int, gated: bool, biases: bool) -> Experts | None:
    """None for a dense model. values: by the names of Megatron's arguments, with underscores. ffn: of a
    dense layer. Raises PlanError, naming the argument, for what cannot be planned."""
    count = values.get("num_experts")
    own = next((name for name in _OWN_GATES if values.get(name)), None)
    if not count:
        if own:
            raise PlanError(f"{_argument(own)}: {_NO_GATE}")
        return None
    for name, why in (_REFUSED_NUMBERS | _REFUSED_FLAGS).items():
        if values.get(name):
            raise PlanError(f"{_argument(name)}: found {values[name]}, and {why}. Drop it.")
    for name in _NUMBERS:
        if (value := values.get(name)) is not None and value < 1:
            raise PlanError(f"{_argument(name)}: expected a whole number above 0, found {value}. Correct it.")
    used = values.get("moe_router_topk") or 2
    if used > count:
        raise PlanError(f"--moe-router-topk: expected at most {count}, --num-experts, found {used}.")
    shared = values.get("moe_shared_expert_intermediate_size") or 0
    if shared and biases:
        raise PlanError(
            "--moe-shared-expert-intermediate-size: Megatron has no shared experts with biases. Add "
            "--disable-bias-linear."
        )
    experts = Experts(
        count=count,
        used=used,
        ffn=values.get("moe_ffn_hidden_size") or ffn,
        where=_where(values.get("moe_layer_freq", 1), layers),
        shared=shared,
        shared_gate=bool(shared and values.get("moe_shared_expert_gate")),
        grouped=bool(values.get("moe_grouped_gemm")),
        gated=gated,
        biases=biases,
    )
    if own and (shared or not experts.grouped or experts.layers < layers):
        raise PlanError(f"{_argument(own)}: {_NO_GATE}")
    return experts


def spread_of(found: argparse.Namespace, tensor: int) -> dict:
    """Fields of a `Layout`. Raises PlanError for experts that cannot be spread so."""
    expert = found.expert_model_parallel_size or 1
    if not found.num_experts:
        return {}
    if found.num_experts % expert:
        raise PlanError(
            f"--num-experts: {found.num_experts} is no multiple of --expert-model-parallel-size, {expert}. "
            "Change one of them."
        )
    if tensor > 1 and not found.sequence_parallel:
        raise PlanError("--sequence-parallel: Megatron wants it for experts and tensor parallelism. Add it.")
    return {
        "expert": expert,
        "expert_tensor": found.expert_tensor_parallel_size,
        "gathers_tokens": found.moe_token_dispatcher_type == "allgather",
    }


def _argument(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _where(frequency: int | list[int], layers: int) -> tuple[bool, ...]:
    if isinstance(frequency, int):
        return tuple(i % frequency == 0 for i in range(layers))
    if len(frequency) != layers:
        raise PlanError(
            f"--moe-layer-freq: expected one number for each of {layers} layers, found {len(frequency)}. "
            "Correct it."
        )
    return tuple(map(bool, frequency))


def _frequency(text: str) -> int | list[int]:
    """Of --moe-layer-freq: every so manieth layer, or a list as ([0]*3+[1]*58)."""
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError:
        found = None
    if isinstance(found, int) and found > 0 or isinstance(found, list) and set(found) <= {0, 1}:
        return found
    raise argparse.ArgumentTypeError(f"expected a number above 0 or a list as ([0]*3+[1]*58), found {text!r}")


def _value(node: ast.expr) -> int | list[int] | None:
    """The value of a number, a list of numbers, or lists added and multiplied; None for other nodes."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=elements):
            found = [_value(element) for element in elements]
            return found if all(isinstance(n, int) for n in found) else None
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as op, right=right):
            a, b = _value(left), _value(right)
            if isinstance(op, ast.Add):
                return a + b if isinstance(a, list) and isinstance(b, list) else None
            return a * b if {type(a), type(b)} == {int, list} else None
    return None


def _refuse_latent_attention(values: Mapping) -> None:
    """Raises PlanError for Megatron's multi-latent attention, which is not planned."""
    if values.get("multi_latent_attention"):
        raise PlanError(
            "multi_latent_attention: found true, and multi-latent attention is not planned. Leave it out for "
            "a plan of the same model with ordinary attention."
        )
