"""What stands in `optimizer.state[p]["exp_avg"]`: an FP32 tensor to everyone who looks, codes inside.

Hosts link, trim, convert and offload any state tensor of the parameter's shape. A state that lied about
its shape or its values would be corrupted in silence, so `Moment` tells the truth: it has the moment's
shape, is FP32, reads as the moment's values, and quantizes what is written into it.
"""

import itertools
from typing import Self

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from coat_kernels.codecs import Codec, Storage

aten = torch.ops.aten


class Moment(torch.Tensor):
    """An FP32 tensor that is stored by a codec. A window of consecutive elements of `storage`.

    Ops that keep the form: narrowing, slicing, splitting and indexing the first dimension, and reshaping
    give windows that write through; `copy_` encodes; `detach`, `clone`, `to`, `zeros_like`, `empty_like`,
    `pin_memory` and `deepcopy` of a whole moment stay compressed. Any other op works on the decoded FP32
    values and, if it is an in-place op, encodes its result. Pickling gives a plain FP32 CPU tensor.

    storage: codes [n], and scale and exponent [ceil(n / group_size)] or empty
    start, shape: the window, in elements of the flat storage
    """

    # DeepSpeed's NVMe swapper must not take it for an FP32 buffer
    swappable = False
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, storage: Storage, codec: Codec, group_size: int, shape, start: int = 0):
        return torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=torch.float32, device=storage.codes.device
        )

    def __init__(self, storage: Storage, codec: Codec, group_size: int, shape, start: int = 0):
        self.storage, self.codec, self.group_size, self.start = storage, codec, group_size, start

    @classmethod
    def zeros(cls, shape, codec: Codec, group_size: int, device: torch.device | str) -> Self:
        """A moment of zeros."""
        shape = torch.Size(shape)
        return cls(codec.zeros(shape.numel(), group_size, device), codec, group_size, shape)

    @classmethod
    def encoded(cls, x: torch.Tensor, codec: Codec, group_size: int, like: Storage | None = None) -> Self:
        """`x` (any shape, floating point) as a moment on the same device; `like` as in `Codec.encode`."""
        return cls(codec.encode(x, group_size, like), codec, group_size, x.shape)

    @property
    def is_whole(self) -> bool:
        """Whether this is all of its storage, not a part."""
        return self.numel() == self.storage.codes.numel()

    def decode(self) -> torch.Tensor:
        """The values as a plain FP32 tensor of the same shape and device."""
        storage, first = self._groups()
        begin = self.start - first
        x = self.codec.decode(storage, self.group_size)
        if not self.is_whole:
            x = x[begin : begin + self.numel()].clone()
        return x.view(self.shape)

    def encode_(self, x: torch.Tensor) -> Self:
        """Writes `x` (same number of elements, any floating point) into the storage."""
        if self.numel() == 0:
            return self
        storage, first = self._groups()
        begin = self.start - first
        if not self.is_whole:
            # the neighbours in the first and the last group are encoded again with the new values
            whole = self.codec.decode(storage, self.group_size)
            whole[begin : begin + self.numel()] = x.reshape(-1)
            x = whole
        for old, new in zip(storage, self.codec.encode(x, self.group_size), strict=True):
            old.copy_(new)
        return self

    def _groups(self) -> tuple[Storage, int]:
        """The part of the storage, in whole groups, that holds the window, and its first element."""
        if self.is_whole:
            return self.storage, 0
        first = self.start // self.group_size
        last = -(-(self.start + self.numel()) // self.group_size)
        codes, scale, exponent = self.storage
        begin = first * self.group_size
        return Storage(codes[begin : last * self.group_size], scale[first:last], exponent[first:last]), begin

    def _window(self, shape, offset: int = 0) -> Self:
        return type(self)(self.storage, self.codec, self.group_size, shape, self.start + offset)

    def _like(self, make) -> Self:
        """A whole moment of the same shape whose storage is `make` of each tensor of this one's."""
        return type(self)(Storage(*map(make, self.storage)), self.codec, self.group_size, self.shape)

    def __repr__(self):
        return f"Moment(shape={tuple(self.shape)}, codec={self.codec.name}, device={self.device})"

    def __reduce_ex__(self, protocol):
        return self.decode().cpu().__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        copy = self.clone()
        memo[id(self)] = copy
        return copy

    @property
    def data(self) -> Self:
        """Another window on the same storage."""
        return self.detach()

    @data.setter
    def data(self, x: torch.Tensor) -> None:
        # torch would exchange the outer tensor and leave the storage behind
        if x.device != self.device or x.shape != self.shape:
            raise ValueError(
                f"cannot assign {tuple(x.shape)} on {x.device} to the .data of {self!r}. "
                "Put a tensor into the optimizer's state instead; the next step encodes it."
            )
        self.copy_(x)

    def tolist(self) -> list:
        return self.decode().tolist()

    def numpy(self, *, force: bool = False):
        return self.decode().numpy(force=force)

    def share_memory_(self) -> Self:
        for t in self.storage:
            t.share_memory_()
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            # collectives do not declare what they write
            raise NotImplementedError(
                f"{func} on a Moment. Use decode(), then copy_ the result into the moment."
            )
        handler = _HANDLERS.get(func)
        if handler is not None and isinstance(args[0], cls):
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return _on_values(func, args, kwargs)


def _plain(x):
    return x.decode() if isinstance(x, Moment) else x


def _on_values(func, args, kwargs):
    """`func` on the decoded values; what it wrote into a moment is encoded."""
    leaves, spec = tree_flatten((args, kwargs))
    plain = {id(x): x.decode() for x in leaves if isinstance(x, Moment)}
    plain_args, plain_kwargs = tree_unflatten([plain.get(id(x), x) for x in leaves], spec)
    out = func(*plain_args, **plain_kwargs)
    written = {}
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for x in tree_leaves(value):
                if isinstance(x, Moment):
                    written[id(plain[id(x)])] = x.encode_(plain[id(x)])
    return tree_map(lambda x: written.get(id(x), x), out)


def _clone(x, *, memory_format=None):
    return x._like(torch.clone) if x.is_whole else NotImplemented


def _to_copy(x, *, dtype=None, device=None, non_blocking=False, **rest):
    if not x.is_whole or dtype not in (None, torch.float32) or rest.get("pin_memory"):
        return NotImplemented
    return x._like(lambda t: t.to(device=device, non_blocking=non_blocking, copy=True))


def _new_like(make):
    def handler(x, *, dtype=None, device=None, pin_memory=False, **rest):
        if not x.is_whole or dtype not in (None, torch.float32):
            return NotImplemented
        return x._like(lambda t: make(t, device=device, pin_memory=pin_memory or False))

    return handler


def _zeros_like(x, *, dtype=None, device=None, pin_memory=False, **rest):
    if not x.is_whole or dtype not in (None, torch.float32) or pin_memory:
        return NotImplemented
    return Moment.zeros(x.shape, x.codec, x.group_size, device or x.device)


def _copy_(x, source, non_blocking=False):
    same = isinstance(source, Moment) and (source.codec, source.group_size) == (x.codec, x.group_size)
    if same and x.is_whole and source.is_whole and source.shape == x.shape:
        for old, new in zip(x.storage, source.storage, strict=True):
            old.copy_(new, non_blocking=non_blocking)
        return x
    return x.encode_(_plain(source).to(x.device, torch.float32).expand(x.shape))


def _zero_(x):
    return x.encode_(torch.zeros(x.shape, device=x.device))


def _slice(x, dim=0, start=None, end=None, step=1):
    if x.dim() == 0 or dim % x.dim() != 0 or step != 1:
        return NotImplemented
    start, end, _ = slice(start, end).indices(x.shape[0])
    rows = max(0, end - start)
    row = x.shape[1:].numel()
    return x._window((rows, *x.shape[1:]), start * row)


def _split(x, sizes, dim=0):
    if dim % max(x.dim(), 1) != 0:
        return NotImplemented
    if isinstance(sizes, int):
        sizes = [min(sizes, x.shape[0] - i) for i in range(0, x.shape[0], sizes)]
    ends = itertools.accumulate(sizes)
    return [_slice(x, 0, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _select(x, dim, index):
    if dim % x.dim() != 0:
        return NotImplemented
    row = x.shape[1:]
    return x._window(row, (index % x.shape[0]) * row.numel())


def _view(x, shape):
    return x._window(torch.empty(x.shape, device="meta").view(shape).shape)


_HANDLERS = {
    aten.detach.default: lambda x: x._window(x.shape),
    aten.alias.default: lambda x: x._window(x.shape),
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.unsqueeze.default: lambda x, dim: _view(x, torch.empty(x.shape, device="meta").unsqueeze(dim).shape),
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.select.int: _select,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: _new_like(torch.empty_like),
    aten.zeros_like.default: _zeros_like,
    aten.copy_.default: _copy_,
    aten.zero_.default: _zero_,
    aten.is_pinned.default: lambda x, device=None: x.storage.codes.is_pinned(),
    aten._pin_memory.default: lambda x, device=None: (
        x._like(lambda t: t.pin_memory()) if x.is_whole else NotImplemented
    ),
}
