"""The storage of a moment: pieces of codes with their scales and exponents; and the operands of a step."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from coat_kernels.codecs import GROUP_SIZE, Codec, Encoded, Storage


class Piece(NamedTuple):
    """Elements `begin` to `end`, exclusive, of a flat moment, in groups that are counted from `begin`."""

    begin: int
    end: int
    codec: Codec
    storage: Storage

    def reencode_(self, old: Encoded | None, new: Encoded | None) -> None:
        """Re-encodes a first moment from relative to `old` to relative to `new`; its values do not change. It
        works in parts: in FP32 the moment may not fit into free memory."""
        before, after = (itertools.repeat(None) if x is None else x.parts() for x in (old, new))
        for (_, own), a, b in zip(self.storage.parts(), before, after, strict=False):
            values = self.codec.decode(own, relative_to=a)
            write(own, self.codec.encode(values, relative_to=b))


Pieces = tuple[Piece, ...]
# one codec for all elements, or the first element and the codec of each piece, ascending from 0
MomentLayout = Codec | Sequence[tuple[int, Codec]]


@dataclasses.dataclass(slots=True, eq=False)
class Pair:
    """The storage of two moments, the first relative to the second.

    All views of either moment hold the pair, so that they notice when a moment is replaced.
    """

    first: Pieces
    second: Pieces
    shared: bool
    """Whether `second` belongs to a moment. Otherwise it is a copy that belongs to the first moment."""

    def other(self, pieces: Pieces) -> Pieces | None:
        """The pieces of the other moment; None for pieces that are no longer in the pair."""
        if pieces is self.first:
            return self.second
        return self.first if pieces is self.second else None


def made_of(pieces: Pieces, make: Callable[[torch.Tensor], torch.Tensor]) -> Pieces:
    """Pieces that store `make(t)` for each stored tensor t."""
    return tuple(piece._replace(storage=Storage(*map(make, piece.storage))) for piece in pieces)


def overwrite(old: Encoded, made: Storage, other: Encoded | None, non_blocking: bool = False) -> None:
    """Overwrites `old` by `made`. If `other` is a first moment relative to this one, it is re-encoded, so
    that its values do not change."""
    if other is None or not other.codec.relative or old.codec.relative:
        write(old.storage, made, non_blocking)
        return
    parts = zip(*(x.parts() for x in (old.storage, made, other.storage)), strict=True)
    for (_, into), (_, new), (_, first) in parts:
        second = Encoded(old.codec, into)
        values = other.codec.decode(first, relative_to=second)
        write(into, new, non_blocking)
        write(first, other.codec.encode(values, relative_to=second))


def write(into: Storage, new: Storage, non_blocking: bool = False) -> None:
    for old, t in zip(into, new, strict=True):
        old.copy_(t, non_blocking=non_blocking)


def only_groups(old: Storage, new: Storage, touched: torch.Tensor) -> Storage:
    """`new` for groups with a `touched` element, `old` for all other groups."""
    groups = F.pad(touched, (0, -touched.numel() % GROUP_SIZE)).view(-1, GROUP_SIZE).any(1)
    elements = groups.repeat_interleave(GROUP_SIZE)[: touched.numel()]
    return Storage(
        torch.where(elements, new.codes, old.codes),
        *(torch.where(groups, n, o) if n.numel() else n for n, o in zip(new[1:], old[1:], strict=True)),
    )


class Operands(NamedTuple):
    """The tensors that a launch reads and writes for one piece of a parameter."""

    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: Piece
    exp_avg_sq: Piece
    step: torch.Tensor
    remainder: torch.Tensor | None

    def part(self, begin: int, end: int) -> "Operands":
        """The elements from `begin`, a multiple of `GROUP_SIZE`, to `end`, exclusive."""
        first, last = begin // GROUP_SIZE, -(-end // GROUP_SIZE)

        def cut(x: torch.Tensor) -> torch.Tensor:
            return x.view(-1)[begin:end]

        def groups(piece: Piece) -> Piece:
            return piece._replace(storage=piece.storage.groups(first, last))

        return self._replace(
            param=cut(self.param),
            grad=cut(self.grad),
            exp_avg=groups(self.exp_avg),
            exp_avg_sq=groups(self.exp_avg_sq),
            remainder=None if self.remainder is None else cut(self.remainder),
        )

    @property
    def states(self) -> list[torch.Tensor]:
        extra = () if self.remainder is None else (self.remainder,)
        return [*self.exp_avg_sq.storage, *self.exp_avg.storage, *extra]

    def replaced(self, by: dict[int, torch.Tensor]) -> "Operands":
        """The same, with the tensor `by[id(x)]` in place of each tensor x whose id is there."""

        def of(x: torch.Tensor | None):
            return by.get(id(x), x)

        def stored(piece: Piece) -> Piece:
            return piece._replace(storage=Storage(*map(of, piece.storage)))

        first, second = stored(self.exp_avg), stored(self.exp_avg_sq)
        return Operands(of(self.param), of(self.grad), first, second, self.step, of(self.remainder))
