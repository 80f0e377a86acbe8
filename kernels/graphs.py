"""Layers replayed as CUDA graphs, one of the forward and one of the backward, recorded where a model calls
them.

A replay costs the CPU a few launches, however many kernels there are. It costs the GPU copies: inputs and
results pass through buffers whose addresses the graphs know. What a forward saves for its backward stays
allocated, as much as a step takes at its peak anyway. The rest of its memory is shared with other graphs.

A graph reads and writes fixed addresses. It is replayed only while all of them are those that were recorded,
and while the replay overwrites nothing that still waits for a backward. Otherwise the function runs eagerly,
or is recorded again. Constants that a model makes anew for each forward, such as tables of angles and masks,
are copied to fixed addresses once for all layers that read them.
"""

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch.autograd.graph import get_gradient_edge

from coat_kernels.autograd import once_differentiable

logger = logging.getLogger(__name__)

# Tokens times parameters of a layer whose forward and backward take an H200 the 3.5 ms that its CPU needs for
# the launches. Larger layers gain nothing from graphs, which hold what is saved for backward.
GRAPHED_WORK = 4e11
# eager calls before a graph is recorded: they and their backwards compile kernels and find scales
WARM_UP = 2
# at most so many where graphs are dropped as shapes change
MOST_WARM_UP = 64
# shapes of one function; each holds what its backward needs
MOST_SHAPES = 2
# after so many changes of addresses, as by offloading of states, graphs of a function are given up
MOST_MOVES = 3


class _Pool:
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


class _Constant:
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


class _Memory:
    """What all graphs of one stream share that one thread calls, or all of one shape there."""

    def __init__(self, device: torch.device, thread: int):
        self._device, self._thread = device, thread
        self._pools: list[_Pool] = []
        self._buffers: dict[Hashable, torch.Tensor] = {}
        self._constants: dict[Hashable, _Constant] = {}
        self._announced: set[torch.Size] = set()
        # whose graphs lie here
        self.users: weakref.WeakSet[Graphs] = weakref.WeakSet()
        # why nothing is recorded any more
        self.refusal: str | None = None

    @property
    def stream(self) -> torch.cuda.Stream:
        return _stream(self._device, self._thread)

    @functools.cached_property
    def _number(self) -> torch.Tensor:
        return torch.zeros(1, device=self._device)

    def _record_little(self) -> torch.cuda.CUDAGraph:
        graph, number = torch.cuda.CUDAGraph(), self._number
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            graph.capture_begin(capture_error_mode="thread_local")
            number.add_(1)
            graph.capture_end()
        return graph

    def pool(self, index: int) -> _Pool:
        """The pool for micro-batch `index` of those that are in flight at a time."""
        while len(self._pools) <= index:
            self._pools.append(_Pool(self._record_little))
        return self._pools[index]

    def buffer(self, use: str, like: torch.Tensor) -> torch.Tensor:
        """A buffer for a tensor like `like`, shared by all graphs: each reads it before the next runs."""
        key = use, like.shape, like.dtype
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(like, memory_format=torch.contiguous_format)
        return self._buffers[key]

    def constant(self, index: int, like: torch.Tensor) -> _Constant:
        """The copy of the constant with this index among those of its function."""
        key = index, like.shape, like.stride(), like.dtype
        if key not in self._constants:
            self._constants[key] = _Constant(like)
        return self._constants[key]

    def abandon(self) -> None:
        """Has everybody drop the graphs that lie here, so that their memory is freed. Those that wait for
        their backwards keep theirs until then."""
        for graphs in list(self.users):
            graphs.leave()

    def record(self, make: Callable[[], "_Recording | _Graph"]):
        """make(), or None if it fails; then nothing is recorded any more."""
        try:
            return make()
        except RuntimeError as error:
            self.refusal = str(error)
            # where recording fails, torch's random numbers still belong to the graph, until one is finished
            self._record_little()
            logger.warning(
                "layers could not be recorded as CUDA graphs and run without: %s. To silence this, set "
                '"cuda_graphs": false in coat.activations.',
                error,
            )
            return None

    def announce(self, shape: torch.Size) -> None:
        """Logs once that layers with inputs of this shape are replayed, if they are."""
        if self.refusal is None and shape not in self._announced:
            self._announced.add(shape)
            logger.info("layers with inputs of shape %s run as CUDA graphs from now on", list(shape))


