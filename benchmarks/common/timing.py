"""One way to time: device events, medians, and peak memory with each time."""

import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from benchmarks.common.environment import device


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


def copy_bandwidth(size: int) -> float:
    """Bytes that a copy of `size` bytes on the device reads and writes in a millisecond."""
    source = torch.empty(size, dtype=torch.uint8, device=device()).random_()
    target = torch.empty_like(source)
    return 2 * size / measure(lambda: target.copy_(source)).median


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
