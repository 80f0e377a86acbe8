"""Activations that autograd saves, in FP8: half the bytes of BF16, a quarter of FP32's.

Activation checkpointing saves the inputs of a region and recomputes the region in backward.
`compressed_checkpoints` has `torch.utils.checkpoint` save them as FP8 codes with one scale for each group of
G elements. The forward pass does not change. Backward recomputes from inputs that are off by at most 2^-4 of
themselves (E4M3 has 3 mantissa bits), or by 2^-17 of the group's amax where they are below 2^-13 of it.
Inputs that E4M3 holds exactly give the same gradients bit for bit. Routers of experts choose what they
chose in the forward pass (`choices.py`).

Inputs are packed by `torch.autograd.graph.saved_tensors_hooks`, set only while the inputs are saved: around a
whole forward the hooks would also pack what the loss saves, which FP8 is too coarse for. Under such hooks
autograd does not notice that a tensor was changed in place before backward, so the hooks compare versions
themselves.

`coat_ds.checkpointing` patches the two functions by which `torch.utils.checkpoint` saves inputs, once, when
the first context opens, so it does not matter where a model imported `checkpoint` from. The patch looks up
the context that is open in its own thread, and without one does what torch does. Regions inside
`torch.compile` save their inputs unchanged.
"""

import contextlib
import copy
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Self

import torch
import torch.utils.checkpoint
from torch.autograd.graph import saved_tensors_hooks

from coat_kernels.autograd.origin import forget_notes, note, noted
from coat_kernels.autograd.router_choices import Choices
from coat_kernels.groups.op import dequantize_groups, quantize_groups
from coat_kernels.groups.reference import Grouped

GROUP_SIZES = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# smaller tensors would save less than the bookkeeping of their codes takes
MIN_NUMEL = 4096
# elements in a row of the kernels' tiles
ROW = 1024

# group size of the `compressed_checkpoints` that is open in this thread or task
open_group_size: ContextVar[int | None] = ContextVar("open_group_size", default=None)
# the inputs of a region inside a region are recomputed by the outer one, not saved
in_region: ContextVar[bool] = ContextVar("in_region", default=False)


def compressing() -> int | None:
    """The group size for the inputs of a region that starts here; None if they are saved unchanged."""
    return None if in_region.get() else open_group_size.get()


class Packed:
    """A dense tensor as FP8 E4M3 codes and exponents, of `group_size` consecutive elements in memory each.

    codes: FP8 [rows, columns], padded with zeros to whole groups
    exponent: uint8 [rows, columns / group_size]
    """

    __slots__ = ("codes", "exponent", "group_size", "shape", "stride", "dtype", "__weakref__")

    def __init__(self, x: torch.Tensor, group_size: int):
        """Packs `x` (FP32, BF16 or FP16, any shape); one that is not dense in memory is unpacked contiguous.

        Inf is kept as NaN, which E4M3 has.
        """
        dense = torch.empty_like(x, device="meta").stride() == x.stride()
        x = x.detach() if dense else x.detach().contiguous()
        self.shape, self.stride, self.dtype = x.shape, x.stride(), x.dtype
        self.group_size = group_size
        flat = x.as_strided((x.numel(),), (1,))
        if padding := -flat.numel() % group_size:
            flat = torch.nn.functional.pad(flat, (0, padding))
        # rows of a power of two of elements, of whole groups, that divides the tensor
        rows = flat.view(-1, math.gcd(flat.numel(), ROW))
        self.codes, self.exponent = quantize_groups(rows, group_size, "e4m3")
        _alive.add(self)

    def with_codes(self, codes: torch.Tensor, exponent: torch.Tensor) -> Self:
        """One of the same shape, strides and dtype with other codes, which may be on another device."""
        other = copy.copy(self)
        other.codes, other.exponent = codes, exponent
        _alive.add(other)
        return other

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.exponent.nbytes

    @property
    def plain_nbytes(self) -> int:
        """Bytes of the tensor itself."""
        return self.shape.numel() * self.dtype.itemsize

    def unpack(self) -> torch.Tensor:
        """The tensor again: shape, strides and dtype of the one that was packed."""
        x = dequantize_groups(Grouped(self.codes, self.exponent), self.group_size, self.dtype)
        return x.as_strided(self.shape, self.stride)


_alive: weakref.WeakSet[Packed] = weakref.WeakSet()


def alive_packed() -> list[Packed]:
    """All packed tensors that are alive in this process."""
    return list(_alive)


