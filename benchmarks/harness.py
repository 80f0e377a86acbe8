"""One registry, one way to time, one table format. Every row has peak memory beside its time."""

import csv
import importlib.metadata
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch


class Benchmark(NamedTuple):
    run: Callable
    needs_gpu: bool
    options: Callable | None
    writes_table: bool


# beside torch
PACKAGES = (
    "triton",
    "deepspeed",
    "megatron-core",
    "transformer-engine",
    "torchao",
    "transformers",
    "liger-kernel",
)
BENCHMARKS: dict[str, Benchmark] = {}
RESULTS = Path(__file__).parent / "results"


def benchmark(
    run: Callable | None = None,
    *,
    needs_gpu: bool = True,
    options: Callable | None = None,
    writes_table: bool = True,
) -> Callable:
    """Registers `run(arguments, table)` under its function's name; its docstring is the help text.

    `options(parser)` adds arguments of its own to those that every benchmark has. One that writes no table
    is given None.
    """
    if run is None:
        return partial(benchmark, needs_gpu=needs_gpu, options=options, writes_table=writes_table)
    BENCHMARKS[run.__name__] = Benchmark(run, needs_gpu, options, writes_table)
    return run


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


def environment() -> dict[str, str]:
    """What a figure depends on."""
    cuda = torch.cuda.is_available()
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=RESULTS.parent
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
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
    }


class Timing:
    """Milliseconds of one call: median, and the 20th and 80th percentiles; and its peak memory in bytes."""

    def __init__(self, samples: list[float], peak: int):
        ordered = sorted(samples)
        self.median, self.low, self.high = (
            ordered[min(int(q * len(ordered)), len(ordered) - 1)] for q in (0.5, 0.2, 0.8)
        )
        self.peak = peak


def mark() -> torch.cuda.Event | float:
    """A point in the work of the device, or in time where there is no GPU."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    """From one `mark()` to a later one; on a GPU, which has to be synchronized, by the device's clock."""
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(call: Callable[[], object], warmup: int = 5, repeats: int = 30) -> Timing:
    """Times `call` and finds how far above the memory held before it the call rises (0 without a GPU)."""
    on_gpu = torch.cuda.is_available()
    for _ in range(warmup):
        call()
    synchronize()
    held = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    call()
    synchronize()
    peak = torch.cuda.max_memory_allocated() - held if on_gpu else 0
    marks = [mark()]
    for _ in range(repeats):
        call()
        marks.append(mark())
    synchronize()
    return Timing([milliseconds(a, b) for a, b in zip(marks, marks[1:], strict=False)], peak)


class Span(NamedTuple):
    """What a GPU did, from and to, in microseconds."""

    name: str
    start: float
    end: float


def gpu_spans(call: Callable[[], object]) -> list[Span]:
    """Kernels, copies and messages of `call` on this GPU, by torch's profiler; none without one."""
    if not torch.cuda.is_available():
        return []
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        synchronize()
    events = (event for event in trace.events() if event.device_type == DeviceType.CUDA)
    return [Span(event.name, event.time_range.start, event.time_range.end) for event in events]


def is_message(span: Span) -> bool:
    return "nccl" in span.name.lower()


def covered_ms(spans: Iterable[Span]) -> float:
    """Milliseconds that spans cover together."""
    total, reached = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total / 1e3


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of `actual - expected` over that of `expected`, in FP64."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return ((actual - expected).norm() / expected.norm()).item()


def reason(error: Exception) -> str:
    """The kind of an error and the start of what it says, for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


class Table:
    """Rows that are printed as they come and written to one CSV file, headed by the environment."""

    def __init__(self, name: str, path: Path | None):
        self.environment, self.name = environment(), name
        self.path = path or RESULTS / f"{name}.csv"
        self.rows: list[dict[str, object]] = []
        print("  ".join(f"{k} {v}" for k, v in self.environment.items()), flush=True)

    def add(self, **row: object) -> None:
        self.rows.append(row)
        shown = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values())
        if len(self.rows) == 1 or list(row) != list(self.rows[-2]):
            print("  ".join(f"{k:>14}" for k in row), flush=True)
        print("  ".join(f"{v:>14}" for v in shown), flush=True)

    def write(self) -> None:
        """Writes what rows there are; one that was measured earlier brings its own environment."""
        if not self.rows:
            return
        own = [k for row in self.rows for k in row if k not in self.environment]
        columns = [*dict.fromkeys(own), *self.environment]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            for row in self.rows:
                writer.writerow(row if "date" in row else self.environment | row)
