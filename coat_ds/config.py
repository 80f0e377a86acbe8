"""The `"coat"` block of a DeepSpeed JSON config.

    {"coat": {"enabled": true}}

is the whole usual block; every field below has the value that it takes then.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Self

from coat_kernels.autograd.checkpointing import GROUP_SIZES as CHECKPOINT_GROUP_SIZES
from coat_kernels.codecs import CODECS, SIGNED_CODECS, first_codec
from coat_kernels.fp8 import E4M3, E5M2
from coat_kernels.groups import DEFAULT_FORMAT, GROUP_FORMATS
from coat_kernels.weights import WEIGHT_CACHES

OPTIMIZER_GROUP_SIZES = (64, 128, 256)
ACTIVATION_GROUP_SIZES = (16, 32, 64, 128)
FP8_FORMATS = (E4M3.name, E5M2.name)
ATTENTION_FORMATS = ("bf16", "sqrt8", "recompute")
FAST_ACCUMULATION = ("forward", "all", "none")
BF16_PARAMS = ("exact", "stochastic", "nearest")
CHECKPOINT_LAYOUTS = ("stock", "compressed")
EXP_AVG_FORMATS = ("auto", *SIGNED_CODECS)
# a ratio to the second moment says nothing of the second moment itself
EXP_AVG_SQ_FORMATS = tuple(name for name, codec in CODECS.items() if not codec.relative)
ROUNDINGS = ("auto", "nearest", "stochastic")
KEEP_FP32 = ("*norm*", "*bias*")
OTHER_NAMES = {
    "fp8": ("e4m3",),
    "float8": ("e4m3",),
    "float8_e4m3fn": ("e4m3", "fp8"),
    "float8_e5m2": ("e5m2", "fp8_e5m2"),
    "int8": ("sqrt8", "log8"),
    "bfloat16": ("bf16",),
    "float32": ("fp32",),
}
WATCH_ACTS = ("off", "warn", "act")
ZERO3_LAYER_UNITS = ("auto", True, False)
CUDA_GRAPHS = ("auto", True, False)
EVALUATIONS = ("fp8", "stock")
AUTO = 'Nobody fills in "auto" in this block: write the value, or drop the key for its default.'


class CoatConfigError(ValueError):
    """A config that cannot be honoured. The message names the key, the value found and the way out."""


def check_type(key: str, value: Any, expected: type) -> None:
    """Raises CoatConfigError unless `value` is of exactly the JSON type `expected` (true is no integer; 1
    is a float)."""
    if type(value) is not expected and not (expected is float and type(value) is int):
        name = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[expected]
        way_out = AUTO if value == "auto" else "Correct the value or drop the key."
        raise CoatConfigError(f"{key}: expected {name}, found {value!r}. {way_out}")


def check_choice(key: str, value: Any, choices: tuple) -> None:
    """Raises CoatConfigError unless `value` is one of `choices`, of the same type."""
    if not any(type(value) is type(c) and value == c for c in choices):
        kind = "an integer, " if {type(c) for c in choices} == {int} else ""
        listed = ", ".join(repr(c) for c in choices)
        raise CoatConfigError(
            f"{key}: expected {kind}one of {listed}; found {value!r}." + _way_to_a_choice(value, choices)
        )


def _way_to_a_choice(value: Any, choices: tuple) -> str:
    if value == "auto":
        return f" {AUTO}"
    if isinstance(value, str) and value.lower() in (str(c).lower() for c in choices if type(c) is not str):
        return " Leave the quotes out."
    return did_you_mean(value, choices) or " Take one of them."


def check_pair(key: str, exp_avg_format: str, exp_avg_sq_format: str) -> None:
    """Raises CoatConfigError for two known formats that do not go together; `key` is put before each name."""
    first = first_codec(exp_avg_format, CODECS[exp_avg_sq_format])
    if not first.stands_beside(CODECS[exp_avg_sq_format]):
        seconds = [name for name, codec in CODECS.items() if first.stands_beside(codec)]
        raise CoatConfigError(
            f"{key}exp_avg_format: {exp_avg_format!r} is relative to a second moment in "
            f"{' or '.join(map(repr, seconds))}; found {key}exp_avg_sq_format {exp_avg_sq_format!r}. "
            f"Take exp_avg_sq_format {seconds[0]!r}, or another exp_avg_format."
        )


def did_you_mean(found: Any, known: Iterable) -> str:
    """A sentence that names the one of `known` which is likely meant, in front of it a space; or nothing."""
    known = [str(k) for k in known]
    close = difflib.get_close_matches(str(found).lower(), known, n=1)
    # what others call it
    close = close or [name for name in OTHER_NAMES.get(str(found).lower(), ()) if name in known][:1]
    return f" Did you mean {close[0]!r}?" if close else ""


@dataclass(frozen=True)
class _Block:
    """A JSON object that a frozen dataclass describes; `KEY` is its path in the config."""

    __slots__ = ()
    KEY: ClassVar[str]
    OR_BOOLEAN: ClassVar[bool] = False
    """Whether true or false may stand for the object; `from_boolean` says for what."""
    REMOVED: ClassVar[Mapping[str | tuple[str, str], str]] = {}
    """Keys, and values of keys, that were removed, and what to do now."""

    @classmethod
    def from_boolean(cls, value: bool) -> Self:
        """What true and false stand for, where `OR_BOOLEAN` says that they do: nobody asks others."""
        raise NotImplementedError(f"{cls.KEY} is no boolean")

    @classmethod
    def from_dict(cls, block: Mapping[str, Any]) -> Self:
        """Builds the dataclass tree from a JSON object; absent keys take their defaults.

        Raises CoatConfigError for unknown keys, wrong types and impossible values.
        """
        if isinstance(block, bool) and cls.OR_BOOLEAN:
            return cls.from_boolean(block)
        if not isinstance(block, Mapping):
            raise CoatConfigError(
                f'{cls.KEY}: expected an object such as {{"enabled": true}}, found {block!r}. Use braces.'
            )
        known: dict[str, Any] = {f.name: f.type for f in fields(cls)}
        for name in block:
            if name in cls.REMOVED:
                raise CoatConfigError(
                    f"{cls.KEY}.{name}: found {block[name]!r}, but the key was removed. {cls.REMOVED[name]}"
                )
            if name not in known:
                raise CoatConfigError(
                    f"{cls.KEY}.{name}: unknown key (value {block[name]!r}). Known keys: {', '.join(known)}."
                    + (did_you_mean(name, known) or " Drop it.")
                )
        return cls(
            **{
                name: known[name].from_dict(value) if is_dataclass(known[name]) else value
                for name, value in block.items()
            }
        )

    def __post_init__(self):
        for f in fields(self):
            key, value = f"{self.KEY}.{f.name}", getattr(self, f.name)
            if is_dataclass(f.type):
                if not isinstance(value, f.type):
                    raise CoatConfigError(f"{key}: expected {f.type.__name__}, found {value!r}.")
            elif "choices" in f.metadata:
                if isinstance(value, str) and (f.name, value) in self.REMOVED:
                    raise CoatConfigError(
                        f"{key}: found {value!r}, which was removed. {self.REMOVED[f.name, value]}"
                    )
                check_choice(key, value, f.metadata["choices"])
            elif f.type in (bool, int, float, str):
                check_type(key, value, f.type)
                minimum = f.metadata.get("minimum")
                # so that NaN is refused, too
                if minimum is not None and not value >= minimum:
                    raise CoatConfigError(f"{key}: expected {minimum} or more, found {value}. Correct it.")
            else:
                object.__setattr__(self, f.name, name_patterns(key, value))


def difference(found: _Block, wanted: _Block) -> tuple[str, Any, Any]:
    """The first key in which two blocks of one kind differ, and both values."""
    pairs = ((f.name, getattr(found, f.name), getattr(wanted, f.name)) for f in fields(found))
    return next(pair for pair in pairs if pair[1] != pair[2])


def name_patterns(key: str, value: Any) -> tuple[str, ...]:
    """`value`, a list of patterns of names, as a tuple. Raises CoatConfigError for anything else: of a string
    alone each letter would be a pattern."""
    if not isinstance(value, list | tuple) or not all(isinstance(p, str) for p in value):
        raise CoatConfigError(
            f"{key}: expected a list of name patterns such as {list(KEEP_FP32)}, found {value!r}. Correct "
            "the value or drop the key."
        )
    return tuple(value)


def _choice(default: Any, choices: Iterable) -> Any:
    """A field that takes one of `choices`."""
    return field(default=default, metadata={"choices": tuple(choices)})


@dataclass(frozen=True, slots=True)
class OptimizerConfig(_Block):
    """How AdamW's moments are stored."""

    KEY: ClassVar[str] = "coat.optimizer"

    enabled: bool = True
    """Build `CoatAdamW` from the `"optimizer"` section. False leaves the optimizer to DeepSpeed."""

    exp_avg_format: str = _choice("auto", EXP_AVG_FORMATS)
    """Storage format of the first moment. "auto": "ratio8", its ratio to the root of the second, where that
    is stored as "log8"; else "fp8_expanded"."""

    exp_avg_sq_format: str = _choice("log8", EXP_AVG_SQ_FORMATS)
    """Storage format of the second moment. "fp8_expanded" is the paper's, of both moments."""

    exp_avg_sq_rounding: str = _choice("auto", ROUNDINGS)
    """How the second moment is rounded. "auto": "log8" stochastically where beta2 is above 63/64, since it
    would otherwise decay by less than half a code in a step, which is lost; else to nearest. Beside Hugging
    Face's Trainer or Accelerate, which refuse the word "auto" here, leave the key out."""

    group_size: int = _choice(128, OPTIMIZER_GROUP_SIZES)
    """Consecutive elements that share one scale and one exponent."""

    min_numel: int = field(default=4096, metadata={"minimum": 0})
    """Tensors with fewer elements keep FP32 moments. 0 compresses them too."""

    keep_fp32: tuple[str, ...] = KEEP_FP32
    """Patterns of parameter names, `*` and `?`, any case: what matches keeps FP32 moments. The default's two
    mean norms and biases: they match the parameter's own name and its module's, and no weight matrices."""

    bf16_params: str = _choice("exact", BF16_PARAMS)
    """How BF16 parameters that the optimizer itself holds are updated: "exact" (16 more bits in the state
    make each an FP32 master), "stochastic" or "nearest" rounding. ZeRO's FP32 masters are not concerned."""

    checkpoint_layout: str = _choice("stock", CHECKPOINT_LAYOUTS)
    """What checkpoints hold. "stock": FP32 moments, as stock AdamW's do, which reads them. "compressed": the
    codes, a quarter of the bytes, which `CoatAdamW` reads."""

    def __post_init__(self):
        # a dataclass with slots is made anew, after which `super()` without arguments finds the old one
        _Block.__post_init__(self)
        check_pair(f"{self.KEY}.", self.exp_avg_format, self.exp_avg_sq_format)


