"""A case on its ranks: the speed of its steps, and the memory of their parts and phases."""

import math
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from benchmarks.common.environment import device
from benchmarks.common.layers import forget
from benchmarks.common.memory import held_bytes, peak_bytes, release
from benchmarks.common.spawn import Rank, run_ranks
from benchmarks.common.timing import covered_ms, gpu_spans, is_message, mark, milliseconds, synchronize
from benchmarks.common.training import loss_of
from benchmarks.common.whole_models import (
    BATCHES,
    SYSTEMS,
    Job,
    build_engine,
    build_model,
    forward,
    masters_of,
    random_batches,
    start,
    train_step,
)
from benchmarks.train.search import Case, identity, next_case
from coat_launch.batches import Batch

WARMUP = 3
# bytes that a case may leave allocated for the next one of its process
LEFT_OVER = 500_000_000


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


def flushes() -> int:
    """How often torch's allocator has found no memory and given its cache back to the GPU first."""
    return torch.cuda.memory_stats()["num_alloc_retries"] if torch.cuda.is_available() else 0


def parts_of(engine) -> dict[str, int]:
    """Bytes on this rank between steps, by name."""
    import coat_ds

    # stage 3 has emptied the tensors, and keeps its part of them in `ds_tensor`
    weights = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
    return {
        "weights": sum(p.nbytes for p in weights),
        "masters": sum(p.nbytes for p in masters_of(engine)),
        "states": coat_ds.state_bytes(engine)["bytes"],
        "copies": sum(getattr(m, "cached_bytes", 0) for m in engine.module.modules()),
    }


def run_case(case: Case, steps: int) -> dict[str, float]:
    """Trains, and measures on this rank: ms, loss, and bytes by name."""
    from megatron_ext.saved_bytes import saved_bytes

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
    marks, losses, flushed = [], [], 0
    for i in range(WARMUP + steps):
        if i == WARMUP and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            flushed = flushes()
        start = mark()
        losses.append(train_step(engine, batches[i % BATCHES]))
        marks.append((start, mark()))
    synchronize()
    flushed = flushes() - flushed
    peaks = {}
    if torch.cuda.is_available():
        peaks = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    phases = memory_by_phase(engine, batches[0])
    bytes_of = {"peak": 0, "reserved": 0} | peaks | parts_of(engine) | {"saved": saved} | phases
    times = [milliseconds(*pair) for pair in marks[WARMUP:]]
    spans = gpu_spans(lambda: train_step(engine, batches[0]))
    # a message lasts as long as other ranks make it wait: so compute without them, and the least busy rank
    computes = covered_ms(span for span in spans if not is_message(span)) if spans else math.nan
    negated = -covered_ms(spans) if spans else math.nan
    own = [statistics.median(times), computes, negated, flushed, *bytes_of.values()]
    figures = torch.tensor(own, dtype=torch.float64)
    figures = figures.to(device())
    # the slowest, busiest and fullest rank speak for all
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    ms, computes, negated, flushed, *values = figures.tolist()
    result = {
        "ms": ms,
        "compute_ms": computes,
        "busy_ms": -negated,
        "flushes": int(flushed),
        "loss_first": losses[0].item(),
        "loss": losses[-1].item(),
    }
    engine.destroy()
    if not math.isfinite(result["loss"]):
        result["note"] = "the loss is not finite"
    return result | {f"{name}_mb": value / 1e6 for name, value in zip(bytes_of, values, strict=True)}


def measure(place: Rank, jobs: list[Job], rows: list[dict], settings: dict) -> Iterator[dict]:
    """Case after case of one way, on one rank."""
    start(place, jobs[0].way)
    from megatron.core.parallel_state import get_global_memory_buffer

    limit, planned, fresh = settings["limit"], settings["planned"], True
    while (case := next_case(jobs, rows, limit, planned)) is not None:
        forget()
        # as large as the largest micro-batch so far wanted it
        get_global_memory_buffer().buffer.clear()
        release()
        # a new process continues after a case that leaves too much allocated
        full = not fresh and held_bytes() > LEFT_OVER
        if _any_rank(full or time.time() > settings["deadline"]):
            break
        fresh = False
        if torch.cuda.is_available():
            total = torch.cuda.get_device_properties(place.rank).total_memory
            fraction = min(1.0, limit / total) if case.limited else 1.0
            torch.cuda.set_per_process_memory_fraction(fraction, place.rank)
        rows.append(identity(case) | run_case(case, settings["steps"]))
        yield rows[-1]


def _any_rank(here: bool) -> bool:
    """Whether it is so on any rank: all have to do the same."""
    found = torch.tensor(float(here), device=device())
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found.item())


def run_jobs(
    jobs: list[Job], rows: list[dict], gpus: int, settings: dict, add: Callable[[dict], None]
) -> None:
    """Measures what `rows` do not hold yet, and has `add` take each new row at once.

    Processes are started for each way, and again after each case that fails, which is a row as well.
    """

    def take(row: dict) -> None:
        rows.append(row)
        add(row)

    limit, planned = settings["limit"], settings["planned"]
    for way in dict.fromkeys(job.way for job in jobs):
        own = [job for job in jobs if job.way == way]
        while (case := next_case(own, rows, limit, planned)) is not None:
            if time.time() > settings["deadline"]:
                print(f"no time left for {identity(case)} and what follows", flush=True)
                return
            _, failure = run_ranks(measure, gpus, own, rows.copy(), settings, take=take)
            if failure is not None and (case := next_case(own, rows, limit, planned)) is not None:
                take(identity(case) | {"note": failure})
