"""The very codes of moments, from their FP32 values alone.

A checkpoint of Megatron holds moments as FP32 tensors and nothing beside them. Encoding decoded values again
does not give the same codes: the exponent of a group comes from its smallest magnitude, which the first
encoding rounded. But that rounding moves it by a few steps at most, and its largest magnitude is stored as it
is. So the steps around are tried, and the one that gives the very same values again is the right one: it is
what was stored, or stands for the same numbers, which is all that the next step reads.
"""

import math
from collections.abc import Iterator

import torch

from coat_ds.state import Layout, Moment, Piece
from coat_ds.state_dict import SAME_VALUE
from coat_kernels.codecs import Storage

# how far a rounded smallest magnitude moves an exponent e: E4M3 holds it with an error of at most a third
# (stochastically rounded from 2.29 to 3 of its smallest steps), 0.4 of the 16.6 octaves that groups are
# stretched to; E5M2 and log8 with less. To that come a rounding of each exponent.
RELATIVE, ABSOLUTE = 0.03, 2


def recovered(values: torch.Tensor, layout: Layout, group_size: int) -> tuple[Moment, bool]:
    """`values` (any shape, FP32) as a moment, in the codes that decode to them if there are such.

    Returns also whether all groups do. Groups that were decoded on another device differ by FP32 roundings
    and get their codes all the same; others are encoded as new ones.
    """
    moment = Moment.encoded(values, layout, group_size)
    flat = values.reshape(-1)
    exact = [_recover_(piece, flat[piece.begin : piece.end], group_size) for piece in moment.pieces]
    return moment, all(exact)


def _recover_(piece: Piece, values: torch.Tensor, group_size: int) -> bool:
    """Exchanges the groups of `piece` whose values are not `values` for those that are, where there are."""
    best = _errors(piece, piece.storage, values, group_size)
    for like in _neighbours(piece):
        if not best.any():
            break
        tried = piece.codec.encode(values, group_size, like)
        errors = _errors(piece, tried, values, group_size)
        better = (errors < best) & (errors <= SAME_VALUE)
        best = torch.where(better, errors, best)
        each = better.repeat_interleave(group_size)[: values.numel()]
        for mask, old, new in zip((each, better, better), piece.storage, tried, strict=True):
            if old.numel():
                old.copy_(torch.where(mask, new, old))
    return not best.any()


def _neighbours(piece: Piece) -> Iterator[Storage]:
    """Scales and exponents that `values` may have been stored with, the likeliest first."""
    codec, first = piece.codec, Storage(*(t.clone() for t in piece.storage))
    if codec.has_exponent:
        center = first.exponent.int()
        reach = (RELATIVE * center).ceil().int() + ABSOLUTE
        for distance in range(1, math.ceil(RELATIVE * 255) + ABSOLUTE + 1):
            for sign in (1, -1):
                moved = center + sign * reach.clamp_max(distance)
                yield first._replace(exponent=moved.clamp(1, 255).to(torch.uint8))
    elif codec.has_scale:
        # the largest magnitude times a constant, rounded twice on its way
        for towards in (torch.inf, 0.0):
            yield first._replace(scale=first.scale.nextafter(torch.full_like(first.scale, towards)))


def _errors(piece: Piece, storage: Storage, values: torch.Tensor, group_size: int) -> torch.Tensor:
    """The largest relative error of each group, FP32 [groups]; infinite where one of two is zero or NaN."""
    decoded = piece.codec.decode(storage, group_size)
    same = (decoded == values) | (decoded.isnan() & ~values.isfinite())
    error = ((decoded - values) / values).abs().nan_to_num(torch.inf, torch.inf)
    error = torch.where(same, 0, error)
    padding = -error.numel() % group_size
    return torch.nn.functional.pad(error, (0, padding)).view(-1, group_size).amax(1)
