"""Where a training step's time goes: what the CPU has launched when, and what the GPU does."""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.distributed as dist

from benchmarks.common.harness import Table, benchmark
from benchmarks.common.layers import forget
from benchmarks.common.memory import release
from benchmarks.common.spawn import Rank, run_ranks
from benchmarks.common.timing import Span, covered_ms, gpu_spans, is_message, synchronize
from benchmarks.common.whole_models import (
    BATCHES,
    MODELS,
    SYSTEMS,
    WAYS,
    Job,
    build_engine,
    build_model,
    forward,
    random_batches,
    start,
    train_step,
)
from coat_launch.split import Batch

WARMUP, REPEATS = (4, 6) if torch.cuda.is_available() else (1, 2)
# by what names of kernels hold, the first that fits; any other kernel is of a kind of its own
KINDS = {
    "messages": ("nccl",),
    "attention": ("sdpa", "flash", "fmha", "cudnn"),
    "products": ("nvjet", "gemm", "cutlass"),
    "copies": ("memcpy", "memset"),
    "torch's own kernels": ("at::", "triton_"),
}
# longest part of another kernel's name that is shown
SHOWN = 48


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    found = (kind for kind, parts in KINDS.items() if any(part in name for part in parts))
    return next(found, kernel[:SHOWN])


def launched(engine, batch: Batch) -> tuple[float, ...]:
    """Milliseconds until the CPU has launched forward, backward and the optimizer, each from the last on,
    and until all of it is done."""
    dist.barrier()
    synchronize()
    marks = [time.perf_counter()]
    loss = forward(engine, batch)
    marks.append(time.perf_counter())
    engine.backward(loss)
    marks.append(time.perf_counter())
    engine.step()
    marks.append(time.perf_counter())
    synchronize()
    parts = (1e3 * (end - start) for start, end in zip(marks, marks[1:], strict=False))
    return *parts, 1e3 * (time.perf_counter() - marks[0])


def rows_of(times: list[tuple[float, ...]], spans: list[Span]) -> list[dict]:
    """`times` of `launched`, `spans` of another step."""
    names = ("host: forward", "host: backward", "host: optimizer", "step")
    medians = (statistics.median(column) for column in zip(*times, strict=True))
    rows = [{"what": name, "ms": ms} for name, ms in zip(names, medians, strict=True)]
    if not spans:
        return rows
    computing = [span for span in spans if not is_message(span)]
    for name, some in (("GPU: anything", spans), ("GPU: anything but messages", computing)):
        rows.append({"what": name, "ms": covered_ms(some), "launches": len(some)})
    by_kind = defaultdict(list)
    for span in spans:
        by_kind[kind_of(span.name)].append(span.end - span.start)
    ordered = sorted(by_kind.items(), key=lambda item: -sum(item[1]))
    return rows + [{"what": kind, "ms": sum(us) / 1e3, "launches": len(us)} for kind, us in ordered]


def measure(place: Rank, jobs: list[Job]) -> Iterator[dict]:
    """The rows of this rank, system after system."""
    start(place, jobs[0].way)
    for job in jobs:
        torch.manual_seed(0)
        batches = random_batches(job, job.micro_batch)
        engine = build_engine(job, job.micro_batch, build_model(job))
        for i in range(WARMUP):
            train_step(engine, batches[i % BATCHES])
        times = [launched(engine, batches[i % BATCHES]) for i in range(REPEATS)]
        spans = gpu_spans(lambda engine=engine, batches=batches: train_step(engine, batches[0]))
        for row in rows_of(times, spans):
            yield job._asdict() | {"gpus": place.ranks} | row
        engine.destroy()
        del engine, batches
        forget()
        release()


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", choices=MODELS, default="llama2-7b")
    add("--way", choices=WAYS, default="tp2", help="default: %(default)s")
    add("--systems", nargs="+", choices=SYSTEMS, metavar="NAME", default=["BF16", "COAT"])
    add("--gpus", type=int, default=2, help="processes, each on a GPU of its own (default %(default)s)")
    add("--layers", type=int, help="in place of all")
    add("--micro-batch", type=int)


@benchmark(needs_gpu=False, options=options)
def step(arguments, table: Table) -> None:
    """Where a step of `python -m benchmarks train` goes: the CPU's launches, and the GPU's kernels by kind.

    Rank 0's. A step that takes as long as its launches waits for the CPU. Rows of each system:
    - step: median, all ranks beginning together; host: X: CPU time until that part is launched, which
      includes where it waits for a result;
    - GPU: anything, anything but messages: of another step, in which the GPU did so, and how many kernels,
      copies and messages that were (under torch's profiler, which slows the CPU); products are GEMMs;
    - the kinds of these, the longest first; messages last as long as other ranks make them wait.
    Without a GPU, or with --quick, a tiny model; without a GPU no kernels, and times mean nothing.
    """
    small = arguments.quick or not torch.cuda.is_available()
    name = "tiny" if small else arguments.model
    model, way = MODELS[name], arguments.way
    if arguments.gpus % WAYS[way].tensor:
        raise SystemExit(f"--way {way}: {WAYS[way].tensor} does not divide --gpus {arguments.gpus}")
    jobs = [
        Job(
            name,
            way,
            system,
            arguments.layers or model.layers,
            arguments.micro_batch or model.layer.batch,
        )
        for system in arguments.systems
    ]
    rows, failure = run_ranks(measure, arguments.gpus, jobs)
    for row in rows[0]:
        table.add(**row)
    # what was measured before stays
    if failure:
        raise SystemExit(failure)
