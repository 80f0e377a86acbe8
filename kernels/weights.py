"""FP8 copies of weights, kept over the micro-batches of one optimizer step.

"none" keeps nothing: each forward and each backward quantizes the weight. "fp8" keeps the codes in both
layouts, two bytes per parameter.

A copy is valid for one parameter: the same object and memory, the same version in autograd, and no step of a
torch optimizer since, unless the parameter is frozen. No copy is kept of a weight that is computed in each
forward (masked, weight norm, parametrizations), because another tensor may later have the same address.
Without gradients (evaluation) nothing is kept, and no copy is used.

A cache also predicts the scale from the last one (`tensorwise/predicted.py`). The prediction changes time,
never a code.
"""

import functools
import itertools
from collections.abc import Callable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from coat_kernels.device import uses_kernels
from coat_kernels.fp8 import Fp8Format
from coat_kernels.tensorwise.operands import fp8_operands
from coat_kernels.tensorwise.predicted import Attempt, PredictedScale, write_reference
from coat_kernels.tensorwise.quantize import Quantized, launch_quantize, quantize_tensor
from coat_kernels.tensorwise.scale import Scales

WEIGHT_CACHES = ("none", "fp8")

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
def _watch_optimizers() -> None:
    # ZeRO and Megatron write weights without changing their version, but after a step of a torch optimizer
    register_optimizer_step_post_hook(_after_step)


def can_be_kept(weight: torch.Tensor) -> bool:
    """Whether it is a parameter that counts its changes. Tensors created in inference mode do not."""
    return isinstance(weight, torch.nn.Parameter) and not weight.is_inference()


class WeightCache:
    """The FP8 copies of one layer's weight. keep: one of `WEIGHT_CACHES`. predicts: also remember the last
    scale.

    Raises ValueError for another value of `keep`.
    """

    def __init__(self, keep: str = "none", predicts: bool = True):
        if keep not in WEIGHT_CACHES:
            raise ValueError(f"weight_cache: expected one of {', '.join(WEIGHT_CACHES)}; found {keep!r}")
        if keep != "none":
            _watch_optimizers()
        self.keep, self.predicts = keep, predicts
        self._predicted: PredictedScale | None = None
        self._key, self._largest, self._codes = None, None, None
        # whether copies are written in place, because a CUDA graph contains their addresses
        self._stays = False
        # a strong reference: torch refuses to swap the contents of a parameter that has weak references
        self._owner: torch.nn.Parameter | None = None

    def __reduce__(self):
        return type(self), (self.keep, self.predicts)

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        held = (self._largest, *(self._codes or ()))
        return sum(t.nbytes for t in held if t is not None)

    def of(self, weight: torch.Tensor) -> "WeightCache":
        """The cache for this weight: this cache if the weight, or its base, `can_be_kept`; else
        `NO_CACHE`."""
        owner = weight if weight._base is None else weight._base
        if not can_be_kept(owner):
            return NO_CACHE
        if self._owner is not owner:
            self._owner, self._key, self._codes = owner, None, None
        return self

    def forward(
        self, weight: torch.Tensor, fmt: Fp8Format, trains: bool = True
    ) -> tuple[Quantized, torch.Tensor]:
        """`weight` [..., k], as [n, k], row-major, and its amax. `trains`: a backward may follow."""
        if self.keep == "none" or not trains:
            return self._quantize(weight, fmt)
        key = self._key_of(weight, fmt)
        if key == self._key:
            return self._codes, self._largest
        self._key = None
        if self._stays and self._codes is not None:
            into, device = (self._codes, self._largest), self._largest.device
            shape = self._codes.rows.shape
            Attempt(self._producer(weight, fmt), self.prediction(fmt), *shape, device, into=into).finish(None)
        else:
            # frees the old copy before the new one is allocated
            self._largest, self._codes = None, None
            self._codes, self._largest = self._quantize(weight, fmt, columns=True)
        self._key = key
        return self._codes, self._largest

    def stay(self, weight: torch.Tensor, fmt: Fp8Format) -> tuple:
        """The cache's part of a CUDA graph's dependencies: the cache, and with gradients the addresses of the
        copies of `weight`. The copies are updated, and from now on written in place."""
        if self.keep == "none" or not torch.is_grad_enabled():
            return (self,)
        self._stays = True
        self.forward(weight, fmt)
        return self, *(t.data_ptr() for t in (self._largest, *self._codes[:3]))

    def columns(self, weight: torch.Tensor, largest: torch.Tensor, fmt: Fp8Format) -> Quantized:
        """`weight` column-major, as in the forward that found `largest`."""
        return self._again(weight, largest, fmt, rows=False)

    def rows(self, weight: torch.Tensor, largest: torch.Tensor, fmt: Fp8Format) -> Quantized:
        """`weight` row-major, as in the forward that found `largest`."""
        return self._again(weight, largest, fmt, rows=True)

    def _again(self, weight: torch.Tensor, largest: torch.Tensor, fmt: Fp8Format, rows: bool) -> Quantized:
        if self._codes is not None and self._key == self._key_of(weight, fmt):
            return self._codes
        flat = weight.reshape(-1, weight.shape[-1]).contiguous()
        return quantize_tensor(flat, largest, fmt, rows=rows, columns=not rows)

    @staticmethod
    def _key_of(weight: torch.Tensor, fmt: Fp8Format) -> tuple:
        epoch = _epoch if weight.requires_grad else _epoch_of_frozen
        return epoch, weight.data_ptr(), weight._version, weight.shape, weight.stride(), fmt

    def prediction(self, fmt: Fp8Format) -> PredictedScale | None:
        """The prediction of the weight's scale in `fmt`; None if scales are not predicted."""
        if self.predicts and self._predicted is None:
            self._predicted = PredictedScale(fmt)
        return self._predicted

    def _quantize(
        self, weight: torch.Tensor, fmt: Fp8Format, columns: bool = False
    ) -> tuple[Quantized, torch.Tensor]:
        return fp8_operands(weight, fmt, columns=columns, predicted=self.prediction(fmt))

    @staticmethod
    def _producer(weight: torch.Tensor, fmt: Fp8Format) -> Callable[[Quantized, Scales], torch.Tensor | None]:
        """The `write` function of an `Attempt`, which quantizes `weight`."""
        flat = weight.detach().reshape(-1, weight.shape[-1]).contiguous()
        if uses_kernels(flat):
            return functools.partial(launch_quantize, flat)
        return functools.partial(write_reference, flat, fmt=fmt)


# the cache of weights that are not kept
NO_CACHE = WeightCache(predicts=False)
