"""What a tensor's producer knows about it, told to whoever takes it: notes on the tensor object.

- An `Origin` says how to make the tensor again. A norm keeps its input for its own backward; the linear
  layer behind it would keep the norm's output as well. With the origin it keeps nothing.
- Maxima: the largest magnitudes of parts of a tensor, activation or gradient, which its producer found while
  writing it. Whoever quantizes the tensor need not read it for its scale.
- A stand-in: the tensor itself, handed through a node of autograd that would otherwise get one gradient less.

An operation in between loses all of them, one in place voids them, which costs memory or time and is never
wrong. Nothing is noted while a model is compiled.
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
        _notes(x)[name] = (value, x._version)
    return x


def _attached(x: torch.Tensor, name: str):
    if torch.compiler.is_compiling():
        return None
    value, version = vars(x).get("coat_notes", {}).get(name, (None, None))
    return None if value is None or version != x._version else value


def _notes(x: torch.Tensor) -> dict:
    return vars(x).setdefault("coat_notes", {})


def share_notes(x: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
    """`alias`, another tensor object of the memory and the version counter of `x`, to whose gradient `x`'s is
    equal: from now on what is noted on one of the two is noted on both.
    """
    alias.coat_notes = _notes(x)
    return alias


def with_origin(x: torch.Tensor, origin: Origin) -> torch.Tensor:
    """`x` itself, with its origin noted."""
    return _attach(x, "origin", origin)


def origin_of(x: torch.Tensor) -> Origin | None:
    """The origin noted on this very tensor object, if there is one and the tensor is still the same."""
    return _attached(x, "origin")


def with_maxima(x: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """`x` itself; `maxima`, FP32, are the largest finite magnitudes of its parts."""
    return _attach(x, "maxima", maxima)


def maxima_of(x: torch.Tensor) -> torch.Tensor | None:
    """The maxima noted on this very tensor object, if there are any and the tensor is still the same."""
    return _attached(x, "maxima")


def with_stand_in(x: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
    """`x` itself; who reads `stand_in` in its place reads the same values."""
    return _attach(x, "stand_in", stand_in)


def take_stand_in(x: torch.Tensor) -> torch.Tensor:
    """What is to be read in place of `x`, once: whoever asks next gets `x`."""
    stand_in = _attached(x, "stand_in")
    if stand_in is None:
        return x
    del _notes(x)["stand_in"]
    return stand_in
