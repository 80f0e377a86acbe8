"""Whole models trained end to end: tokens per second, and where the memory goes."""

import argparse
import csv
import gc
import importlib.util
import json
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.decoder_layers import device, forget
from benchmarks.harness import (
    RESULTS,
    Table,
    benchmark,
    covered_ms,
    gpu_spans,
    is_message,
    mark,
    milliseconds,
    synchronize,
)
from benchmarks.memory import held_bytes, peak_bytes
from benchmarks.training import loss_of
from benchmarks.whole_models import (
    BATCHES,
    BY_DEFAULT,
    MODELS,
    SYSTEMS,
    WAYS,
    Job,
    build_engine,
    build_model,
    forward,
    masters_of,
    predict,
    predicted_columns,
    random_batches,
    start,
    train_step,
)
from coat_launch.split import Batch

WARMUP = 3
# dense BF16 products, by what the name of the device holds; FP8 rows are rated by the same figure
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12}
# runs at most in a search for the largest micro-batch
TRIES = 5
# bytes that a case may leave behind for the next one of its process
LEFT_OVER = 500_000_000


class Case(NamedTuple):
    """One row."""

    job: Job
    micro_batch: int
    limited: bool
    """Whether the allocator may take no more than the limit."""


def is_of(row: dict, job: Job) -> bool:
    return tuple(row.get(name) for name in ("model", "way", "system", "layers")) == job.key


def next_case(jobs: list[Job], rows: list[dict], limit: float | None) -> Case | None:
    """What is to be measured after `rows`; with a `limit`, in bytes, also each job's largest micro-batch."""
    for job in jobs:
        mine = [row for row in rows if is_of(row, job)]
        equal = [row for row in mine if not row["limited"] and row["micro_batch"] == job.micro_batch]
        if not equal:
            return Case(job, job.micro_batch, False)
        if limit is not None and (size := _next_size(equal[0], mine, limit)):
            return Case(job, size, True)
    return None


