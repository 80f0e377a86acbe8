"""What a tensor's producer knows about it, told to whoever takes it: notes on the tensor object.

- An `Origin` says how to make the tensor again. A norm keeps its input for its own backward; the linear
  layer behind it would keep the norm's output as well. With the origin it keeps nothing.
- Maxima: the largest magnitudes of parts of a tensor, activation or gradient, which its producer found while
  writing it. Whoever quantizes the tensor need not read it for its scale.
- A stand-in: the tensor itself, handed through a node of autograd that would otherwise get one gradient less.

An operation in between loses all of them, one in place or other memory behind the same object voids them,
which costs memory or time and is never wrong. Nothing is noted while a model is compiled, and nothing on
inference tensors, which do not count changes. Nobody sees who writes into a plain tensor through `.data`:
where a user's hook might, `forget_notes`.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Origin(NamedTuple):
    """`columns(*tensors, largest, fmt)` gives the tensor [m, n] again, up to the rounding of what is kept, as
    `Quantized` columns with the scale that belongs to the largest magnitude `largest`; others saturate.
    watched: tensors that it is made from beside those, which users may change, and their versions.
    """

    tensors: tuple[torch.Tensor, ...]
    columns: Callable
    watched: tuple[tuple[torch.Tensor, int], ...] = ()


class _Notes(dict):
    """By name: what is noted, and the `_state` of the tensor at that time. `of_leaf`: of a leaf as well."""

    of_leaf = False

    def __reduce__(self):
        # saved and copied tensors are without notes; every reader of checkpoints knows this class
        return OrderedDict, ()


def _state(x: torch.Tensor) -> tuple[int, int]:
    """What changes with the values of `x`."""
    if type(x) is torch.Tensor:
        return x._version, x.data_ptr()
    try:
        # a deferred tensor has no memory, or others know where it is
        return x._version, x.source.times_exposed
    except AttributeError:
        return x._version, 0


def note(x: torch.Tensor, name: str, value: Any) -> torch.Tensor:
    """`x` itself; `noted` gives `value` as long as this very tensor object is what it is now."""
    if not torch.compiler.is_compiling() and not x.is_inference():
        _notes(x)[name] = value, _state(x)
    return x


def noted(x: torch.Tensor, name: str) -> Any:
    """What was noted on `x` under this name, None if nothing was or `x` has changed since."""
    if torch.compiler.is_compiling():
        return None
    notes = x.__dict__.get("coat_notes")
    if not notes or name not in notes:
        return None
    value, state = notes[name]
    return value if state == _state(x) else None


def forget_notes(x: torch.Tensor) -> None:
    """Removes what is noted on `x`."""
    x.__dict__.pop("coat_notes", None)


def _notes(x: torch.Tensor) -> _Notes:
    notes = x.__dict__.get("coat_notes")
    if type(notes) is not _Notes:
        notes = x.__dict__["coat_notes"] = _Notes()
    return notes


def share_notes(x: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
    """`alias`, another tensor object of the memory and the version counter of `x`, to whose gradient `x`'s is
    equal: from now on what is noted on one of the two is noted on both.

    Except for a leaf, since there might be a stand-in among the notes (`with_stand_in`).
    """
    alias.coat_notes = notes = _notes(x)
    notes.of_leaf = notes.of_leaf or (x.is_leaf and x.requires_grad)
    return alias


def with_origin(x: torch.Tensor, origin: Origin) -> torch.Tensor:
    """`x` itself, with its origin noted."""
    return note(x, "origin", origin)


def origin_of(x: torch.Tensor) -> Origin | None:
    """The origin noted on this very tensor object, if there is one and the tensor, and what it is made from,
    are still the same.
    """
    origin = noted(x, "origin")
    if origin is not None:
        for t, version in origin.watched:
            if t._version != version:
                return None
    return origin


def with_maxima(x: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """`x` itself; `maxima`, FP32, are the largest finite magnitudes of its parts."""
    return note(x, "maxima", maxima)


def maxima_of(x: torch.Tensor) -> torch.Tensor | None:
    """The maxima noted on this very tensor object, if there are any and the tensor is still the same."""
    return noted(x, "maxima")


def with_stand_in(x: torch.Tensor, stand_in: torch.Tensor, holder: torch.Tensor) -> torch.Tensor:
    """`x` itself; who reads `stand_in` in its place reads the same values.

    A leaf has it for the life of `holder` only, another tensor of its graph: that graph ends in the leaf, and
    the two would keep each other alive for ever if nobody took it.
    """
    if not ((x.is_leaf and x.requires_grad) or _notes(x).of_leaf):
        return note(x, "stand_in", stand_in)
    note(holder, "held", stand_in)
    return note(x, "stand_in", weakref.ref(stand_in))


def take_stand_in(x: torch.Tensor) -> torch.Tensor:
    """What is to be read in place of `x`, once: whoever asks next gets `x`."""
    stand_in = noted(x, "stand_in")
    if stand_in is None:
        return x
    del _notes(x)["stand_in"]
    if isinstance(stand_in, weakref.ref):
        stand_in = stand_in()
    return x if stand_in is None else stand_in
