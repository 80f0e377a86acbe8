"""One layer under measurement: times of passes, what is kept for backward, copies of weights."""

import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.common.layers import Layer, Result, random_weights, result_of
from benchmarks.common.memory import requested_bytes
from benchmarks.common.shapes import LayerShape
from benchmarks.common.timing import mark, milliseconds, synchronize

WARMUP = 3
# passes timed at each visit of a round, after some that are not: a GPU at its power limit takes a moment to
# find the clock that it can hold for this row, which is the one of a long run
SETTLE, VISIT = (15, 30) if torch.cuda.is_available() else (1, 3)


def saved_by_python(y: torch.Tensor) -> Iterator[torch.Tensor]:
    """Tensors that the `torch.autograd.Function`s that computed `y` keep for backward."""
    seen, ahead = set(), [y.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield from (t for t in getattr(node, "saved_tensors", None) or () if t is not None)
        ahead.extend(following for following, _ in node.next_functions)


def storages(t: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory of a tensor; of a wrapper, as TransformerEngine's quantized tensors are, of its parts."""
    try:
        t.untyped_storage().data_ptr()
    except RuntimeError:
        for part in vars(t).values():
            if isinstance(part, torch.Tensor):
                yield from storages(part)
    else:
        yield t.untyped_storage()


def weight_copies(layer: Layer, x: torch.Tensor) -> int:
    """Bytes of copies of weights that one forward makes and keeps for its backward."""
    shapes = {tuple(sorted(p.shape)) for p in layer.parameters().values() if p.ndim == 2}
    # what each forward allocates differs between two of them that are alive together
    first, second = layer.forward(x), layer.forward(x)
    shared = {storage.data_ptr() for t in saved_by_python(first) for storage in storages(t)}
    own = {
        storage.data_ptr(): storage.nbytes()
        for t in saved_by_python(second)
        if tuple(sorted(t.shape)) in shapes
        for storage in storages(t)
    }
    return sum(size for pointer, size in own.items() if pointer not in shared)


class Row:
    """A layer under measurement, on its own leaf."""

    def __init__(
        self,
        make: Callable[[LayerShape], Layer],
        shape: LayerShape,
        weights,
        x: torch.Tensor,
        grad: torch.Tensor,
    ):
        """`weights`, Megatron's, are loaded; without any, the layer is the reference and gets random ones."""
        started = time.perf_counter()
        self.layer = make(shape)
        self.layer.load(weights or random_weights(self.layer.parameters()))
        self.leaf = self.layer.transpose(x).clone().requires_grad_()
        self.grad = self.layer.transpose(grad)
        held = self._allocated()
        for _ in range(WARMUP):
            self.run()
        self.result = result_of(self.layer, x, grad)
        self.clear()
        synchronize()
        self.setup_s = time.perf_counter() - started
        # the result is kept, and nothing else that was there before
        own = (self.result.y, self.result.dx, *self.result.parameters.values())
        self.held = self._allocated() - held - sum(t.nbytes for t in own)
        self.times: list[tuple[float, float, float]] = []
        self.cpu: list[float] = []
        self.errors: dict[str, float] = {}
        self.memory: dict[str, float] = {}

    @staticmethod
    def _allocated() -> int:
        return requested_bytes() if torch.cuda.is_available() else 0

    def clear(self) -> None:
        self.leaf.grad = None
        self.layer.module.zero_grad()

    def run(self) -> tuple:
        """One pass; marks of its start, middle and end."""
        self.clear()
        start = mark()
        y = self.layer.forward(self.leaf)
        middle = mark()
        y.backward(self.grad)
        return start, middle, mark()

    def visit(self) -> None:
        """Times passes that follow each other as layers do."""
        for _ in range(SETTLE):
            self.run()
        marks = []
        for _ in range(VISIT):
            started = time.perf_counter()
            marks.append(self.run())
            self.cpu.append(1e3 * (time.perf_counter() - started))
        synchronize()
        self.times += [(milliseconds(a, c), milliseconds(a, b), milliseconds(b, c)) for a, b, c in marks]
        self.clear()

    def compare(self, expected: Result) -> None:
        """Finds the errors of what it computed, which is as large as the weights and is let go."""
        self.errors = self.result.errors(expected, self.layer)
        del self.result

    def measure_memory(self) -> dict[str, float]:
        """Bytes kept by a forward, of weights' copies, and the peak of both passes, in 10^6."""
        if not torch.cuda.is_available():
            from megatron_ext.saved_bytes import saved_bytes

            kept = saved_bytes([self.layer.module], lambda: self.layer.forward(self.leaf))
            return {"saved_mb": kept.total / 1e6, "weights_mb": 0.0, "peak_mb": 0.0}
        synchronize()
        before = requested_bytes()
        torch.cuda.reset_peak_memory_stats()
        y = self.layer.forward(self.leaf)
        saved = requested_bytes() - before - y.nbytes
        y.backward(self.grad)
        synchronize()
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        del y
        self.clear()
        copies = weight_copies(self.layer, self.leaf)
        return {
            "saved_mb": (saved - copies) / 1e6,
            "weights_mb": (self.held + copies) / 1e6,
            "peak_mb": peak / 1e6,
        }
