"""Checks whether a machine and its packages are ready: findings, and a fix for each problem.

This package may import every other package of `coat_ds`. Start at command.py.
"""

from typing import NamedTuple

# unknown: the check needs something that this machine does not have; this is no problem
OK, WARNING, PROBLEM, UNKNOWN = "ok", "warning", "problem", "unknown"


class Finding(NamedTuple):
    """The result of one check."""

    check: str
    """Name of the check, in a word or two."""
    state: str
    text: str
    """One line; for a problem with the fix."""
    details: dict = {}
    """Plain values, for scripts."""


def reason(error: BaseException) -> str:
    """The first line of the error's message, 160 characters at most; the error's type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
