"""The names under which pickles of optimizers refer to their classes. They must stay in this module."""

from coat_ds.optim.fragments import Fragment
from coat_ds.optim.optimizer import CoatAdamW

__all__ = ["CoatAdamW", "Fragment"]
