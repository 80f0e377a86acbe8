"""The memory of graphs: pools, shared buffers, and copies of constants."""

import contextlib
import functools
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from coat_kernels import libraries

logger = logging.getLogger(__name__)

# PyTorch allows one capture at a time per process
_capture = threading.Lock()
# the reasons why this process no longer records or replays graphs
_distrusted: list[str] = []
OFF = 'To silence this, set "cuda_graphs": false in coat.activations.'


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disables garbage collection of reference cycles inside the context."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def captured(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: tuple[int, int] | None = None
) -> Iterator[None]:
    """Kernels launched inside go into `graph`, on `stream`, with their memory in `pool`.

    If another graph ended meanwhile, for example as garbage, the capture would fail (PyTorch #161037).
    """
    stream.wait_stream(torch.cuda.current_stream())
    with uncollected(), torch.cuda.stream(stream):
        # other threads, such as a data loader's, may continue meanwhile
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


class Pool:
    """Memory that graphs use in turn.

    The tensors that a forward saves for its backward belong to the forward alone until then. They may overlap
    with temporaries of graphs that were recorded earlier; those graphs must not be replayed in between.
    """

    def __init__(self, record_little: Callable[[], torch.cuda.CUDAGraph]):
        # a pool ends with its last graph
        self._anchor = record_little()
        self.handle = self._anchor.pool()
        # number of graphs recorded so far
        self.count = 0
        # numbers of the forwards that wait for their backwards
        self.in_flight: set[int] = set()

    def allows(self, number: int) -> bool:
        """Whether the graph with this number may be replayed now."""
        return max(self.in_flight, default=-1) < number


class Constant:
    """A copy of a tensor that callers recreate in each forward, shared by all graphs that read it."""

    def __init__(self, like: torch.Tensor):
        # rows may be padded, and kernels must see the same strides
        held = like.untyped_storage().nbytes() // like.element_size() - like.storage_offset()
        self.buffer = like.new_empty(held).as_strided(like.shape, like.stride())
        # number of forwards whose backward will read it
        self.readers = 0
        self._source: weakref.ref[torch.Tensor] | None = None
        self._version = 0

    def update(self, x: torch.Tensor) -> bool:
        """Whether the buffer holds `x` now. It copies `x`, unless a backward must still read the former
        values."""
        if self._source is None or self._source() is not x or self._version != x._version:
            if self.readers:
                return False
            self.buffer.copy_(x)
            self._source, self._version = weakref.ref(x), x._version
        return True


class Memory:
    """The memory that all graphs of one stream and one thread share; with `one_shape`, only those of one
    shape. Training and evaluation have separate memories."""

    def __init__(self, device: torch.device, thread: int):
        self._device, self._thread = device, thread
        self._pools: list[Pool] = []
        self._buffers: dict[Hashable, torch.Tensor] = {}
        self._constants: dict[Hashable, Constant] = {}
        self._announced: set[torch.Size] = set()
        # objects whose graphs lie here
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        # all graphs, including those that only the autograd graph of an output still holds
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._refusal: str | None = None

    @property
    def refusal(self) -> str | None:
        """Why nothing is recorded or replayed any more; None while graphs are used."""
        return _distrusted[0] if _distrusted else self._refusal

    @property
    def stream(self) -> torch.cuda.Stream:
        return _stream(self._device, self._thread)

    @functools.cached_property
    def _number(self) -> torch.Tensor:
        return torch.zeros(1, device=self._device)

    def _record_little(self) -> torch.cuda.CUDAGraph:
        graph, number = torch.cuda.CUDAGraph(), self._number
        with captured(graph, self.stream):
            number.add_(1)
        return graph

    def pool(self, index: int) -> Pool:
        """The pool for micro-batch `index` of the micro-batches in flight."""
        while len(self._pools) <= index:
            self._pools.append(Pool(self._record_little))
        return self._pools[index]

    def buffer(self, use: str, like: torch.Tensor) -> torch.Tensor:
        """A buffer for a tensor like `like`, shared by all graphs: each graph reads it before the next one
        runs."""
        key = use, like.shape, like.dtype
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(like, memory_format=torch.contiguous_format)
        return self._buffers[key]

    def constant(self, index: int, like: torch.Tensor) -> Constant:
        """The copy of the constant with this index in its function's arguments."""
        key = index, like.shape, like.stride(), like.dtype
        if key not in self._constants:
            self._constants[key] = Constant(like)
        return self._constants[key]

    def make_room(self) -> None:
        """Drops all graphs here, so that graphs of another shape can use the memory. Graphs that wait for
        their backwards keep their memory until then."""
        for graphs in list(self.users):
            graphs.make_room()

    def end(self) -> None:
        """Drops all graphs here, including those that wait for their backwards."""
        for graphs in list(self.users):
            graphs.drop()
        for graph in list(self.graphs):
            graph.end()

    def record(self, make: Callable[[], Any]) -> Any:
        """Returns make(), or None if it fails; then nothing is recorded any more. Also returns None while
        another graph is recorded: by another thread, or by this one, if its backward runs nodes of other
        functions."""
        if not _capture.acquire(blocking=False):
            return None
        try:
            # eager passes have run before, so cuDNN has loaded all libraries that it uses
            if mixed := _mixed_libraries():
                distrust(f"layers run without CUDA graphs, since replays may be wrong: {mixed}")
                return None
            return make()
        except RuntimeError as error:
            self._refusal = str(error)
            # if recording fails, torch's random numbers belong to the graph until another one is finished
            self._record_little()
            logger.warning("layers could not be recorded as CUDA graphs and run without: %s. %s", error, OFF)
            return None
        finally:
            _capture.release()

    def announce(self, shape: torch.Size, run: str = "run") -> None:
        """Logs once that layers with inputs of this shape run as CUDA graphs, if they do."""
        if self.refusal is None and shape not in self._announced:
            self._announced.add(shape)
            logger.info("layers with inputs of shape %s %s as CUDA graphs from now on", list(shape), run)


