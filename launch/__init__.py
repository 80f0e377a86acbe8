"""Pretraining and its launchers, imported as `coat_launch`."""

import importlib.resources


def config_path(name: str) -> str:
    """The path of a file in `configs/`, in a clone and in an installed wheel."""
    return str(importlib.resources.files("coat_launch.configs") / name)