@functools.cache
def _stream(device: torch.device, thread: int) -> torch.cuda.Stream:
    """Graphs are recorded on a stream of their own, one for all of a thread: cuBLAS keeps a workspace for
    each stream, also when graphs that were recorded there are gone."""
    return torch.cuda.Stream(device)


# by device, thread, stream and shape, if it is of one, alive as long as a module uses them
_memories: weakref.WeakValueDictionary[tuple, _Memory] = weakref.WeakValueDictionary()


def _memory(device: torch.device, thread: int, stream: int, shape: torch.Size | None) -> _Memory:
    key = device, thread, stream, shape
    memory = _memories.get(key)
    if memory is None:
        memory = _memories[key] = _Memory(device, thread)
    return memory


def _is_watched() -> bool:
    """Whether saved tensors are hooked (checkpointing, offloading), or this forward is recomputed inside a
    backward, or a larger graph is being recorded, or torch looks for NaN behind each operation."""
    return (
        torch._C._current_graph_task_id() != -1
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or torch.cuda.is_current_stream_capturing()
        or torch.is_anomaly_enabled()
    )


def _overlaps(x: torch.Tensor) -> bool:
    """Whether elements of `x` share memory, as of a tensor that was expanded."""
    return any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True))


def _addresses(tensors: Sequence[torch.Tensor | None]) -> tuple:
    return tuple(None if t is None else (t.data_ptr(), t.requires_grad) for t in tensors)


class _Borrowed:
    """Memory of a tensor, for `torch.as_tensor`, which does not keep the tensor alive."""

    def __init__(self, x: torch.Tensor):
        self.__cuda_array_interface__ = {
            "shape": (x.numel() * x.element_size(),),
            "typestr": "|u1",
            "data": (x.data_ptr(), False),
            "version": 2,
        }


