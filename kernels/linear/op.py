"""A linear layer that runs its three GEMMs in FP8 and saves its input in FP8.

Each operand has one just-in-time scale (COAT, section 5). FP8 GEMMs need both operands contiguous along the
summed dimension, so each operand is written in the layout of its GEMM. The input is also written
column-major, for the wgrad GEMM, and only that copy is saved.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.weak import TensorWeakRef

from coat_kernels.autograd import observers
from coat_kernels.autograd.derivatives import once_differentiable
from coat_kernels.autograd.origin import SAVED_CODES, Origin, note, noted, whole_of, with_maxima
from coat_kernels.device import require_fp8, uses_kernels
from coat_kernels.fp8 import ALIGNMENT, E4M3, E5M2, Fp8Format
from coat_kernels.linear.matmul import accumulate_matmul, scaled_matmul
from coat_kernels.parallel import TensorParallel, all_reduce, gather_columns, gather_rows, reduce_scatter
from coat_kernels.tensorwise.operands import fp8_operands
from coat_kernels.tensorwise.predicted import PredictedScale
from coat_kernels.tensorwise.quantize import Quantized
from coat_kernels.tensorwise.transpose import transpose_codes
from coat_kernels.weights import NO_CACHE, WeightCache, Weights


@dataclass(frozen=True, slots=True)
class LinearFormats:
    """The FP8 format of the output's gradient, and which GEMMs accumulate fast: with fewer bits, on GPUs that
    offer the choice (Hopper). The input and the weight are E4M3.
    """

    backward: Fp8Format = E5M2
    fast_forward: bool = True
    fast_input_grad: bool = False
    fast_weight_grad: bool = False


DEFAULT_FORMATS = LinearFormats()


class LinearOptions(NamedTuple):
    """How one call of a linear layer multiplies: everything except its tensors.

    formats: the FP8 formats. cache: what the caller keeps of the quantized weights; not used while a model is
        compiled.
    parallel: how the layer is split over ranks. All-gathered tensors have one scale on all ranks; any other
        tensor has one scale per rank. If the layer is split by input, the caller must sum the partial
        results, except under sequence parallelism, where the first dimension is that of the tokens.
    grad_buffer: returns, in backward, the tensor [N, K], of any floating-point type, to which the
        weight's gradient is added. Autograd gets zeros that take no memory.
    x_scale, grad_scale: predict the scales of x and of the output's gradient if they are plain tensors, which
        saves a pass over each. Not used while a model is compiled.
    """

    formats: LinearFormats
    cache: WeightCache
    parallel: TensorParallel | None = None
    grad_buffer: Callable[[], torch.Tensor] | None = None
    x_scale: PredictedScale | None = None
    grad_scale: PredictedScale | None = None

    def graph_key(self, weights: Weights) -> tuple:
        """The dependencies of GEMMs with `weights` other than their tensors, for CUDA graphs
        (`Graphs.call`)."""
        address = None if self.grad_buffer is None else self.grad_buffer().data_ptr()
        cached = self.cache.refresh_for_graph(weights)
        return self.formats, self.x_scale, self.grad_scale, address, *cached

    @property
    def input_group(self) -> dist.ProcessGroup | None:
        """The ranks that must use the same scale for the input, because its codes are gathered into one
        operand."""
        return self.parallel.group if self.parallel and self.parallel.gathers_input else None


DEFAULT_OPTIONS = LinearOptions(DEFAULT_FORMATS, NO_CACHE)


class LinearState:
    """What a linear layer, or several that are one GEMM, keeps from one call to the next: FP8 copies of its
    weights, and the last scales of its input and of its output's gradient. It belongs to the caller.

    weight_cache: as `keep` of `WeightCache`.
    """

    def __init__(self, formats: LinearFormats = DEFAULT_FORMATS, weight_cache: str = "none"):
        self.formats, self.cache = formats, WeightCache(weight_cache)
        self.x_scale, self.grad_scale = PredictedScale(E4M3), PredictedScale(formats.backward)

    def options(
        self,
        weight: torch.Tensor | Weights,
        parallel: TensorParallel | None = None,
        grad_buffer: Callable[[], torch.Tensor] | None = None,
    ) -> LinearOptions:
        """The options of a call with this weight, or with these."""
        cache = self.cache
        if cache.keep != "none" and not torch.compiler.is_compiling():
            cache = cache.of(weight if isinstance(weight, tuple) else (weight,))
        return LinearOptions(self.formats, cache, parallel, grad_buffer, self.x_scale, self.grad_scale)


def multiply(
    rows: torch.Tensor,
    scale: torch.Tensor,
    w: Quantized,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    options: LinearOptions,
) -> torch.Tensor:
    """The forward GEMM of row-major FP8 `rows` [m, k] with their `scale` and a row-major weight: [m, n] in
    `dtype`, for the tokens that `options.parallel` selects."""
    parallel = options.parallel
    if (observer := observers.current()) is not None:
        observer.codes("input", options.x_scale, rows)
    if parallel and parallel.gathers_input:
        rows = gather_rows(rows, parallel.group)()
    y = scaled_matmul(rows, w.rows, scale, w.scale, bias, dtype, options.formats.fast_forward)
    return reduce_scatter(y, parallel.group)() if parallel and parallel.scatters_output else y


def multiply_backward(
    grad: Quantized,
    weights: Weights,
    w: Quantized | None,
    columns: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None,
    dtype: torch.dtype,
    options: LinearOptions,
) -> tuple[Callable[[], torch.Tensor] | None, Sequence[torch.Tensor | None]]:
    """The dgrad and wgrad GEMMs of `grad`, which is quantized row-major and column-major as needed.

    w: the column-major weights; None if the input needs no gradient.
    columns: returns the column-major input of all tokens, and its scale; None if the weights need no
        gradients.

    Returns a function that waits for the input's gradient, [m, k] in `dtype`, and the gradient of each
    weight, a view of rows. The caller must not hold `grad` and `w`, so that they are freed as soon as they
    are used.
    """
    formats, grad_x, (weight, *others) = options.formats, None, weights
    grad_rows, grad_columns, grad_scale, _ = grad
    del grad
    if grad_rows is not None and (observer := observers.current()) is not None:
        observer.codes("gradient", options.grad_scale, grad_rows)
    if w is not None:
        grad_x = scaled_matmul(
            grad_rows, w.columns, grad_scale, w.scale, None, dtype, formats.fast_input_grad
        )
        # large and no longer needed; freed before the weight's gradient is allocated
        del grad_rows, w
        grad_x = _sum_over_ranks(grad_x, options.parallel)
    if columns is None:
        return grad_x, [None] * len(weights)
    by_columns, scale = columns()
    operands, fast = (grad_columns, by_columns, grad_scale, scale), formats.fast_weight_grad
    if options.grad_buffer is None:
        grad_w = scaled_matmul(*operands, None, weight.dtype, fast)
        return grad_x, grad_w.split([len(w) for w in weights]) if others else [grad_w]
    into = options.grad_buffer()
    if into.shape != weight.shape:
        raise ValueError(f"grad_buffer: expected shape {list(weight.shape)}, found {list(into.shape)}")
    accumulate_matmul(*operands, into, weight.dtype, fast)
    # the shape that autograd expects, without memory
    return grad_x, [weight.new_zeros(()).expand(weight.shape)]


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, origin, options, trains, dtype, *weights):
        # all or none of them
        *_, needs_weight = ctx.needs_input_grad
        trains_weight = trains and needs_weight
        saves_x = trains_weight and origin is None
        whole = _shared_input(x) if saves_x and options.parallel is None else None
        saved = () if whole is None else _noted_codes(whole)
        (rows, columns, scale, _), amax_x = fp8_operands(
            x, E4M3, columns=saves_x and not saved, group=options.input_group, predicted=options.x_scale
        )
        if saves_x and not saved:
            saved = (columns, scale)
            if whole is not None:
                _note_codes(whole, saved, amax_x)
        w, amax_w = options.cache.forward(weights, trains)
        y = multiply(rows, scale, w, bias, dtype, options)
        ctx.options, ctx.shape, ctx.dtype = options, x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.columns = None
        if trains_weight and not saves_x:
            ctx.columns, saved = origin.columns, (*origin.tensors, amax_x)
        ctx.count = len(weights)
        ctx.save_for_backward(*weights, amax_w, *saved)
        # detach(): autograd forbids in-place operations on a view that a function returns
        return y.view(-1, *x.shape[1:-1], y.shape[-1]).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        saved = ctx.saved_tensors
        weights, (amax_w, *saved) = saved[: ctx.count], saved[ctx.count :]
        needs_x, needs_bias, *_, needs_w = ctx.needs_input_grad
        options, grad_x, grads, sums = ctx.options, None, [None] * ctx.count, None
        if needs_x or needs_w:
            # in a list, so the GEMMs can free parts of it as soon as they are used
            grad = [quantized_grad(grad_y, options, needs_x, needs_w, needs_bias)]
            sums = grad[0].sums
            columns = None
            if needs_w:
                # the all-gather overlaps with the dgrad GEMM. The gradient's scale is already known, so no
                # other collective waits for the all-gather
                tokens = ctx.shape[:-1].numel()
                whole = Quantized(None, *saved) if ctx.columns is None else ctx.columns(*saved, E4M3)
                columns = gathered_columns(whole, tokens, options)
                del whole
            w = [options.cache.columns(weights, amax_w) if needs_x else None]
            grad_x, grads = multiply_backward(grad.pop(), weights, w.pop(), columns, ctx.dtype, options)
        elif needs_bias:
            sums = grad_y.flatten(0, -2).sum(0, dtype=torch.float32)
        return (
            grad_x().view(ctx.shape) if needs_x else None,
            sums.to(ctx.bias_dtype) if needs_bias else None,
            *(None,) * 4,
            *grads,
        )


def _shared_input(x: torch.Tensor) -> torch.Tensor | None:
    """A tensor on which layers with the same input `x` share notes, for example the projections of attention
    without a norm before them; None if there is none.

    Never a leaf: a leaf may be the input of a CUDA graph, and replays write it without changing its notes.
    """
    if torch.compiler.is_compiling():
        return None
    whole = whole_of(x)
    return whole if type(whole) is torch.Tensor and whole.grad_fn is not None else None


def _note_codes(x: torch.Tensor, saved: tuple[torch.Tensor, torch.Tensor], amax: torch.Tensor) -> None:
    """Notes on `x` the codes that autograd saves of it, and its amax. The references are weak: if hooks move
    the codes elsewhere, or checkpointing drops them, the note must not keep them alive."""
    with_maxima(note(x, SAVED_CODES, tuple(map(TensorWeakRef, saved))), amax)


def _noted_codes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The column-major codes of `x` and their scale, if another layer saves them; empty if none does."""
    found = tuple(reference() for reference in noted(x, SAVED_CODES) or ())
    return () if any(t is None for t in found) else found


