"""The function that checkpoints of the layout "compressed" name to rebuild moments. It must stay here."""

from coat_ds.optim.stored_moment import _rebuild

__all__ = ["_rebuild"]