@dataclass(frozen=True, slots=True)
class ActivationsConfig(_Block):
    """How layers save activations and in which formats they multiply: Megatron's under the layer spec, and
    those that `coat_ds.convert` finds. True or false may stand for the object."""

    KEY: ClassVar[str] = "coat.activations"
    OR_BOOLEAN: ClassVar[bool] = True
    REMOVED: ClassVar[Mapping[str | tuple[str, str], str]] = {
        "forward_format": "Activations and weights are always multiplied in 'e4m3'. Drop the key.",
        ("weight_cache", "scale"): "It saved no time. Write 'none', or 'fp8' for two bytes a parameter.",
        ("attention_format", "e4m3"): "Its error was six times that of 'bf16'. Write 'sqrt8', as many bytes.",
    }

    enabled: bool = True
    """Have the layers compute in FP8: those that Megatron built by our spec, and any other model's linear
    layers, norms, feed-forwards and attention, which are converted in place when the engine is built. False
    leaves every layer as it is."""

    group_size: int = _choice(16, ACTIVATION_GROUP_SIZES)
    """Consecutive elements of a row that share one scale in a saved activation."""

    backward_format: str = _choice(E5M2.name, FP8_FORMATS)
    """FP8 format of gradients; that of activations and weights is E4M3."""

    saved_format: str = _choice(DEFAULT_FORMAT, GROUP_FORMATS)
    """How groups are saved, in 8 bits an element: "sqrt8", integers whose squares are the values, or "e4m3",
    the paper's FP8, with three to four times the error and more room for outliers in a group."""

    attention_format: str = _choice("bf16", ATTENTION_FORMATS)
    """How q, k, v and attention's output are saved: as they are, or in groups as "sqrt8".
    "recompute" saves the output alone, in `saved_format`, and makes the others again in backward; where a
    layer does not run as a fused block it saves all of them so. Under torch.compile they stay as they are."""

    weight_cache: str = _choice("none", WEIGHT_CACHES)
    """What is kept of quantized weights over the micro-batches of a step: nothing, or "fp8", two bytes a
    parameter, which saves quantizing them again; of frozen ones, for good. Under ZeRO-3 every GPU then holds
    those of all layers, and with one micro-batch a step nothing was gained. Who writes a weight through
    `.data` between steps calls `coat_kernels.weights.invalidate_weight_caches()`."""

    fast_accumulation: str = _choice("forward", FAST_ACCUMULATION)
    """Which FP8 products Hopper's tensor cores sum with fewer bits: the "forward" ones, "all" or "none". The
    gradient of the weight of queries, keys and values, in which large terms cancel, is always summed with all
    bits; in models that `convert` changed that of attention's output, too."""

    cuda_graphs: str | bool = _choice("auto", CUDA_GRAPHS)
    """Whether dense layers are recorded as CUDA graphs and replayed, which leaves the CPU next to nothing to
    do. "auto": where the GPU would wait for it, of larger layers only where graphs take little memory; true:
    wherever it is possible; false: nowhere. Of models that `convert` changed, layers that run as fused
    blocks. Never under ZeRO-3, where weights move, nor with dropout or while activations are recomputed."""

    evaluation: str = _choice("fp8", EVALUATIONS)
    """How layers compute where a model is evaluated, behind `model.eval()` and without gradients: in "fp8",
    as they are trained, or as "stock" layers, which is what a saved model does that is loaded without COAT.
    Of Megatron's layers the matrix products."""

    fallback: bool = False
    """Keep a linear layer whose sizes FP8 products cannot take in BF16. False makes it an error.
    `coat_ds.convert` always keeps them."""

    emulate: bool = False
    """On a GPU without FP8, compute with the reference arithmetic: slow, and for looking only."""

    @classmethod
    def from_boolean(cls, value: bool) -> Self:
        return cls(enabled=value)


