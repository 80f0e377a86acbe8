"""Who is told of the FP8 codes of linear layers while a step is watched. As a rule nobody is."""

from typing import Protocol

import torch


class Observer(Protocol):
    """Both are called between the launches of a forward or backward pass. They must not wait for the
    device."""

    def codes(self, role: str, prediction: object, codes: torch.Tensor) -> None:
        """A product takes `codes` [m, n], FP8, row-major: the "input" of a layer or its "gradient".
        `prediction` is the layer's `PredictedScale` of this operand, by which it is known, or None."""

    def predicted(self, prediction: object, used: torch.Tensor, true: torch.Tensor) -> None:
        """An operand was first quantized with the scale `used`; `true` is the right one, FP32 [1] each."""


current: Observer | None = None
"""Who is told, or nobody. Asked before `observer`, which costs a call, in code that runs for each product."""


def observe(observer: Observer | None) -> None:
    """From now on tells `observer`, or nobody."""
    global current
    current = observer


def observer() -> Observer | None:
    """Who is to be told now. Nobody while a model is compiled or a CUDA graph is recorded, which would repeat
    it on every step."""
    if current is None or torch.compiler.is_compiling():
        return None
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return None
    return current