@functools.cache
def _mixed_libraries() -> str:
    """The libraries that this process has in two versions; "" if there are none."""
    return "; ".join(libraries.conflicts())


def distrust(reason: str) -> None:
    """Ends the use of CUDA graphs in this process, with one warning."""
    if not _distrusted:
        logger.warning("%s. %s", reason, OFF)
    _distrusted.append(reason)


def all_record(agree: Callable[[bool], bool], recorded: bool) -> bool:
    """Whether every rank of a function's group has recorded a graph. If not, no rank uses graphs from now on:
    a rank that skipped a comparison would let the others wait in its collectives."""
    if agree(recorded):
        return True
    if agree is not bool:
        distrust("layers run without CUDA graphs, since a rank of their group could not record one")
    return False


def distrust_replay(what: str, distance: float) -> None:
    """`distrust`, because a replay of `what` differed from the eager pass by `distance`, relative to the
    norm."""
    files = libraries.mapped()
    versions = {
        name: ", ".join(sorted({libraries.version_of(p) for p in paths})) for name, paths in files.items()
    }
    found = "; ".join(f"{name} {version}" for name, version in versions.items()) or "none found"
    distrust(
        f"a CUDA graph of a layer's {what} gave other results than the eager pass (off by {distance:.2g} of "
        f"their norm), so layers run without graphs from now on. CUDA libraries in this process: {found}"
    )


@functools.cache
def _stream(device: torch.device, thread: int) -> torch.cuda.Stream:
    """The stream on which a thread's graphs are recorded, one per thread: cuBLAS keeps a workspace for each
    stream, even after the graphs recorded there have ended."""
    return torch.cuda.Stream(device)


# Key: device, thread, stream, shape (None unless `one_shape`), and whether backwards follow. An entry lives
# as long as a module uses it.
_memories: weakref.WeakValueDictionary[tuple, Memory] = weakref.WeakValueDictionary()


def memory_of(
    device: torch.device, thread: int, stream: int, shape: torch.Size | None, trains: bool = True
) -> Memory:
    key = device, thread, stream, shape, trains
    memory = _memories.get(key)
    if memory is None:
        memory = _memories[key] = Memory(device, thread)
    return memory


def end_graphs() -> None:
    """Ends all graphs of this process. Functions that are called later are recorded again.

    Call it before a process group ends: ending it waits for every CUDA graph that holds one of the group's
    NCCL collectives. Never call it between a forward and its backward, which could then not be replayed.
    """
    for memory in list(_memories.values()):
        memory.end()
