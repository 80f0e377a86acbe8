"""Facts about a tensor, noted on the tensor object by its producer for its readers.

- An `Origin` defines how to recompute the tensor. A norm saves its input for its own backward. The next
  linear layer would save the norm's output as well. With the origin it saves nothing.
- Maxima: the amax of each part of a tensor, found by its producer while writing it. With maxima, quantizing
  the tensor needs no extra read for the scale.
- A pass-through: x as a norm returns it. The residual add reads it, so both gradients of x meet in the
  norm's backward.

An operation between producer and reader loses all notes. An in-place operation, or new memory for the same
tensor object, makes them void. A lost note costs memory or time; the result is the same. Nothing is noted
while a model is compiled, nor on inference tensors, which have no version counter. A write into a plain
tensor through `.data` is not detected: where a user's hook might do that, call `forget_notes`.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# The names of all notes, with their types, writers and readers. Besides these, only a parameter's
# `coat_gradient_moves` (`coat_kernels.graphs.MOVES_IN_BACKWARD`) is an attribute on a framework's tensor.
# Origin. Written by norms, activations and attention, read by linear layers
ORIGIN = "origin"
# FP32 tensor. Written by the ops that write the noted tensor, read where a tensor is quantized
MAXIMA = "maxima"
# tensor, or a weak reference to it. Written by Megatron's norms, read by the residual add
PASSTHROUGH = "passthrough"
# tensor: what the weak reference under PASSTHROUGH refers to, on the tensor that keeps it alive
HELD = "held"
# weak references to E4M3 codes and their scale. Written and read by linear layers that share an input
SAVED_CODES = "saved_codes"
# weak reference to CompressedTensor. Written and read by FP8 activation checkpointing
COMPRESSED = "compressed"
# Origin, on the base of an output's view. Written by converted attention, read by its output projection
ATTENDED = "attended"
# tables of cosines and sines by token, on the model's: a tuple (Megatron), or a tensor for each batch size.
# For packed sequences (Megatron) the model's and those by token, on the borders. Written and read by the
# fused layer's adapters
TABLES = "tables"
# tuple of the mask to add or None, for each dtype, on a Boolean mask. Written and read by attention
ADDITIVE = "additive"
# documents of packed batches. transformers' adapter: (address of cu_seq_lens_q, PackedMask), on cu_seq_lens_q
# or the model's PackedMask; by length (borders,), on position_ids; by number of documents longer borders, on
# borders. Megatron's: Documents, on cu_seqlens_q or on the mask
BORDERS = "borders"


class Origin(NamedTuple):
    """How to recompute a tensor [m, n].

    `columns(*tensors, amax, fmt)` returns the tensor as column-major `Quantized` codes with the scale of
    the amax `amax`; larger values saturate. It is exact up to the rounding of the saved tensors.
    guarded: other tensors that the result depends on, which users may change, and their versions.
    """

    tensors: tuple[torch.Tensor, ...]
    columns: Callable
    guarded: tuple[tuple[torch.Tensor, int], ...] = ()


class _Notes(dict):
    """From name to a note and the `_state` of the tensor when the note was made. `of_leaf`: whether one of
    the tensors that share these notes is a leaf."""

    of_leaf = False

    def __reduce__(self):
        # saved and copied tensors carry no notes; every reader of checkpoints can load an OrderedDict
        return OrderedDict, ()


def _state(x: torch.Tensor) -> tuple[int, int]:
    """A value that changes when the values of `x` change."""
    # subclasses, such as DTensor, may have no memory of their own
    return x._version, x.data_ptr() if type(x) is torch.Tensor else 0


def note(x: torch.Tensor, name: str | tuple, value: Any) -> torch.Tensor:
    """Notes `value` on `x` and returns `x`. name: one of the constants above, alone or in a tuple with what
    the value depends on. `noted` returns the value as long as this tensor object keeps its
    memory and version."""
    if not torch.compiler.is_compiling() and not x.is_inference():
        _notes(x)[name] = value, _state(x)
    return x


def noted(x: torch.Tensor, name: str | tuple) -> Any:
    """The value noted on `x` under this name; None if there is none or `x` has changed since."""
    if torch.compiler.is_compiling():
        return None
    notes = x.__dict__.get("coat_notes")
    if not notes or name not in notes:
        return None
    value, state = notes[name]
    return value if state == _state(x) else None


def forget_notes(x: torch.Tensor) -> None:
    """Removes all notes from `x`."""
    x.__dict__.pop("coat_notes", None)


def _notes(x: torch.Tensor) -> _Notes:
    notes = x.__dict__.get("coat_notes")
    if type(notes) is not _Notes:
        notes = x.__dict__["coat_notes"] = _Notes()
    return notes


def share_notes(x: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
    """Makes `alias`, another tensor object with the same memory and version counter, share the notes of `x`.
    The gradients of the two must be equal.

    A pass-through on a leaf is held weakly (`with_passthrough`).
    """
    alias.coat_notes = notes = _notes(x)
    notes.of_leaf = notes.of_leaf or (x.is_leaf and x.requires_grad)
    return alias


def whole_of(x: torch.Tensor) -> torch.Tensor | None:
    """The base of the view `x`, if `x` covers all of it in the same order; `x` itself if it is no view;
    else None."""
    base = x._base
    if base is None:
        return x
    same = (base.shape, base.stride(), base.storage_offset()) == (x.shape, x.stride(), x.storage_offset())
    return base if same else None


def with_origin(x: torch.Tensor, origin: Origin) -> torch.Tensor:
    """`x` itself, with its origin noted."""
    return note(x, ORIGIN, origin)


def origin_of(x: torch.Tensor) -> Origin | None:
    """The origin noted on this very tensor object; None if there is none, or if the tensor or the tensors it
    is recomputed from have changed since."""
    origin = noted(x, ORIGIN)
    if origin is not None:
        for t, version in origin.guarded:
            if t._version != version:
                return None
    return origin


def with_maxima(x: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """Notes `maxima` on `x` and returns `x`. maxima: FP32, the amax of each part of `x`."""
    return note(x, MAXIMA, maxima)


def maxima_of(x: torch.Tensor) -> torch.Tensor | None:
    """The maxima noted on this very tensor object; None if there are none or the tensor has changed since."""
    return noted(x, MAXIMA)


def with_passthrough(x: torch.Tensor, passthrough: torch.Tensor, holder: torch.Tensor) -> torch.Tensor:
    """Notes `passthrough`, which has the same values and can be read in place of `x`, on `x`; returns `x`.

    On a leaf the note lives only as long as `holder`, another tensor of the graph. The graph ends in the
    leaf, so otherwise an unused pass-through and the leaf would keep each other alive forever.
    """
    if not ((x.is_leaf and x.requires_grad) or _notes(x).of_leaf):
        return note(x, PASSTHROUGH, passthrough)
    note(holder, HELD, passthrough)
    return note(x, PASSTHROUGH, weakref.ref(passthrough))


def take_passthrough(x: torch.Tensor) -> torch.Tensor:
    """The tensor to read in place of `x`. The pass-through is returned once: the next call returns `x`."""
    passthrough = noted(x, PASSTHROUGH)
    if passthrough is None:
        return x
    del _notes(x)[PASSTHROUGH]
    if isinstance(passthrough, weakref.ref):
        passthrough = passthrough()
    return x if passthrough is None else passthrough
