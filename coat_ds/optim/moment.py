"""The tensor in `optimizer.state[p]["exp_avg"]`: FP32 to every caller, codes inside.

Frameworks link, trim, convert and offload any state tensor of the parameter's shape. They would silently
corrupt a state whose shape or values differ from the moment's. So `Moment` has the moment's shape, is FP32,
reads as the moment's values, and quantizes what is written into it.

Relative codes, those of `ratio8`, store exp_avg divided by the square root of the stored exp_avg_sq. Decoding
them reads the second moment. When the second moment is written, through any view, the first is re-encoded, so
that its values do not change. The owners of the pieces:

    state[p]    `pair_up` links both moments: they hold one `Pair` with the pieces of both, as do all their
                views. Each moment owns its pieces.
    a copy      of a first moment (`clone`, `to`, pickled codes) holds a `Pair` of its own, not shared. It
                owns a copy of the second moment's pieces, too.
    no pair     relative codes are relative to roots of 1.
"""

import itertools
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Self

import torch

from coat_ds.optim.options import MOMENTS
from coat_ds.optim.pieces import MomentLayout, Pair, Piece, Pieces, made_of, only_groups, overwrite, write
from coat_ds.optim.recover import recover_
from coat_ds.optim.saving import DecodedStorage, decodes_on_save
from coat_ds.optim.shards import laid_out_like, local
from coat_ds.optim.tensor import StoredTensor, differ
from coat_kernels.codecs import AT_ONCE, GROUP_SIZE, Codec, Encoded, Storage

aten = torch.ops.aten


