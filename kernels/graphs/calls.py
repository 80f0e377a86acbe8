"""Calls of a function: eager, recorded or replayed."""

import functools
import threading
from collections.abc import Callable, Hashable, Sequence

import torch

from coat_kernels.autograd.derivatives import refuse_forward_mode
from coat_kernels.graphs.evaluation import Evaluations
from coat_kernels.graphs.memory import Memory, all_record, memory_of
from coat_kernels.graphs.recording import Recording, Replay, addresses
from coat_kernels.graphs.warm_up import WarmUp

# maximum number of shapes per function; each shape holds what its backward needs
MAX_SHAPES = 2
# after this many changes of addresses, for example by offloading of states, a function stops using graphs
MAX_MOVES = 3


def _cannot_record() -> bool:
    """Whether saved tensors have hooks (checkpointing, offloading), or this forward is recomputed inside a
    backward, or a larger graph is being recorded, or torch checks for NaN after each operation."""
    return (
        torch._C._current_graph_task_id() != -1
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or torch.cuda.is_current_stream_capturing()
        or torch.is_anomaly_enabled()
    )


def _can_be_evaluated(*tensors: torch.Tensor) -> bool:
    """Whether this is a forward without gradients on tensors that count their changes. Tensors created in
    inference mode do not."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    return not any(t.is_inference() for t in tensors)


def _overlaps(x: torch.Tensor) -> bool:
    """Whether elements of `x` share memory, as in an expanded tensor."""
    return any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True))


class ShapeGraphs:
    """The calls of a function with inputs of one shape, and the graphs recorded from them."""

    def __init__(self, where: Hashable):
        # the addresses in the graphs
        self.where = where
        # number of eager calls whose backward has begun
        self.calls = 0
        self.recordings: list[Recording] = []

    def count(self, grad: torch.Tensor) -> None:
        """A hook on the output of an eager call. Graphs are recorded only after a backward, because recording
        cannot compile backward kernels or make the first allocations of libraries."""
        self.calls += 1


class Graphs:
    """The graphs of one function of a module. Copies and pickles of the module have no graphs.

    one_shape: for inputs whose shape may change at any time. Only graphs of one shape exist at a time. Before
        another shape runs, the graphs of all layers are dropped, because the shape may need their memory. If
        they had not paid off by then, the number of consecutive calls of one shape before graphs are recorded
        again doubles.
    """

    # whether all calls are eager, while a reading is taken
    eager = False

    def __init__(self, one_shape: bool = False):
        self._one_shape = one_shape
        self._by_shape: dict[Hashable, ShapeGraphs] = {}
        # kept alive between calls, with its key
        self._memory: Memory | None = None
        self._memory_key: tuple | None = None
        self._moves = 0
        self._warm_up = WarmUp()
        self._evaluations = Evaluations()

    def __reduce__(self):
        return type(self), (self._one_shape,)

    @property
    def count(self) -> int:
        """How many forwards of training are recorded and can be replayed now."""
        return sum(len(shape_graphs.recordings) for shape_graphs in self._by_shape.values())

    @property
    def evaluated(self) -> int:
        """How many forwards without gradients are recorded."""
        return self._evaluations.count

    def make_room(self) -> None:
        """`drop`, before calls of another shape."""
        if self.count:
            self._warm_up.dropped()
        self.drop()

    def drop(self) -> None:
        """Drops the graphs of training, with their share of the memory that holds them."""
        self._by_shape.clear()
        self._moves = self._warm_up.replays = 0
        self._memory = None

    def call(
        self,
        function: Callable[..., torch.Tensor],
        x: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
        dependencies: Callable[[], tuple[Hashable, ...]] = tuple,
        max_in_flight: int = 1,
        constants: Sequence[torch.Tensor] = (),
        evaluates: bool = False,
        grad_buffers: Callable[[], Sequence[torch.Tensor]] = tuple,
        agree: Callable[[bool], bool] = bool,
    ) -> torch.Tensor:
        """function(x, *constants, *tensors), by a graph if possible.

        A graph is used only if its first replay reproduces the results of the eager pass (`verify.py`).

        Args:
            function: launches the same kernels for the same sizes, whatever the values, draws no random
                numbers, and keeps no reference to x for its backward.
            x: on a GPU. Without a gradient the function runs eagerly, unless `evaluates`.
            tensors: parameters, tensors that share their memory, and constants; None is passed on.
            dependencies: returns what else the function depends on: options, addresses of other memory that
                it or its backward uses, objects that own such memory. Called only where a graph is possible.
            max_in_flight: number of forwards of one shape that may wait for their backwards at a time.
            constants: tensors without gradients, whose memory may differ in each forward. The same tensor
                object holds the same values in all layers.
            evaluates: forwards without gradients are evaluations, and not those of a checkpoint, which a
                backward repeats. They have their own graph.
            grad_buffers: returns the tensors to which the function's backward adds.
            agree: returns True if all ranks that take part in the function's collectives call it with True.

        Returns the function's result, in memory of its own.
        """
        refuse_forward_mode(x)
        run_eagerly = functools.partial(function, x, *constants, *tensors)
        trains = x.requires_grad and torch.is_grad_enabled()
        if not (trains or evaluates and _can_be_evaluated(x, *constants)) or self.eager or _cannot_record():
            return run_eagerly()
        if any(map(_overlaps, constants)):
            return run_eagerly()
        if not trains:
            return self._evaluations.call(function, x, tensors, dependencies, constants, agree)
        memory = self._memory_of(x)
        if memory.refusal is not None:
            # this also frees the memory of graphs that are no longer used
            self._by_shape.clear()
            return run_eagerly()
        copies = tuple(memory.constant(i, constant) for i, constant in enumerate(constants))
        # a model may omit its mask if all tokens are visible
        shape_graphs = self._of_shape((x.shape, x.dtype, memory, copies), addresses(tensors) + dependencies())
        if shape_graphs is None:
            return run_eagerly()
        if shape_graphs.calls < self._warm_up.calls:
            y = run_eagerly()
            # an in-place write into a view removes the view's hooks from the graph
            whole = y if y._base is None or not y._base.requires_grad else y._base
            whole.register_hook(shape_graphs.count)
            return y
        recording = next((r for r in shape_graphs.recordings if r.is_ready), None)
        if recording is None and len(shape_graphs.recordings) == max_in_flight:
            return run_eagerly()
        for copy, constant in zip(copies, constants, strict=True):
            if not copy.update(constant):
                return run_eagerly()
        if recording is None:
            pool = memory.pool(len(shape_graphs.recordings))
            recording = memory.record(
                lambda: Recording(memory, pool, function, x, tensors, copies, grad_buffers, agree)
            )
            if not all_record(agree, recording is not None) or not recording.verify_forward(x):
                return run_eagerly()
            shape_graphs.recordings.append(recording)
        self._warm_up.replays += 1
        return Replay.apply(recording, x, *tensors)

    def _memory_of(self, x: torch.Tensor) -> Memory:
        """The memory for graphs of inputs like `x`."""
        stream = torch.cuda.current_stream(x.device).cuda_stream
        # graphs are per thread: another thread would write into buffers before a replay has read them
        key = x.device, threading.get_ident(), stream, x.shape if self._one_shape else None
        if self._memory is None or self._memory_key != key:
            if self._memory is not None and self._one_shape:
                self._memory.make_room()
            self._memory, self._memory_key = memory_of(*key), key
            self._memory.users.add(self)
        return self._memory

    def _of_shape(self, key: Hashable, where: Hashable) -> ShapeGraphs | None:
        """The graphs of calls with `key`; None if there are too many other shapes, or if addresses change
        too often."""
        shape_graphs = self._by_shape.get(key)
        if shape_graphs is None:
            if len(self._by_shape) == MAX_SHAPES:
                return None
            shape_graphs = self._by_shape[key] = ShapeGraphs(where)
        elif shape_graphs.where != where:
            self._moves += 1
            shape_graphs = self._by_shape[key] = ShapeGraphs(where)
        return shape_graphs if self._moves <= MAX_MOVES else None
