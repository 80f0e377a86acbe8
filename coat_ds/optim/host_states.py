"""Optimizer states in pinned host memory, which pass through the GPU during a step.

All states of a rank lie in one allocation. A step cuts them into chunks. Each chunk is copied to the GPU,
stepped there by the kernel that steps resident states, and copied back. Copies in, steps and copies out run
on three CUDA streams, so that they overlap. Groups of elements are stepped independently of each other, so
the results have the same bits as those of resident states.

Parameters and gradients on the CPU, such as those of DeepSpeed's `offload_optimizer`, pass through the GPU
with their states. Without a GPU everything takes the same path with plain copies.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from coat_ds.log import log_once
from coat_ds.optim.host_memory import Pages, allocate
from coat_ds.optim.layouts import Layouts
from coat_ds.optim.moment import Moment
from coat_ds.optim.options import SECOND_FIRST, has_remainder
from coat_ds.optim.pieces import Operands, made_of
from coat_ds.optim.shards import laid_out_like, local

# Elements per chunk, and chunks that are on the GPU at once: one is copied in, one stepped, one copied out.
# On an H200 (benchmarks/results/host_states_h200.csv) the CPU launched a step of 1.6 billion parameters in 80
# ms, and the step took 147 ms. 2^24 elements in 4 slots took 176 ms, with 168 ms of launches. A
# fourth slot changed nothing.
CHUNK = 2**25
SLOTS = 3
ONE_QUEUE = (
    "CoatAdamW: offload: found CUDA_DEVICE_MAX_CONNECTIONS=1: copies of states hold up the kernels of "
    "backward. Unset the variable, unless tensor parallelism needs it."
)
# bytes; the kernel loads 16 bytes at once, and the copy engines are slower from other addresses
ALIGNMENT = 256
# elements: the ends of parts are whole groups, whose first elements are aligned in every tensor
UNIT = 256


class HostStates:
    """The host memory of one optimizer's states, and where the state of each parameter lies in it.

    resident: bytes of states that stay on the device.
    """

    def __init__(self, resident: float) -> None:
        self._resident = resident
        # bytes of the states on the device and in host memory, in this order
        self.decided = [0, 0]
        # whether the state of a parameter is in host memory
        self.offloaded: dict[torch.Tensor, bool] = {}
        self._pages: list[Pages] = []
        self._streams: dict[torch.device, list[torch.cuda.Stream]] = {}
        # bytes of the last pages that states take
        self._used = 0
        # pages, first byte and number of bytes of each state
        self._slices: dict[torch.Tensor, tuple[Pages, int, int]] = {}
        self._placed: dict[torch.Tensor, tuple] = {}

    def streams_on(self, device: torch.device) -> list[torch.cuda.Stream]:
        """The streams of copies to a GPU and back. torch has 32 streams for all callers: new ones in each
        step would meet the streams of FSDP2 and of NCCL."""
        if device not in self._streams:
            if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
                log_once(ONE_QUEUE)
            self._streams[device] = [torch.cuda.Stream(device) for _ in range(2)]
        return self._streams[device]

    def decide(self, sizes: dict[torch.Tensor, int]) -> None:
        """Decides, once, where states are. sizes: the bytes of the state of each parameter (`host_bytes`)."""
        for p, size in sizes.items():
            if p not in self.offloaded:
                # parameters on the CPU, with their states, are stepped by a GPU
                off_device = stepping_device(p.device) != p.device
                self.offloaded[p] = off_device or self.decided[0] + size > self._resident
                self.decided[self.offloaded[p]] += size

    def place(self, p: torch.Tensor, state: dict[str, Any]) -> None:
        """Moves the moments and the remainder in the state of `p` into the allocation, which is made first if
        it does not exist. Does nothing if they are there.

        Raises HostMemoryError, before it allocates, if there is too little host memory.
        """
        second, first = (local(state[name]) for name in SECOND_FIRST)
        remainder = local(state["remainder"]) if "remainder" in state else None
        found = (second.pieces, first.pieces, remainder)
        if p in self._placed and all(a is b for a, b in zip(self._placed[p], found, strict=True)):
            return
        held = [*second.stored(), *first.unpaired().stored(), *([] if remainder is None else [remainder])]
        pages, begin = self._slice(p, sum(map(aligned, held)))
        if any(pages.address <= t.data_ptr() < pages.address + len(pages) for t in held):
            # they may move within the slice
            held = list(map(torch.clone, held))
        moved = iter(held)

        def placed(_) -> torch.Tensor:
            nonlocal begin
            old = next(moved)
            new = pages.view(begin, old.numel(), old.dtype).view(old.shape)
            begin += aligned(old)
            return new.copy_(old)

        second = Moment(made_of(second.pieces, placed), second.shape)
        first = Moment(made_of(first.pieces, placed), first.shape).relative_to(second)
        state["exp_avg_sq"], state["exp_avg"] = laid_out_like(p, second), laid_out_like(p, first)
        if remainder is not None:
            remainder = placed(remainder)
            state["remainder"] = laid_out_like(p, remainder)
        self._placed[p] = (second.pieces, first.pieces, remainder)

    def _slice(self, p: torch.Tensor, size: int) -> tuple[Pages, int]:
        """Pages and first byte of `size` bytes for the state of `p`."""
        if p not in self._slices or self._slices[p][2] != size:
            if not self._pages or self._used + size > len(self._pages[-1]) - ALIGNMENT:
                room = size if self._pages else max(size, self.decided[1])
                # the rest keeps runs of bytes from going on in other pages
                self._pages.append(allocate(room + ALIGNMENT, stepping_device(p.device)))
                self._used = 0
            self._slices[p] = self._pages[-1], self._used, size
            self._used += size
        return self._slices[p][:2]

    def bytes_at(self, start: int, stop: int) -> torch.Tensor:
        """The bytes from address `start` to address `stop`, both in states that have been placed."""
        pages = next(x for x in self._pages if x.address <= start < x.address + len(x))
        return pages.view(start - pages.address, stop - start, torch.uint8)


def stepping_device(device: torch.device) -> torch.device:
    """The device that steps parameters on `device` whose states are in host memory."""
    if device.type == "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def host_bytes(p: torch.Tensor, group: dict[str, Any], layouts: Layouts) -> int:
    """The bytes of the state of `p` in the allocation."""
    shape, size = local(p).shape, 0
    for name in SECOND_FIRST:
        moment = Moment.zeros(shape, layouts.layout_of(p, group, name), "meta")
        size += sum(map(aligned, moment.stored()))
    return size + (
        aligned(torch.empty(shape, dtype=torch.int16, device="meta")) if has_remainder(p, group) else 0
    )


def aligned(x: torch.Tensor) -> int:
    """The bytes of `x` in the allocation."""
    return -(-x.nbytes // ALIGNMENT) * ALIGNMENT


def chunks_of(bucket: list[Operands]) -> Iterator[list[Operands]]:
    """The operands of a launch, cut and joined to chunks of at most `CHUNK` elements."""
    chunk: list[Operands] = []
    room = CHUNK
    for whole in bucket:
        begin, numel = 0, whole.param.numel()
        while begin < numel:
            end = min(numel, begin + room)
            chunk.append(whole.part(begin, end))
            room = (room - (end - begin)) // UNIT * UNIT
            if not room:
                yield chunk
                chunk, room = [], CHUNK
            begin = end
    if chunk:
        yield chunk


class Run(NamedTuple):
    """Consecutive bytes of host memory, from one address to another, and their place in a slot."""

    start: int
    stop: int
    begin: int
    """First byte in the slot."""

    @property
    def end(self) -> int:
        return self.begin + self.stop - self.start


def runs_of(states: list[torch.Tensor]) -> tuple[list[Run], list[int]]:
    """The bytes that hold `states`, as few runs as possible, and the first byte of each tensor in a slot."""
    runs: list[Run] = []
    places = []
    for t in states:
        if not t.numel():
            places.append(0)
            continue
        at = t.data_ptr()
        # between two whole tensors there is only padding; before a part there are bytes of an earlier chunk,
        # whose copy back may still run
        if runs and at % ALIGNMENT == 0 and 0 <= at - runs[-1].stop < ALIGNMENT:
            runs[-1] = runs[-1]._replace(stop=at + t.nbytes)
        else:
            # at the same distance from an aligned address as in host memory
            begin = -(-runs[-1].end // ALIGNMENT) * ALIGNMENT if runs else 0
            runs.append(Run(at, at + t.nbytes, begin + at % ALIGNMENT))
        places.append(runs[-1].begin + at - runs[-1].start)
    return runs, places


class SlotPlan(NamedTuple):
    """Where the tensors of a chunk are in a slot, and which bytes of host memory are copied."""

    chunk: list[Operands]
    places: list[tuple[torch.Tensor, int]]
    """The tensors in the slot, each with its first byte."""
    copies: list[tuple[int, torch.Tensor, bool]]
    """First byte in the slot, bytes of host memory, and whether they are copied back."""
    size: int


def plan_of(chunk: list[Operands], host: HostStates) -> SlotPlan:
    states = [t for x in chunk for t in x.states]
    runs, begins = runs_of(states)
    places = list(zip(states, begins, strict=True))
    copies = [(run.begin, host.bytes_at(run.start, run.stop), True) for run in runs]
    size = runs[-1].end
    for x in chunk:
        for t, is_written in ((x.param, True), (x.grad, False)) if x.param.is_cpu else ():
            begin = -(-size // ALIGNMENT) * ALIGNMENT
            size = begin + t.nbytes
            places.append((t, begin))
            copies.append((begin, t.reshape(-1).view(torch.uint8), is_written))
    return SlotPlan(chunk, places, copies, size)


class HostTransfer:
    """Streams states through one GPU in one step."""

    def __init__(self, host: HostStates, device: torch.device):
        self._host, self._device, self._is_cuda = host, device, device.type == "cuda"
        self._slots: list[torch.Tensor] = []
        # the old slots of this step, which copies may still read
        self._dropped: list[torch.Tensor] = []
        self._free: list[torch.cuda.Event | None] = [None] * SLOTS
        self._next = 0
        if self._is_cuda:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "CoatAdamW: offload: found a step with offload='cpu' captured in a CUDA graph, which "
                    "cannot wait for host memory. Run the step eagerly, or keep the states on the GPU."
                )
            self._in, self._out = host.streams_on(device)

    def chunks(self, bucket: list[Operands]) -> Iterator[list[Operands]]:
        """The operands of a launch in chunks, with their states on the GPU while the caller holds a chunk."""
        plans = [plan_of(chunk, self._host) for chunk in chunks_of(bucket)]
        self._make_slots(max(plan.size for plan in plans))
        for plan in plans:
            number, self._next = self._next, (self._next + 1) % SLOTS
            slot = self._slots[number]
            with self._copying_in(number):
                for begin, here, _ in plan.copies:
                    slot[begin : begin + here.numel()].copy_(here, non_blocking=True)
            placed = {
                id(t): slot[begin : begin + t.nbytes].view(t.dtype).view(t.shape) for t, begin in plan.places
            }
            yield [x.replaced(placed) for x in plan.chunk]
            with self._copying_out(number):
                for begin, here, is_written in plan.copies:
                    if is_written:
                        here.copy_(slot[begin : begin + here.numel()], non_blocking=True)

    def end(self) -> None:
        """Waits until all states are back: the CPU may read them at any time, and other streams may use the
        memory of the slots."""
        if self._is_cuda:
            self._out.synchronize()

    def _make_slots(self, size: int) -> None:
        if self._slots and self._slots[0].numel() >= size:
            return
        # chunks of several launches differ in padding
        size = -(-size // 2**22) * 2**22
        self._dropped += self._slots
        self._slots = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(SLOTS)]
        self._free = [None] * SLOTS
        if self._is_cuda:
            # the current stream may still use memory that the allocator has given to the slots
            self._in.wait_stream(torch.cuda.current_stream(self._device))

    @contextlib.contextmanager
    def _copying_in(self, number: int) -> Iterator[None]:
        if not self._is_cuda:
            yield
            return
        with torch.cuda.stream(self._in):
            if (free := self._free[number]) is not None:
                self._in.wait_event(free)
            yield
            arrived = self._in.record_event()
        torch.cuda.current_stream(self._device).wait_event(arrived)

    @contextlib.contextmanager
    def _copying_out(self, number: int) -> Iterator[None]:
        if not self._is_cuda:
            yield
            return
        self._out.wait_event(torch.cuda.current_stream(self._device).record_event())
        with torch.cuda.stream(self._out):
            yield
            self._free[number] = self._out.record_event()


class HostTransfers(dict[torch.device, HostTransfer]):
    """The `HostTransfer`s of one step, by `stepping_device`."""

    def __init__(self, host: HostStates):
        self.host = host

    def end(self) -> None:
        """Ends all of them (`HostTransfer.end`)."""
        for transfer in self.values():
            transfer.end()

    def __missing__(self, device: torch.device) -> HostTransfer:
        return self.setdefault(device, HostTransfer(self.host, device))
