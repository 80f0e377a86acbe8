"""E4M3 operands of weights, and their copies over the micro-batches of one optimizer step.

The weights of one GEMM are a tuple: one weight, or the weights of several layers that read the same input
(queries, keys and values; gate and up), stacked along the rows. Stacked weights have one scale. Each weight
is quantized directly into its rows and columns of the operand, so nothing is concatenated in BF16.

"none" keeps nothing: each forward and each backward quantizes the weight. "fp8" keeps the codes in both
layouts, two bytes per parameter.

A copy is valid for the same parameters: the same objects and memory, the same versions in autograd, and no
step of a torch optimizer since, unless they are frozen. A weight that is computed in each forward (masked,
weight norm, parametrizations) is not cached, because another tensor may later have the same address.
Without gradients (evaluation) nothing is cached, and no copy is used.

A cache also predicts the scale from the last one (`tensorwise/predicted.py`). The prediction changes time,
never a code.
"""

import functools
import itertools

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from coat_kernels.device import uses_kernels
from coat_kernels.fp8 import E4M3
from coat_kernels.tensorwise.operands import fp8_operands
from coat_kernels.tensorwise.predicted import PredictedScale, quantize_predicted
from coat_kernels.tensorwise.quantize import Quantized, empty_operands, launch_quantize, quantize_tensor
from coat_kernels.tensorwise.scale import Scales

WEIGHT_CACHES = ("none", "fp8")
# of one GEMM: [..., k], or several [n_i, k], each n_i a multiple of 16
Weights = tuple[torch.Tensor, ...]

_counter = itertools.count(1)
# epochs of trained and of frozen parameters; a step does not change the latter
_epoch = _epoch_of_frozen = 0


def invalidate_weight_caches() -> None:
    """Makes every layer quantize its weight again. Needed only after a weight was written through `.data` or
    another tensor that shares its memory, outside an optimizer's step: `p.copy_(...)` under `torch.no_grad()`
    is detected, `p.data.copy_(...)` is not."""
    global _epoch, _epoch_of_frozen
    _epoch = _epoch_of_frozen = next(_counter)


def _after_step(*_) -> None:
    global _epoch
    _epoch = next(_counter)


@functools.cache
def _count_optimizer_steps() -> None:
    # ZeRO and Megatron write weights without changing their version, but after a step of a torch optimizer
    register_optimizer_step_post_hook(_after_step)


def can_be_cached(weight: torch.Tensor) -> bool:
    """Whether it is a parameter that counts its changes. Tensors created in inference mode do not."""
    return isinstance(weight, torch.nn.Parameter) and not weight.is_inference()


