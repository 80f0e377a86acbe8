"""Checks whether DeepSpeed's engines will read the coat block in this Python environment."""

import importlib.metadata
import os

from coat_ds.doctor import OK, PROBLEM, UNKNOWN, WARNING, Finding
from coat_ds.zero.autoload import DISABLE

GROUP = "torch.backends"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
NAME = "entry point"


def check() -> Finding:
    if os.environ.get(DISABLE) == "1":
        return Finding(NAME, WARNING, f"{DISABLE}=1 keeps every coat block from having an effect. Unset it")
    if os.environ.get(AUTOLOAD, "1") == "0":
        return Finding(
            NAME,
            PROBLEM,
            f"{AUTOLOAD}=0: torch loads none, so blocks are ignored. Unset it, or call coat_ds.install()",
        )
    found = [e for e in importlib.metadata.entry_points(group=GROUP) if e.name == "coat_ds"]
    if not found:
        return Finding(
            NAME,
            UNKNOWN,
            "coat-train is not installed, but run from a checkout: call coat_ds.install() before DeepSpeed "
            "builds an engine, or pip install it",
        )
    try:
        found[0].load()
    except Exception as error:
        text = f"cannot be loaded ({type(error).__name__}: {error}). Install coat-train again"
        return Finding(NAME, PROBLEM, text)
    return Finding(NAME, OK, "active: torch loads it, and DeepSpeed's engines read the coat block")
