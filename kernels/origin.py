"""What a tensor's producer knows about it, told to whoever takes it: plain attributes of the tensor object.

- An `Origin` says how to make the tensor again. A norm keeps its input for its own backward; the linear
  layer behind it would keep the norm's output as well. With the origin it keeps nothing.
- Maxima: the largest magnitudes of parts of a tensor, activation or gradient, which its producer found while
  writing it. Whoever quantizes the tensor need not read it for its scale.

An operation in between loses both, one in place voids them, which costs memory or time and is never wrong.
Nothing is attached while a model is compiled.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Origin(NamedTuple):
    """`columns(*tensors, largest, fmt)` gives the tensor [m, n] again, up to the rounding of what is kept, as
    `Quantized` columns with the scale that belongs to the largest magnitude `largest`; others saturate.
    """

    tensors: tuple[torch.Tensor, ...]
    columns: Callable


def _attach(x: torch.Tensor, name: str, value) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        setattr(x, name, (value, x._version))
    return x


def _attached(x: torch.Tensor, name: str):
    if torch.compiler.is_compiling():
        return None
    value, version = getattr(x, name, (None, None))
    return value if version == x._version else None


def with_origin(x: torch.Tensor, origin: Origin) -> torch.Tensor:
    """`x` itself, with its origin attached."""
    return _attach(x, "coat_origin", origin)


def origin_of(x: torch.Tensor) -> Origin | None:
    """The origin attached to this very tensor object, if there is one and the tensor is still the same."""
    return _attached(x, "coat_origin")


def with_maxima(x: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """`x` itself; `maxima`, FP32, are the largest finite magnitudes of its parts."""
    return _attach(x, "coat_maxima", maxima)


def maxima_of(x: torch.Tensor) -> torch.Tensor | None:
    """The maxima attached to this very tensor object, if there are any and the tensor is still the same."""
    return _attached(x, "coat_maxima")