def _next_size(equal: dict, rows: list[dict], limit: float) -> int | None:
    """The micro-batch to try next in the search for the largest; None if it was found, or cannot be.

    The peak is a line over the micro-batch: through what is held between steps at first, then through the
    two largest that were measured.
    """
    if "out of memory" not in equal.get("note", "out of memory"):
        return None
    tried = [row for row in rows if row["limited"]]
    fits = {row["micro_batch"]: 1e6 * row["peak_mb"] for row in tried if "peak_mb" in row}
    fails = [row["micro_batch"] for row in tried if "peak_mb" not in row]
    largest, refused = max(fits, default=0), min(fails, default=math.inf)
    if len(tried) >= TRIES or largest + 1 >= refused:
        return None
    if "peak_mb" not in equal:
        # nothing is known but that it is too large, whatever the limit
        guess = min(refused, equal["micro_batch"]) // 2
        return max(guess, largest + 1) if guess else None
    points = {0: 1e6 * equal["between_steps_mb"], equal["micro_batch"]: 1e6 * equal["peak_mb"], **fits}
    (m0, y0), (m1, y1) = sorted(points.items())[-2:]
    slope = max((y1 - y0) / (m1 - m0), 1.0)
    if largest and fits[largest] + slope > limit:
        return None
    guess = m1 + int((limit - y1) // slope)
    return int(min(max(guess, largest + 1), refused - 1))


def memory_by_phase(engine, batch: Batch) -> dict[str, float]:
    """Bytes held after each phase of a step over those before it, and the peak of each, absolute."""
    on_gpu = torch.cuda.is_available()

    def phase(name: str, call) -> object:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        result = call()
        synchronize()
        found[f"{name}_peak"] = peak_bytes()
        found[f"after_{name}"] = held_bytes() - found["between_steps"]
        return result

    found = {"between_steps": held_bytes()}
    loss = phase("forward", lambda: forward(engine, batch))
    phase("backward", lambda: engine.backward(loss))
    phase("step", engine.step)
    return found


def run_case(case: Case, steps: int) -> dict[str, float]:
    """Trains, and measures on this rank: ms, loss, and bytes by name."""
    import coat_ds
    from megatron_ext.ledger import cached_weight_bytes, saved_bytes

    torch.manual_seed(0)
    batches = random_batches(case.job, case.micro_batch)
    model = build_model(case.job)
    saved = math.nan
    # TransformerEngine's layers save tensors that cannot be counted so
    if SYSTEMS[case.job.system].package is None:
        # of one sequence: the model is whole here, and the limit may be for a part of it
        first = Batch(*(t[:1] for t in batches[0]))
        saved = case.micro_batch * saved_bytes(model, lambda: loss_of(model, first)).total
    engine = build_engine(case.job, case.micro_batch, model)
    marks, losses = [], []
    for i in range(WARMUP + steps):
        if i == WARMUP and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        start = mark()
        losses.append(train_step(engine, batches[i % BATCHES]))
        marks.append((start, mark()))
    synchronize()
    peaks = {}
    if torch.cuda.is_available():
        peaks = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    phases = memory_by_phase(engine, batches[0])
    # stage 3 has emptied the tensors, and keeps its part of them beside
    weights = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
    parts = {
        "weights": sum(p.nbytes for p in weights),
        "masters": sum(p.nbytes for p in masters_of(engine)),
        "states": coat_ds.state_bytes(engine)["bytes"],
        "saved": saved,
        "copies": cached_weight_bytes(engine.module),
    }
    bytes_of = {"peak": 0, "reserved": 0} | peaks | parts | phases
    times = [milliseconds(*pair) for pair in marks[WARMUP:]]
    spans = gpu_spans(lambda: train_step(engine, batches[0]))
    # a message lasts as long as other ranks make it wait
    computes = covered_ms(span for span in spans if not is_message(span)) if spans else math.nan
    figures = torch.tensor([statistics.median(times), computes, *bytes_of.values()], dtype=torch.float64)
    figures = figures.to(device())
    # the slowest, busiest and fullest rank speak for all
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    ms, computes, *values = figures.tolist()
    result = {"ms": ms, "compute_ms": computes, "loss_first": losses[0].item(), "loss": losses[-1].item()}
    engine.destroy()
    if not math.isfinite(result["loss"]):
        result["note"] = "the loss is not finite"
    return result | {f"{name}_mb": value / 1e6 for name, value in zip(bytes_of, values, strict=True)}


def rank_main(rank: int, gpus: int, jobs: list[Job], rows: list[dict], settings: dict, folder: str) -> None:
    """Measures case after case of one way on one rank; rank 0 writes a line of JSON for each."""
    start(rank, gpus, jobs[0].way, folder)
    on_gpu = torch.cuda.is_available()
    limit, fresh = settings["limit"], True
    with open(os.path.join(folder, f"{rank}.jsonl"), "w") as lines:
        while (case := next_case(jobs, rows, limit)) is not None:
            forget()
            gc.collect()
            # a new process goes on behind a case that leaves too much behind
            full = not fresh and held_bytes() > LEFT_OVER
            if _any_rank(full or time.time() > settings["deadline"]):
                break
            fresh = False
            if on_gpu:
                torch.cuda.empty_cache()
                total = torch.cuda.get_device_properties(rank).total_memory
                fraction = min(1.0, limit / total) if case.limited else 1.0
                torch.cuda.set_per_process_memory_fraction(fraction, rank)
            rows.append(identity(case) | run_case(case, settings["steps"]))
            print(json.dumps(rows[-1]), file=lines, flush=True)
    dist.destroy_process_group()


def _any_rank(here: bool) -> bool:
    """Whether it is so on any rank: all have to do the same."""
    found = torch.tensor(float(here), device=device())
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found.item())


