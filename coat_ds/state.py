"""The name by which checkpoints of the layout "compressed" find what reads their moments. It cannot move."""

from coat_ds.optim.stored_moment import _rebuild

__all__ = ["_rebuild"]
