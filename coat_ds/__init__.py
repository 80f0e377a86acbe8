"""COAT for DeepSpeed and plain PyTorch: AdamW with 8-bit moments, which a block of the JSON config enables,
and FP8 layers for any model (`convert`).

Importing this package imports neither DeepSpeed nor torch; its names are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING

from coat_ds.zero.autoload import install, uninstall

if TYPE_CHECKING:
    # the names below, for type checkers
    from coat_ds import plan, watch
    from coat_ds.checkpointing import compressed_checkpoints
    from coat_ds.config import CoatConfig, CoatConfigError
    from coat_ds.layers.convert import conversion_of, convert, unconvert
    from coat_ds.optim.accounting import state_bytes
    from coat_ds.optim.optimizer import CoatAdamW

_HOMES = {
    "CoatAdamW": "coat_ds.optim.optimizer",
    "CoatConfig": "coat_ds.config",
    "CoatConfigError": "coat_ds.config",
    "compressed_checkpoints": "coat_ds.checkpointing",
    "conversion_of": "coat_ds.layers.convert",
    "convert": "coat_ds.layers.convert",
    "state_bytes": "coat_ds.optim.accounting",
    "unconvert": "coat_ds.layers.convert",
    "__version__": "coat_ds.versions",
}
# subpackages that are used as attributes
_ROOMS = ("plan", "watch")

__all__ = [
    "CoatAdamW",
    "CoatConfig",
    "CoatConfigError",
    "compressed_checkpoints",
    "conversion_of",
    "convert",
    "install",
    "plan",
    "state_bytes",
    "unconvert",
    "uninstall",
    "watch",
]


def __getattr__(name: str):
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
