"""Activations that autograd saves, in FP8: half the bytes of BF16, a quarter of FP32's.

Activation checkpointing saves the inputs of a region and recomputes the region in backward.
`compressed_checkpoints` has `torch.utils.checkpoint` save them as FP8 codes with one scale per group of 128
elements. The forward pass does not change. Backward recomputes from inputs with an error of at most 2^-4 of
their value (E4M3 has 3 mantissa bits), or of 2^-17 of the group's amax for inputs below 2^-13 of the amax.
Inputs that E4M3 represents exactly give bit-identical gradients. The recompute repeats the choices of routers
in the forward pass (`router_choices.py`).

Inputs are compressed by `torch.autograd.graph.saved_tensors_hooks`, set only while the inputs are saved. Set
during a whole forward, the hooks would also compress what the loss saves, for which FP8 is too coarse. Under
such hooks autograd does not detect in-place changes of a tensor before backward, so the hooks compare
versions themselves.

`coat_ds.checkpointing` patches the two functions by which `torch.utils.checkpoint` saves inputs, once, when
the first context opens, so it does not matter from where a model imported `checkpoint`. The patch looks up
the context that is open in its own thread; without one it behaves as torch does. Regions inside
`torch.compile` save their inputs unchanged.
"""

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.graph import saved_tensors_hooks

from coat_kernels.autograd.origin import COMPRESSED, forget_notes, note, noted
from coat_kernels.autograd.router_choices import Choices
from coat_kernels.groups.op import dequantize_groups, quantize_groups
from coat_kernels.groups.reference import GROUP_FORMATS, Grouped

FORMAT = "e4m3"
# consecutive elements that share one scale
GROUP_SIZE = 128
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# below this size the bookkeeping of codes needs more memory than FP8 saves
MIN_NUMEL = 4096
# elements per row of the kernels' tiles
ROW = 1024

# whether a `compressed_checkpoints` is open in this thread or task
context_open: ContextVar[bool] = ContextVar("context_open", default=False)
# inputs of a region inside another region are recomputed by the outer region, not saved
in_region: ContextVar[bool] = ContextVar("in_region", default=False)


def is_compressing() -> bool:
    """Whether the inputs of a region that starts now are saved in FP8."""
    return context_open.get() and not in_region.get()


class CompressedTensor:
    """A dense tensor as FP8 E4M3 codes and exponents, in groups of `GROUP_SIZE` elements, consecutive in
    memory.

    codes: uint8 [rows, columns], padded with zeros to whole groups
    exponent: uint8 [rows, columns / GROUP_SIZE]
    """

    __slots__ = ("codes", "exponent", "shape", "stride", "dtype", "__weakref__")

    def __init__(self, x: torch.Tensor):
        """Compresses `x` (FP32, BF16 or FP16, any shape). If `x` is not dense in memory, `unpack` returns a
        contiguous tensor.

        Inf becomes NaN, because E4M3 has no Inf.
        """
        dense = torch.empty_like(x, device="meta").stride() == x.stride()
        x = x.detach() if dense else x.detach().contiguous()
        self.shape, self.stride, self.dtype = x.shape, x.stride(), x.dtype
        flat = x.as_strided((x.numel(),), (1,))
        if padding := -flat.numel() % GROUP_SIZE:
            flat = torch.nn.functional.pad(flat, (0, padding))
        # rows of whole groups; the row length is a power of two that divides the number of elements
        rows = flat.view(-1, math.gcd(flat.numel(), ROW))
        self.codes, self.exponent = quantize_groups(rows, GROUP_SIZE, FORMAT)[:2]
        _alive.add(self)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.exponent.nbytes

    @property
    def plain_nbytes(self) -> int:
        """Bytes of the unpacked tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def unpack(self) -> torch.Tensor:
        """The decoded tensor, with the shape, strides and dtype of the original."""
        q = Grouped(self.codes, self.exponent, GROUP_FORMATS[FORMAT])
        x = dequantize_groups(q, GROUP_SIZE, self.dtype)
        return x.as_strided(self.shape, self.stride)


_alive: weakref.WeakSet[CompressedTensor] = weakref.WeakSet()


def alive_compressed() -> list[CompressedTensor]:
    """All compressed tensors that are alive in this process."""
    return list(_alive)


def compressed_bytes() -> tuple[int, int]:
    """Bytes of `alive_compressed`, and of the tensors that they replace."""
    alive = alive_compressed()
    return sum(p.nbytes for p in alive), sum(p.plain_nbytes for p in alive)


def is_activation(x: Any) -> bool:
    """Whether `x` is a floating-point activation of at least `MIN_NUMEL` elements that autograd computed, so
    only the graph keeps it alive. Parameters, their views, masks, tables and inputs are not activations."""
    return (
        type(x) is torch.Tensor
        and x.dtype in DTYPES
        and x.layout is torch.strided
        and x.numel() >= MIN_NUMEL
        and x.requires_grad
        and not x.is_leaf
        # the output of a reentrant region may be a view of a leaf without gradients, created inside the
        # region
        and (x._base is None or not (x._base.is_leaf and x._base.requires_grad))
    )


def compress(x: torch.Tensor) -> CompressedTensor:
    """`x`, compressed once, even if several regions save it, as decoder layers do an encoder's output."""
    reference = noted(x, COMPRESSED)
    found = reference and reference()
    if found is None:
        found = CompressedTensor(x)
    # the unpacked tensor has no other notes, and the region must find the same notes in both passes
    forget_notes(x)
    note(x, COMPRESSED, weakref.ref(found))
    return found