@dataclass(frozen=True, slots=True)
class CheckpointingConfig(_Block):
    """How DeepSpeed's and torch's activation checkpointing keep the inputs of a region."""

    KEY: ClassVar[str] = "coat.checkpointing"

    compress: bool = False
    """Keep them in FP8. The forward pass stays what it is; backward computes from inputs rounded to E4M3."""

    group_size: int = _choice(128, CHECKPOINT_GROUP_SIZES)
    """Consecutive elements that share one scale."""


@dataclass(frozen=True, slots=True)
class ReportConfig(_Block):
    """What rank 0 logs once, beside the line that COAT is active. True or false may stand for the object."""

    KEY: ClassVar[str] = "coat.report"
    OR_BOOLEAN: ClassVar[bool] = True

    states: bool = True
    """When the optimizer is built: a table of tensors, with the formats and bytes of their moments."""

    saved: bool = False
    """After the first training forward: the bytes that it keeps for backward. They are counted by hooks on
    what autograd saves, for that one forward."""

    @classmethod
    def from_boolean(cls, value: bool) -> Self:
        return cls(**{f.name: value for f in fields(cls)})


@dataclass(frozen=True, slots=True)
class WatchConfig(_Block):
    """What is measured while a model trains (`coat_ds.watch`). Readings go to DeepSpeed's monitors, where any
    is enabled, or to Megatron-LM's writers, and to `folder`. True stands for the defaults, false for
    `"every": 0`."""

    KEY: ClassVar[str] = "coat.watch"
    OR_BOOLEAN: ClassVar[bool] = True

    every: int = field(default=100, metadata={"minimum": 0})
    """Steps from one reading to the next. 0: none. Nothing is measured either where nobody takes the readings
    and `act` is "off"."""

    folder: str = ""
    """The folder in which one rank, DeepSpeed's first or Megatron's last, appends each reading to
    watch.jsonl, for `coat watch`. Empty: no file."""

    act: str = _choice("off", WATCH_ACTS)
    """What follows where a linear layer or the moments of a tensor pass a limit in `readings` readings in a
    row. "warn": a line in the log. "act": the layer computes in BF16 from then on, the moments are kept in
    FP32; checkpoints remember it."""

    readings: int = field(default=3, metadata={"minimum": 1})
    """Readings in a row."""

    update_error: float = field(default=0.5, metadata={"minimum": 0})
    """The limit of a tensor's update error, 0.5 being half of the update's root mean square."""

    flushed: float = field(default=0.5, metadata={"minimum": 0})
    """The limit of the share of a layer's inputs, or of its gradients, whose FP8 codes are zero."""

    def __post_init__(self):
        _Block.__post_init__(self)
        if not self.every and self.act != "off":
            raise CoatConfigError(
                f'{self.KEY}.act: found {self.act!r} beside "every": 0, which measures nothing to act on. '
                "Set every to 1 or more, or drop the key."
            )

    @classmethod
    def from_boolean(cls, value: bool) -> Self:
        return cls() if value else cls(every=0)


