"""Both graphs of a function, and the autograd node that replays them."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.autograd.graph import get_gradient_edge

from coat_kernels.autograd.derivatives import once_differentiable
from coat_kernels.graphs.memory import Constant, Memory, Pool, all_record, captured, distrust_replay
from coat_kernels.graphs.verify import compare, saved_for_backward


def addresses(tensors: Sequence[torch.Tensor | None]) -> tuple:
    return tuple(None if t is None else (t.data_ptr(), t.requires_grad) for t in tensors)


class _Borrowed:
    """Memory of a tensor, for `torch.as_tensor`, without keeping the tensor alive."""

    def __init__(self, x: torch.Tensor):
        self.__cuda_array_interface__ = {
            "shape": (x.numel() * x.element_size(),),
            "typestr": "|u1",
            "data": (x.data_ptr(), False),
            "version": 2,
        }


def _borrow(x: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor on the memory of `x`, which a later graph may reuse. An expanded tensor of zeros, which takes
    no memory, is re-created."""
    if x is None:
        return None
    if x.numel() > 1 and not any(x.stride()):
        return torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)
    if not x.is_contiguous():
        raise RuntimeError(f"expected results that are contiguous, found strides {x.stride()} of {x.shape}")
    return torch.as_tensor(_Borrowed(x), device=x.device).view(x.dtype).view(x.shape)