_IDENTITY = ("model", "way", "system", "layers", "micro_batch", "limited")
# what rows of several numbers of layers share
_LINE = ("model", "way", "system", "micro_batch")


def identity(case: Case) -> dict:
    """What tells the row of a case from others."""
    names = dict(zip(("model", "way", "system", "layers"), case.job.key, strict=True))
    return names | {"micro_batch": case.micro_batch, "limited": case.limited}


def run_jobs(jobs: list[Job], rows: list[dict], gpus: int, settings: dict, add) -> None:
    """Measures what `rows` do not hold yet, and has `add` take each new row at once.

    Processes are started for each way, and again behind each case that fails, which is a row as well.
    """
    for way in dict.fromkeys(job.way for job in jobs):
        own = [job for job in jobs if job.way == way]
        while (case := next_case(own, rows, settings["limit"])) is not None:
            if time.time() > settings["deadline"]:
                print(f"no time left for {identity(case)} and what follows", flush=True)
                return
            with tempfile.TemporaryDirectory() as folder:
                lines, taken = Path(folder, "0.jsonl"), 0

                def take(lines=lines) -> None:
                    nonlocal taken
                    written = lines.read_text().split("\n")[:-1] if lines.exists() else []
                    for line in written[taken:]:
                        rows.append(json.loads(line))
                        add(rows[-1])
                    taken = len(written)

                failure = None
                try:
                    context = mp.spawn(
                        rank_main, (gpus, own, rows.copy(), settings, folder), nprocs=gpus, join=False
                    )
                    while not context.join(timeout=1):
                        take()
                except Exception as error:
                    print(error, flush=True)
                    # the last line of a rank's traceback, or how it ended
                    failure = str(error).strip().splitlines()[-1][:160]
                take()
                if failure is not None and (case := next_case(own, rows, settings["limit"])) is not None:
                    rows.append(identity(case) | {"note": failure})
                    add(rows[-1])


def published(row: dict, gpus: int) -> dict:
    """A row as it stands in the table: with speed, and with the predicted bytes beside the measured ones."""
    model, way = MODELS[row["model"]], WAYS[row["way"]]
    made = {"model": row["model"], "way": row["way"], "gpus": gpus, **row}
    if "ms" not in row:
        return made
    layers, micro_batch, seconds = row["layers"], row["micro_batch"], 1e-3 * row["ms"]
    made["tokens_per_s_gpu"] = micro_batch * model.layer.sequence / way.tensor / seconds
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    if peak := next((value for part, value in PEAK_FLOPS.items() if part in name), None):
        made["mfu"] = model.flops(layers, micro_batch) / way.tensor / seconds / peak
    expected = predict(model, layers, way, gpus, SYSTEMS[row["system"]], micro_batch)
    made |= predicted_columns(expected)
    return {name: value for name, value in made.items() if value == value}


def extrapolate(
    model: str, way: str, system: str, micro_batch: int, gpus: int, rows: list[dict]
) -> dict | None:
    """The row of the whole model, on the line through the two largest numbers of layers.

    Where only one was measured, the peak alone: with what is predicted for the layers that lack.
    """
    layers = MODELS[model].layers
    points = {
        row["layers"]: row
        for row in rows
        if tuple(row[name] for name in _LINE) == (model, way, system, micro_batch)
        and not row["limited"]
        and "ms" in row
    }
    if not points or layers in points:
        return None
    whole = identity(Case(Job(model, way, system, layers, micro_batch), micro_batch, False))
    *lower, (n1, high) = sorted(points.items())
    if lower:
        n0, low = lower[-1]
        linear = {
            name: value + (layers - n1) * (value - low[name]) / (n1 - n0)
            for name, value in high.items()
            if name in low and name.endswith(("ms", "_mb")) and "predicted" not in name
        }
        return whole | {"extrapolated_from": f"{n0} and {n1} layers"} | linear

    def planned(count: int) -> float:
        return predict(MODELS[model], count, WAYS[way], gpus, SYSTEMS[system], micro_batch).peak.total / 1e6

    if not high["peak_mb"]:
        return None
    peak = high["peak_mb"] + planned(layers) - planned(n1)
    return whole | {"extrapolated_from": f"{n1} layers and the plan", "peak_mb": peak}