class Moment(StoredTensor):
    """An FP32 tensor that is stored by codecs: a window of consecutive elements of its pieces.

    Views of consecutive elements are windows, which write through; other views are refused.
    `copy_` encodes; `clone`, `to`, `zeros_like`, `empty_like`, `pin_memory` and `deepcopy` of a whole moment
    stay compressed. Any other op works on the decoded FP32 values and, if it is an in-place op, encodes the
    groups that it changed. Pickling gives a plain FP32 CPU tensor.

    pieces: the stored tensors, in order: codes [n], and scale and exponent [ceil(n / GROUP_SIZE)] or empty;
        no group crosses from one piece into the next
    start, shape: the window, in elements of all pieces
    pair: the pair of both moments of the parameter, if the first is relative to the second
    """

    @staticmethod
    def __new__(cls, pieces: Pieces, shape, start: int = 0, pair: Pair | None = None):
        device = pieces[0].storage.codes.device
        made = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=torch.float32, device=device)
        # C++ code that reads its data pointer gets an error instead of a null pointer
        torch._C._set_throw_on_mutable_data_ptr(made)
        return made

    def __init__(self, pieces: Pieces, shape, start: int = 0, pair: Pair | None = None):
        self.pieces, self.start, self.pair = pieces, start, pair

    @classmethod
    def zeros(cls, shape, piece_layout: MomentLayout, device: torch.device | str) -> Self:
        """A moment of zeros."""
        shape = torch.Size(shape)
        if isinstance(piece_layout, Codec):
            piece_layout = ((0, piece_layout),)
        ends = (*(begin for begin, _ in piece_layout[1:]), shape.numel())
        pieces = tuple(
            Piece(begin, end, codec, codec.zeros(end - begin, device=device))
            for (begin, codec), end in zip(piece_layout, ends, strict=True)
        )
        return cls(pieces, shape)

    def recover_(self, x: torch.Tensor, worker: torch.device | None = None) -> bool:
        """Writes `x` (same number of elements, any floating point, on any device), in codes that decode to
        exactly `x` where such codes exist. Returns whether they exist for all groups.

        worker: the device that encodes, part by part; by default the moment's.
        """
        exact, x = True, x.reshape(-1)
        for piece, other in self.paired_pieces():
            into, values = Encoded(piece.codec, piece.storage), x[piece.begin : piece.end]
            exact &= recover_(into, values, other, worker)
        return exact

    def relative_to(self, second: "Moment | None") -> Self:
        """This first moment, its relative codes now relative to `second`, with shared storage. Without such
        codes, or without a second moment, this moment.

        `second` gets no link to it; `pair_up` makes that link.
        """
        if second is None or not self.has_relative_codes:
            return self
        return type(self)(self.pieces, self.shape, pair=Pair(self.pieces, second.pieces, shared=True))

    def is_relative_to(self, second: "Moment") -> bool:
        """Whether this is the first moment of a pair whose second moment is `second`."""
        return self.pair is not None and self.pair.first is self.pieces and self.pair.second is second.pieces

    def unpaired(self) -> Self:
        """This moment in no pair, with the same storage: its codes without the second moment."""
        return type(self)(self.pieces, self.shape, self.start)

    @property
    def has_relative_codes(self) -> bool:
        """Whether any of its codes is relative to a second moment."""
        return any(piece.codec.relative for piece in self.pieces)

    def paired_pieces(self) -> Iterator[tuple[Piece, Encoded | None]]:
        """Each piece, with the stored piece of the other moment if there is a pair."""
        other = None if self.pair is None else self.pair.other(self.pieces)
        for i, piece in enumerate(self.pieces):
            yield piece, None if other is None else Encoded(other[i].codec, other[i].storage)

    @property
    def piece_layout(self) -> tuple[tuple[int, Codec], ...]:
        """First element and codec of each piece."""
        return tuple((piece.begin, piece.codec) for piece in self.pieces)

    @property
    def is_whole(self) -> bool:
        """Whether the window covers all elements of the pieces."""
        return self.numel() == self.pieces[-1].end

    def decode(self, device: torch.device | str | None = None) -> torch.Tensor:
        """The values as a plain tensor on `device`, by default the moment's, which may lack the memory."""
        x = torch.empty(self.numel(), dtype=torch.float32, device=device or self.device)
        # states in pinned memory belong to a GPU, which decodes them many times as fast
        pinned = self.device.type == "cpu" and any(t.is_pinned() for t in self.pieces[0].storage)
        worker = torch.device("cuda") if pinned else self.device
        for codec, part, other, within, where in self._parts():
            other = None if other is None else other.to(worker)
            x[where] = codec.decode(part.to(worker), relative_to=other)[within].to(x.device)
        return x.view(self.shape)

    def encode_(self, x: torch.Tensor, only_changed: bool = False) -> Self:
        """Encodes `x` (same number of elements, any floating point, on any device) into the stored tensors.

        only_changed: groups whose values do not change keep their codes.
        """
        x = x.reshape(-1)
        for codec, part, other, within, where in self._parts():
            values = _plain(x[where]).to(self.device, torch.float32)
            if only_changed or values.numel() < part.codes.numel():
                # the neighbours in the first and last group are re-encoded together with the new values
                before = codec.decode(part, relative_to=other)
                whole = before.clone()
                whole[within] = values
                values = whole
            made = codec.encode(values, relative_to=other)
            if only_changed:
                made = only_groups(part, made, differ(values, before))
            overwrite(Encoded(codec, part), made, other)
        return self

    def with_layout(self, piece_layout: MomentLayout, second: "Moment | None" = None) -> Self:
        """The same values, except for rounding, in other pieces; pieces are converted one by one.

        second: the second moment, if this is a first moment that may be relative to it.
        """
        return type(self).zeros(self.shape, piece_layout, self.device).relative_to(second).encode_(self)

    def _parts(self) -> Iterator[tuple[Codec, Storage, Encoded | None, slice, slice]]:
        """The window in parts of a few million elements: in FP32 the whole may not fit into free memory.

        Yields the codec, the stored part of a piece in whole groups, the same part of the other moment of the
        pair, the slice of this part that is in the window, and the slice of the window that is this part.
        """
        stop = self.start + self.numel()
        first = bisect_right(self.pieces, self.start, key=lambda piece: piece.begin) - 1
        for (begin, end, codec, storage), other in itertools.islice(self.paired_pieces(), first, None):
            if max(begin, self.start) >= min(end, stop):
                return
            # a multiple of every group size, counted from the start of the piece
            start = begin + max(self.start - begin, 0) // AT_ONCE * AT_ONCE
            for at in range(start, min(end, stop), AT_ONCE):
                low, high = max(at, self.start), min(at + AT_ONCE, end, stop)
                g, h = (low - begin) // GROUP_SIZE, -(-(high - begin) // GROUP_SIZE)
                same_of_other = None if other is None else Encoded(other.codec, other.storage.groups(g, h))
                a = begin + g * GROUP_SIZE
                within, where = slice(low - a, high - a), slice(low - self.start, high - self.start)
                yield codec, storage.groups(g, h), same_of_other, within, where

    def window(self, shape, offset: int = 0) -> Self:
        return type(self)(self.pieces, shape, self.start + offset, self.pair)

    def _like(self, make) -> Self:
        """A whole moment of the same shape that stores `make(t)` for each stored tensor t.

        A relative first moment also gets a copy of its second moment.
        """
        pieces, pair = made_of(self.pieces, make), None
        if self.has_relative_codes and self.pair is not None:
            pair = Pair(pieces, made_of(self.pair.second, make), shared=False)
        return type(self)(pieces, self.shape, pair=pair)

    def stored(self) -> Iterator[torch.Tensor]:
        """All stored tensors, including a relative moment's own copy of its second moment."""
        copied = () if self.pair is None or self.pair.shared else self.pair.second
        pieces = self.pieces + copied
        return itertools.chain.from_iterable(piece.storage for piece in pieces)

    def __repr__(self):
        codecs = ", ".join(dict.fromkeys(piece.codec.name for piece in self.pieces))
        return f"Moment(shape={tuple(self.shape)}, codec={codecs}, device={self.device})"

    def __reduce_ex__(self, protocol):
        if not decodes_on_save():
            return self.decode("cpu").__reduce_ex__(protocol)
        storage = torch.storage.TypedStorage(
            wrap_storage=DecodedStorage(self), dtype=self.dtype, _internal=True
        )
        # the device of the values that the file names
        storage._fake_device = "cpu"
        arguments = (storage, 0, tuple(self.shape), self.stride(), False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments


def pair_up(state: dict[str, Any], p: torch.Tensor) -> None:
    """Links the moments in the state of `p` to each other, if the first is relative to the second."""
    held = tuple(local(state[name]) for name in MOMENTS)
    # the usual case; this runs for every parameter in every step
    if held[0].pair is held[1].pair and held[0].is_relative_to(held[1]):
        return
    if held[0].pair is None and held[1].pair is None and not held[0].has_relative_codes:
        return
    for name, old, new in zip(MOMENTS, held, paired(*held), strict=True):
        if new is not old:
            state[name] = laid_out_like(p, new)


def paired(first: Moment, second: Moment) -> tuple[Moment, Moment]:
    """Both moments of a parameter, whole and in equal pieces, as a pair if the first is relative.

    Returns them unchanged if they are a pair already. If either was replaced by another moment, the first is
    re-encoded relative to the present second one; its values do not change.
    """
    if not first.has_relative_codes:
        if second.pair is None:
            return first, second
        return first, Moment(second.pieces, second.shape)
    own, pair = first.pair, second.pair
    if own is not None and own is pair and own.other(first.pieces) is second.pieces:
        return first, second
    for (piece, old), (_, _, codec, storage) in zip(first.paired_pieces(), second.pieces, strict=True):
        # decoded values encode to the same codes, if the second moment has the same (codecs/ratio.py)
        if piece.codec.relative and not (old and old.storage is storage):
            piece.reencode_(old, Encoded(codec, storage))
    own = own if own is not None and own.first is first.pieces else Pair(first.pieces, (), shared=True)
    # views of the second moment hold its pair and must find the new first moment in it
    pair = pair if pair is not None and pair.second is second.pieces else own
    if pair.first is not first.pieces:
        _set_free(pair)
    for x in (own, pair):
        x.first, x.second, x.shared = first.pieces, second.pieces, True

    def joined(x: Moment) -> Moment:
        return Moment(x.pieces, x.shape, pair=pair)

    return joined(first), joined(second)


def _set_free(pair: Pair) -> None:
    """Re-encodes the first moment of a pair without a second one, because it is decoded that way outside the
    pair."""
    for piece, other in zip(pair.first, pair.second, strict=True):
        if piece.codec.relative:
            piece.reencode_(Encoded(other.codec, other.storage), None)


def as_plain(value: torch.Tensor | None, p: torch.Tensor) -> torch.Tensor:
    """A moment of `p` as a plain FP32 tensor, or a DTensor of plain shards; zeros if there is none yet."""
    if value is None:
        return laid_out_like(p, torch.zeros(local(p).shape, dtype=torch.float32, device=p.device))
    held = local(value)
    return laid_out_like(p, held.decode()) if isinstance(held, Moment) else value.float()


def _plain(x):
    return x.decode() if isinstance(x, StoredTensor) else x


def _whole(make):
    """A handler for whole moments that stay FP32; the decoded values take other calls."""

    def handler(x, *, dtype=None, **how):
        return make(x, **how) if x.is_whole and dtype in (None, torch.float32) else NotImplemented

    return handler


def _to_copy(x, device=None, non_blocking=False, **rest):
    return x._like(lambda t: t.to(device=device, non_blocking=non_blocking, copy=True))


def _empty_like(x, device=None, pin_memory=False, **rest):
    return x._like(lambda t: torch.empty_like(t, device=device, pin_memory=pin_memory or False))


def _zeros_like(x, device=None, pin_memory=False, **rest):
    if pin_memory:
        return NotImplemented
    made = Moment.zeros(x.shape, x.piece_layout, device or x.device)
    if x.has_relative_codes and x.pair is not None:
        second = tuple(
            piece._replace(storage=piece.codec.zeros(piece.end - piece.begin, device=made.device))
            for piece in x.pair.second
        )
        made.pair = Pair(made.pieces, second, shared=False)
    return made


def _copy_(x, source, non_blocking=False):
    same = isinstance(source, Moment) and source.piece_layout == x.piece_layout
    if same and x.is_whole and source.is_whole and source.shape == x.shape and _may_take_codes(x, source):
        if x.has_relative_codes and x.pair is not None:
            for old, new in zip(x.pair.second, source.pair.second, strict=True):
                write(old.storage, new.storage, non_blocking)
        for (piece, other), (*_, new) in zip(x.paired_pieces(), source.pieces, strict=True):
            overwrite(Encoded(piece.codec, piece.storage), new, other, non_blocking)
        return x
    # writing the stored values changes no codes
    return x.encode_(_plain(source).expand(x.shape), only_changed=True)


def _may_take_codes(x: Moment, source: Moment) -> bool:
    """Whether the codes of `source` have the same meaning in `x`, which has the same pieces and codecs."""
    if not x.has_relative_codes:
        return True
    if x.pair is None or source.pair is None:
        return x.pair is source.pair
    codecs, others = ([piece.codec for piece in pieces] for pieces in (x.pair.second, source.pair.second))
    return not x.pair.shared and codecs == others


Moment.handlers = {
    aten.clone.default: _whole(lambda x, **rest: x._like(torch.clone)),
    aten._to_copy.default: _whole(_to_copy),
    aten.empty_like.default: _whole(_empty_like),
    aten.zeros_like.default: _whole(_zeros_like),
    aten.copy_.default: _copy_,
    aten.is_pinned.default: lambda x, device=None: all(t.is_pinned() for t in x.stored() if t.numel()),
    aten._pin_memory.default: _whole(lambda x, **rest: x._like(lambda t: t.pin_memory())),
}
