"""Attributes of somebody else that have other values for a while."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def exchanged(owner: Any, **names: Any) -> Iterator[None]:
    """Sets attributes of `owner` and puts the old ones back at the end."""
    old = {name: getattr(owner, name) for name in names}
    for name, value in names.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(owner, name, value)
