"""Layers replayed as CUDA graphs, one of the forward and one of the backward, recorded where a model calls
them.

A replay costs the CPU a few launches, however many kernels there are. It costs the GPU copies: inputs and
results pass through buffers whose addresses the graphs know. What a forward saves for its backward stays
allocated, as much as a step takes at its peak anyway. The rest of its memory is shared with other graphs.

A graph reads and writes fixed addresses. It is replayed only while all of them are those that were recorded,
and while the replay overwrites nothing that still waits for a backward. Otherwise the function runs eagerly,
or is recorded again.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Hashable, Sequence

import torch
from torch.autograd.graph import get_gradient_edge

from coat_kernels.autograd import once_differentiable

logger = logging.getLogger(__name__)

# eager calls before a graph is recorded: they compile kernels and find scales
WARM_UP = 2
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


class _Memory:
    """What all graphs of one stream share."""

    def __init__(self, device: torch.device):
        # graphs are recorded on a stream of their own
        self.stream = torch.cuda.Stream(device)
        self._number = torch.zeros(1, device=device)
        self._pools: list[_Pool] = []
        self._buffers: dict[Hashable, torch.Tensor] = {}
        self._announced: set[torch.Size] = set()
        # why nothing is recorded any more
        self.refusal: str | None = None

    def _record_little(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            graph.capture_begin(capture_error_mode="thread_local")
            self._number.add_(1)
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


# by device and stream, alive as long as a module uses them
_memories: weakref.WeakValueDictionary[tuple, _Memory] = weakref.WeakValueDictionary()


def _memory(device: torch.device, stream: int) -> _Memory:
    memory = _memories.get((device, stream))
    if memory is None:
        memory = _memories[device, stream] = _Memory(device)
    return memory


def _is_watched() -> bool:
    """Whether saved tensors are hooked (checkpointing, offloading), or this forward is recomputed inside a
    backward, or a larger graph is being recorded."""
    return (
        torch._C._current_graph_task_id() != -1
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or torch.cuda.is_current_stream_capturing()
    )


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

    def __init__(self, pool: _Pool, number: int):
        self._pool, self._number = pool, number
        pool.in_flight.add(number)

    def __del__(self):
        self._pool.in_flight.discard(self._number)


class _Recording:
    """Both graphs of a function for inputs at certain addresses."""

    def __init__(
        self,
        memory: _Memory,
        pool: _Pool,
        function: Callable,
        x: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
    ):
        self._memory, self._pool = memory, pool
        self._x = memory.buffer("input", x)
        # leaves of a graph of their own, on the same memory
        leaves = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors]
        self._inputs = [self._x.detach().requires_grad_(), *leaves]
        self._forward = _Graph(memory, pool, functools.partial(self._run, function))
        self._backward: _Graph | None = None
        self._grad: torch.Tensor | None = None

    def _run(self, function: Callable) -> tuple[torch.Tensor]:
        y = function(*self._inputs)
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
        in_flight = _InFlight(self._pool, self._forward.number)
        self._x.copy_(x)
        self._forward.replay()
        return _copied(self._forward.results[0]), in_flight

    def backward(self, grad: torch.Tensor) -> list[torch.Tensor | None]:
        """The gradients of x and the tensors."""
        if self._grad is None:
            self._grad = self._memory.buffer("gradient", grad)
        self._grad.copy_(grad)
        if self._backward is None and self._memory.refusal is None:
            self._backward = self._memory.record(
                lambda: _Graph(self._memory, self._pool, self._differentiate)
            )
            self._memory.announce(grad.shape)
        if self._backward is None or not self._pool.allows(self._backward.number):
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
        ctx.saved_tensors  # noqa: B018
        grads = ctx.recording.backward(grad)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.in_flight = None
        return None, *grads


class _Place:
    """The calls of a function with inputs of one shape, and the graphs recorded of them."""

    def __init__(self, where: Hashable):
        # the addresses that graphs know
        self.where = where
        self.calls = 0
        self.recordings: list[_Recording] = []


class Graphs:
    """The graphs of one function of a module. Copies of the module, and what is pickled, start anew."""

    def __init__(self):
        self._places: dict[Hashable, _Place] = {}
        # kept alive between calls
        self._memory: _Memory | None = None
        self._moves = 0

    def __reduce__(self):
        return type(self), ()

    def __deepcopy__(self, memo):
        return type(self)()

    @property
    def count(self) -> int:
        """How many forwards have been recorded, and can be replayed now."""
        return sum(len(place.recordings) for place in self._places.values())

    def clear(self) -> None:
        """Drops what was recorded, with its memory. No forward may wait for its backward."""
        self._places.clear()
        self._moves = 0

    def call(
        self,
        function: Callable[..., torch.Tensor],
        x: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
        uses: tuple[Hashable, ...] = (),
        under_way: int = 1,
    ) -> torch.Tensor:
        """function(x, *tensors), by a graph where that is possible.

        Args:
            function: launches the same kernels for the same sizes, whatever the values, draws no random
                numbers, and keeps no reference to x for its backward.
            x: on a GPU. Without a gradient the function runs as it is written.
            tensors: parameters, what shares their memory, and constants; None is handed on.
            uses: what else the function depends on: options, addresses of other memory that it or its
                backward uses, and objects that own some.
            under_way: how many forwards of one shape may wait for their backwards at a time.

        Returns what the function does, in memory of its own.
        """
        if not x.requires_grad or _is_watched():
            return function(x, *tensors)
        stream = torch.cuda.current_stream(x.device)
        memory = self._memory = _memory(x.device, stream.cuda_stream)
        place = self._place((x.shape, x.dtype, memory), _addresses(tensors) + uses)
        if place is None or memory.refusal is not None:
            return function(x, *tensors)
        place.calls += 1
        if place.calls <= WARM_UP:
            return function(x, *tensors)
        recording = next((r for r in place.recordings if r.is_ready), None)
        if recording is None and len(place.recordings) < under_way:
            pool = memory.pool(len(place.recordings))
            recording = memory.record(lambda: _Recording(memory, pool, function, x, tensors))
            place.recordings += [recording] * (recording is not None)
        if recording is None:
            return function(x, *tensors)
        return _Replay.apply(recording, x, *tensors)

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
