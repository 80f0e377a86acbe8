"""Pretraining and its launchers, imported as `coat_launch`.

It may import every other package. Start at
pretrain_gpt.py, which trains, or at torchrun_multinode.sh, which starts it on several nodes.
"""

import importlib.resources


def config_path(name: str) -> str:
    """The path of a file in `configs/`, in a clone and in an installed wheel."""
    return str(importlib.resources.files("coat_launch.configs") / name)