def plot(rows: list[dict], path: Path) -> None:
    """Peak memory against speed, a panel for each model and way; hollow where a system takes its largest."""
    shown = [
        row for row in rows if row.get("peak_mb") and row.get("tokens_per_s_gpu") and not row.get("note")
    ]
    titles = ("model", "way", "gpus", "layers")
    panels = list(dict.fromkeys(tuple(row[name] for name in titles) for row in shown))
    if not panels:
        return
    columns = min(3, len(panels))
    figure, grid = plt.subplots(
        -(-len(panels) // columns),
        columns,
        figsize=(4.2 * columns + 2.5, 3.6 * -(-len(panels) // columns)),
        layout="constrained",
        squeeze=False,
    )
    points = {}
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for panel, axes in zip(panels, grid.flat, strict=False):
        for row in shown:
            if tuple(row[name] for name in titles) != panel:
                continue
            # more systems than matplotlib's own ten colors
            color = plt.colormaps["tab20"](list(SYSTEMS).index(row["system"]))
            at = (row["peak_mb"] / 1e3, row["tokens_per_s_gpu"])
            style = {"facecolors": "none"} if row["limited"] else {"facecolors": color}
            point = axes.scatter(*at, marker="o", edgecolors=color, **style)
            if not row["limited"]:
                points.setdefault(row["system"], point)
            axes.annotate(str(row["micro_batch"]), at, xytext=(4, 4), textcoords="offset points", size=7)
        model, way, gpus, layers = panel
        whole = "" if layers == MODELS[model].layers else f" of {MODELS[model].layers}"
        axes.set(
            title=f"{model}, {way}, {gpus} GPU{'s' * (gpus > 1)}, {layers}{whole} layers", xlabel="peak, GB"
        )
        axes.set(ylabel="tokens/s and GPU")
        # from zero, with room for the number behind the last point
        axes.set(xlim=(0, 1.1 * axes.dataLim.xmax), ylim=(0, 1.1 * axes.dataLim.ymax))
        axes.title.set_size("medium")
    figure.legend(points.values(), points, loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def read_rows(path: Path) -> list[dict]:
    """Rows of a table that was written, numbers as numbers, without empty cells."""

    def value(text: str) -> object:
        if text in ("True", "False"):
            return text == "True"
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                pass
        return text

    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{k: value(v) for k, v in row.items() if v != ""} for row in csv.DictReader(file)]


def plan(jobs: list[Job], gpus: int, micro_batches: list[int], table: Table) -> None:
    """Adds what is predicted, measured nowhere."""
    for job in jobs:
        for micro_batch in micro_batches:
            model, way = MODELS[job.model], WAYS[job.way]
            expected = predict(model, job.layers, way, gpus, SYSTEMS[job.system], micro_batch)
            baseline = predict(model, job.layers, way, gpus, SYSTEMS["BF16"], micro_batch)
            table.add(
                model=job.model,
                way=job.way,
                gpus=gpus,
                system=job.system,
                layers=job.layers,
                micro_batch=micro_batch,
                **predicted_columns(expected),
                bf16_to_this=baseline.peak.total / expected.peak.total,
            )


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
    add("--steps", type=int, default=8, help="timed, behind three others (default %(default)s)")
    add("--memory-limit-gb", type=float, default=80, help="in the search for the largest micro-batch")
    add("--equal-only", action="store_true", help="no such search")
    add("--minutes", type=float, default=math.inf, help="start no row after that")
    add("--plan", action="store_true", help="the predicted bytes alone; needs no GPU")


@benchmark(needs_gpu=False, options=options)
def train(arguments, table: Table) -> None:
    """Models of 7 to 13 billion parameters end to end: speed, and the memory of each part and phase.

    megatron-core's GPTModel under DeepSpeed, BF16 weights, FP32 masters, clipping at 1.0, random weights and
    tokens, four batches in turn, buckets of 1e8 elements. zero1 to zero3 are ZeRO's stages; tp2 and tp4 are
    tensor with sequence parallelism and ZeRO-1 over what GPUs are left. Every system is measured at the same
    micro-batch first, then at the largest that fits a limit on torch's allocator (limited; in 10^9 bytes: a
    GPU of 80 GiB has 85.9 of them, of which CUDA and NCCL take some). A row that ran out of memory, failed
    otherwise or lost its loss has a note. Rows that are in --output or in the file of that name in
    benchmarks/results, of as many GPUs of that kind, stay and are not measured again, but for such other
    failures. Columns, of the slowest and fullest rank:
    - tokens_per_s_gpu, mfu: by the median step of forward, backward and optimizer; of 989 TFLOP/s, the dense
      BF16 peak, in FP8 rows too, and not counting what is recomputed;
    - compute_ms: of one more step, under torch's profiler, in which the GPU did anything but messages;
    - peak_mb, reserved_mb: most that tensors took and that torch took from the GPU in the timed steps;
    - weights_mb, masters_mb, states_mb: bytes of these tensors; copies_mb: of FP8 weights that COAT's layers
      hold; saved_mb: kept for backward by the layers, counted on one sequence;
    - between_steps_mb, after_X_mb, X_peak_mb: held before a step; held after forward, backward and step over
      that (after backward these are the gradients); the peak during each, all included. In 10^6 bytes, as
      requested from the allocator;
    - X_predicted_mb, all_predicted_mb: the most that a role takes at any moment of a step, and the peak of
      all together, as `coat plan` has them (coat_ds/plan/memory.py); before 2026-11-22 a sum of roles;
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
    counts = arguments.layers or [model.layers]
    jobs = [
        Job(name, way, system, layers, sizes[0])
        for way in arguments.ways
        for layers in counts
        for system in arguments.systems or BY_DEFAULT
    ]
    if arguments.plan:
        if arguments.output is None:
            table.path = RESULTS / "train_plan.csv"
        plan(jobs, gpus, sizes, table)
        return

    # of two files the one that is written to comes first
    earlier = {}
    for path in (table.path, RESULTS / table.path.name):
        for row in read_rows(path):
            earlier.setdefault(tuple(row.get(k) for k in (*_IDENTITY, "gpus", "device")), row)
    rows = []
    for row in earlier.values():
        if row["device"] == table.environment["device"] and row["gpus"] == gpus:
            failed = "note" in row and "out of memory" not in row["note"]
            if "extrapolated_from" in row or failed and any(is_of(row, job) for job in jobs):
                continue
            rows.append(row)
        table.add(**row)

    def add(row: dict) -> None:
        table.add(**published(row, gpus))
        # what follows may be cut off
        table.write()

    for job in jobs:
        package = SYSTEMS[job.system].package
        if package and importlib.util.find_spec(package) is None:
            rows.append(identity(Case(job, job.micro_batch, False)) | {"note": f"{package} is not installed"})
            add(rows[-1])
    settings = {
        "limit": 1e9 * arguments.memory_limit_gb if on_gpu and not arguments.equal_only else None,
        "steps": arguments.steps,
        "deadline": time.time() + 60 * arguments.minutes,
    }
    run_jobs(jobs, rows, gpus, settings, add)
    for line in dict.fromkeys(tuple(row[name] for name in _LINE) for row in rows):
        if (row := extrapolate(*line, gpus, rows)) is not None:
            add(row)
    plot(table.rows, table.path.with_suffix(".png"))
