"""The options of `CoatAdamW`: their names, their values, and the formats of moments that they select."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from numbers import Integral, Real
from typing import Any

import torch

from coat_ds.config import KEEP_FP32, CoatConfigError, OptimizerConfig, check_pair, checked, did_you_mean
from coat_ds.log import log_rank_0, warn_rank_0
from coat_ds.optim.shards import shape_of
from coat_kernels.codecs import GROUP_SIZE, Codec, first_codec, get_codec

MOMENTS = ("exp_avg", "exp_avg_sq")
# the order in which moments are written: the first may be relative to the second
SECOND_FIRST = MOMENTS[::-1]
FORMATS = tuple(f"{name}_format" for name in MOMENTS)
Rule = Sequence[str] | Callable[[str | None, torch.Tensor], bool]
# the implementation switches of torch.optim.AdamW and DeepSpeed's Adams; CoatAdamW has one implementation.
# Its parameter groups hold them all the same, so that those optimizers can load its state dict
STOCK_SWITCHES: dict[str, Any] = {
    "amsgrad": False,
    "foreach": None,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
    "bias_correction": True,
}
# options that torch.optim.AdamW does not have; loading a state dict does not change them
COAT_KEYS = (
    "exp_avg_format",
    "exp_avg_sq_format",
    "min_numel",
    "bf16_params",
)
# norms of heads and biases of experts have at most this number of heads or experts; position embeddings and
# weight matrices have more in both dimensions
SMALLEST_MATRIX = 256
# the numbers, in addition to the betas, that enter a step
RATES = ("lr", "eps", "weight_decay")


def keeps_fp32(rule: Rule, name: str | None, p: torch.Tensor) -> bool:
    """Whether `rule`, patterns of names or a function of name and parameter, keeps FP32 moments for `p`.

    The default patterns are for norms and biases. They are matched against the names of the parameter and of
    the module that holds it, but not of outer modules, such as DBRX's `norm_attn_norm` around its attention.
    They match no weight matrices.
    """
    if callable(rule):
        return bool(rule(name, p))
    if name is None:
        return False
    name, sides = name.lower(), shape_of(p)[-2:]
    is_matrix = len(sides) == 2 and min(sides) >= SMALLEST_MATRIX
    own = "" if is_matrix else ".".join(name.split(".")[-2:])
    return any(fnmatchcase(own if pattern in KEEP_FP32 else name, pattern.lower()) for pattern in rule)


def idle_patterns(patterns: Iterable[str], names: Iterable[str], key: str = "coat.optimizer.") -> list[str]:
    """A line for each pattern of `keep_fp32` that matches no name, except the default patterns."""
    names = [name.lower() for name in names]
    return [
        f"{key}keep_fp32: {pattern!r} matches no parameter of this model: everything keeps the format it "
        f"would have without it.{_nearest_name(pattern, names)} Correct it or drop it."
        for pattern in patterns
        if pattern not in KEEP_FP32 and not any(fnmatchcase(name, pattern.lower()) for name in names)
    ]


def log_idle_bf16_params(wanted: str, held: Iterable[torch.Tensor], remedy: str) -> None:
    """Warns if `wanted`, a value of `bf16_params`, is not the default and the optimizer holds no BF16."""
    if wanted != "exact" and not any(p.dtype == torch.bfloat16 for p in held):
        warn_rank_0(
            f"coat.optimizer.bf16_params: found {wanted!r}, of no effect: the optimizer holds FP32 masters "
            f"and no BF16 parameters. {remedy}, or drop the key."
        )


def check_patterns(patterns: Sequence[str], groups: Iterable[dict[str, Any]]) -> None:
    """Logs which patterns of `keep_fp32` match no name in the parameter groups. Raises ValueError for
    patterns other than the default's if the groups have no names."""
    groups = list(groups)
    own = tuple(pattern for pattern in patterns if pattern not in KEEP_FP32)
    remedy = "Give model.named_parameters(), or a function of (name or None, parameter)."
    if not all("param_names" in group for group in groups):
        if own:
            raise ValueError(
                f"CoatAdamW: keep_fp32={own!r} is about names, and the parameters have none. {remedy}"
            )
        if patterns:
            log_rank_0(
                f"CoatAdamW: keep_fp32={tuple(patterns)!r} is of no effect: the parameters have no names. "
                f"{remedy}"
            )
        return
    names = [name for group in groups for name in group["param_names"]]
    for line in idle_patterns(own, names, "CoatAdamW: "):
        warn_rank_0(line)


def _nearest_name(pattern: str, names: Iterable[str]) -> str:
    """The question "Did you mean ...?" with the part of a parameter's name closest to `pattern`; or empty."""
    parts = {part for name in names for part in name.split(".") if not part.isdigit()}
    return did_you_mean(pattern.replace("*", "").replace("?", "").strip("."), sorted(parts))


