"""What a figure depends on: the device, the versions and the commit."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

# in addition to torch
PACKAGES = (
    "triton",
    "deepspeed",
    "megatron-core",
    "transformer-engine",
    "torchao",
    "transformers",
    "liger-kernel",
)
# options that say where results and logs go, on which no figure depends
PLACES = ("--output", "--work")


def device() -> torch.device:
    """Where benchmarks run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; none without a GPU."""
    if not torch.cuda.is_available():
        return []
    found = ",".join(map(str, range(torch.cuda.device_count())))
    return os.environ.get("CUDA_VISIBLE_DEVICES", found).split(",")


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def driver() -> str:
    """NVIDIA's, of the first GPU."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True).stdout.split()
    except OSError:
        found = []
    return found[0] if found else "unknown"


def command(words: Sequence[str]) -> str:
    """A command line of benchmarks, without folders of the machine that it ran on."""
    kept, words = [], iter(words)
    for word in words:
        if word in PLACES:
            next(words, None)
        else:
            kept.append(word)
    return shlex.join(["python", "-m", "benchmarks", *kept])


def environment() -> dict[str, str]:
    """What a figure depends on."""
    cuda = torch.cuda.is_available()
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    # where the tree travels without its history, the environment names the commit
    commit = os.environ.get("COAT_COMMIT") or git.stdout.strip() or "unknown"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "driver": driver() if cuda else "none",
        "cuda": torch.version.cuda or "none",
        "torch": torch.__version__,
        **{package.replace("-", "_"): version(package) for package in PACKAGES},
        "commit": commit,
        "command": command(sys.argv[1:]),
    }
