"""Reads JSON files that were written by hand or may have been truncated by a crash."""

import json
import os
from pathlib import Path


def read_object(path: str | os.PathLike) -> dict:
    """The object in the file. Raises ValueError, which does not name the path, for any other content."""
    try:
        value = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error
    except RecursionError as error:
        raise ValueError("not a JSON file (too many brackets in brackets)") from error
    except ValueError as error:
        raise ValueError(f"not a JSON file ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")
    return value
