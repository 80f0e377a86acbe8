"""Megatron's mixtures of experts, as its arguments and its TransformerConfig say them."""

import argparse
import ast
from collections.abc import Mapping

from coat_ds.plan.errors import PlanError
from coat_ds.plan.experts import Experts

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    """Of a number, a list of numbers, a sum of lists, or a list times a number; None of anything else."""
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
