"""How the moments of each tensor are to be stored: which tensors keep FP32, and where pieces begin.

This decides alone: `CoatAdamW` converts the moments that exist.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from coat_ds.optim.fragments import Fragment, piece_begins
from coat_ds.optim.options import BOTH_FP32, FormatNames, Rule, codec_of, keeps_fp32
from coat_kernels.codecs import Codec, get_codec


class TensorSet:
    """A set of tensors that it does not keep alive: Accelerate takes parameters of the whole model out of an
    optimizer, in whose place shards come, to free their memory. Shards, and other tensors that torch moves by
    exchanging what is in them, are kept alive: it refuses that where there are weak references."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()):
        # by identity, as tensors compare element by element
        self._refs: dict[int, Callable[[], torch.Tensor | None]] = {}
        for t in tensors:
            self.add(t)

    def add(self, t: torch.Tensor) -> None:
        exchanges = torch.__future__.get_swap_module_params_on_conversion()
        is_kept = exchanges or is_traceable_wrapper_subclass(t)
        self._refs[id(t)] = (lambda: t) if is_kept else weakref.ref(t)

    def discard(self, t: torch.Tensor) -> None:
        self._refs.pop(id(t), None)

    def __contains__(self, t: torch.Tensor) -> bool:
        # another tensor may have had this id
        ref = self._refs.get(id(t))
        return ref is not None and ref() is t

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (t for ref in tuple(self._refs.values()) if (t := ref()) is not None)

    def __reduce__(self):
        return TensorSet, (list(self),)


@dataclasses.dataclass(eq=False)
class Layouts:
    """The layouts of the moments of one optimizer. `group` is a parameter group throughout."""

    keep_fp32: Rule
    """As in `CoatAdamW`."""
    kept: TensorSet = dataclasses.field(default_factory=TensorSet)
    """Tensors that keep FP32 moments however large they are."""
    named: TensorSet = dataclasses.field(default_factory=TensorSet)
    """Tensors that `keep_fp32` was asked about, whatever the answer."""
    fragments: dict[torch.Tensor, tuple[Fragment, ...]] = dataclasses.field(default_factory=dict)
    """What each flat partition is composed of."""
    group_index: dict[torch.Tensor, int] = dataclasses.field(default_factory=dict)
    """The parameter group of each flat partition; ZeRO-3 puts it there during a step only."""

    def knows(self, p: torch.Tensor) -> bool:
        """Whether nothing is left to ask about `p`."""
        return p in self.named or p in self.fragments

    def ask_names(self, group: dict[str, Any]) -> None:
        """Asks `keep_fp32` about the parameters of the group that it was not asked about yet."""
        for name, p in zip(group.get("param_names", repeat(None)), group["params"], strict=False):
            if p not in self.named:
                self.named.add(p)
                if keeps_fp32(self.keep_fp32, name, p):
                    self.kept.add(p)

    def keep(self, p: torch.Tensor, whether: bool) -> None:
        """Has `p` keep FP32 moments, or no more."""
        (self.kept.add if whether else self.kept.discard)(p)

    def keeps(self, p: torch.Tensor, group: dict[str, Any]) -> bool:
        """Whether `p`, as large as it was if ZeRO-3 has emptied it, keeps FP32 moments."""
        return getattr(p, "ds_numel", p.numel()) < group["min_numel"] or p in self.kept

    def layout_of(self, p: torch.Tensor, group: dict[str, Any], name: str) -> tuple[tuple[int, Codec], ...]:
        """First element and codec of each piece of the moment `name` of `p`."""
        codec, kept = codec_of(group, name), get_codec("fp32")
        if p not in self.fragments:
            return ((0, kept if self.keeps(p, group) else codec),)
        begins = piece_begins(self.fragments[p], p.numel(), group["group_size"])
        return tuple((begin, kept if is_kept else codec) for begin, is_kept in begins)

    def unless_kept(self, p: torch.Tensor, group: dict[str, Any], formats: FormatNames) -> FormatNames:
        """`formats`, which are those of a whole group, or FP32 if all of `p` keeps that."""
        fragments = self.fragments.get(p)
        kept = self.keeps(p, group) if fragments is None else all(f.kept for f in fragments)
        return BOTH_FP32 if kept else formats

    def tensors_in(self, p: torch.Tensor) -> int:
        """How many of the model's parameters `p` is: of a flat partition those that do not keep FP32."""
        return max(sum(not f.kept for f in self.fragments.get(p, ())), 1)
