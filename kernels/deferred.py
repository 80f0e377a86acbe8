"""BF16 tensors that are never written, because only an FP8 GEMM reads them.

To everyone who looks, a `Deferred` tensor is the BF16 or FP32 tensor that its producer would have written. It
holds how to compute that tensor. A GEMM takes its FP8 operands, and a bias the sums of its columns, both
written by the producer's own kernel. Any other operation computes the tensor first.
"""

import functools
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from coat_kernels.autograd import once_differentiable
from coat_kernels.device import uses_kernels
from coat_kernels.fp8 import Fp8Format
from coat_kernels.origin import maxima_of
from coat_kernels.parallel import largest_of_all
from coat_kernels.tensorwise.predicted import Attempt, PredictedScale, write_reference
from coat_kernels.tensorwise.quantize import (
    Quantized,
    launch_quantize,
    quantize_tensor,
    quantize_tensor_triton,
)
from coat_kernels.tensorwise.scale import largest_magnitude
from coat_kernels.tensorwise.transpose import transpose_codes

aten = torch.ops.aten
# with at most this many maxima, each program of a launch over all tiles reads them all
FEW_MAXIMA = 1024


class Source:
    """What a deferred tensor [m, n] is computed from, shared by its views.

    inputs: tensors that must not change
    make(*inputs): the tensor [m, n], as the producer would have written it
    write(*inputs, out, scales): launches the producer on CUDA, as `write_reference`
    at_once: eager: quantize now (row-major, no column sums), not at first use
    """

    def __init__(
        self,
        inputs: tuple[torch.Tensor, ...],
        make: Callable[..., torch.Tensor],
        write: Callable[..., torch.Tensor | None],
        prediction: PredictedScale,
        shape: tuple[int, int],
        dtype: torch.dtype,
        at_once: bool = False,
    ):
        self._inputs, self._versions = inputs, [t._version for t in inputs]
        self._make, self._write = make, write
        self.prediction, self.shape = prediction, shape
        self.dtype, self.device = dtype, inputs[0].device
        self.made: torch.Tensor | None = None
        # how often its memory was handed out to code that may write into it unseen
        self.times_exposed = 0
        self._attempt = self._try(inputs, True, False, False) if at_once else None
        self._finished = None

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        if self._inputs is None:
            raise RuntimeError(
                "a gradient whose FP8 operands a linear layer has taken exists no more. Clone it in a hook "
                "of the tensor, before the layer's backward, or call retain_grad()."
            )
        if [t._version for t in self._inputs] != self._versions:
            raise RuntimeError(
                "a tensor that a deferred activation or gradient is computed from has been modified by an "
                "inplace operation. Clone it before modifying it."
            )
        return self._inputs

    def value(self) -> torch.Tensor:
        """The tensor itself [m, n], computed once."""
        if self.made is None:
            with torch.no_grad():
                made = self._make(*self.inputs)
            self.release()
            self.made = made
            self.prediction.times_made += 1
        return self.made

    def release(self) -> None:
        """Drops everything the tensor could be computed from."""
        self._inputs = self._attempt = self._finished = self._make = self._write = None

    def _try(self, inputs: tuple[torch.Tensor, ...], rows: bool, columns: bool, sums: bool) -> Attempt:
        make, launch, fmt = self._make, self._write, self.prediction.fmt
        if uses_kernels(inputs[0]):
            write = functools.partial(launch, *inputs)
        else:

            def write(out, scales):
                return write_reference(make(*inputs), out, scales, fmt)

        return Attempt(write, self.prediction, *self.shape, self.device, rows, columns, sums)

    def operands(
        self, rows: bool, columns: bool, group: dist.ProcessGroup | None, sums: bool
    ) -> tuple[Quantized, torch.Tensor] | None:
        """As `fp8_operands`. None where the eager launch did not compute what is asked for: column sums, or
        the scale of another group."""
        # also checks that they have not changed
        inputs = self.inputs
        if self._attempt is None:
            return self._try(inputs, rows, columns, sums).finish(group)
        if sums:
            return None
        if self._finished is None:
            self._finished = group, *self._attempt.finish(group)
        agreed, out, largest = self._finished
        if agreed is not group:
            return None
        by_columns = transpose_codes(out.rows) if columns else None
        return Quantized(out.rows if rows else None, by_columns, out.scale), largest