@dataclass(frozen=True, slots=True)
class CoatConfig(_Block):
    """The whole block."""

    KEY: ClassVar[str] = "coat"

    enabled: bool = False
    """The switch. Without the block, or with false, nothing changes."""

    require: bool = False
    """Make it an error if activations are enabled and no linear layer of the model computes in FP8, which
    otherwise is a warning."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """8-bit optimizer states."""

    activations: ActivationsConfig = field(default_factory=ActivationsConfig)
    """FP8 saved activations and FP8 linear layers."""

    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    """FP8 inputs of checkpointed regions."""

    report: ReportConfig = field(default_factory=ReportConfig)
    """What is said about bytes."""

    watch: WatchConfig = field(default_factory=WatchConfig)
    """What is measured while it trains, and what follows."""

    zero3_layer_units: str | bool = _choice("auto", ZERO3_LAYER_UNITS)
    """Whether ZeRO-3 gathers and releases a layer's weights together, which saves the CPU time of hooks on
    each module. "auto": of COAT and converted layers; true: of Megatron's own and Hugging Face's too; false:
    of none. Layers with frozen parameters are left out, unless the whole model is frozen. Hugging Face's
    Trainer and Accelerate refuse the word "auto" in any block that is not theirs: leave the key out there."""

    @classmethod
    def from_dict(cls, block: Mapping[str, Any] | None) -> Self:
        """Builds the config from the `"coat"` block; None (no block) gives a disabled one.

        Raises CoatConfigError, also for a block without `enabled`: it would be ignored without a word.
        """
        if block is None:
            return cls()
        config = super(CoatConfig, cls).from_dict(block)
        if "enabled" not in block:
            found = ", ".join(block) or "an empty block"
            raise CoatConfigError(
                f'coat.enabled: missing, found {found}. Add "enabled": true or "enabled": false.'
            )
        return config
