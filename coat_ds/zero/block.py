"""How a DeepSpeed config is read: where its `"coat"` block is, and what its switches mean. Needs nothing but
the standard library."""

from collections.abc import Mapping
from typing import Any

OPTIMIZER_TYPE = "CoatAdamW"
# what pydantic takes for True
_TRUE_WORDS = ("true", "1", "on", "t", "y", "yes")


def asks_for_coat(config: Any) -> bool:
    """Whether a DeepSpeed config has a `"coat"` block, wherever it is, or names our optimizer."""
    if not isinstance(config, Mapping):
        return False
    section = config.get("optimizer")
    kind = section.get("type") if isinstance(section, Mapping) else None
    named = str(kind).lower() == OPTIMIZER_TYPE.lower()
    return "coat" in config or named or misplaced_block(config) is not None


def misplaced_block(config: Mapping[str, Any], within: str = "") -> str | None:
    """The path of a block under another spelling, as "COAT", or inside of a section; None without.

    within: the path of `config` itself, with a dot behind it; empty for the whole config.
    """
    for key, value in config.items():
        named = str(key).lower() == "coat"
        if named and (within or key != "coat"):
            return f"{within}{key}"
        # what stands in the block itself is its own reader's to judge
        found = (
            misplaced_block(value, f"{within}{key}.") if isinstance(value, Mapping) and not named else None
        )
        if found is not None:
            return found
    return None


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A section of the config; empty if there is none, or something else in its place."""
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def flag(value: Any, auto: bool = False) -> bool:
    """A switch of the JSON, read as by DeepSpeed: pydantic takes numbers and words, and "auto"
    leaves the key out.

    auto: what "auto" means. DeepSpeed's default is False; Hugging Face's Trainer fills in its own argument.
    """
    if value == "auto":
        return auto
    if isinstance(value, str):
        return value.lower() in _TRUE_WORDS
    return bool(value)


def enabled(config: Mapping[str, Any], key: str, auto: bool = False) -> bool:
    """Whether the section `key` is switched on (`flag`)."""
    return flag(section(config, key).get("enabled"), auto)