def rows_of(weight: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """The weights as one matrix [n, k]: a view of a single contiguous weight, else a copy."""
    if others:
        return torch.cat([w.detach() for w in (weight, *others)])
    return weight.detach().reshape(-1, weight.shape[-1]).contiguous()


def _write(weights: Weights, out: Quantized, scales: Scales) -> torch.Tensor | None:
    """`launch_quantize` for each weight, into its part of `out`."""
    found, start = [], 0
    pitch = None if out.columns is None else out.columns.shape[1]
    for weight in weights:
        flat = rows_of(weight)
        end = start + len(flat)
        rows = None if out.rows is None else out.rows[start:end]
        columns = None if out.columns is None else out.columns[:, start:end]
        found.append(launch_quantize(flat, Quantized(rows, columns, out.scale), scales, pitch))
        start = end
    if scales.maxima is not None:
        return None
    return found[0] if len(found) == 1 else torch.cat(found)


class WeightCache:
    """The FP8 copies of the weights of one GEMM. keep: one of `WEIGHT_CACHES`. predicts: also remember the
    last scale.

    Raises ValueError for another value of `keep`.
    """

    def __init__(self, keep: str = "none", predicts: bool = True):
        if keep not in WEIGHT_CACHES:
            raise ValueError(f"weight_cache: expected one of {', '.join(WEIGHT_CACHES)}; found {keep!r}")
        if keep != "none":
            _count_optimizer_steps()
        self.keep, self.predicts = keep, predicts
        self._predicted: PredictedScale | None = None
        self._key, self._amax, self._codes = None, None, None
        # whether copies are written in place, because a CUDA graph contains their addresses
        self._in_place = False
        # strong references: torch refuses to swap the contents of a parameter that has weak references
        self._owners: tuple[torch.nn.Parameter, ...] = ()

    def __reduce__(self):
        return type(self), (self.keep, self.predicts)

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        held = (self._amax, *(self._codes or ()))
        return sum(t.nbytes for t in held if t is not None)

    def of(self, weights: Weights) -> "WeightCache":
        """The cache for these weights: this cache if it keeps nothing, or if each weight, or its base,
        `can_be_cached`; else `NO_CACHE`."""
        if self.keep == "none":
            return self
        owners = tuple(w if w._base is None else w._base for w in weights)
        if not all(map(can_be_cached, owners)):
            return NO_CACHE
        if [*map(id, owners)] != [*map(id, self._owners)]:
            self._owners, self._key, self._codes = owners, None, None
        return self

    def forward(self, weights: Weights, trains: bool = True) -> tuple[Quantized, torch.Tensor]:
        """The weights as [n, k], E4M3, row-major, and their amax. `trains`: a backward may follow."""
        if self.keep == "none" or not trains:
            return self._quantize(weights)
        key = self._key_of(weights)
        if key == self._key:
            return self._codes, self._amax
        self._key = None
        if self._in_place and self._codes is not None:
            self._quantize_predicted(weights, into=(self._codes, self._amax))
        else:
            # frees the old copy before the new one is allocated
            self._amax, self._codes = None, None
            self._codes, self._amax = self._quantize(weights, columns=True)
        self._key = key
        return self._codes, self._amax

    def refresh_for_graph(self, weights: Weights) -> tuple:
        """Updates the copies of `weights`, which are written in place from now on. Returns the cache's part
        of a CUDA graph's key: the cache, and with gradients the addresses of the copies."""
        if self.keep == "none" or not torch.is_grad_enabled():
            return (self,)
        self._in_place = True
        self.forward(weights)
        return self, *(t.data_ptr() for t in (self._amax, *self._codes[:3]))

    def columns(self, weights: Weights, amax: torch.Tensor) -> Quantized:
        """`weights` column-major, as in the forward that found `amax`."""
        return self._requantize(weights, amax, rows=False)

    def rows(self, weights: Weights, amax: torch.Tensor) -> Quantized:
        """`weights` row-major, as in the forward that found `amax`."""
        return self._requantize(weights, amax, rows=True)

    def _requantize(self, weights: Weights, amax: torch.Tensor, rows: bool) -> Quantized:
        if self._codes is not None and self._key == self._key_of(weights):
            return self._codes
        first, *others = weights
        if not others or not uses_kernels(first):
            return quantize_tensor(rows_of(*weights), amax, E4M3, rows=rows, columns=not rows)
        n, k = sum(map(len, weights)), first.shape[1]
        out = empty_operands(n, k, E4M3, amax.device, rows, not rows, False)
        _write(weights, out, Scales.known(amax, out.scale))
        return out

    @staticmethod
    def _key_of(weights: Weights) -> tuple:
        epochs = (_epoch if w.requires_grad else _epoch_of_frozen for w in weights)
        places = ((w.data_ptr(), w._version, w.shape, w.stride()) for w in weights)
        return *epochs, *places

    def prediction(self) -> PredictedScale | None:
        """The prediction of the weights' scale; None if scales are not predicted."""
        if self.predicts and self._predicted is None:
            self._predicted = PredictedScale(E4M3)
        return self._predicted

    def _quantize(self, weights: Weights, columns: bool = False) -> tuple[Quantized, torch.Tensor]:
        x, *others = weights
        if others and uses_kernels(x):
            return self._quantize_predicted(weights, columns)
        x = rows_of(*weights) if others else x
        return fp8_operands(x, E4M3, columns=columns, predicted=self.prediction())

    def _quantize_predicted(
        self, weights: Weights, columns: bool = False, into: tuple[Quantized, torch.Tensor] | None = None
    ) -> tuple[Quantized, torch.Tensor]:
        """The weights row-major, first quantized by kernels with the predicted scale; in new memory, or in
        `into`."""
        write, device = functools.partial(_write, weights), weights[0].device
        n, k = sum(w.shape[:-1].numel() for w in weights), weights[0].shape[-1]
        prediction = self.prediction() or PredictedScale(E4M3)
        return quantize_predicted(write, prediction, (n, k), device, columns=columns, into=into)


# the cache of weights that are not cached
NO_CACHE = WeightCache(predicts=False)
