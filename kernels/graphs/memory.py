"""The memory in which graphs lie: pools, buffers that they share, and copies of constants."""

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

# PyTorch allows one capture at a time in a process
_capture = threading.Lock()
# why no graph of this process is recorded or replayed any more
_distrusted: list[str] = []
OFF = 'To silence this, set "cuda_graphs": false in coat.activations.'


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage of reference cycles is collected inside."""
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
    """What is launched inside goes into `graph`, on `stream`, with its memory in `pool`.

    The end of another graph would make the capture fail (PyTorch #161037), and may be due as garbage.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with uncollected(), torch.cuda.stream(stream):
        # other threads, such as one that loads data, may go on meanwhile
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


class Pool:
    """Memory that graphs use in turn.

    What a forward saves for its backward belongs to it alone from then on. But it may lie where graphs that
    were recorded earlier have their temporaries: those must not be replayed in between.
    """

    def __init__(self, record_little: Callable[[], torch.cuda.CUDAGraph]):
        # a pool does not outlive the last graph in it
        self._anchor = record_little()
        self.handle = self._anchor.pool()
        # graphs recorded so far
        self.count = 0
        # numbers of the forwards that wait for their backwards
        self.in_flight: set[int] = set()

    def allows(self, number: int) -> bool:
        """Whether the graph of this number may be replayed now."""
        return max(self.in_flight, default=-1) < number


class Constant:
    """A copy of what callers make anew for each forward, shared by all graphs that read it."""

    def __init__(self, like: torch.Tensor):
        # rows may be padded: kernels see the same strides
        held = like.untyped_storage().nbytes() // like.element_size() - like.storage_offset()
        self.buffer = like.new_empty(held).as_strided(like.shape, like.stride())
        # forwards whose backward will read it
        self.readers = 0
        self._source: weakref.ref[torch.Tensor] | None = None
        self._version = 0

    def take(self, x: torch.Tensor) -> bool:
        """Whether it holds `x` now. Not while another one is still to be read."""
        if self._source is None or self._source() is not x or self._version != x._version:
            if self.readers:
                return False
            self.buffer.copy_(x)
            self._source, self._version = weakref.ref(x), x._version
        return True


class Memory:
    """What all graphs of one stream share that one thread calls, or all of one shape there. Training and
    evaluation have memories of their own."""

    def __init__(self, device: torch.device, thread: int):
        self._device, self._thread = device, thread
        self._pools: list[Pool] = []
        self._buffers: dict[Hashable, torch.Tensor] = {}
        self._constants: dict[Hashable, Constant] = {}
        self._announced: set[torch.Size] = set()
        # whose graphs lie here
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        # all of them, also those that only an output's graph of autograd still holds
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._refusal: str | None = None

    @property
    def refusal(self) -> str | None:
        """Why nothing is recorded or replayed any more, None while graphs are used."""
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
        """The pool for micro-batch `index` of those that are in flight at a time."""
        while len(self._pools) <= index:
            self._pools.append(Pool(self._record_little))
        return self._pools[index]

    def buffer(self, use: str, like: torch.Tensor) -> torch.Tensor:
        """A buffer for a tensor like `like`, shared by all graphs: each reads it before the next runs."""
        key = use, like.shape, like.dtype
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(like, memory_format=torch.contiguous_format)
        return self._buffers[key]

    def constant(self, index: int, like: torch.Tensor) -> Constant:
        """The copy of the constant with this index among those of its function."""
        key = index, like.shape, like.stride(), like.dtype
        if key not in self._constants:
            self._constants[key] = Constant(like)
        return self._constants[key]

    def give_way(self) -> None:
        """Has everybody drop the graphs that lie here for those of another shape, so that their memory is
        freed. Those that wait for their backwards keep theirs until then."""
        for graphs in list(self.users):
            graphs.give_way()

    def end(self) -> None:
        """Has everybody drop the graphs that lie here, and ends those that wait for their backwards, too."""
        for graphs in list(self.users):
            graphs.leave()
        for graph in list(self.graphs):
            graph.end()

    def record(self, make: Callable[[], Any]) -> Any:
        """make(), or None if it fails; then nothing is recorded any more. None as well while another graph is
        recorded: by another thread, or by this one, whose backward may run others' nodes meanwhile."""
        if not _capture.acquire(blocking=False):
            return None
        try:
            # by now eager passes have made cuDNN load all that it uses
            if mixed := _mixed_libraries():
                distrust(f"layers run without CUDA graphs, since replays may be wrong: {mixed}")
                return None
            return make()
        except RuntimeError as error:
            self._refusal = str(error)
            # where recording fails, torch's random numbers still belong to the graph, until one is finished
            self._record_little()
            logger.warning("layers could not be recorded as CUDA graphs and run without: %s. %s", error, OFF)
            return None
        finally:
            _capture.release()

    def announce(self, shape: torch.Size, run: str = "run") -> None:
        """Logs once that layers with inputs of this shape are replayed, if they are."""
        if self.refusal is None and shape not in self._announced:
            self._announced.add(shape)
            logger.info("layers with inputs of shape %s %s as CUDA graphs from now on", list(shape), run)


@functools.cache
def _mixed_libraries() -> str:
    """The libraries that this process has in two versions, "" if there are none."""
    return "; ".join(libraries.conflicts())


def distrust(reason: str) -> None:
    """Ends the use of CUDA graphs in this process, with one warning."""
    if not _distrusted:
        logger.warning("%s. %s", reason, OFF)
    _distrusted.append(reason)


def all_record(agree: Callable[[bool], bool], recorded: bool) -> bool:
    """Whether every rank of a function's group has recorded a graph. If not, none of them uses graphs from
    now on: a rank that skipped a comparison would leave the others waiting in its collectives."""
    if agree(recorded):
        return True
    if agree is not bool:
        distrust("layers run without CUDA graphs, since a rank of their group could not record one")
    return False


def distrust_replay(what: str, distance: float) -> None:
    """`distrust`, since a replay of `what` was that far from the eager pass, relative to its norm."""
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
    """Graphs are recorded on a stream of their own, one for all of a thread: cuBLAS keeps a workspace for
    each stream, also when graphs that were recorded there are gone."""
    return torch.cuda.Stream(device)


# by device, thread, stream, shape, if it is of one, and whether backwards follow; alive as long as a module
# uses them
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
    """Ends all graphs of this process. Functions that are called again are recorded anew.

    What comes before the end of a process group: NCCL waits there for every CUDA graph that holds one of the
    group's collectives. Between a forward and its backward, which then could not be replayed, nobody may call
    it.
    """
    for memory in list(_memories.values()):
        memory.end()
