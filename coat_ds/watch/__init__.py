"""Training watched: every N steps the errors of 8 bits, by layer group.

It may import `coat_kernels`, `coat_ds.optim` and `coat_ds.layers`. Start at watch.py.

watch.py says when a reading begins and ends, states.py measures what storing does to moments, codes.py
counts codes, readings.py writes and reads a run's file, and command.py shows a run.
docs/watch.md has the formulas.
"""

from typing import Any

from coat_ds.watch.watch import Watch

__all__ = ["Callback", "Watch"]


def __getattr__(name: str) -> Any:
    if name != "Callback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # it imports transformers
    from coat_ds.watch.callback import Callback

    return Callback
