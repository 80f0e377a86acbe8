"""Which case is measured next, up to each system's largest micro-batch."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.common.whole_models import Job

# runs at most in a search for the largest micro-batch
TRIES = 5
# a try at most, over the largest micro-batch that was measured
REACH = 4
# those whose peak grows with micro-batches
PHASES = ("forward_peak_mb", "backward_peak_mb")
# of a row: what tells it from others
IDENTITY = ("model", "way", "system", "layers", "micro_batch", "limited")


class Case(NamedTuple):
    """One row."""

    job: Job
    micro_batch: int
    limited: bool
    """Whether the allocator may take no more than the limit."""


def is_of(row: dict, job: Job) -> bool:
    return tuple(row.get(name) for name in ("model", "way", "system", "layers")) == job.key


def next_case(
    jobs: list[Job], rows: list[dict], limit: float | None, planned: Mapping[Job, int]
) -> Case | None:
    """What is to be measured after `rows`; with a `limit`, in bytes, also each job's largest micro-batch, and
    half of it.

    `planned` holds the largest that `coat plan` expects, which is tried first.
    """
    for job in jobs:
        mine = [row for row in rows if is_of(row, job)]
        equal = [row for row in mine if not row["limited"] and row["micro_batch"] == job.micro_batch]
        if not equal:
            return Case(job, job.micro_batch, False)
        if limit is None:
            continue
        if size := _next_size(equal[0], mine, limit, planned.get(job, 0)) or _half(mine):
            return Case(job, size, True)
    return None


def _next_size(equal: dict, rows: list[dict], limit: float, planned: int) -> int | None:
    """The micro-batch to try next in the search for the largest; None if it was found, or cannot be.

    What was planned, if not 0, comes first. Then the peaks of forward and of backward are lines over the
    micro-batch: through what is held between steps at first, then through the two largest that were measured.
    The optimizer's step, whose peak may be higher, does not know of micro-batches. No try is more than
    `REACH` times as large as what was measured, except the planned one.
    """
    if "out of memory" not in equal.get("note", "out of memory"):
        return None
    tried = [row for row in rows if row["limited"]]
    fits = {row["micro_batch"]: row for row in tried if "peak_mb" in row}
    fails = [row["micro_batch"] for row in tried if "peak_mb" not in row]
    if not tried and planned and ("peak_mb" in equal or planned < equal["micro_batch"]):
        return planned
    largest, refused = max(fits, default=0), min(fails, default=math.inf)
    if len(tried) >= TRIES or largest + 1 >= refused:
        return None
    if "peak_mb" not in equal:
        # nothing is known but that it is too large, whatever the limit
        guess = min(refused, equal["micro_batch"]) // 2
        return max(guess, largest + 1) if guess else None
    measured = {equal["micro_batch"]: equal, **fits}
    guess = max(REACH * max(measured), planned)
    for phase in PHASES if PHASES[0] in equal else ("peak_mb",):
        points = {0: 1e6 * equal["between_steps_mb"]}
        points |= {size: 1e6 * row[phase] for size, row in measured.items()}
        (m0, y0), (m1, y1) = sorted(points.items())[-2:]
        slope = max((y1 - y0) / (m1 - m0), 1.0)
        if largest == m1 and y1 + slope > limit:
            return None
        guess = min(guess, m1 + int((limit - y1) // slope))
    return int(min(max(guess, largest + 1), refused - 1))


def _half(rows: list[dict]) -> int:
    """Half of the largest micro-batch within the limit, unless one near it was measured; 0 if there is none.
    It is often faster than the largest, where the allocator has no memory to spare."""
    fits = [row["micro_batch"] for row in rows if row["limited"] and "peak_mb" in row]
    half = max(fits, default=0) // 2
    near = (row["micro_batch"] for row in rows if half <= 2 * row["micro_batch"] <= 3 * half)
    return 0 if any(near) else half


def identity(case: Case) -> dict:
    """What tells the row of a case from others."""
    names = dict(zip(("model", "way", "system", "layers"), case.job.key, strict=True))
    return names | {"micro_batch": case.micro_batch, "limited": case.limited}
