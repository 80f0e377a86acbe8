"""A linear layer whose three GEMMs run in FP8 and which saves its input in FP8.

Each operand has one just-in-time scale (COAT, section 5). FP8 GEMMs want both operands contiguous along the
dimension that is summed, so each operand is written in the layout of its GEMM. The input is also written
column-major, for the wgrad GEMM, and only that copy is saved.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.weak import TensorWeakRef

from coat_kernels.autograd import watching
from coat_kernels.autograd.derivatives import once_differentiable
from coat_kernels.autograd.origin import Origin, note, noted, whole_of, with_maxima
from coat_kernels.device import require_fp8, uses_kernels
from coat_kernels.fp8 import ALIGNMENT, E4M3, E5M2, Fp8Format
from coat_kernels.linear.matmul import accumulate_matmul, scaled_matmul
from coat_kernels.parallel import TensorParallel, all_reduce, gather_columns, gather_rows, reduce_scatter
from coat_kernels.tensorwise.operands import fp8_operands
from coat_kernels.tensorwise.predicted import PredictedScale
from coat_kernels.tensorwise.quantize import Quantized
from coat_kernels.tensorwise.transpose import transpose_codes
from coat_kernels.weights import NO_CACHE, WeightCache


@dataclass(frozen=True, slots=True)
class LinearFormats:
    """FP8 formats of the forward operands (input, weight) and of the output's gradient, and which GEMMs
    accumulate fast: with fewer bits, on GPUs that offer the choice (Hopper).

    emulate: GPUs without FP8 are allowed and take the references: slow, and for looking only.
    """

    forward: Fp8Format = E4M3
    backward: Fp8Format = E5M2
    fast_forward: bool = True
    fast_input_grad: bool = False
    fast_weight_grad: bool = False
    emulate: bool = False


DEFAULT_FORMATS = LinearFormats()


@dataclass(frozen=True, slots=True)
class LinearOptions:
    """How a linear layer multiplies: everything but its tensors. Fields as the arguments of `fp8_linear`.

    torch.compile of torch 2.11 cannot make one whose fields have objects for defaults.
    """

    formats: LinearFormats
    cache: WeightCache
    parallel: TensorParallel | None = None
    weight_grad_into: Callable[[], torch.Tensor] | None = None
    x_scale: PredictedScale | None = None
    grad_scale: PredictedScale | None = None

    def uses(self, weight: torch.Tensor) -> tuple:
        """What GEMMs with `weight` use beside their tensors, for CUDA graphs (`Graphs.call`)."""
        address = None if self.weight_grad_into is None else self.weight_grad_into().data_ptr()
        kept = self.cache.stay(weight, self.formats.forward)
        return self.formats, self.x_scale, self.grad_scale, address, *kept

    @property
    def input_group(self) -> dist.ProcessGroup | None:
        """The ranks that agree on the scale of the input, because its codes meet in one operand."""
        return self.parallel.group if self.parallel and self.parallel.gathers_input else None


def multiply(
    rows: torch.Tensor,
    scale: torch.Tensor,
    w: Quantized,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    options: LinearOptions,
) -> torch.Tensor:
    """The forward GEMM of row-major FP8 `rows` [m, k] with their `scale` and a row-major weight: [m, n] in
    `dtype`, for the tokens that `options.parallel` says."""
    parallel = options.parallel
    if watching.current is not None and (observer := watching.observer()) is not None:
        observer.codes("input", options.x_scale, rows)
    if parallel and parallel.gathers_input:
        rows = gather_rows(rows, parallel.group)()
    y = scaled_matmul(rows, w.rows, scale, w.scale, bias, dtype, options.formats.fast_forward)
    return reduce_scatter(y, parallel.group)() if parallel and parallel.scatters_output else y


def multiply_backward(
    grad: Quantized,
    weight: torch.Tensor,
    w: Quantized | None,
    columns: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None,
    dtype: torch.dtype,
    options: LinearOptions,
) -> tuple[Callable[[], torch.Tensor] | None, torch.Tensor | None]:
    """The dgrad and wgrad GEMMs of `grad`, quantized row-major and column-major as they are needed.

    w: the column-major weight; None where the input needs no gradient.
    columns: gives the column-major input of all tokens, and its scale; None where the weight needs no
        gradient.

    Returns a function that waits for the gradient of the input, [m, k] in `dtype`, and the gradient of the
    weight. The caller must not hold `grad` and `w`, so that they are freed on the way.
    """
    formats, grad_x, grad_w = options.formats, None, None
    grad_rows, grad_columns, grad_scale, _ = grad
    del grad
    if (
        watching.current is not None
        and grad_rows is not None
        and (observer := watching.observer()) is not None
    ):
        observer.codes("gradient", options.grad_scale, grad_rows)
    if w is not None:
        grad_x = scaled_matmul(
            grad_rows, w.columns, grad_scale, w.scale, None, dtype, formats.fast_input_grad
        )
        # large and no longer needed: free them before the weight's gradient is allocated
        del grad_rows, w
        grad_x = _sum_over_ranks(grad_x, options.parallel)
    if columns is not None:
        by_columns, scale = columns()
        operands, fast = (grad_columns, by_columns, grad_scale, scale), formats.fast_weight_grad
        if options.weight_grad_into is None:
            grad_w = scaled_matmul(*operands, None, weight.dtype, fast)
        else:
            into = options.weight_grad_into()
            if into.shape != weight.shape:
                raise ValueError(
                    f"weight_grad_into: expected shape {list(weight.shape)}, found {list(into.shape)}"
                )
            accumulate_matmul(*operands, into, weight.dtype, fast)
            # the shape that autograd wants, without memory
            grad_w = weight.new_zeros(()).expand(weight.shape)
    return grad_x, grad_w


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, origin, options, trains, dtype):
        trains_weight = trains and ctx.needs_input_grad[1]
        keep = trains_weight and origin is None
        fmt = options.formats.forward
        whole = _shared(x) if keep and options.parallel is None else None
        kept = () if whole is None else _kept_of(whole, fmt)
        (rows, columns, scale, _), largest_x = fp8_operands(
            x, fmt, columns=keep and not kept, group=options.input_group, predicted=options.x_scale
        )
        if keep and not kept:
            kept = (columns, scale)
            if whole is not None:
                _note_kept(whole, kept, largest_x, fmt)
        w, largest_w = options.cache.forward(weight, fmt, trains)
        y = multiply(rows, scale, w, bias, dtype, options)
        ctx.options, ctx.shape, ctx.dtype = options, x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.columns = None
        if trains_weight and not keep:
            ctx.columns, kept = origin.columns, (*origin.tensors, largest_x)
        ctx.save_for_backward(weight, largest_w, *kept)
        # detach(): autograd forbids in-place operations on a view that a function returns
        return y.view(-1, *x.shape[1:-1], y.shape[-1]).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        weight, largest_w, *kept = ctx.saved_tensors
        options, needs = ctx.options, ctx.needs_input_grad[:3]
        needs_x, needs_w, needs_bias = needs
        grad_x = grad_w = sums = None
        if needs_x or needs_w:
            # in a list, so that the GEMMs can free parts of it on the way
            grad = [quantized_grad(grad_y, options, *needs)]
            sums = grad[0].sums
            columns = None
            if needs_w:
                # the all-gather overlaps with the dgrad GEMM. The gradient's scale is known by now, so no
                # other collective queues behind it
                columns = _columns_of_input(ctx, kept, options.formats.forward)
            w = [options.cache.columns(weight, largest_w, options.formats.forward) if needs_x else None]
            grad_x, grad_w = multiply_backward(grad.pop(), weight, w.pop(), columns, ctx.dtype, options)
        elif needs_bias:
            sums = grad_y.flatten(0, -2).sum(0, dtype=torch.float32)
        return (
            grad_x().view(ctx.shape) if needs_x else None,
            grad_w,
            sums.to(ctx.bias_dtype) if needs_bias else None,
            *(None,) * 4,
        )


def _shared(x: torch.Tensor) -> torch.Tensor | None:
    """The tensor by which other layers may know the values of `x`, as the projections of attention that has
    no norm in front; None if there is none.

    No leaf, which may be the input of a CUDA graph: replays write it, and change no note.
    """
    if torch.compiler.is_compiling():
        return None
    whole = whole_of(x)
    return whole if type(whole) is torch.Tensor and whole.grad_fn is not None else None


def _note_kept(
    x: torch.Tensor, kept: tuple[torch.Tensor, torch.Tensor], largest: torch.Tensor, fmt: Fp8Format
) -> None:
    """Notes on `x` what autograd keeps of it, and its amax. Weakly: where hooks keep it elsewhere, or
    checkpointing not at all, the note must not."""
    with_maxima(note(x, "kept", (fmt, *map(TensorWeakRef, kept))), largest)


def _kept_of(x: torch.Tensor, fmt: Fp8Format) -> tuple[torch.Tensor, ...]:
    """The column-major codes of `x` and their scale, if another layer keeps them; empty if none does."""
    kept_in, *references = noted(x, "kept") or (None,)
    found = tuple(reference() for reference in references if kept_in == fmt)
    return () if any(t is None for t in found) else found


def _columns_of_input(ctx, kept, fmt: Fp8Format):
    """A function that gives the column-major input of all tokens, and its scale."""
    columns, scale = kept if ctx.columns is None else ctx.columns(*kept, fmt)[1:3]
    return gathered_columns(columns, scale, ctx.shape[:-1].numel(), ctx.options)


def gathered_columns(
    columns: torch.Tensor, scale: torch.Tensor, m: int, options: LinearOptions
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """A function that gives the column-major input of `m` tokens a rank for `multiply_backward`. An
    all-gather, where one is needed, starts now."""
    parallel = options.parallel
    if parallel is None or not parallel.gathers_input:
        return lambda: (columns, scale)
    wait = gather_columns(columns, m, parallel.group)
    return lambda: (wait(), scale)


def quantized_grad(
    grad_y: torch.Tensor, options: LinearOptions, rows: bool = True, columns: bool = True, sums: bool = False
) -> Quantized:
    """The gradient of this rank's output columns for all tokens, quantized as asked for, and its column sums
    over this rank's tokens."""
    fmt, parallel, predicted = options.formats.backward, options.parallel, options.grad_scale
    if not (parallel and parallel.scatters_output):
        return fp8_operands(grad_y, fmt, rows, columns, sums=sums, predicted=predicted)[0]
    part = fp8_operands(grad_y, fmt, group=parallel.group, sums=sums, predicted=predicted)[0]
    whole = gather_rows(part.rows, parallel.group)()
    return part._replace(rows=whole, columns=transpose_codes(whole) if columns else None)