def _borrow(x: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor on the memory of `x`, which may be given to the next graph. An expanded tensor of zeros, which
    takes no memory, is built anew."""
    if x is None:
        return None
    if x.numel() > 1 and not any(x.stride()):
        return torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)
    if not x.is_contiguous():
        raise RuntimeError(f"expected results that are contiguous, found strides {x.stride()} of {x.shape}")
    return torch.as_tensor(_Borrowed(x), device=x.device).view(x.dtype).view(x.shape)


def _copied(x: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of what a replay left in `x`, before the next replay writes there."""
    return x if x is None or not any(x.stride()) else x.clone()


class _Graph:
    """The kernels that `body()` launches. `results` is what it returned, which each replay writes again."""

    def __init__(self, memory: _Memory, pool: _Pool, body: Callable[[], Sequence[torch.Tensor | None]]):
        self._graph = torch.cuda.CUDAGraph()
        # while a graph is recorded, unused memory cannot be freed
        torch.cuda.empty_cache()
        memory.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(memory.stream):
            # other threads, such as one that loads data, may go on meanwhile
            self._graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            try:
                made = body()
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(memory.stream)
        self.results = tuple(map(_borrow, made))
        self.number = pool.count
        pool.count += 1

    def replay(self) -> None:
        self._graph.replay()


class _InFlight:
    """While it lives, a forward waits for its backward."""

    def __init__(self, pool: _Pool, number: int, constants: Sequence[_Constant]):
        self._pool, self._number, self._constants = pool, number, constants
        pool.in_flight.add(number)
        for constant in constants:
            constant.readers += 1

    def __del__(self):
        self._pool.in_flight.discard(self._number)
        for constant in self._constants:
            constant.readers -= 1


@contextlib.contextmanager
def _at_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> Iterator[None]:
    """Lets autograd read `tensors` as of these versions, where their values are known to be right."""
    now, set_versions = tuple(t._version for t in tensors), torch._C._autograd._unsafe_set_version_counter
    set_versions(tuple(tensors), tuple(versions))
    try:
        yield
    finally:
        set_versions(tuple(tensors), now)


class _Recording:
    """Both graphs of a function for inputs at certain addresses."""

    def __init__(
        self,
        memory: _Memory,
        pool: _Pool,
        function: Callable,
        x: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
        constants: Sequence[_Constant],
    ):
        self._memory, self._pool, self._constants = memory, pool, constants
        self._x = memory.buffer("input", x)
        # leaves of a graph of their own, on the same memory
        leaves = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors]
        self._inputs = [self._x.detach().requires_grad_(), *leaves]
        buffers = [constant.buffer for constant in constants]
        self._read = [t for t in (*self._inputs, *buffers) if t is not None]
        self._versions = [t._version for t in self._read]
        self._forward = _Graph(memory, pool, functools.partial(self._run, function))
        self._backward: _Graph | None = None
        # addresses that it knows
        self._where: tuple = ()
        self._grad: torch.Tensor | None = None

    def _run(self, function: Callable) -> tuple[torch.Tensor]:
        x, *leaves = self._inputs
        y = function(x, *(constant.buffer for constant in self._constants), *leaves)
        # holds on to what was saved for backward, not to y
        self._edge = get_gradient_edge(y)
        return (y.detach(),)

    def _differentiate(self) -> list[torch.Tensor | None]:
        trained = [t for t in self._inputs if t is not None and t.requires_grad]
        # kept, so that no other graph takes the memory of what was saved
        grads = torch.autograd.grad([self._edge], trained, [self._grad], retain_graph=True, allow_unused=True)
        found = iter(grads)
        return [next(found) if t is not None and t.requires_grad else None for t in self._inputs]

    @property
    def is_ready(self) -> bool:
        """Whether the forward may be replayed: nothing waits for a backward that it would overwrite."""
        return self._pool.allows(self._forward.number)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, _InFlight]:
        """The function's output, and what to hold until its backward has run."""
        in_flight = _InFlight(self._pool, self._forward.number, self._constants)
        self._x.copy_(x)
        self._forward.replay()
        return _copied(self._forward.results[0]), in_flight

    def backward(self, grad: torch.Tensor, where: tuple) -> list[torch.Tensor | None]:
        """The gradients of x and the tensors, whose addresses are `where` by now: FSDP frees weights between
        forward and backward, and gathers them anew."""
        if self._grad is None:
            self._grad = self._memory.buffer("gradient", grad)
        self._grad.copy_(grad)
        # steps have changed what it reads since the forward was recorded, but not since this forward
        at_versions = functools.partial(_at_versions, self._read, self._versions)
        if self._backward is None and self._memory.refusal is None:
            with at_versions():
                self._backward = self._memory.record(
                    lambda: _Graph(self._memory, self._pool, self._differentiate)
                )
            self._where = where
            self._memory.announce(grad.shape)
        if self._backward is None or self._where != where or not self._pool.allows(self._backward.number):
            with at_versions():
                return self._differentiate()
        self._backward.replay()
        return [_copied(g) for g in self._backward.results]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, recording, x, *tensors):
        y, ctx.in_flight = recording.forward(x)
        ctx.recording = recording
        # a replay reads them again; torch raises if one was changed in between
        ctx.save_for_backward(*tensors)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        # raises where one was changed, or where they were freed by a backward before
        tensors = ctx.saved_tensors
        grads = ctx.recording.backward(grad, _addresses(tensors))
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.in_flight = None
        return None, *grads


class _Place:
    """The calls of a function with inputs of one shape, and the graphs recorded of them."""

    def __init__(self, where: Hashable):
        # the addresses that graphs know
        self.where = where
        # eager ones whose backward has begun
        self.calls = 0
        self.recordings: list[_Recording] = []

    def count(self, grad: torch.Tensor) -> None:
        """A hook of an eager call's output. A graph could not compile the kernels of the backward, nor take
        what libraries want at first."""
        self.calls += 1


