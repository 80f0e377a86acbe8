"""The `"coat"` block of a DeepSpeed JSON config.

    {"coat": {"enabled": true}}

is the whole usual block; every field below has the value that it takes then.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Self

from coat_kernels.codecs import CODECS, SIGNED_CODECS
from coat_kernels.fp8 import E4M3, E5M2

OPTIMIZER_GROUP_SIZES = (64, 128, 256)
ACTIVATION_GROUP_SIZES = (16, 32, 64, 128)
FP8_FORMATS = (E4M3.name, E5M2.name)
BF16_PARAMS = ("exact", "stochastic", "nearest")
CHECKPOINT_LAYOUTS = ("stock", "compressed")
ROUNDINGS = ("auto", "nearest", "stochastic")
KEEP_FP32 = ("*norm*", "*bias*")


class CoatConfigError(ValueError):
    """A config that cannot be honoured. The message names the key, the value found and the way out."""


def check_type(key: str, value: Any, expected: type) -> None:
    """Raises CoatConfigError unless `value` is of exactly the JSON type `expected` (true is no integer)."""
    if type(value) is not expected:
        name = {bool: "true or false", int: "an integer", str: "a string"}[expected]
        raise CoatConfigError(f"{key}: expected {name}, found {value!r}. Correct the value or drop the key.")


def check_choice(key: str, value: Any, choices: tuple) -> None:
    """Raises CoatConfigError unless `value` is one of `choices`, of the same type."""
    check_type(key, value, type(choices[0]))
    if value not in choices:
        listed = ", ".join(repr(c) for c in choices)
        raise CoatConfigError(
            f"{key}: expected one of {listed}; found {value!r}.{_did_you_mean(value, choices)}"
        )


def _did_you_mean(found: Any, known) -> str:
    close = difflib.get_close_matches(str(found), [str(k) for k in known], n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


class _Block:
    """A JSON object that a frozen dataclass describes; `KEY` is its path in the config."""

    __slots__ = ()
    KEY: ClassVar[str]

    @classmethod
    def from_dict(cls, block: Mapping[str, Any]) -> Self:
        """Builds the dataclass tree from a JSON object; absent keys take their defaults.

        Raises CoatConfigError for unknown keys, wrong types and impossible values.
        """
        if not isinstance(block, Mapping):
            raise CoatConfigError(
                f'{cls.KEY}: expected an object such as {{"enabled": true}}, found {block!r}. Use braces.'
            )
        known = {f.name: f.type for f in fields(cls)}
        for name in block:
            if name not in known:
                raise CoatConfigError(
                    f"{cls.KEY}.{name}: unknown key (value {block[name]!r}). Known keys: {', '.join(known)}."
                    + (_did_you_mean(name, known) or " Drop it.")
                )
        return cls(
            **{
                name: known[name].from_dict(value) if is_dataclass(known[name]) else value
                for name, value in block.items()
            }
        )


@dataclass(frozen=True, slots=True)
class OptimizerConfig(_Block):
    """How AdamW's moments are stored."""

    KEY: ClassVar[str] = "coat.optimizer"

    enabled: bool = True
    """Build `CoatAdamW` from the `"optimizer"` section. False leaves the optimizer to DeepSpeed."""

    exp_avg_format: str = "fp8_expanded"
    """Storage format of the first moment, by name (`coat_kernels.codecs.SIGNED_CODECS`)."""

    exp_avg_sq_format: str = "fp8_expanded"
    """Storage format of the second moment, by name."""

    exp_avg_sq_rounding: str = "auto"
    """How the second moment is rounded. "auto": "log8" stochastically where beta2 is above 63/64, since it
    would otherwise decay by less than half a code in a step, that is never; else to nearest."""

    group_size: int = 128
    """Consecutive elements that share one scale and one exponent."""

    min_numel: int = 4096
    """Tensors with fewer elements keep FP32 moments. 0 compresses them too."""

    keep_fp32: tuple[str, ...] = KEEP_FP32
    """Patterns of parameter names, `*` and `?`, any case: what matches keeps FP32 moments."""

    bf16_params: str = "exact"
    """How BF16 parameters that the optimizer itself holds are updated: "exact" (16 more bits in the state
    make each an FP32 master), "stochastic" or "nearest" rounding. ZeRO's FP32 masters are not concerned."""

    checkpoint_layout: str = "stock"
    """What checkpoints hold. "stock": FP32 moments, as stock AdamW's do, which reads them. "compressed": the
    codes, a quarter of the bytes, which are read where `coat_ds` is installed."""

    def __post_init__(self):
        check_type(f"{self.KEY}.enabled", self.enabled, bool)
        check_choice(f"{self.KEY}.checkpoint_layout", self.checkpoint_layout, CHECKPOINT_LAYOUTS)
        check_choice(f"{self.KEY}.exp_avg_format", self.exp_avg_format, tuple(SIGNED_CODECS))
        check_choice(f"{self.KEY}.exp_avg_sq_format", self.exp_avg_sq_format, tuple(CODECS))
        check_choice(f"{self.KEY}.group_size", self.group_size, OPTIMIZER_GROUP_SIZES)
        check_choice(f"{self.KEY}.exp_avg_sq_rounding", self.exp_avg_sq_rounding, ROUNDINGS)
        check_choice(f"{self.KEY}.bf16_params", self.bf16_params, BF16_PARAMS)
        patterns = self.keep_fp32
        if not isinstance(patterns, list | tuple) or not all(isinstance(p, str) for p in patterns):
            raise CoatConfigError(
                f"{self.KEY}.keep_fp32: expected a list of name patterns such as {list(KEEP_FP32)}, found "
                f"{patterns!r}. Correct the value or drop the key."
            )
        object.__setattr__(self, "keep_fp32", tuple(patterns))
        check_type(f"{self.KEY}.min_numel", self.min_numel, int)
        if self.min_numel < 0:
            raise CoatConfigError(
                f"{self.KEY}.min_numel: expected 0 or more, found {self.min_numel}. 0 compresses everything."
            )