def copied(x: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of a replay's result `x`, before the next replay overwrites it."""
    return x if x is None or not any(x.stride()) else x.clone()


class Graph:
    """The kernels that `body()` launches. `results` is its return value; each replay writes it."""

    def __init__(self, memory: Memory, pool: Pool, body: Callable[[], Sequence[torch.Tensor | None]]):
        self._graph = torch.cuda.CUDAGraph()
        # memory that is unused when recording starts cannot be freed while the graph is recorded
        torch.cuda.empty_cache()
        with captured(self._graph, memory.stream, pool.handle):
            made = body()
        torch.cuda.current_stream().wait_stream(memory.stream)
        self.results = tuple(map(_borrow, made))
        self.number = pool.count
        pool.count += 1
        memory.graphs.add(self)

    def replay(self) -> None:
        self._graph.replay()

    def end(self) -> None:
        """Frees what CUDA and NCCL hold for it. After that, torch raises RuntimeError for a replay."""
        self._graph.reset()


class _InFlight:
    """While this object lives, a forward waits for its backward."""

    def __init__(self, pool: Pool, number: int, constants: Sequence[Constant]):
        self._pool, self._number, self._constants = pool, number, constants
        pool.in_flight.add(number)
        for constant in constants:
            constant.readers += 1

    def __del__(self):
        self._pool.in_flight.discard(self._number)
        for constant in self._constants:
            constant.readers -= 1


class Recording:
    """Both graphs of a function for inputs at fixed addresses."""

    def __init__(
        self,
        memory: Memory,
        pool: Pool,
        function: Callable,
        x: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
        constants: Sequence[Constant],
        grad_buffers: Callable[[], Sequence[torch.Tensor]],
        agree: Callable[[bool], bool],
    ):
        self._memory, self._pool, self._constants = memory, pool, constants
        self._grad_buffers, self._agree = grad_buffers, agree
        # released after the check of the forward
        self._function: Callable | None = function
        self._x = memory.buffer("input", x)
        # separate leaves for the graph, on the same memory
        leaves = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors]
        self._inputs = [self._x.detach().requires_grad_(), *leaves]
        buffers = [constant.buffer for constant in constants]
        self._read = tuple(t for t in (*self._inputs, *buffers) if t is not None)
        self._versions = tuple(t._version for t in self._read)
        self._forward = Graph(memory, pool, functools.partial(self._run, function))
        self._backward: Graph | None = None
        # addresses in the graph of backward
        self._where: tuple = ()
        self._grad: torch.Tensor | None = None

    def _run(self, function: Callable) -> tuple[torch.Tensor]:
        x, *leaves = self._inputs
        y = function(x, *(constant.buffer for constant in self._constants), *leaves)
        # keeps the tensors saved for backward alive, but not y
        self._edge = get_gradient_edge(y)
        return (y.detach(),)

    def _differentiate(self) -> list[torch.Tensor | None]:
        trained = [t for t in self._inputs if t is not None and t.requires_grad]
        # retained, so that no other graph takes the memory of the saved tensors
        grads = torch.autograd.grad([self._edge], trained, [self._grad], retain_graph=True, allow_unused=True)
        found = iter(grads)
        return [next(found) if t is not None and t.requires_grad else None for t in self._inputs]

    @contextlib.contextmanager
    def _at_recorded_versions(self) -> Iterator[None]:
        """Lets autograd read the inputs, which steps have changed since they were recorded, but not since the
        forward that is differentiated."""
        set_versions = torch._C._autograd._unsafe_set_version_counter
        now = tuple(t._version for t in self._read)
        set_versions(self._read, self._versions)
        try:
            yield
        finally:
            set_versions(self._read, now)

    def verify_forward(self, x: torch.Tensor) -> bool:
        """Whether a replay for `x` reproduces the output, and the tensors saved for backward, of the eager
        pass."""
        self._x.copy_(x.detach())
        self._forward.replay()
        function, self._function = self._function, None

        def run() -> list[torch.Tensor]:
            first = self._x.detach().requires_grad_()
            with torch.enable_grad():
                y = function(first, *(constant.buffer for constant in self._constants), *self._inputs[1:])
            return [y.detach(), *saved_for_backward(get_gradient_edge(y).node)]

        replayed = [self._forward.results[0], *saved_for_backward(self._edge.node)]
        distance, _ = compare(replayed, run, self._agree)
        if distance is not None:
            distrust_replay("forward", distance)
        return distance is None

    def _verify_backward(self) -> list[torch.Tensor | None]:
        """The gradients of an eager backward, with which the first replay is compared. Both add to the
        tensors of `grad_buffers`, such as Megatron's main_grad; the sum is restored, so only one addition
        remains."""
        grad_buffers = self._grad_buffers()
        before = [t.clone() for t in grad_buffers]

        def results(grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
            found = [*map(copied, grads), *(t.clone() for t in grad_buffers)]
            for t, old in zip(grad_buffers, before, strict=True):
                t.copy_(old)
            return found

        self._backward.replay()
        replayed = results(self._backward.results)
        distance, eager = compare(replayed, lambda: results(self._differentiate()), self._agree)
        if distance is not None:
            distrust_replay("backward", distance)
        grads = len(self._inputs)
        for t, total in zip(grad_buffers, eager[grads:], strict=True):
            t.copy_(total)
        return eager[:grads]

    @property
    def is_ready(self) -> bool:
        """Whether the forward may be replayed: no pending backward needs memory that the replay
        overwrites."""
        return self._pool.allows(self._forward.number)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, _InFlight]:
        """The function's output, and an object to hold until its backward has run."""
        in_flight = _InFlight(self._pool, self._forward.number, self._constants)
        self._x.copy_(x)
        self._forward.replay()
        return copied(self._forward.results[0]), in_flight

    def backward(self, grad: torch.Tensor, where: tuple) -> list[torch.Tensor | None]:
        """The gradients of x and the tensors. The current addresses of the tensors are `where`: FSDP frees
        weights between forward and backward, and gathers them again."""
        if self._grad is None:
            self._grad = self._memory.buffer("gradient", grad)
        self._grad.copy_(grad)
        if self._backward is None and self._memory.refusal is None:
            with self._at_recorded_versions():
                self._backward = self._memory.record(
                    lambda: Graph(self._memory, self._pool, self._differentiate)
                )
                self._where = where
                if not all_record(self._agree, self._backward is not None):
                    self._backward = None
                else:
                    grads = self._verify_backward()
                    self._memory.announce(grad.shape)
                    return grads
        replays = self._backward is not None and self._memory.refusal is None
        if not (replays and self._where == where and self._pool.allows(self._backward.number)):
            with self._at_recorded_versions():
                return self._differentiate()
        self._backward.replay()
        return [copied(g) for g in self._backward.results]


class Replay(torch.autograd.Function):
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
        # raises if one was changed, or if an earlier backward freed them
        tensors = ctx.saved_tensors
        grads = ctx.recording.backward(grad, addresses(tensors))
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.in_flight = None
        return None, *grads
