"""How a DeepSpeed config is read: where its `"coat"` block is, and what its switches mean. Imports only the
standard library."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

OPTIMIZER_TYPE = "CoatAdamW"
# what pydantic takes for True
_TRUE_WORDS = ("true", "1", "on", "t", "y", "yes")
# the keys of the block (`CoatConfig`, whose module imports torch)
BLOCK_KEYS = frozenset(
    (
        "enabled",
        "require",
        "optimizer",
        "activations",
        "fp8_activation_checkpointing",
        "watch",
        "zero3_layer_units",
    )
)
# the key, the module, the distribution, and swapped letters, which difflib finds too different
_NAMES = "coat", "coat_ds", "coat_train", "caot", "cota"
# similarity to "coat", by difflib, of a key that is taken for it: one letter more or less, as in "coats"
_SIMILAR = 0.85


def asks_for_coat(config: Any) -> bool:
    """Whether a DeepSpeed config has a `"coat"` block, wherever it is, or names our optimizer."""
    if not isinstance(config, Mapping):
        return False
    section = config.get("optimizer")
    kind = section.get("type") if isinstance(section, Mapping) else None
    named = str(kind).lower() == OPTIMIZER_TYPE.lower()
    return "coat" in config or named or misplaced_block(config) is not None


def misplaced_block(config: Mapping[str, Any], within: str = "") -> str | None:
    """The path of a block with another spelling, such as "COAT" or "coats", or inside a section; None if
    there is no such block.

    within: the path of `config` itself with a trailing dot; empty for the whole config.
    """
    for key, value in config.items():
        named = str(key).lower() == "coat"
        if (named and (within or key != "coat")) or (not within and not named and _is_mistyped(key, value)):
            return f"{within}{key}"
        # the contents of the block itself are checked by CoatConfig
        if isinstance(value, Mapping) and not named:
            found = misplaced_block(value, f"{within}{key}.")
            if found is not None:
                return found
    return None


def _is_mistyped(key: Any, value: Any) -> bool:
    """Whether a key at the top of a config is probably a mistyped "coat", such as "coats" or "coat_ds", and
    its value a block, or {} or true in its place. A name that does not begin with a letter, such as "_coat",
    is a comment."""
    is_object = isinstance(value, Mapping)
    is_block = value is True or (is_object and (not value or not BLOCK_KEYS.isdisjoint(value)))
    name = str(key).strip().lower()
    return is_block and name[:1].isalpha() and bool(get_close_matches(name, _NAMES, cutoff=_SIMILAR))


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A section of the config; empty if there is none, or if its value is no mapping."""
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def flag(value: Any, auto: bool = False) -> bool:
    """A switch of the JSON, read as DeepSpeed does: pydantic accepts numbers and words, and "auto" is the
    same as no key.

    auto: the value of "auto". DeepSpeed's default is False; Hugging Face's Trainer fills in its own argument.
    """
    if value == "auto":
        return auto
    if isinstance(value, str):
        return value.lower() in _TRUE_WORDS
    return bool(value)


def enabled(config: Mapping[str, Any], key: str, auto: bool = False) -> bool:
    """Whether the section `key` is switched on (`flag`)."""
    return flag(section(config, key).get("enabled"), auto)
