"""The names by which pickled optimizers find their classes. They cannot move."""

from coat_ds.optim.fragments import Fragment
from coat_ds.optim.optimizer import CoatAdamW

__all__ = ["CoatAdamW", "Fragment"]