def _sum_over_ranks(grad_x: torch.Tensor, parallel: TensorParallel | None):
    """A function that waits for the gradient of this rank's input, summed over the ranks where they hold
    parts of the weight."""
    if parallel and parallel.gathers_input:
        return reduce_scatter(grad_x, parallel.group)
    if parallel and parallel.by_output and parallel.reduce_grad:
        return all_reduce(grad_x, parallel.group)
    return lambda: grad_x


def _check_sizes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises ValueError for shapes that do not belong together, or that FP8 GEMMs do not take."""
    out_features, in_features = weight.shape
    if x.shape[-1] != in_features:
        raise ValueError(f"fp8_linear: the weight takes {in_features} columns, x has {x.shape[-1]}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"fp8_linear: the bias has shape {list(bias.shape)}, of {out_features} outputs")
    if uses_kernels(x) and (out_features % ALIGNMENT or in_features % ALIGNMENT):
        raise ValueError(
            f"FP8 matrix products need sizes that are multiples of {ALIGNMENT}, found a weight of "
            f"{out_features} x {in_features}. Change the layer's sizes or keep it in BF16."
        )


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    formats: LinearFormats | None = None,
    origin: Origin | None = None,
    cache: WeightCache | None = None,
    parallel: TensorParallel | None = None,
    weight_grad_into: Callable[[], torch.Tensor] | None = None,
    x_scale: PredictedScale | None = None,
    grad_scale: PredictedScale | None = None,
) -> torch.Tensor:
    """x W^T + b with FP8 GEMMs.

    Args:
        x: [..., K], BF16 or FP32, which is quantized as it is, under autocast too.
        weight: [N, K]; kept by reference for backward, not copied.
        bias: [N] or None. Its gradient is summed in FP32, by the kernel that quantizes the output's gradient.
        formats: the FP8 formats; E4M3 forward and E5M2 backward by default.
        origin: how to recompute x in backward; without it x is kept as FP8 and one FP32 scale.
        cache: what the caller keeps of the quantized weight; nothing by default.
        parallel: how the layer is split over ranks. What it all-gathers has one scale on all ranks; any other
            tensor has one on each rank. Partial sums of a layer that is split by input are left to the
            caller, except under sequence parallelism, where the first dimension is that of the tokens.
        weight_grad_into: gives, in backward, the tensor [N, K], of any floating-point type, to which the
            weight's gradient is added. Autograd gets zeros that take no memory.
        x_scale, grad_scale: predict the scales of x and of the output's gradient where those are plain
            tensors, which saves a pass over each; the caller's, one each for every call site. Not used while
            a model is compiled.

    Returns [..., N] in the dtype of x, or autocast's. Raises ValueError for shapes that do not belong
    together and, on CUDA, if K or N is not a multiple of 16; RuntimeError on a GPU without FP8 that
    `formats` does not emulate.
    """
    formats = formats or DEFAULT_FORMATS
    require_fp8(x.device, formats.emulate)
    _check_sizes(x, weight, bias)
    device, dtype = x.device.type, x.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.get_autocast_dtype(device):
        # x is quantized as it is, without a cast
        dtype = torch.get_autocast_dtype(device)
    if cache is None or torch.compiler.is_compiling():
        cache = NO_CACHE
    elif cache.keep != "none":
        cache = cache.of(weight)
    if parallel is None and x.numel() == 0:
        # nothing to quantize, and GPUs refuse empty GEMMs; the gradients are zeros. Backward keeps a copy: a
        # view, as of an expert's tokens, would keep all that it is a part of
        return F.linear(x.to(dtype, copy=True), weight.to(dtype), None if bias is None else bias.to(dtype))
    options = LinearOptions(formats, cache, parallel, weight_grad_into, x_scale, grad_scale)
    tokens = x if x.ndim > 1 else x[None]
    y = _Fp8Linear.apply(tokens, weight, bias, origin, options, torch.is_grad_enabled(), dtype)
    return y if x.ndim > 1 else y[0]
