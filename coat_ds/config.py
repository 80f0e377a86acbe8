"""The `"coat"` block of a DeepSpeed JSON config.

    {"coat": {"enabled": true}}

is the usual block: every other field takes the default below.
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from coat_kernels.codecs import CODECS, GROUP_SIZE, SIGNED_CODECS, first_codec
from coat_kernels.fp8 import E4M3, E5M2
from coat_kernels.groups import DEFAULT_FORMAT, GROUP_FORMATS
from coat_kernels.groups import GROUP_SIZE as SAVED_GROUP_SIZE
from coat_kernels.weights import WEIGHT_CACHES

FP8_FORMATS = (E4M3.name, E5M2.name)
ATTENTION_FORMATS = ("bf16", "sqrt8", "recompute")
FAST_ACCUMULATION = ("forward", "all", "none")
BF16_PARAMS = ("exact", "stochastic", "nearest")
CHECKPOINT_LAYOUTS = ("stock", "compressed")
OFFLOADS = ("none", "cpu")
EXP_AVG_FORMATS = (None, *SIGNED_CODECS)
# a codec that stores a ratio to the second moment cannot store the second moment itself
EXP_AVG_SQ_FORMATS = tuple(name for name, codec in CODECS.items() if not codec.relative)
KEEP_FP32 = ("*norm*", "*bias*")
CHOSEN_OR_SET = (None, True, False)
EVALUATIONS = ("fp8", "stock")
AUTO = 'No trainer fills in "auto" in this block: write the value, or drop the key for its default.'
AUTO_IS_NULL = 'Write null (None in Python) in place of "auto", or drop the key: COAT then chooses.'


class CoatConfigError(ValueError):
    """An invalid config. The message names the key, the value found and the fix."""


def read_object(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CoatConfigError, which names the path, for any other content."""
    try:
        value = json.loads(Path(path).read_bytes())
    # RecursionError: brackets that are nested too deeply
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else f"not a JSON file ({error})"
        raise CoatConfigError(f"{path}: {why}. Give a JSON file that can be read.") from None
    if not isinstance(value, dict):
        raise CoatConfigError(f"{path}: expected a JSON object, found {type(value).__name__}. Use braces.")
    return value


def check_type(key: str, value: Any, expected: type) -> None:
    """Raises CoatConfigError unless `value` is of exactly the JSON type `expected` (true is no integer; 1
    is a float)."""
    if type(value) is not expected and not (expected is float and type(value) is int):
        name = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[expected]
        remedy = AUTO if value == "auto" else "Correct the value or drop the key."
        raise CoatConfigError(f"{key}: expected {name}, found {value!r}. {remedy}")


def check_choice(key: str, value: Any, choices: tuple) -> None:
    """Raises CoatConfigError unless `value` is one of `choices`, of the same type."""
    if not any(type(value) is type(c) and value == c for c in choices):
        kind = "an integer, " if {type(c) for c in choices} == {int} else ""
        listed = ", ".join(repr(c) for c in choices)
        raise CoatConfigError(
            f"{key}: expected {kind}one of {listed}; found {value!r}." + _way_to_a_choice(value, choices)
        )


def check_offload(key: str, value: Any) -> None:
    """Raises CoatConfigError unless `value` is one of `OFFLOADS` or a number of GB."""
    is_number = type(value) in (int, float)
    # written with `not` so that NaN is refused too
    if not (value >= 0 if is_number else value in OFFLOADS):
        raise CoatConfigError(
            f"{key}: expected {', '.join(map(repr, OFFLOADS))} or GB of states that stay on the GPU, 0 or "
            f"more; found {value!r}.{_way_to_a_choice(value, OFFLOADS)}"
        )


def _way_to_a_choice(value: Any, choices: tuple) -> str:
    if value == "auto":
        return f" {AUTO_IS_NULL if None in choices else AUTO}"
    if isinstance(value, str) and value.lower() in (str(c).lower() for c in choices if type(c) is not str):
        return " Leave the quotes out."
    return did_you_mean(value, choices) or " Take one of them."


