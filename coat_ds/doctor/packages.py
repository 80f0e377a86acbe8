"""Compares versions of packages with the tested ones, and finds combinations that are known to fail."""

import importlib.metadata
import platform
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from coat_ds.doctor import OK, PROBLEM, UNKNOWN, WARNING, Finding
from coat_ds.versions import ACCELERATE, DEEPSPEED, MEGATRON_CORE, TORCH, TRANSFORMERS


class Tested(NamedTuple):
    """The versions that are accepted, and those that tests and benchmarks ran with."""

    accepted: str
    tested: str
    needed: bool = False


PYTHON = "python"
# in the order in which they are shown
PACKAGES = {
    PYTHON: Tested(">=3.11", ">=3.11,<3.14", needed=True),
    "coat-train": Tested(">=0", ">=0"),
    "torch": Tested(f">={TORCH.oldest}", str(TORCH), needed=True),
    "triton": Tested(">=3.6", ">=3.6,<3.10"),
    "deepspeed": Tested(str(DEEPSPEED), "==0.18.9,==0.19.8"),
    "megatron-core": Tested(str(MEGATRON_CORE), "==0.16.1,==0.19.2"),
    "transformers": Tested(TRANSFORMERS, ">=5,<6"),
    "accelerate": Tested(ACCELERATE, ">=1.10,<2"),
    "peft": Tested(">=0.19", ">=0.19,<1"),
    "trl": Tested(">=1", ">=1,<2"),
    "transformer-engine": Tested(">=2", "==2.12.*,==2.20.*"),
}


# combinations of versions that fail, and the fix
FAILURES = [
    (
        {"deepspeed": "<0.19", "torch": ">=2.13"},
        "the step of ZeRO 1 and 2 fails on more than one GPU. Take deepspeed>=0.19, or torch<2.13",
    )
]


def versions(names: Iterable[str] = PACKAGES) -> dict[str, str | None]:
    """Versions of packages; None for a package that is not installed."""
    return {name: _version(name) for name in names}


def _version(name: str) -> str | None:
    if name == PYTHON:
        return platform.python_version()
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check(installed: Mapping[str, str | None] | None = None) -> list[Finding]:
    """A finding for each package, and for each known failure of the `installed` versions; None: those of this
    Python."""
    installed = versions() if installed is None else installed
    found = [_of_package(name, known, installed.get(name)) for name, known in PACKAGES.items()]
    for combination, text in FAILURES:
        if all(_is_in(installed.get(name), wanted) for name, wanted in combination.items()):
            together = " with ".join(f"{name} {installed[name]}" for name in combination)
            found.append(Finding("known failure", PROBLEM, f"{together}: {text}"))
    return found


def _of_package(name: str, known: Tested, version: str | None) -> Finding:
    details = {"version": version, "accepted": known.accepted, "tested": known.tested}
    if version is None:
        if known.needed:
            return Finding(name, PROBLEM, f"not installed. pip install '{name}{known.accepted}'", details)
        return Finding(name, UNKNOWN, "not installed; only needed if you use it", details)
    if not _is_in(version, known.accepted):
        text = f"{version} found, {known.accepted} is needed. pip install '{name}{known.accepted}'"
        return Finding(name, PROBLEM, text, details)
    if not _was_tested(version, known.tested):
        return Finding(name, WARNING, f"{version}, not tested; tested: {known.tested}", details)
    return Finding(name, OK, version, details)


def _is_in(version: str | None, specifier: str) -> bool:
    if version is None:
        return False
    # without the local part of builds such as 2.13.0+cpu; pre-releases are included
    return SpecifierSet(specifier).contains(Version(version).public, prereleases=True)


def _was_tested(version: str, tested: str) -> bool:
    """A list of exact versions matches any of them; a list of bounds has to match as a whole."""
    if tested.startswith("=="):
        return any(_is_in(version, exact) for exact in tested.split(","))
    return _is_in(version, tested)