def gathered_columns(
    x: Quantized, m: int, options: LinearOptions
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Returns a function that returns the column-major input of `m` tokens per rank for `multiply_backward`.
    The all-gather, if one is needed, starts at once."""
    columns, scale, parallel = x.columns, x.scale, options.parallel
    if parallel is None or not parallel.gathers_input:
        return lambda: (columns, scale)
    wait = gather_columns(columns, m, parallel.group)
    return lambda: (wait(), scale)


def quantized_grad(
    grad_y: torch.Tensor, options: LinearOptions, rows: bool = True, columns: bool = True, sums: bool = False
) -> Quantized:
    """The gradient of this rank's output columns for all tokens, quantized as requested, and its column sums
    over this rank's tokens."""
    fmt, parallel, predicted = options.formats.backward, options.parallel, options.grad_scale
    if not (parallel and parallel.scatters_output):
        return fp8_operands(grad_y, fmt, rows, columns, sums=sums, predicted=predicted)[0]
    part = fp8_operands(grad_y, fmt, group=parallel.group, sums=sums, predicted=predicted)[0]
    whole = gather_rows(part.rows, parallel.group)()
    return part._replace(rows=whole, columns=transpose_codes(whole) if columns else None)


def _sum_over_ranks(grad_x: torch.Tensor, parallel: TensorParallel | None):
    """Returns a function that waits for the gradient of this rank's input. It is summed over the ranks if
    they hold parts of the weight."""
    if parallel and parallel.gathers_input:
        return reduce_scatter(grad_x, parallel.group)
    if parallel and parallel.by_output and parallel.reduce_grad:
        return all_reduce(grad_x, parallel.group)
    return lambda: grad_x


def _check_sizes(x: torch.Tensor, weights: Weights, bias: torch.Tensor | None) -> None:
    """Raises ValueError for shapes that do not match, or that FP8 GEMMs do not support."""
    out_features, in_features = sum(w.shape[0] for w in weights), weights[0].shape[1]
    if x.shape[-1] != in_features:
        raise ValueError(f"fp8_linear: the weight takes {in_features} columns, x has {x.shape[-1]}")
    if bias is not None and bias.shape != (out_features,):
        raise ValueError(f"fp8_linear: the bias has shape {list(bias.shape)}, of {out_features} outputs")
    if uses_kernels(x) and (out_features % ALIGNMENT or in_features % ALIGNMENT):
        raise ValueError(
            f"FP8 GEMMs need sizes that are multiples of {ALIGNMENT}, found a weight of "
            f"{out_features} x {in_features}. Change the layer's sizes or keep it in BF16."
        )


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor | Weights,
    bias: torch.Tensor | None = None,
    options: LinearOptions = DEFAULT_OPTIONS,
    *,
    origin: Origin | None = None,
) -> torch.Tensor:
    """x W^T + b with FP8 GEMMs.

    Args:
        x: [..., K], BF16 or FP32, quantized without a cast, also under autocast.
        weight: [N, K], or several [N_i, K] of one dtype that are stacked along the rows, all or none of them
            trained, without `grad_buffer`. Backward keeps references, not copies.
        bias: [N] or None. Its gradient is summed in FP32, by the kernel that quantizes the output's gradient.
        options: by default E4M3 forward and E5M2 backward, and nothing is kept.
        origin: how to recompute x in backward; without it x is saved as FP8 and one FP32 scale.

    Returns [..., N] in the dtype of x, or in autocast's. Raises ValueError for shapes that do not match and,
    on CUDA, if K or N is not a multiple of 16; RuntimeError on a GPU without FP8.
    """
    require_fp8(x.device)
    weights = weight if isinstance(weight, tuple) else (weight,)
    _check_sizes(x, weights, bias)
    device, dtype = x.device.type, x.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.get_autocast_dtype(device):
        # x is quantized without a cast
        dtype = torch.get_autocast_dtype(device)
    if torch.compiler.is_compiling():
        options = options._replace(cache=NO_CACHE)
    if options.parallel is None and x.numel() == 0:
        # Nothing to quantize, and GPUs refuse empty GEMMs; the gradients are zeros. Backward keeps a copy: a
        # view, for example of an expert's tokens, would keep the whole tensor alive.
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return F.linear(x.to(dtype, copy=True), weight.to(dtype), None if bias is None else bias.to(dtype))
    tokens = x if x.ndim > 1 else x[None]
    y = _Fp8Linear.apply(tokens, bias, origin, options, torch.is_grad_enabled(), dtype, *weights)
    return y if x.ndim > 1 else y[0]