class Graphs:
    """The graphs of one function of a module. Copies of the module, and what is pickled, start anew.

    one_shape: for inputs whose shape may change at any time. Graphs of one shape are held at a time. Where
        another shape comes, those of all layers are dropped before it runs, as it may need the memory, and
        twice as many calls of one shape must follow each other until there are graphs again.
    """

    def __init__(self, one_shape: bool = False):
        self._one_shape = one_shape
        self._places: dict[Hashable, _Place] = {}
        # kept alive between calls, with what it is for
        self._memory: _Memory | None = None
        self._memory_key: tuple | None = None
        self._moves = 0
        self._warm_up = WARM_UP

    def __reduce__(self):
        return type(self), (self._one_shape,)

    def __deepcopy__(self, memo):
        return type(self)(self._one_shape)

    @property
    def count(self) -> int:
        """How many forwards have been recorded, and can be replayed now."""
        return sum(len(place.recordings) for place in self._places.values())

    def clear(self) -> None:
        """Drops what was recorded, with its memory. No forward may wait for its backward."""
        self._places.clear()
        self._moves = 0

    def leave(self) -> None:
        """Drops what was recorded, with its share of the memory that holds it."""
        if self.count:
            self._warm_up = min(2 * self._warm_up, MOST_WARM_UP)
        self.clear()
        self._memory = None

    def call(
        self,
        function: Callable[..., torch.Tensor],
        x: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
        uses: Callable[[], tuple[Hashable, ...]] = tuple,
        under_way: int = 1,
        constants: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """function(x, *constants, *tensors), by a graph where that is possible.

        Args:
            function: launches the same kernels for the same sizes, whatever the values, draws no random
                numbers, and keeps no reference to x for its backward.
            x: on a GPU. Without a gradient the function runs as it is written.
            tensors: parameters, what shares their memory, and constants; None is handed on.
            uses: gives what else the function depends on: options, addresses of other memory that it or its
                backward uses, and objects that own some. Not asked where no graph is to be had.
            under_way: how many forwards of one shape may wait for their backwards at a time.
            constants: without gradients, of memory that may be another one in each forward. The same tensor
                object holds the same values in all layers.

        Returns what the function does, in memory of its own.
        """
        run_eagerly = functools.partial(function, x, *constants, *tensors)
        if not (x.requires_grad and torch.is_grad_enabled()) or _is_watched():
            return run_eagerly()
        memory = self._memory_of(x)
        if memory.refusal is not None or any(map(_overlaps, constants)):
            return run_eagerly()
        copies = tuple(memory.constant(i, constant) for i, constant in enumerate(constants))
        # a model may leave out its mask where all tokens are seen
        place = self._place((x.shape, x.dtype, memory, copies), _addresses(tensors) + uses())
        if place is None:
            return run_eagerly()
        if place.calls < self._warm_up:
            y = run_eagerly()
            # who writes into a view in place takes its hooks out of the graph
            whole = y if y._base is None or not y._base.requires_grad else y._base
            whole.register_hook(place.count)
            return y
        recording = next((r for r in place.recordings if r.is_ready), None)
        if recording is None and len(place.recordings) == under_way:
            return run_eagerly()
        for copy, constant in zip(copies, constants, strict=True):
            if not copy.take(constant):
                return run_eagerly()
        if recording is None:
            pool = memory.pool(len(place.recordings))
            recording = memory.record(lambda: _Recording(memory, pool, function, x, tensors, copies))
            if recording is None:
                return run_eagerly()
            place.recordings.append(recording)
        return _Replay.apply(recording, x, *tensors)

    def _memory_of(self, x: torch.Tensor) -> _Memory:
        """Where graphs for inputs like `x` lie."""
        stream = torch.cuda.current_stream(x.device).cuda_stream
        # another thread would write into buffers before a replay has read them
        key = x.device, threading.get_ident(), stream, x.shape if self._one_shape else None
        if self._memory is None or self._memory_key != key:
            if self._memory is not None and self._one_shape:
                self._memory.abandon()
            self._memory, self._memory_key = _memory(*key), key
            self._memory.users.add(self)
        return self._memory

    def _place(self, key: Hashable, where: Hashable) -> _Place | None:
        """The place of calls with `key`; None if there are too many others, or if addresses change all the
        time."""
        place = self._places.get(key)
        if place is None:
            if len(self._places) == MOST_SHAPES:
                return None
            place = self._places[key] = _Place(where)
        elif place.where != where:
            self._moves += 1
            place = self._places[key] = _Place(where)
        return place if self._moves <= MOST_MOVES else None
