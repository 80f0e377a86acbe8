"""The two moments of a parameter if the first is stored relative to the second."""

from typing import Any

import torch

from coat_ds.optim.moment import Moment
from coat_ds.optim.options import MOMENTS
from coat_ds.optim.pieces import Pair
from coat_ds.optim.shards import laid_out_like, local
from coat_kernels.codecs import Stored


def pair_up(state: dict[str, Any], p: torch.Tensor) -> None:
    """Links the moments in the state of `p` to each other, if the first is relative to the second."""
    held = tuple(local(state[name]) for name in MOMENTS)
    # the usual case; this runs for every parameter in every step
    if held[0].pair is held[1].pair and held[0].is_beside(held[1]):
        return
    if held[0].pair is None and held[1].pair is None and not held[0].is_relative:
        return
    for name, old, new in zip(MOMENTS, held, paired(*held), strict=True):
        if new is not old:
            state[name] = laid_out_like(p, new)


def paired(first: Moment, second: Moment) -> tuple[Moment, Moment]:
    """Both moments of a parameter, whole and in equal pieces, as a pair if the first is relative.

    Returns them unchanged if they are a pair already. If either was replaced by another moment, the first is
    re-encoded relative to the present second one; its values do not change.
    """
    if not first.is_relative:
        if second.pair is None:
            return first, second
        return first, Moment(second.pieces, second.shape)
    own, pair = first.pair, second.pair
    if own is not None and own is pair and own.other(first.pieces) is second.pieces:
        return first, second
    for (piece, old), (_, _, codec, storage) in zip(first.each_piece(), second.pieces, strict=True):
        # decoded values encode to the same codes, if the second moment has the same (codecs/ratio.py)
        if piece.codec.relative and not (old and old.storage is storage):
            piece.reencode_(old, Stored(codec, storage))
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
            piece.reencode_(Stored(other.codec, other.storage), None)
