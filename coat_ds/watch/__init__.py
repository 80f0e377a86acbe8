"""Training watched: every N steps errors and bytes, by layer group.

It may import `coat_kernels`, `coat_ds.optim` and `coat_ds.layers`. Start at watch.py.

states.py measures what storing does to moments, codes.py counts FP8 codes, memory.py sums bytes, watch.py
says when, fallback.py acts, and command.py shows a run. docs/watch.md has the formulas.
"""

import importlib

_HOMES = {
    "Callback": "coat_ds.watch.callback",
    "Watch": "coat_ds.watch.watch",
    "jsonl": "coat_ds.watch.outs",
    "monitor": "coat_ds.watch.outs",
    "writer": "coat_ds.watch.outs",
}
__all__ = ["Callback", "Watch", "jsonl", "monitor", "writer"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
