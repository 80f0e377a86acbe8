"""The total number of inputs that the property-based tests of this folder try, and the folder of their
files."""

import os
from pathlib import Path

import pytest

# `make test-hostile` runs 100,000 random inputs; `make test` tries the same few each time, in seconds
RANDOM = "COAT_HOSTILE_EXAMPLES" in os.environ
EXAMPLES = int(os.environ.get("COAT_HOSTILE_EXAMPLES", "300"))


def share(part: float) -> int:
    """The number of inputs of a test that takes `part` of the total."""
    return max(1, round(part * EXAMPLES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hostile")
