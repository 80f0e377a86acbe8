"""Calls of a function, which are launched, recorded or replayed."""

import functools
import threading
from collections.abc import Callable, Hashable, Sequence

import torch

from coat_kernels.autograd.derivatives import refuse_forward_mode
from coat_kernels.graphs.evaluation import Evaluations
from coat_kernels.graphs.memory import Memory, all_record, memory_of
from coat_kernels.graphs.patience import Patience
from coat_kernels.graphs.recording import Recording, Replay, addresses

# shapes of one function; each holds what its backward needs
MOST_SHAPES = 2
# after so many changes of addresses, as by offloading of states, graphs of a function are given up
MOST_MOVES = 3


def _is_watched() -> bool:
    """Whether saved tensors are hooked (checkpointing, offloading), or this forward is recomputed inside a
    backward, or a larger graph is being recorded, or torch looks for NaN behind each operation."""
    return (
        torch._C._current_graph_task_id() != -1
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or torch.cuda.is_current_stream_capturing()
        or torch.is_anomaly_enabled()
    )


def _can_be_evaluated(*tensors: torch.Tensor) -> bool:
    """Whether this is a forward without gradients whose tensors say when they change, as those that inference
    mode makes do not."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    return not any(t.is_inference() for t in tensors)


def _overlaps(x: torch.Tensor) -> bool:
    """Whether elements of `x` share memory, as of a tensor that was expanded."""
    return any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True))


class Place:
    """The calls of a function with inputs of one shape, and the graphs recorded of them."""

    def __init__(self, where: Hashable):
        # the addresses that graphs know
        self.where = where
        # eager ones whose backward has begun
        self.calls = 0
        self.recordings: list[Recording] = []

    def count(self, grad: torch.Tensor) -> None:
        """A hook of an eager call's output. A graph could not compile the kernels of the backward, nor take
        what libraries want at first."""
        self.calls += 1


class Graphs:
    """The graphs of one function of a module. Copies of the module, and what is pickled, start anew.

    one_shape: for inputs whose shape may change at any time. Graphs of one shape are held at a time. Where
        another shape comes, those of all layers are dropped before it runs, as it may need the memory. Where
        they had not paid off by then, twice as many calls of one shape as before must follow each other until
        there are graphs again.
    """

    def __init__(self, one_shape: bool = False):
        self._one_shape = one_shape
        self._places: dict[Hashable, Place] = {}
        # kept alive between calls, with what it is for
        self._memory: Memory | None = None
        self._memory_key: tuple | None = None
        self._moves = 0
        self._patience = Patience()
        self._evaluations = Evaluations()

    def __reduce__(self):
        return type(self), (self._one_shape,)

    @property
    def count(self) -> int:
        """How many forwards of training have been recorded, and can be replayed now."""
        return sum(len(place.recordings) for place in self._places.values())

    @property
    def evaluated(self) -> int:
        """How many forwards without gradients have been."""
        return self._evaluations.count

    def clear(self) -> None:
        """Drops what was recorded, with its memory. No forward may wait for its backward."""
        self._places.clear()
        self._moves = self._patience.replays = 0
        self._evaluations.leave()

    def give_way(self) -> None:
        """`leave`, for calls of another shape."""
        if self.count:
            self._patience.dropped()
        self.leave()

    def leave(self) -> None:
        """Drops what was recorded in training, with its share of the memory that holds it."""
        self._places.clear()
        self._moves = self._patience.replays = 0
        self._memory = None

    def call(
        self,
        function: Callable[..., torch.Tensor],
        x: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
        uses: Callable[[], tuple[Hashable, ...]] = tuple,
        under_way: int = 1,
        constants: Sequence[torch.Tensor] = (),
        evaluates: bool = False,
        written: Callable[[], Sequence[torch.Tensor]] = tuple,
        agree: Callable[[bool], bool] = bool,
    ) -> torch.Tensor:
        """function(x, *constants, *tensors), by a graph where that is possible.

        A graph counts once its first replay has given the results of the eager pass (`proof.py`).

        Args:
            function: launches the same kernels for the same sizes, whatever the values, draws no random
                numbers, and keeps no reference to x for its backward.
            x: on a GPU. Without a gradient the function runs as it is written, unless it evaluates.
            tensors: parameters, what shares their memory, and constants; None is handed on.
            uses: gives what else the function depends on: options, addresses of other memory that it or its
                backward uses, and objects that own some. Not asked where no graph is to be had.
            under_way: how many forwards of one shape may wait for their backwards at a time.
            constants: without gradients, of memory that may be another one in each forward. The same tensor
                object holds the same values in all layers.
            evaluates: forwards without gradients are no checkpoint's, which a backward repeats. They have a
                graph of their own.
            written: gives the tensors that the function's backward adds to.
            agree: whether all ranks that take part in the function's collectives say True.

        Returns what the function does, in memory of its own.
        """
        refuse_forward_mode(x)
        run_eagerly = functools.partial(function, x, *constants, *tensors)
        trains = x.requires_grad and torch.is_grad_enabled()
        if not (trains or evaluates and _can_be_evaluated(x, *constants)) or _is_watched():
            return run_eagerly()
        if any(map(_overlaps, constants)):
            return run_eagerly()
        if not trains:
            return self._evaluations.call(function, x, tensors, uses, constants, agree)
        memory = self._memory_of(x)
        if memory.refusal is not None:
            # also the memory of graphs that are not used any more
            self._places.clear()
            return run_eagerly()
        copies = tuple(memory.constant(i, constant) for i, constant in enumerate(constants))
        # a model may leave out its mask where all tokens are seen
        place = self._place((x.shape, x.dtype, memory, copies), addresses(tensors) + uses())
        if place is None:
            return run_eagerly()
        if place.calls < self._patience.calls:
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
            recording = memory.record(
                lambda: Recording(memory, pool, function, x, tensors, copies, written, agree)
            )
            if not all_record(agree, recording is not None) or not recording.proves_forward(x):
                return run_eagerly()
            place.recordings.append(recording)
        self._patience.replays += 1
        return Replay.apply(recording, x, *tensors)

    def _memory_of(self, x: torch.Tensor) -> Memory:
        """Where graphs for inputs like `x` lie."""
        stream = torch.cuda.current_stream(x.device).cuda_stream
        # another thread would write into buffers before a replay has read them
        key = x.device, threading.get_ident(), stream, x.shape if self._one_shape else None
        if self._memory is None or self._memory_key != key:
            if self._memory is not None and self._one_shape:
                self._memory.give_way()
            self._memory, self._memory_key = memory_of(*key), key
            self._memory.users.add(self)
        return self._memory

    def _place(self, key: Hashable, where: Hashable) -> Place | None:
        """The place of calls with `key`; None if there are too many others, or if addresses change all the
        time."""
        place = self._places.get(key)
        if place is None:
            if len(self._places) == MOST_SHAPES:
                return None
            place = self._places[key] = Place(where)
        elif place.where != where:
            self._moves += 1
            place = self._places[key] = Place(where)
        return place if self._moves <= MOST_MOVES else None