def packed_bytes() -> tuple[int, int]:
    """Bytes of all packed tensors that are alive in this process, and of the tensors that they stand for."""
    alive = alive_packed()
    return sum(p.nbytes for p in alive), sum(p.plain_nbytes for p in alive)


def is_activation(x: Any) -> bool:
    """Whether `x` is a floating-point activation of at least `MIN_NUMEL` elements that autograd computed, so
    that only the graph keeps it alive. A parameter, a view of one, a mask, a table or an input is none."""
    return (
        type(x) is torch.Tensor
        and x.dtype in DTYPES
        and x.layout is torch.strided
        and x.numel() >= MIN_NUMEL
        and x.requires_grad
        and not x.is_leaf
        # what a reentrant region returns may be a view of a leaf without gradients, made inside
        and (x._base is None or not (x._base.is_leaf and x._base.requires_grad))
    )


def packed(x: torch.Tensor, group_size: int) -> Packed:
    """`x` packed. It is packed once, even if several regions save the same tensor, as decoder layers do with
    an encoder's output."""
    reference = noted(x, "packed")
    found = reference and reference()
    if found is None or found.group_size != group_size:
        found = Packed(x, group_size)
    # of other notes what is unpacked has none, and a region must read the same of both
    forget_notes(x)
    note(x, "packed", weakref.ref(found))
    return found


def saved_in_fp8(group_size: int) -> saved_tensors_hooks:
    """A context in which autograd saves activations (`is_activation`) packed, and the rest unchanged.

    Backward raises RuntimeError, as without it, if one of them has been changed in place since.
    """

    def pack(x: torch.Tensor) -> tuple[torch.Tensor | Packed, torch.Tensor, int]:
        if is_activation(x):
            return packed(x, group_size), _version_counter(x), x._version
        if x.is_leaf:
            return x, x, x._version
        forget_notes(x)
        # a non-leaf tensor that is kept by its own node would never be freed
        kept = x.detach()
        return kept, kept, x._version

    def unpack(saved: tuple[torch.Tensor | Packed, torch.Tensor, int]) -> torch.Tensor:
        kept, counter, version = saved
        if counter._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: an input of a checkpointed region, {kept.dtype} {list(kept.shape)}, is at "
                f"version {counter._version}; expected version {version} instead. Clone it first."
            )
        return kept.unpack() if isinstance(kept, Packed) else kept

    return saved_tensors_hooks(pack, unpack)


def _version_counter(x: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that shares the version counter of `x`, and keeps only that alive."""
    counter = x.detach()
    counter.data = x.new_empty(0)
    return counter


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    token = in_region.set(True)
    try:
        yield
    finally:
        in_region.reset(token)


def region(function: Callable, choices: Choices | None = None) -> Callable:
    """`function`, the content of a recomputed region, marked so that regions inside it know that they are
    inside. Routers choose what they chose in the first run, or else in the first of `choices`."""
    choices = Choices() if choices is None else choices

    def run(*args, **kwargs):
        with _inside(), choices:
            return function(*args, **kwargs)

    return run


@functools.cache
def packing_function(
    cls: type[torch.autograd.Function], group_size: int | None = None
) -> type[torch.autograd.Function]:
    """A subclass of the checkpoint function `cls` whose `save_for_backward` packs, in groups of `group_size`,
    or else as the open `compressed_checkpoints` says. The first argument of `cls` is the region, which runs
    without gradients, so that only its inputs are saved."""

    def apply(_, function, *args):
        size = compressing() if group_size is None or in_region.get() else group_size
        if size is None:
            return cls.apply(function, *args)
        with saved_in_fp8(size):
            return cls.apply(region(function), *args)

    return type(cls.__name__, (cls,), {"__doc__": cls.__doc__, "apply": classmethod(apply)})


def packing_generator(generator: Callable) -> Callable:
    """The generator by which torch's checkpoint runs a region that is not reentrant. Its inputs are packed
    where a `compressed_checkpoints` is open."""

    @functools.wraps(generator)
    def packing(function, *args, **kwargs):
        size = compressing()
        if size is None:
            return (yield from generator(function, *args, **kwargs))
        choices = Choices()
        # inputs are saved at the start; what the region saves goes to torch's own hooks, on top of these
        with saved_in_fp8(size), _inside(), choices:
            # runs the region's forward itself
            return (yield from generator(region(function, choices), *args, **kwargs))

    return packing