def rounds_stochastically(group: dict[str, Any], codec: Codec) -> bool:
    """Whether second moments stored by `codec` are rounded stochastically in a parameter group."""
    return codec.fine and 1 - float(group["betas"][1]) < 1 / 64


def codec_of(group: dict[str, Any], name: str) -> Codec:
    """The codec in which a parameter group stores one of `MOMENTS`."""
    second = get_codec(group["exp_avg_sq_format"])
    return second if name == "exp_avg_sq" else first_codec(group["exp_avg_format"], second)


def has_remainder(p: torch.Tensor, group: dict[str, Any]) -> bool:
    """Whether `p` is BF16 and a 16-bit remainder in its state extends it to an FP32 master."""
    return p.dtype == torch.bfloat16 and group["bf16_params"] == "exact"


def check_names(group: dict[str, Any], known: dict[str, Any], common_options: dict[str, Any]) -> None:
    """Raises ValueError for a key that is nearly a known option, and for an option of the whole optimizer
    with another value in the group. Equal values pass: torch's `ZeroRedundancyOptimizer` puts all options in
    groups.

    Other keys are notes of the caller: schedulers' initial_lr, DeepSpeed's name and moe, Megatron's lr_mult.
    """
    for name in group.keys() & common_options.keys():
        # patterns are kept as a tuple
        given = tuple(group[name]) if isinstance(group[name], list) else group[name]
        if given != common_options[name]:
            raise ValueError(
                f"CoatAdamW: a parameter group has {name}={group[name]!r}, which is one for the whole "
                "optimizer. Give it to the constructor."
            )
    for name in group.keys() - known.keys() - {"params", "param_names"}:
        meant = get_close_matches(str(name).lower(), ("params", *known), n=1, cutoff=0.85)
        if meant:
            raise ValueError(
                f"CoatAdamW: a parameter group has {name!r}, which is no option. Did you mean {meant[0]!r}? "
                "Name notes of your own otherwise."
            )


def check_options(options: dict[str, Any]) -> None:
    """Raises ValueError for options that `CoatAdamW` does not support."""
    for name, only in STOCK_SWITCHES.items():
        value = options[name]
        # foreach and fused choose between implementations; there is one here
        if value != only and not (only is None and isinstance(value, bool)):
            raise ValueError(f"CoatAdamW: {name}={value!r} is not supported. Leave it at {only!r}.")
    check_numbers(options)
    for name in RATES:
        if not options[name] >= 0:
            raise ValueError(f"CoatAdamW: {name} must be 0 or more, found {options[name]!r}.")
    for f in fields(OptimizerConfig):
        if f.name in COAT_KEYS:
            checked(f, f"CoatAdamW: {f.name}", options[f.name])
    check_pair("CoatAdamW: ", options["exp_avg_format"], options["exp_avg_sq_format"])
    if options.get("group_size", GROUP_SIZE) != GROUP_SIZE:
        raise CoatConfigError(
            f"CoatAdamW: group_size: found {options['group_size']!r}, but the option was removed: groups "
            f"have {GROUP_SIZE} elements. Drop it."
        )


def check_numbers(options: dict[str, Any], key: str = "CoatAdamW: ") -> None:
    """Raises CoatConfigError for numbers that no step can compute with. Rates below 0 pass: the step ascends.

    key: prefixes each name.
    """
    for name in RATES:
        value = options[name]
        if _is_number(value):
            continue
        remedy = "Leave the quotes out." if isinstance(value, str) else "Write a number."
        if value == "auto":
            remedy = 'Only Hugging Face\'s Trainer fills in "auto"; write a number.'
        raise CoatConfigError(f"{key}{name}: expected a number, found {value!r}. {remedy}")
    betas = options["betas"]
    is_pair = isinstance(betas, tuple | list) and len(betas) == 2
    # with a second one of 0, exp_avg_sq would be the last gradient's square
    if not is_pair or not all(_is_number(beta) and 0 <= beta < 1 for beta in betas) or not betas[1] > 0:
        raise CoatConfigError(
            f"{key}betas: expected two numbers in [0, 1) such as [0.9, 0.95], the second above 0; found "
            f"{betas!r}. Correct them."
        )


def check_seed(seed: Any) -> None:
    """Raises CoatConfigError for a seed that is no integer, or too large for the kernels' 64-bit counter."""
    # numpy's integers, too
    if not isinstance(seed, Integral) or abs(int(seed)) >= 2**62:
        raise CoatConfigError(
            f"CoatAdamW: seed: expected an integer below 2**62, found {seed!r}. Correct it or drop it."
        )


def _is_number(value: Any) -> bool:
    is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1
    # NaN is not equal to itself
    return is_scalar or (isinstance(value, Real) and not isinstance(value, bool) and value == value)
