"""COAT for DeepSpeed: AdamW whose moments are stored in FP8, switched on by a block of the JSON config.

Importing this package does not import DeepSpeed.
"""

from coat_ds.config import CoatConfig, CoatConfigError
from coat_ds.engine import initialize, state_bytes
from coat_ds.optimizer import CoatAdamW

__all__ = ["CoatAdamW", "CoatConfig", "CoatConfigError", "initialize", "state_bytes"]