def saved_in_fp8() -> saved_tensors_hooks:
    """A context in which autograd compresses the activations that it saves (`is_activation`).

    Backward raises RuntimeError if one of them has changed in place since, as it does without this context.
    """

    def pack(x: torch.Tensor) -> tuple[torch.Tensor | CompressedTensor, torch.Tensor, int]:
        if is_activation(x):
            return compress(x), _version_counter(x), x._version
        if x.is_leaf:
            return x, x, x._version
        forget_notes(x)
        # a non-leaf tensor that its own node holds would never be freed
        held = x.detach()
        return held, held, x._version

    def unpack(saved: tuple[torch.Tensor | CompressedTensor, torch.Tensor, int]) -> torch.Tensor:
        held, counter, version = saved
        if counter._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: an input of a checkpointed region, {held.dtype} {list(held.shape)}, is at "
                f"version {counter._version}; expected version {version} instead. Clone it first."
            )
        return held.unpack() if isinstance(held, CompressedTensor) else held

    return saved_tensors_hooks(pack, unpack)


def _version_counter(x: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that shares the version counter of `x` and keeps only the counter alive."""
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
    """`function`, the body of a recomputed region, marked so that regions inside it detect that they are
    nested. Routers repeat the choices of the first run, or of the first run of `choices`."""
    choices = Choices() if choices is None else choices

    def run(*args, **kwargs):
        with _inside(), choices:
            return function(*args, **kwargs)

    return run


@functools.cache
def compressing_function(
    cls: type[torch.autograd.Function], always: bool = False
) -> type[torch.autograd.Function]:
    """A subclass of the checkpoint function `cls` whose `save_for_backward` compresses: `always`, or if a
    `compressed_checkpoints` is open. The first argument of `cls` is the region. It runs without gradients, so
    only its inputs are saved."""

    def apply(_, function, *args):
        if in_region.get() or not (always or context_open.get()):
            return cls.apply(function, *args)
        with saved_in_fp8():
            return cls.apply(region(function), *args)

    return type(cls.__name__, (cls,), {"__doc__": cls.__doc__, "apply": classmethod(apply)})


def compressing_generator(generator: Callable) -> Callable:
    """The generator by which torch's checkpoint runs a non-reentrant region. Its inputs are compressed if a
    `compressed_checkpoints` is open."""

    @functools.wraps(generator)
    def compressing(function, *args, **kwargs):
        if not is_compressing():
            return (yield from generator(function, *args, **kwargs))
        choices = Choices()
        # inputs are saved at the start; tensors that the region saves go to torch's own hooks, on top of
        # these
        with saved_in_fp8(), _inside(), choices:
            # the generator runs the region's forward itself
            return (yield from generator(region(function, choices), *args, **kwargs))

    return compressing