class Deferred(torch.Tensor):
    """A tensor of `source`'s values in `shape`, which is computed when an operation reads it.

    Detached tensors and views stay deferred. What an operation writes into it, it holds.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, source: Source, shape):
        return torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=source.dtype, device=source.device
        )

    def __init__(self, source: Source, shape):
        self.source = source

    @property
    def is_pending(self) -> bool:
        """Whether the tensor has not been computed yet."""
        return self.source.made is None

    def plain(self) -> torch.Tensor:
        """The values, outside of autograd. From now on they are this tensor's own memory."""
        return self.source.value().view(self.shape)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in _VIEWS and args[0].is_pending:
            return _VIEWS[func](*args)
        if torch.Tag.inplace_view in func.tags:
            raise RuntimeError(f"{func} on a deferred tensor. Clone it first.")
        leaves, spec = tree_flatten((args, kwargs or {}))
        made = [(x, x.plain() if isinstance(x, cls) else x) for x in leaves]
        args, kwargs = tree_unflatten([plain for _, plain in made], spec)
        # an in-place operation returns the tensor that it was called on
        owner = {id(plain): x for x, plain in made if x is not plain}
        return tree_map(lambda x: owner.get(id(x), x), func(*args, **kwargs))

    def __repr__(self):
        return repr(self.plain().detach())

    def __reduce_ex__(self, protocol):
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), self.plain().clone())

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, values):
        if values.shape != self.shape:
            raise RuntimeError(f"data of a deferred tensor: expected {self.shape}, found {values.shape}")
        self.detach().copy_(values)

    def _exposed(self) -> torch.Tensor:
        self.source.times_exposed += 1
        return self.plain()

    def numpy(self, *, force: bool = False):
        if self.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy()."
            )
        return self._exposed().numpy(force=force)

    def __dlpack__(self, **how):
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return self._exposed().__dlpack__(**how)

    def tolist(self) -> list:
        return self.plain().tolist()

    def data_ptr(self) -> int:
        return self._exposed().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._exposed().untyped_storage()


def _view(x: Deferred, shape) -> Deferred:
    return Deferred(x.source, torch.empty(x.shape, device="meta").view(shape).shape)


_VIEWS = {
    aten.detach.default: lambda x: Deferred(x.source, x.shape),
    aten.alias.default: lambda x: Deferred(x.source, x.shape),
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
}


def fp8_operands(
    x: torch.Tensor,
    fmt: Fp8Format,
    rows: bool = True,
    columns: bool = False,
    group: dist.ProcessGroup | None = None,
    sums: bool = False,
    predicted: PredictedScale | None = None,
) -> tuple[Quantized, torch.Tensor]:
    """`x` [..., n], as [m, n], quantized row-major and column-major as asked for, and its amax, FP32 [1],
    over the ranks of `group`.

    A deferred `x` is quantized by its producer. `sums` of columns are those of this rank. Where no maxima are
    noted, kernels quantize with the scale that is `predicted`, if that is a scale of `fmt`.
    """
    n = x.shape[-1]
    if isinstance(x, Deferred):
        source = x.source
        if x.is_pending and source.prediction.fmt == fmt and source.shape[1] == n:
            found = source.operands(rows, columns, group, sums)
            if found is not None:
                return found
        x = x.plain()
    maxima, plain = maxima_of(x), x.reshape(-1, n).contiguous()
    if uses_kernels(x) and not torch.compiler.is_compiling():
        if maxima is None and predicted is not None and predicted.fmt.dtype is fmt.dtype:
            write = functools.partial(launch_quantize, plain)
            return Attempt(write, predicted, *plain.shape, x.device, rows, columns, sums).finish(group)
        if maxima is not None and maxima.numel() <= FEW_MAXIMA and group is None:
            largest = torch.empty(1, dtype=torch.float32, device=x.device)
            return quantize_tensor_triton(plain, maxima, fmt, rows, columns, sums, largest), largest
    largest = largest_magnitude(x)
    if group is not None:
        largest_of_all(largest, group)
    return quantize_tensor(plain, largest, fmt, rows, columns, sums), largest


def holders(x: Deferred) -> int:
    """References to a tensor from Python and from C++, and to its source."""
    return sys.getrefcount(x) + x._use_count() + sys.getrefcount(x.source)


class _Probe(torch.autograd.Function):
    """Passes a deferred gradient from `make` on, and counts the holders of the gradient that it receives."""

    @staticmethod
    def forward(ctx, x, make, found):
        ctx.make, ctx.found = make, found
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if ctx.make is not None:
            return ctx.make(), None, None
        ctx.found.append(holders(grad))
        return torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device), None, None


@functools.cache
def holders_in_backward(device: torch.device) -> int:
    """The `holders` of a gradient in `backward` that nobody but the autograd engine holds."""
    found: list[int] = []

    def make() -> Deferred:
        source = (torch.zeros(1, 1, device=device),), None, None, PredictedScale(None), (1, 1), torch.float32
        return Deferred(Source(*source), (1, 1))

    with torch.enable_grad():
        x = torch.zeros(1, 1, device=device, requires_grad=True)
        y = _Probe.apply(_Probe.apply(x, None, found), make, found)
    torch.autograd.grad(y, x, torch.zeros_like(y))
    return found[0]
