"""What a check says."""

from typing import NamedTuple

# unknown: there is nothing here to check it on, which is no fault
OK, WARNING, PROBLEM, UNKNOWN = "ok", "warning", "problem", "unknown"


class Finding(NamedTuple):
    """Of one thing."""

    check: str
    """Which, in a word or two."""
    state: str
    text: str
    """One line; of a problem with the way out."""
    details: dict = {}
    """Plain values, for scripts."""


def reason(error: BaseException) -> str:
    """Of what the error says, or else its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
