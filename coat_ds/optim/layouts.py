"""How the moments of each tensor are stored: which tensors keep FP32, and where pieces begin, also in flat
partitions, such as ZeRO's, that are composed of parts of parameters.

This module only decides. `CoatAdamW` converts the moments that exist.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from coat_ds.optim.options import Rule, codec_of, keeps_fp32
from coat_ds.optim.shards import shape_of
from coat_kernels.codecs import GROUP_SIZE, Codec, get_codec


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


@dataclasses.dataclass(eq=False)
class Layouts:
    """The layouts of the moments of one optimizer. `group` is a parameter group throughout."""

    keep_fp32: Rule
    """As in `CoatAdamW`."""
    fp32_moments: dict[torch.Tensor, bool] = dataclasses.field(default_factory=dict)
    """Whether a tensor keeps FP32 moments, for tensors where this was decided without `keep_fp32`."""
    fragments: dict[torch.Tensor, tuple[Fragment, ...]] = dataclasses.field(default_factory=dict)
    """What each flat partition is composed of."""
    group_index: dict[torch.Tensor, int] = dataclasses.field(default_factory=dict)
    """The parameter group of each flat partition. ZeRO-3 puts partitions into the group only for a step."""
    _answers: dict[int, tuple[int, bool]] = dataclasses.field(default_factory=dict, init=False)
    """By the id of a parameter: its index in its group and what `keep_fp32` returned for it. Ids, because
    references would keep alive the parameters that Accelerate replaces by shards, and weak references would
    forbid `torch.utils.swap_tensors`. A tensor that reuses an id at the same index has the same name."""

    def keeps_fp32(self, p: torch.Tensor, group: dict[str, Any]) -> bool:
        """Whether `p` keeps FP32 moments."""
        if shape_of(p).numel() < group["min_numel"]:
            return True
        return self.fp32_moments[p] if p in self.fp32_moments else self._keeps_by_rule(p, group)

    def _keeps_by_rule(self, p: torch.Tensor, group: dict[str, Any]) -> bool:
        params = group["params"]
        place, answer = self._answers.get(id(p), (len(params), False))
        if place < len(params) and params[place] is p:
            return answer
        for i, (held, name) in enumerate(zip_longest(params, group.get("param_names", ())[: len(params)])):
            self._answers[id(held)] = i, keeps_fp32(self.keep_fp32, name, held)
        if any(p is held for held in params):
            return self._answers[id(p)][1]
        return keeps_fp32(self.keep_fp32, None, p)

    def layout_of(self, p: torch.Tensor, group: dict[str, Any], name: str) -> tuple[tuple[int, Codec], ...]:
        """First element and codec of each piece of the moment `name` of `p`."""
        codec, fp32 = codec_of(group, name), get_codec("fp32")
        if p not in self.fragments:
            return ((0, fp32 if self.keeps_fp32(p, group) else codec),)
        begins = piece_begins(self.fragments[p], p.numel())
        return tuple((begin, fp32 if is_fp32 else codec) for begin, is_fp32 in begins)

    def held_in(self, index: int, group: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of the parameter group `index`, including those that ZeRO-3 puts into it only for a
        step."""
        flats = (p for p, i in self.group_index.items() if i == index)
        return list(dict.fromkeys((*group["params"], *flats)))

    def note_fp32(self, groups: Iterable[dict[str, Any]]) -> None:
        """Notes which parameters keep FP32 moments, before ZeRO replaces them by flat partitions without
        names."""
        for group in groups:
            self.fp32_moments |= {p: True for p in group["params"] if self.keeps_fp32(p, group)}

    def parts_of(self, p: torch.Tensor) -> list[tuple[torch.Tensor | None, int, int]]:
        """The model's parameters that `p`, a tensor of the optimizer, holds: parameter, first element in `p`,
        number of elements. The parameter is None if it is not known."""
        fragments = self.fragments.get(p)
        return [(p, 0, p.numel())] if fragments is None else [(f.param, f.start, f.numel) for f in fragments]
