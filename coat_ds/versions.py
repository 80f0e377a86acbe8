"""This project's version and the supported versions of the frameworks, defined only here. setup.py reads
this file, and the checks import it.
"""

from typing import NamedTuple

__version__ = "0.1.0"


class Supported(NamedTuple):
    """The oldest release that works, and the first that was not tested. As a string ">=oldest,<untried"."""

    oldest: str
    untried: str

    def __str__(self) -> str:
        return f">={self.oldest},<{self.untried}"

    def includes(self, version: str) -> bool:
        """Whether `version` is supported. Its local part, such as +cu130, is not compared."""
        from packaging.specifiers import SpecifierSet
        from packaging.version import Version

        return SpecifierSet(str(self)).contains(Version(version).public, prereleases=True)


DEEPSPEED = Supported("0.18.9", "0.20")
MEGATRON_CORE = Supported("0.16.1", "0.21")
TORCH = Supported("2.11", "2.16")
# specifiers without an upper bound: releases newer than the tested ones are accepted
TRANSFORMERS = ">=5"
ACCELERATE = ">=1.10"
