"""Where a tensor can be rebuilt from, so that whoever needs it in backward need not keep it.

A norm keeps its input for its own backward; the linear layer behind it would keep the norm's output as
well. The producer therefore attaches an `Origin` to its output: tensors that it keeps anyway and the
function that makes the output from them again. The consumer saves those (shared, so without cost).
It is a plain attribute of the tensor object: an operation in between loses it, one in place voids it,
which costs memory and is never wrong.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Origin(NamedTuple):
    """`rebuild(*tensors)` gives the tensor again, up to the rounding of what is stored."""

    tensors: tuple[torch.Tensor, ...]
    rebuild: Callable[..., torch.Tensor]
    maxima: torch.Tensor | None = None
    """Largest finite magnitudes of parts of the tensor, FP32, where its producer wrote them."""


def with_origin(y: torch.Tensor, origin: Origin) -> torch.Tensor:
    """`y` itself, with its origin attached."""
    y.coat_origin = origin, y._version
    return y


def origin_of(y: torch.Tensor) -> Origin | None:
    """The origin attached to this very tensor object, if there is one and the tensor is still the same."""
    origin, version = getattr(y, "coat_origin", (None, None))
    return origin if version == y._version else None
