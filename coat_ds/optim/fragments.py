"""Flat partitions, such as ZeRO's, that are composed of parts of parameters."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from coat_kernels.codecs import GROUP_SIZE


class Fragment(NamedTuple):
    """The part of one model parameter that a flat partition holds."""

    start: int
    """Its first element in the partition."""
    numel: int
    offset: int
    """Its first element in the parameter."""
    fp32: bool
    """Whether the parameter keeps FP32 moments."""
    param: torch.Tensor | None = None
    """The model parameter; None if it is not known."""


def piece_begins(fragments: Sequence[Fragment], numel: int) -> tuple[tuple[int, bool], ...]:
    """First element of each piece of a partition of `numel` elements, and whether it keeps FP32 moments.

    A fragment extends the current piece if it starts at a group boundary of that piece.
    """
    begins: list[tuple[int, bool]] = []

    def begin(at: int, fp32: bool) -> None:
        if not begins or begins[-1][1] != fp32 or (not fp32 and (at - begins[-1][0]) % GROUP_SIZE):
            begins.append((at, fp32))

    end, fp32 = 0, True
    for start, size, offset, fp32, _ in fragments:
        if start > end:
            begin(end, fp32)
        begin(start, fp32)
        # the part of a group that the fragment starts with
        head = -offset % GROUP_SIZE
        if 0 < head < size:
            begin(start + head, fp32)
        end = start + size
    if end < numel or not begins:
        begin(end, fp32)
    return tuple(begins)
