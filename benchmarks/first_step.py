"""Minutes of a new user: from an empty environment to the first trained step."""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common.harness import Table, benchmark, reason

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "1")
# what docs/install.md says to install, and what the page of each way says to run
WAYS = {
    "DeepSpeed": (".[deepspeed]", (*TORCHRUN, "examples/deepspeed_json.py")),
    "Hugging Face's Trainer": (".[huggingface]", ("python", "examples/trainer.py", "--plain")),
    "PyTorch, FSDP2": (".", (*TORCHRUN, "examples/fsdp2.py")),
    "Megatron": (".[megatron]", ("python", "examples/megatron_gpt.py")),
}
SHOWN = ("torch", "triton", "deepspeed", "megatron-core", "transformers")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip installs first")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")


def timed(command: list, environment: dict, folder: Path) -> tuple[float, float]:
    """Seconds of a command, and processor seconds.

    Raises RuntimeError with the end of what it wrote if it fails.
    """
    start, before = time.perf_counter(), processor_seconds()
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stdout.strip()[-150:]}")
    return time.perf_counter() - start, processor_seconds() - before


def processor_seconds() -> float:
    """Of all commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(way: str, torch: str, folder: Path) -> dict:
    """The row of a way, whose environment, copy of the clone and compiled extensions lie in `folder`."""
    wanted, script = WAYS[way]
    clone, venv = folder / "clone", folder / "venv"
    clone.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "x"], cwd=clone, input=archive.stdout, check=True)
    path = os.pathsep.join((str(venv / "bin"), os.environ["PATH"]))
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": path, "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    timed([sys.executable, "-m", "venv", venv], environment, folder)
    row = {"way": way, "installed": wanted, "script": " ".join(script)}
    commands = {
        "torch": ["pip", "install", torch],
        "coat": ["pip", "install", wanted],
        "first_step": [*script, "--steps", "1"],
    }
    for name, command in commands.items():
        row[f"{name}_s"], row[f"{name}_cpu_s"] = timed(command, environment, clone)
    freeze = subprocess.run(
        ["pip", "freeze"], env=environment, cwd=clone, capture_output=True, text=True, check=True
    ).stdout
    versions = dict(line.split("==") for line in freeze.splitlines() if "==" in line)
    # of the new environment, in place of this one's
    return row | {name.replace("-", "_"): versions.get(name, "absent") for name in SHOWN}


@benchmark(needs_gpu=False, options=options)
def first_step(arguments, table: Table) -> None:
    """A new user's minutes: a clean environment, installation, and one step of the example of each way.

    - torch_s, coat_s: pip's time for torch, and for this project with what it needs.
    - first_step_s: the example with --steps 1, until it has ended. On a CPU DeepSpeed compiles its
      collectives in it, once on each machine.

    Those with cpu are processor seconds, which do not count what else the machine was doing. What is
    installed is the commit, by `git archive`, as in a clone. Each environment is removed again.
    """
    for way in arguments.ways:
        folder = Path(tempfile.mkdtemp(prefix="coat_first_step_"))
        try:
            row = measure(way, arguments.torch, folder)
        except (RuntimeError, OSError) as error:
            row = {"way": way, "installed": WAYS[way][0], "note": reason(error)}
        finally:
            shutil.rmtree(folder)
        table.add(**row)
