"""Steps of states in host memory."""

import time
from collections.abc import Callable

import torch

import coat_ds
from benchmarks.adamw import OPTIONS, llama_sizes
from benchmarks.common.environment import device
from benchmarks.common.harness import Table, benchmark
from benchmarks.common.timing import measure, synchronize
from coat_ds import CoatAdamW
from coat_ds.optim import host_states as streamed
from coat_ds.optim.host_memory import allocate

# slots, and elements of a chunk
CASES = [(3, 2**24), (4, 2**24), (6, 2**24), (4, 2**23), (3, 2**25), (4, 2**25)]


def link_ms(size: int, chunk: int = 2**26) -> float:
    """Milliseconds in which `size` bytes are copied to the GPU, and the same number back, at once.

    The host memory is allocated like the memory of the states, and `chunk` bytes are copied at once. Copies
    of memory that torch had pinned took 146 ms in one session and 239 ms in another, for the same bytes.
    """
    if not torch.cuda.is_available():
        return float("nan")
    part = min(size, 2**31) // chunk * chunk
    pages = [allocate(part, device()) for _ in range(2)]
    here = [x.view(0, part, torch.uint8).fill_(1) for x in pages]
    there = [torch.empty(chunk, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both() -> None:
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for begin in range(0, part, chunk):
            to_gpu, back = (x[begin : begin + chunk] for x in here)
            with torch.cuda.stream(streams[0]):
                there[0].copy_(to_gpu, non_blocking=True)
            with torch.cuda.stream(streams[1]):
                back.copy_(there[1], non_blocking=True)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    return measure(both, warmup=3, repeats=10).median * size / part


def cpu_ms(step: Callable[[], None]) -> float:
    """Milliseconds of the CPU in a step, without those in which it waits for the end of the copies."""
    end, waited = streamed.HostTransfer.end, []

    def timed(transfer: streamed.HostTransfer) -> None:
        start = time.perf_counter()
        end(transfer)
        waited.append(time.perf_counter() - start)

    streamed.HostTransfer.end = timed
    try:
        synchronize()
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start - sum(waited))
    finally:
        streamed.HostTransfer.end = end


@benchmark
def host_states(arguments, table: Table) -> None:
    """A step of BF16 parameters whose states stream from host memory, by slots and elements of a chunk.

    `to_link`: over `link_ms`, in which the same bytes are copied in both directions at once. `cpu_ms`: until
    the CPU has launched the step. `init_s`: seconds in which the states are created, once.
    """
    shapes = llama_sizes(8, 4096, 11008)
    params = [
        torch.nn.Parameter(0.02 * torch.randn(shape, device=device(), dtype=torch.bfloat16))
        for shape in (shapes[1:5] if arguments.quick else shapes[1:-2])
    ]
    for p in params:
        p.grad = 1e-3 * torch.randn_like(p)
    numel = sum(p.numel() for p in params)
    optimizer = CoatAdamW(params, **OPTIONS, offload="cpu")
    synchronize()
    start = time.perf_counter()
    optimizer.init_states()
    row = {"init_s": time.perf_counter() - start}
    size = coat_ds.state_bytes(optimizer)["bytes"]
    link = link_ms(size)
    usual = streamed.SLOTS, streamed.CHUNK
    try:
        for slots, chunk in CASES:
            streamed.SLOTS, streamed.CHUNK = slots, chunk
            timing = measure(optimizer.step, warmup=3, repeats=5)
            table.add(
                parameters=numel,
                chunk=chunk,
                slots=slots,
                ms=timing.median,
                gb_per_s_each_way=size / timing.median / 1e6,
                link_ms=link,
                to_link=timing.median / link,
                cpu_ms=cpu_ms(optimizer.step),
                peak_mib=timing.peak / 2**20,
                **row,
            )
    finally:
        streamed.SLOTS, streamed.CHUNK = usual
