"""One FP8 GEMM with the weights of several layers, stacked along the rows.

Layers that read the same input (queries, keys and values; gate and up) become one GEMM with one matrix of
codes, which has one scale. Each weight is quantized directly into its rows and columns of that matrix, so
nothing is concatenated in BF16. Instead of a joint weight, autograd sees a tensor without memory. Its
gradient is passed to the weights as views.
"""

import functools
from collections.abc import Callable, Sequence

import torch

from coat_kernels.autograd.derivatives import once_differentiable
from coat_kernels.device import uses_kernels
from coat_kernels.fp8 import Fp8Format
from coat_kernels.tensorwise.operands import fp8_operands
from coat_kernels.tensorwise.predicted import Attempt, PredictedScale
from coat_kernels.tensorwise.quantize import Quantized, empty_operands, launch_quantize, quantize_tensor
from coat_kernels.tensorwise.scale import Scales
from coat_kernels.weights import WeightCache, can_be_kept


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *weights):
        ctx.rows = [w.shape[0] for w in weights]
        return weights[0].new_zeros(()).expand(sum(ctx.rows), weights[0].shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        starts = [sum(ctx.rows[:i]) for i in range(len(ctx.rows))]
        return tuple(grad.narrow(0, start, rows) for start, rows in zip(starts, ctx.rows, strict=True))


def _parts(whole: Quantized, weights: Sequence[torch.Tensor]) -> list[Quantized]:
    """The place of each weight's operands in the joint operands."""
    parts, start = [], 0
    for w in weights:
        end = start + w.shape[0]
        rows = None if whole.rows is None else whole.rows[start:end]
        columns = None if whole.columns is None else whole.columns[:, start:end]
        parts.append(Quantized(rows, columns, whole.scale))
        start = end
    return parts


def _write(weights: Sequence[torch.Tensor], out: Quantized, scales: Scales) -> torch.Tensor | None:
    """`launch_quantize` for each weight."""
    parts = zip(weights, _parts(out, weights), strict=True)
    pitch = None if out.columns is None else out.columns.shape[1]
    maxima = [launch_quantize(w.detach().contiguous(), part, scales, pitch) for w, part in parts]
    return None if scales.maxima is not None else torch.cat(maxima)


def quantize_merged(
    weights: Sequence[torch.Tensor], largest: torch.Tensor, fmt: Fp8Format, rows: bool, columns: bool
) -> Quantized:
    """`weights` [n_i, k], stacked, with the amax `largest`, quantized as requested. Each n_i is a multiple of
    16."""
    if not uses_kernels(weights[0]):
        return quantize_tensor(torch.cat([w.detach() for w in weights]), largest, fmt, rows, columns)
    n, k = sum(w.shape[0] for w in weights), weights[0].shape[1]
    out = empty_operands(n, k, fmt, weights[0].device, rows, columns, False)
    _write(weights, out, Scales(None, None, largest, largest.numel(), None, out.scale))
    return out


class MergedCache(WeightCache):
    """`WeightCache` for the weights of several layers that share one GEMM. Its methods take the tuple of
    weights instead of one weight."""

    def of(self, weights: tuple[torch.Tensor, ...]) -> "_Bound":
        """The cache with these weights, for one GEMM with `merged(weights)`."""
        if self.keep == "none":
            return _Bound(self, weights)
        if not all(map(can_be_kept, weights)):
            return _Bound(_UNKEPT, weights)
        owners = self._owner or ()
        if len(owners) != len(weights) or any(o is not w for o, w in zip(owners, weights, strict=True)):
            self._owner, self._key, self._codes = weights, None, None
        return _Bound(self, weights)

    def _again(self, weights, largest: torch.Tensor, fmt: Fp8Format, rows: bool) -> Quantized:
        if self._codes is not None and self._key == self._key_of(weights, fmt):
            return self._codes
        return quantize_merged(weights, largest, fmt, rows, not rows)

    @staticmethod
    def _key_of(weights, fmt: Fp8Format) -> tuple:
        return tuple(WeightCache._key_of(w, fmt) for w in weights)

    def _quantize(self, weights, fmt: Fp8Format, columns: bool = False) -> tuple[Quantized, torch.Tensor]:
        if not uses_kernels(weights[0]):
            return fp8_operands(torch.cat([w.detach() for w in weights]), fmt, columns=columns)
        predicted = self.prediction(fmt) or PredictedScale(fmt)
        n, k = sum(w.shape[0] for w in weights), weights[0].shape[1]
        write = self._producer(weights, fmt)
        return Attempt(write, predicted, n, k, weights[0].device, True, columns).finish(None)

    @staticmethod
    def _producer(weights, fmt: Fp8Format) -> Callable[[Quantized, Scales], torch.Tensor | None]:
        if uses_kernels(weights[0]):
            return functools.partial(_write, weights)
        return WeightCache._producer(torch.cat([w.detach() for w in weights]), fmt)


class _Bound:
    """A `MergedCache` with its weights, used instead of the `WeightCache` of a joint weight."""

    def __init__(self, cache: MergedCache, weights: tuple[torch.Tensor, ...]):
        self.cache, self.weights, self.keep = cache, weights, cache.keep
        # tensors created in inference mode do not count changes
        self.versions = [None if w.is_inference() else w._version for w in weights]

    def of(self, weight: torch.Tensor) -> "_Bound":
        return self

    def forward(self, weight, fmt: Fp8Format, trains: bool = True) -> tuple[Quantized, torch.Tensor]:
        return self.cache.forward(self.weights, fmt, trains)

    def stay(self, weight, fmt: Fp8Format) -> tuple:
        return self.cache.stay(self.weights, fmt)

    def columns(self, weight, largest: torch.Tensor, fmt: Fp8Format) -> Quantized:
        return self.cache.columns(self._unchanged(), largest, fmt)

    def rows(self, weight, largest: torch.Tensor, fmt: Fp8Format) -> Quantized:
        return self.cache.rows(self._unchanged(), largest, fmt)

    def _unchanged(self) -> tuple[torch.Tensor, ...]:
        for w, version in zip(self.weights, self.versions, strict=True):
            if version is not None and w._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: a weight of {list(w.shape)} is at version {w._version}; expected version "
                    f"{version}."
                )
        return self.weights


# for weights that are computed in each forward
_UNKEPT = MergedCache(predicts=False)


def merged(weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The stand-in for `weights` [n_i, k], stacked, in a GEMM whose cache is `MergedCache.of(weights)`: zeros
    [sum of n_i, k] without memory. Its gradient goes to the weights."""
    return _Merged.apply(*weights)
