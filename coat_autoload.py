"""What torch loads at the end of its import. It needs nothing but the standard library and cannot fail.

`import torch` fails if an entry point of `torch.backends` does. This file is installed as a copy even where
the rest of the project is not, in editable installs: it is there when the clone is gone.
"""

import importlib.metadata
import json
import logging
import os


def register() -> None:
    """Calls `coat_ds.zero.autoload.register`, or prints one line on rank 0 that says what is missing."""
    try:
        from coat_ds.zero.autoload import register

        register()
    # whatever it is, torch's import would fail with it
    except Exception as error:
        if os.environ.get("COAT_DISABLE") != "1" and os.environ.get("RANK", "0") == "0":
            logging.getLogger("coat_ds").warning(
                "COAT is off, for coat_ds cannot be loaded: %s: %s%s. Install it again, or remove what is "
                "left of it: pip uninstall coat-train",
                type(error).__name__,
                error,
                _source(),
            )


def _source() -> str:
    """Where pip installed it from, if that was a folder."""
    try:
        noted = importlib.metadata.distribution("coat-train").read_text("direct_url.json")
        return f" (installed from {json.loads(noted)['url']})"
    # a broken record must not break the line that says what is broken
    except Exception:
        return ""