def check_pair(key: str, exp_avg_format: str, exp_avg_sq_format: str) -> None:
    """Raises CoatConfigError for two known formats that cannot be combined; `key` prefixes each name."""
    first = first_codec(exp_avg_format, CODECS[exp_avg_sq_format])
    if not first.pairs_with(CODECS[exp_avg_sq_format]):
        seconds = [name for name, codec in CODECS.items() if first.pairs_with(codec)]
        raise CoatConfigError(
            f"{key}exp_avg_format: {exp_avg_format!r} is relative to a second moment in "
            f"{' or '.join(map(repr, seconds))}; found {key}exp_avg_sq_format {exp_avg_sq_format!r}. "
            f"Take exp_avg_sq_format {seconds[0]!r}, or another exp_avg_format."
        )


def did_you_mean(found: Any, known: Iterable) -> str:
    """A sentence, after a space, with the name in `known` closest to `found`; empty if none is close."""
    known = [str(k) for k in known]
    close = difflib.get_close_matches(str(found).lower(), known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


@dataclass(frozen=True)
class _Block:
    """A JSON object described by a frozen dataclass; `KEY` is its path in the config."""

    __slots__ = ()
    KEY: ClassVar[str]
    OFF: ClassVar[Mapping[str, Any]] = {}
    """The keys that false stands for, where true or false may replace the object."""
    REMOVED: ClassVar[Mapping[str, str]] = {}
    """Removed keys, each with what to write instead."""

    @classmethod
    def from_dict(cls, block: Mapping[str, Any]) -> Self:
        """Builds the dataclass tree from a JSON object; absent keys take their defaults.

        Raises CoatConfigError for unknown keys, wrong types and impossible values.
        """
        if isinstance(block, bool) and cls.OFF:
            return cls() if block else cls(**cls.OFF)
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
            value = checked(f, f"{self.KEY}.{f.name}", getattr(self, f.name))
            object.__setattr__(self, f.name, value)


def checked(f: Field, key: str, value: Any) -> Any:
    """The value of a block's field `f`; of name patterns, a tuple. Raises CoatConfigError, which names `key`,
    for an impossible value."""
    wanted = f.type
    if isinstance(wanted, type) and is_dataclass(wanted):
        if not isinstance(value, wanted):
            raise CoatConfigError(f"{key}: expected {wanted.__name__}, found {value!r}.")
    elif "check" in f.metadata:
        f.metadata["check"](key, value)
    elif "choices" in f.metadata:
        check_choice(key, value, f.metadata["choices"])
    elif wanted in (bool, int, float, str):
        check_type(key, value, wanted)
        minimum = f.metadata.get("minimum")
        if minimum is not None and value < minimum:
            raise CoatConfigError(f"{key}: expected {minimum} or more, found {value}. Correct it.")
    else:
        return name_patterns(key, value)
    return value


def difference(found: _Block, wanted: _Block) -> tuple[str, Any, Any]:
    """The first key in which two blocks of the same class differ, and both values."""
    pairs = ((f.name, getattr(found, f.name), getattr(wanted, f.name)) for f in fields(found))
    return next(pair for pair in pairs if pair[1] != pair[2])


def name_patterns(key: str, value: Any) -> tuple[str, ...]:
    """`value`, a list of name patterns, as a tuple. Raises CoatConfigError for anything else, also for a
    string: each of its letters would become a pattern."""
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
    REMOVED: ClassVar[Mapping[str, str]] = {
        "exp_avg_sq_rounding": "'log8' is rounded stochastically if beta2 is above 63/64. Drop the key.",
        "group_size": f"{GROUP_SIZE} elements share one scale. Drop the key.",
    }

    enabled: bool = True
    """Build `CoatAdamW` from the `"optimizer"` section. False leaves the optimizer to DeepSpeed."""

    exp_avg_format: str | None = _choice(None, EXP_AVG_FORMATS)
    """Storage format of the first moment. Null is "ratio8" (its ratio to the root of the second moment) if
    the second moment is stored as "log8"; else "fp8_expanded"."""

    exp_avg_sq_format: str = _choice("log8", EXP_AVG_SQ_FORMATS)
    """Storage format of the second moment. The paper stores both moments as "fp8_expanded". "log8" is rounded
    stochastically if beta2 is above 63/64, because the decay of a step is then less than half a code, and
    rounding to nearest would lose it."""

    min_numel: int = field(default=4096, metadata={"minimum": 0})
    """Tensors with fewer elements keep FP32 moments. With 0 all sizes are compressed."""

    keep_fp32: tuple[str, ...] = KEEP_FP32
    """Patterns of parameter names, with `*` and `?`, in any case. Matching parameters keep FP32 moments. The
    two default patterns cover norms and biases: they match the parameter's own name and its module's, and no
    weight matrices."""

    bf16_params: str = _choice("exact", BF16_PARAMS)
    """How the optimizer updates BF16 parameters that have no FP32 master weights: "exact" keeps 16 more bits
    in the state, which complete an FP32 master weight; "stochastic" and "nearest" round. No effect on ZeRO's
    FP32 master weights."""

    checkpoint_layout: str = _choice("stock", CHECKPOINT_LAYOUTS)
    """What checkpoints hold. "stock": FP32 moments, which stock AdamW can load. "compressed": the 8-bit
    codes, a quarter of the bytes, which only `CoatAdamW` can load."""

    offload: str | float = field(
        default="none", metadata={"choices": OFFLOADS, "minimum": 0, "check": check_offload}
    )
    """Where moments and the 16 bits of "exact" are. "none": on the GPU. "cpu": in pinned host memory; each
    step streams them through the GPU, which takes as long as copying them both ways, and has the same
    results. A number: states stay on the GPU, tensor by tensor, while they fit into this number of GB, 10^9
    bytes each, and the others stream; a partition of ZeRO 1 or 2 is one tensor. ZeRO's masters stay on the
    GPU. With DeepSpeed's `offload_optimizer` they are in host memory, and all states with them."""

    def __post_init__(self):
        # slots=True creates a second class, and `super()` without arguments still refers to the first
        _Block.__post_init__(self)
        check_pair(f"{self.KEY}.", self.exp_avg_format, self.exp_avg_sq_format)


@dataclass(frozen=True, slots=True)
class ActivationsConfig(_Block):
    """How layers save activations, and the formats of their GEMMs. It applies to Megatron's layers under
    COAT's layer spec, and to layers that `coat_ds.convert` converts. True or false may replace the object."""

    KEY: ClassVar[str] = "coat.activations"
    OFF: ClassVar[Mapping[str, Any]] = {"enabled": False}
    REMOVED: ClassVar[Mapping[str, str]] = {
        "fallback": "convert() keeps a layer in BF16 if FP8 GEMMs do not support its sizes. Megatron's "
        "layers then stay Megatron's. Drop the key.",
        "emulate": "A GPU without FP8 cannot compute FP8 layers, and a CPU always can. Drop the key.",
        "forward_format": "Activations and weights are always multiplied in 'e4m3'. Drop the key.",
        "group_size": f"{SAVED_GROUP_SIZE} elements of a row share one scale. Drop the key.",
    }

    enabled: bool = True
    """Compute layers in FP8. For Megatron these are the layers of COAT's layer spec. In any other model,
    linear layers, norms, feed-forwards and attention are converted in place when the engine is built. False
    leaves every layer unchanged."""

    backward_format: str = _choice(E5M2.name, FP8_FORMATS)
    """FP8 format of gradients. Activations and weights are always E4M3."""

    saved_format: str = _choice(DEFAULT_FORMAT, GROUP_FORMATS)
    """Format of saved activations, 8 bits an element. "sqrt8": integers whose squares are the values.
    "e4m3": the paper's FP8, with 3 to 4 times the error and more range for outliers in a group."""

    attention_format: str = _choice("bf16", ATTENTION_FORMATS)
    """How q, k, v and attention's output are saved: in "bf16", or in groups as "sqrt8". "recompute" saves
    only the output, in `saved_format`, and recomputes q, k and v in backward; layers that do not run as fused
    blocks save all four in `saved_format`. The key has no effect under torch.compile."""

    weight_cache: str = _choice("none", WEIGHT_CACHES)
    """Whether FP8 copies of weights are kept over the micro-batches of a step. "none": weights are quantized
    in each micro-batch. "fp8": the copies are kept, two bytes a parameter; copies of frozen weights are kept
    for the whole run. Under ZeRO-3 every GPU then holds the copies of all layers, and "fp8" gained nothing
    with one micro-batch a step. After writing to `weight.data` between steps, as PEFT does when it merges
    adapters, call `coat_kernels.weights.invalidate_weight_caches()`."""

    fast_accumulation: str = _choice("forward", FAST_ACCUMULATION)
    """Which FP8 GEMMs accumulate with fewer bits on Hopper's tensor cores: those of "forward", "all" or
    "none". The weight gradient of queries, keys and values, in which large terms cancel, is always
    accumulated with all bits. In models that `convert` changed, the weight gradient of attention's output
    projection is too."""

    cuda_graphs: bool | None = _choice(None, CHOSEN_OR_SET)
    """Whether dense layers run as CUDA graphs, which removes almost all CPU time of the layer. Null: only
    where the GPU would wait for the CPU; for larger layers only where graphs take little memory. True:
    wherever it is possible. False: all layers run eagerly. In models that `convert` changed, only layers that
    run as fused blocks can be graphs. No graphs are used under ZeRO-3, where weights move, with dropout, or
    while activations are recomputed."""

    evaluation: str = _choice("fp8", EVALUATIONS)
    """How layers compute in evaluation, which means after `model.eval()` and without gradients. "fp8": as in
    training. "stock": as stock layers, as the saved model computes when it is loaded without COAT. For
    Megatron's layers the key applies only to the GEMMs."""


@dataclass(frozen=True, slots=True)
class WatchConfig(_Block):
    """What is measured during training (`coat_ds.watch`). Readings go to DeepSpeed's enabled monitors or to
    Megatron-LM's writers, and to `folder`. True may replace the object and means the defaults; false means
    `"every": 0`."""

    KEY: ClassVar[str] = "coat.watch"
    OFF: ClassVar[Mapping[str, Any]] = {"every": 0}
    REMOVED: ClassVar[Mapping[str, str]] = {
        "readings": "No layer changes its format during a run. Drop the key.",
        "act": "No layer changes its format during a run: `coat watch` names the layers and tensors above a "
        "limit, and what helps. Drop the key.",
        "update_error": "The limits are fixed, and `coat watch` applies them. Drop the key.",
        "flushed": "The limits are fixed, and `coat watch` applies them. Drop the key.",
    }

    every: int = field(default=100, metadata={"minimum": 0})
    """Steps from one reading to the next. 0: no readings. Nothing is measured either if no monitor, writer or
    folder takes the readings."""

    folder: str = ""
    """The folder of watch.jsonl, which `coat watch` reads. Rank 0 appends each reading. Empty: no file."""


@dataclass(frozen=True, slots=True)
class CoatConfig(_Block):
    """The whole block."""

    KEY: ClassVar[str] = "coat"
    REMOVED: ClassVar[Mapping[str, str]] = {
        "checkpointing": 'In place of "compress": true write "fp8_activation_checkpointing": true.',
        "report": "The table of states is always logged. Drop the key.",
    }

    enabled: bool = False
    """Switches COAT on. Without the block, or with false, nothing changes."""

    require: bool = False
    """Raise an error if activations are enabled and no linear layer of the model computes in FP8. With false
    a warning is logged."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """8-bit optimizer states."""

    activations: ActivationsConfig = field(default_factory=ActivationsConfig)
    """FP8 linear layers, and activations saved in 8 bits."""

    fp8_activation_checkpointing: bool = False
    """Save the inputs of regions that DeepSpeed's, torch's or Megatron's activation checkpointing recomputes
    in FP8. The forward pass is unchanged. The recompute in backward starts from inputs rounded to E4M3."""

    watch: WatchConfig = field(default_factory=WatchConfig)
    """What is measured during training."""

    zero3_layer_units: bool | None = _choice(None, CHOSEN_OR_SET)
    """Whether ZeRO-3 gathers and releases all weights of a layer together, which saves the CPU time of hooks
    on each module. Null: for COAT's and converted layers. True: also for Megatron's own and Hugging Face's
    layers. False: for none. Layers with frozen parameters are gathered module by module, unless the whole
    model is frozen."""

    @classmethod
    def from_dict(cls, block: Mapping[str, Any] | None) -> Self:
        """Builds the config from the `"coat"` block; None (no block) gives a disabled one.

        Raises CoatConfigError, also for a block without `enabled`, which would otherwise be ignored silently.
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
