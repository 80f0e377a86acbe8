"""Compares versions of packages with the tested ones, and finds combinations that are known to fail."""

import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from coat_ds.doctor.finding import OK, PROBLEM, UNKNOWN, WARNING, Finding
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


class KnownBad(NamedTuple):
    """A combination of versions in which something fails."""

    versions: dict[str, str]
    """Specifiers by package; the combination is found if all match."""
    state: str
    text: str
    issue: str = ""
    """The framework's issue."""


KNOWN_BAD = (
    KnownBad(
        {"deepspeed": "<0.19", "torch": ">=2.13"},
        PROBLEM,
        "the step of ZeRO 1 and 2 fails on more than one GPU. Take deepspeed>=0.19, or torch<2.13",
    ),
    KnownBad(
        {"deepspeed": "<0.19"},
        WARNING,
        "in a pipeline all stages but the last divide their gradients by the micro-batches twice. Take "
        "deepspeed>=0.19 for pipelines",
    ),
    KnownBad(
        {"deepspeed": ">=0.19.2,<0.20"},
        WARNING,
        "ZeRO-3 leaves frozen parameters gathered: count them whole in memory, or use stage 2 for LoRA",
        "DeepSpeed #8148",
    ),
    KnownBad(
        {"deepspeed": ">=0.18.9,<0.20", "transformers": ">=5"},
        WARNING,
        "Trainer cannot resume from a universal checkpoint. Resume on the checkpoint's own number of GPUs",
        "DeepSpeed #6470",
    ),
    KnownBad(
        {"deepspeed": ">=0.19.6", "transformers": "<5.18"},
        WARNING,
        'Trainer without warm-up steps and a "scheduler" section with "auto" end in a ValueError of '
        "warmup_num_steps. Take transformers>=5.18, or set warmup_steps",
    ),
    KnownBad(
        {"megatron-core": ">=0.16", "transformer-engine": ">=2"},
        WARNING,
        "CUDA graphs of TransformerEngine's FP8 layers may give NaN after some steps; COAT's are others",
        "Megatron-LM #5966",
    ),
    KnownBad(
        {"megatron-core": ">=0.16", "deepspeed": ">=0.18"},
        WARNING,
        "DeepSpeed does not sum gradients of norms under sequence parallelism. Call "
        "megatron_ext.mpu.sum_shared_gradients(model) before deepspeed.initialize, as coat train does",
        "DeepSpeed #7339",
    ),
)


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
    for bad in KNOWN_BAD:
        if all(_is_in(installed.get(name), wanted) for name, wanted in bad.versions.items()):
            together = " with ".join(f"{name} {installed[name]}" for name in bad.versions)
            issue = f" ({bad.issue})" if bad.issue else ""
            found.append(
                Finding("known failure", bad.state, f"{together}: {bad.text}{issue}", {"issue": bad.issue})
            )
    if _is_other_apex():
        found.append(
            Finding(
                "apex",
                WARNING,
                "the installed apex is not NVIDIA's but another project of that name. pip uninstall apex",
            )
        )
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


def _is_other_apex() -> bool:
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return False
    parts = (importlib.util.find_spec(f"apex.{part}") for part in ("multi_tensor_apply", "optimizers"))
    try:
        return not all(parts)
    # the other project may fail when it is imported
    except ImportError:
        return True
