"""Whole models trained end to end: tokens per second, and where the memory goes."""

import argparse
import importlib.util
import math
import time

import torch

from benchmarks.common.harness import RESULTS, Table, benchmark, read_rows
from benchmarks.common.whole_models import BY_DEFAULT, MODELS, SYSTEMS, WAYS, Job
from benchmarks.train.measure import run_jobs
from benchmarks.train.search import IDENTITY, Case, identity, is_of
from benchmarks.train.table import LINE, extrapolate, largest, plan, published


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", choices=MODELS, default="llama2-7b")
    add("--ways", nargs="+", choices=WAYS, default=["zero2"], help="default: %(default)s")
    add(
        "--systems",
        nargs="+",
        choices=SYSTEMS,
        metavar="NAME",
        help=f"of {', '.join(SYSTEMS)} (default: the first {len(BY_DEFAULT)})",
    )
    add("--gpus", type=int, help="processes, each on a GPU of its own (default: all there are)")
    add("--layers", type=int, nargs="+", help="in place of all, which is then extrapolated; better from two")
    add("--micro-batch", type=int, nargs="+", help="at which all systems are compared; several with --plan")
    add("--steps", type=int, default=8, help="timed, after three others (default %(default)s)")
    add("--memory-limit-gb", type=float, default=80, help="in the search for the largest micro-batch")
    add("--equal-only", action="store_true", help="no such search")
    add("--minutes", type=float, default=math.inf, help="start no row after that")
    add("--plan", action="store_true", help="the predicted bytes alone; needs no GPU")


@benchmark(needs_gpu=False, options=options)
def train(arguments, table: Table) -> None:
    """Models of 7 to 13 billion parameters end to end: speed, and the memory of each part and phase.

    megatron-core's GPTModel under DeepSpeed, BF16 weights, FP32 masters, clipping at 1.0, random weights and
    tokens, four batches in turn, buckets of 1e8 elements. zero1 to zero3 are ZeRO's stages; tp2 and tp4 are
    tensor with sequence parallelism and ZeRO-1 over what GPUs are left, tp4_zero2 has ZeRO-2. Every system is
    measured at the same micro-batch first, then at the largest that fits a limit on torch's allocator
    (limited; in 10^9 bytes: a GPU of 80 GiB has 85.9, and CUDA and NCCL take some of it); the search
    begins where `coat plan` expects it to end, and half of the largest is measured last. A row that ran out
    of memory, failed otherwise or lost its loss has a note. Rows that are in --output or in the file of that
    name in benchmarks/results, of the same number and kind of GPUs, stay and are not measured again, except
    after such other failures. Columns, of the slowest and fullest rank:
    - tokens_per_s_gpu, mfu: by the median step of forward, backward and optimizer; of 989 TFLOP/s, the dense
      BF16 peak, in FP8 rows too, and not counting what is recomputed;
    - compute_ms: of one more step, under torch's profiler, in which the GPU did anything but messages;
    - busy_ms: of the same step, in which the GPU did anything at all, on the rank that did least: others wait
      for it in their messages; older rows lack it;
    - flushes: how often torch gave its cache back for want of memory, in all timed steps; older rows lack it;
    - peak_mb, reserved_mb: most that tensors took and that torch took from the GPU in the timed steps;
    - weights_mb, masters_mb, states_mb: bytes of these tensors; copies_mb: of FP8 weights that COAT's layers
      hold; saved_mb: kept for backward by the layers, counted on one sequence;
    - between_steps_mb, after_X_mb, X_peak_mb: held before a step; held after forward, backward and step over
      that (after backward these are the gradients); the peak during each, all included. In 10^6 bytes, as
      requested from the allocator;
    - X_predicted_mb, all_predicted_mb: the most that a role takes at any moment of a step, and the peak of
      all together, as `coat plan` has them (coat_ds/plan/memory.py); before 2026-11-22 a sum of roles;
    - loss: of the last of about eleven steps, in nats. The four batches of random tokens repeat, so a model
      memorizes them: from 11 at the start the loss falls towards 0, at a speed that depends on micro-batch,
      rounding and learning rate. It shows that the run trains, and not how well a system converges;
    - extrapolated_from: the row was not measured, but lies on the line through two numbers of layers; or is
      the peak with one number, and what is predicted for the layers that lack.
    Without a GPU, or with --quick, a tiny model; without a GPU no peaks, no search, and times mean nothing.
    """
    on_gpu = torch.cuda.is_available()
    small = (arguments.quick or not on_gpu) and not arguments.plan
    name = "tiny" if small else arguments.model
    model, gpus = MODELS[name], arguments.gpus or (torch.cuda.device_count() if on_gpu else 1)
    for way in arguments.ways:
        if gpus % WAYS[way].tensor:
            raise SystemExit(f"--ways {way}: {WAYS[way].tensor} does not divide --gpus {gpus}")
    sizes = arguments.micro_batch or [model.layer.batch]
    if len(sizes) > 1 and not arguments.plan:
        raise SystemExit(f"--micro-batch: expected one number without --plan, found {sizes}")
    jobs = [
        Job(name, way, system, layers, sizes[0])
        for way in arguments.ways
        for layers in arguments.layers or [model.layers]
        for system in arguments.systems or BY_DEFAULT
    ]
    if not arguments.plan:
        measure_all(jobs, gpus, arguments, table)
        return
    if arguments.output is None:
        table.path = RESULTS / "train_plan.csv"
    plan(jobs, gpus, sizes, table)


def earlier_rows(jobs: list[Job], gpus: int, table: Table) -> list[dict]:
    """Puts earlier rows in the table; returns those that are not measured again."""
    # of two files the one that is written to comes first
    earlier = {}
    for path in (table.path, RESULTS / table.path.name):
        for row in read_rows(path):
            earlier.setdefault(tuple(row.get(k) for k in (*IDENTITY, "gpus", "device")), row)
    rows = []
    for row in earlier.values():
        if row["device"] == table.environment["device"] and row["gpus"] == gpus:
            failed = "note" in row and "out of memory" not in row["note"]
            if "extrapolated_from" in row or failed and any(is_of(row, job) for job in jobs):
                continue
            rows.append(row)
        table.add(**row)

    return rows


def measure_all(jobs: list[Job], gpus: int, arguments, table: Table) -> None:
    """Every job, then whole models by extrapolation."""
    rows = earlier_rows(jobs, gpus, table)

    def add(row: dict) -> None:
        table.add(**published(row, gpus))

    for job in jobs:
        package = SYSTEMS[job.system].package
        if package and importlib.util.find_spec(package) is None:
            rows.append(identity(Case(job, job.micro_batch, False)) | {"note": f"{package} is not installed"})
            add(rows[-1])
    searched = torch.cuda.is_available() and not arguments.equal_only
    limit = 1e9 * arguments.memory_limit_gb if searched else None
    settings = {
        "limit": limit,
        "planned": {job: largest(job, gpus, limit) for job in jobs} if limit else {},
        "steps": arguments.steps,
        "deadline": time.time() + 60 * arguments.minutes,
    }
    run_jobs(jobs, rows, gpus, settings, add)
    for line in dict.fromkeys(tuple(row[name] for name in LINE) for row in rows):
        if (row := extrapolate(*line, gpus, rows)) is not None:
            add(row)
