"""An optional observer of the FP8 codes of linear layers and of the groups that autograd saves; None unless a
step is watched."""

from typing import Protocol

import torch


class Observer(Protocol):
    """The methods are called between the launches of a forward or backward pass. They must not synchronize
    with the device."""

    def codes(self, role: str, prediction: object, codes: torch.Tensor) -> None:
        """A GEMM reads `codes` [m, n], FP8, row-major: the "input" of a layer or its "gradient". `prediction`
        is the layer's `PredictedScale` of this operand, which identifies the operand, or None."""

    def predicted(self, prediction: object, used: torch.Tensor, true: torch.Tensor) -> None:
        """An operand was first quantized with the scale `used`; the correct scale is `true`, FP32 [1]
        each."""

    def saves(self, q: object) -> None:
        """The tensors of `q`, a `Grouped`, are handed to autograd, which may save them."""


current: Observer | None = None
"""The current observer. Code that runs for each GEMM checks it before it calls `observer`, to save a call."""


def observe(observer: Observer | None) -> None:
    """Sets the observer; None removes it."""
    global current
    current = observer


def observer() -> Observer | None:
    """The observer to call now; None while a model is compiled or a CUDA graph is recorded, because the
    recorded graph would repeat the call on every step."""
    if current is None or torch.compiler.is_compiling():
        return None
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return None
    return current