@dataclass(frozen=True, slots=True)
class ActivationsConfig(_Block):
    """How the layers save activations and in which formats they multiply. The model's layer spec takes it."""

    KEY: ClassVar[str] = "coat.activations"

    enabled: bool = True
    """Use the FP8 layers, where the model is made of them."""

    group_size: int = 16
    """Consecutive elements of a row that share one scale in a saved activation."""

    forward_format: str = "e4m3"
    """FP8 format of activations and weights: E4M3, since no GPU multiplies E5M2 by E5M2."""

    backward_format: str = "e5m2"
    """FP8 format of gradients."""

    def __post_init__(self):
        check_type(f"{self.KEY}.enabled", self.enabled, bool)
        check_choice(f"{self.KEY}.group_size", self.group_size, ACTIVATION_GROUP_SIZES)
        check_choice(f"{self.KEY}.forward_format", self.forward_format, (E4M3.name,))
        check_choice(f"{self.KEY}.backward_format", self.backward_format, FP8_FORMATS)


@dataclass(frozen=True, slots=True)
class CoatConfig(_Block):
    """The whole block."""

    KEY: ClassVar[str] = "coat"

    enabled: bool = False
    """The switch. Without the block, or with false, nothing changes."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """FP8 optimizer states."""

    activations: ActivationsConfig = field(default_factory=ActivationsConfig)
    """FP8 saved activations and FP8 linear layers."""

    def __post_init__(self):
        check_type(f"{self.KEY}.enabled", self.enabled, bool)
        for name, expected in (("optimizer", OptimizerConfig), ("activations", ActivationsConfig)):
            value = getattr(self, name)
            if not isinstance(value, expected):
                raise CoatConfigError(f"{self.KEY}.{name}: expected {expected.__name__}, found {value!r}.")

    @classmethod
    def from_dict(cls, block: Mapping[str, Any] | None) -> Self:
        """Builds the config from the `"coat"` block; None (no block) gives a disabled one.

        Raises CoatConfigError, also for a block that sets something but not `enabled`: it would be
        ignored without a word.
        """
        config = super(CoatConfig, cls).from_dict({} if block is None else block)
        if block and "enabled" not in block:
            raise CoatConfigError(
                f'coat.enabled: missing beside {", ".join(block)}. Add "enabled": true or "enabled": false.'
            )
        return config
