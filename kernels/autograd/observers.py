"""An optional observer of the FP8 codes of linear layers and of the groups that autograd saves; None unless
`coat_ds.watch` takes a reading."""

from typing import Protocol

import torch


class Observer(Protocol):
    """The methods are called between the launches of a forward or backward pass. They must not synchronize
    with the device."""

    def codes(self, role: str, prediction: object, codes: torch.Tensor) -> None:
        """A GEMM reads `codes` [m, n], FP8, row-major: the "input" of a layer or its "gradient". `prediction`
        is the layer's `PredictedScale` of this operand, which identifies the operand, or None."""

    def saves(self, q: object) -> None:
        """The tensors of `q`, a `Grouped`, are handed to autograd, which may save them."""


_current: Observer | None = None


def observe(observer: Observer | None) -> None:
    """Sets the observer; None removes it."""
    global _current
    _current = observer


# compiled code has none, and no guard that would have it compiled again for a reading
@torch.compiler.assume_constant_result
def current() -> Observer | None:
    """The observer to call now; None while a model is compiled or a CUDA graph is recorded, because the
    recorded graph would repeat the call on every step."""
    if _current is None or torch.compiler.is_compiling():
        return None
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return None
    return _current
