"""Forwards without a backward: eager, recorded or replayed."""

import threading
from collections.abc import Callable, Hashable, Sequence

import torch

from coat_kernels.graphs.memory import Memory, all_record, distrust_replay, memory_of
from coat_kernels.graphs.recording import Graph, addresses, copied
from coat_kernels.graphs.verify import compare
from coat_kernels.graphs.warm_up import WarmUp


class Evaluation:
    """A recorded forward. Only its result outlives a replay, so all evaluations share their memory."""

    def __init__(
        self,
        memory: Memory,
        function: Callable[..., torch.Tensor],
        x: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
        constants: Sequence[torch.Tensor],
    ):
        self._memory, self._x = memory, memory.buffer("input", x)
        self._constants = [memory.constant(i, constant) for i, constant in enumerate(constants)]
        arguments = self._x, *(constant.buffer for constant in self._constants), *tensors
        self._graph = Graph(memory, memory.pool(0), lambda: (function(*arguments),))

    def replay(self, x: torch.Tensor, constants: Sequence[torch.Tensor]) -> torch.Tensor:
        self._x.copy_(x)
        for copy, constant in zip(self._constants, constants, strict=True):
            copy.update(constant)
        self._graph.replay()
        return copied(self._graph.results[0])


class Evaluations:
    """The forwards of one function without gradients. One graph is held at a time. Calls of another kind
    replace it after enough consecutive calls."""

    def __init__(self):
        self._warm_up = WarmUp()
        self.drop()

    def drop(self) -> None:
        """Drops the graph, with its share of the memory that holds it."""
        self._recorded: Evaluation | None = None
        self._key: Hashable = None
        # the kind of the last calls, and the number of consecutive calls of this kind
        self._last: Hashable = None
        self._calls = 0
        # kept alive, because it holds the reason why nothing is recorded
        self._memory: Memory | None = None

    @property
    def count(self) -> int:
        """The number of graphs, 0 or 1."""
        return int(self._recorded is not None)

    def call(
        self,
        function: Callable[..., torch.Tensor],
        x: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
        dependencies: Callable[[], tuple[Hashable, ...]],
        constants: Sequence[torch.Tensor],
        agree: Callable[[bool], bool],
    ) -> torch.Tensor:
        """Like `Graphs.call`, with the same arguments."""
        where = x.device, threading.get_ident(), torch.cuda.current_stream(x.device).cuda_stream, x.shape
        kinds = tuple((c.shape, c.stride(), c.dtype) for c in constants)
        key = where, x.dtype, kinds, addresses(tensors), dependencies()
        if key != self._last:
            self._last, self._calls = key, 0
        self._calls += 1
        refused = self._memory is not None and self._memory.refusal is not None
        if refused:
            self._recorded = None
        arguments = function, x, tensors, constants
        if refused or (key != self._key and not self._record(key, where, arguments, agree)):
            return function(x, *constants, *tensors)
        self._warm_up.replays += 1
        return self._recorded.replay(x, constants)

    def _record(self, key, where, arguments: tuple, agree: Callable[[bool], bool]) -> bool:
        """Records calls with `key` after enough calls; returns whether there is a graph now."""
        if self._calls <= self._warm_up.calls:
            return False
        self._memory = memory = memory_of(*where, trains=False)
        if memory.refusal is not None:
            return False
        recorded = memory.record(lambda: Evaluation(memory, *arguments))
        if not all_record(agree, recorded is not None):
            return False
        function, x, tensors, constants = arguments
        replayed = [recorded.replay(x, constants)]
        distance, _ = compare(replayed, lambda: [function(x, *constants, *tensors)], agree)
        if distance is not None:
            distrust_replay("evaluation", distance)
            return False
        if self._recorded is not None:
            self._warm_up.dropped()
        self._recorded, self._key = recorded, key
        memory.users.add(self)
        memory.announce(x.shape, "are evaluated")
        return True
