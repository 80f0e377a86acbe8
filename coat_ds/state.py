"""What stands in `optimizer.state[p]["exp_avg"]`: an FP32 tensor to everyone who looks, codes inside.

Hosts link, trim, convert and offload any state tensor of the parameter's shape. A state that lied about
its shape or its values would be corrupted in silence, so `Moment` tells the truth: it has the moment's
shape, is FP32, reads as the moment's values, and quantizes what is written into it.

A relative code stores exp_avg over the root of exp_avg_sq as that is stored. The two moments of a parameter
then share a `Pair`: the first is decoded beside the second, and when the second is written, by whatever view,
the first is encoded anew, so that its values stay.
"""

import dataclasses
import itertools
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from coat_ds.config import OPTIMIZER_GROUP_SIZES
from coat_ds.recover import recovered
from coat_kernels.codecs import CODECS, Codec, Storage, Stored

aten = torch.ops.aten
_streaming: ContextVar[bool] = ContextVar("coat_ds_streaming", default=False)


class Piece(NamedTuple):
    """Elements `begin` to `end`, exclusive, of a flat moment, in groups that are counted from `begin`."""

    begin: int
    end: int
    codec: Codec
    storage: Storage

    def write_(self, storage: Storage, non_blocking: bool = False) -> None:
        _write(self.storage, storage, non_blocking)


Pieces = tuple[Piece, ...]


@dataclasses.dataclass(slots=True, eq=False)
class Pair:
    """What is stored of two moments of which the first is relative to the second.

    All views of either hold it: they see it when a moment is exchanged for another.
    """

    first: Pieces
    second: Pieces
    shared: bool
    """Whether `second` is a moment's. Otherwise it is a copy, of the first one's own."""

    def other(self, pieces: Pieces) -> Pieces | None:
        """What is stored of the other moment; None for pieces that are in the pair no more."""
        return self.second if pieces is self.first else self.first if pieces is self.second else None


# one codec for all elements, or the first element and the codec of each piece, ascending from 0
Layout = Codec | Sequence[tuple[int, Codec]]


class _Stored(torch.Tensor):
    """A tensor whose values are all or some of a moment's."""

    # DeepSpeed's NVMe swapper must not take it for an FP32 buffer
    swappable = False
    __torch_function__ = torch._C._disabled_torch_function_impl

    def decode(self) -> torch.Tensor:
        """The values as a plain tensor of the same shape, type and device."""
        raise NotImplementedError

    @property
    def data(self) -> Self:
        """Another view of what is stored."""
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
        """A copy of the values, which cannot be written: it would be in vain."""
        array = self.decode().numpy(force=force)
        array.flags.writeable = False
        return array

    def __reduce_ex__(self, protocol):
        return self.decode().cpu().__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        memo[id(self)] = copy = self.clone()
        return copy

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            # collectives do not declare what they write
            raise NotImplementedError(
                f"{func} on a Moment. Use decode(), then copy_ the result into the moment."
            )
        handler = _HANDLERS.get(func)
        if handler is not None and isinstance(args[0], Moment):
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if _is_view(func):
            return _views(func, *args, **kwargs)
        return _on_values(func, args, kwargs)


class Moment(_Stored):
    """An FP32 tensor that is stored by codecs. A window of consecutive elements of its pieces.

    Views of it, of any kind, write through: those of consecutive elements are windows, others `MomentView`s.
    `copy_` encodes; `clone`, `to`, `zeros_like`, `empty_like`, `pin_memory` and `deepcopy` of a whole moment
    stay compressed. Any other op works on the decoded FP32 values and, if it is an in-place op, encodes the
    groups that it changed. Pickling gives a plain FP32 CPU tensor.

    pieces: what is stored, one after the other: codes [n], and scale and exponent [ceil(n / group_size)] or
        empty; no group crosses from one piece into the next
    start, shape: the window, in elements of all pieces
    pair: of this moment and the other one of the same parameter, where one of them is relative
    """

    @staticmethod
    def __new__(cls, pieces: Pieces, group_size: int, shape, start: int = 0, pair: Pair | None = None):
        return torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=torch.float32, device=pieces[0].storage.codes.device
        )

    def __init__(self, pieces: Pieces, group_size: int, shape, start: int = 0, pair: Pair | None = None):
        self.pieces, self.group_size, self.start, self.pair = pieces, group_size, start, pair

    @classmethod
    def zeros(cls, shape, layout: Layout, group_size: int, device: torch.device | str) -> Self:
        """A moment of zeros."""
        shape = torch.Size(shape)
        layout = ((0, layout),) if isinstance(layout, Codec) else layout
        ends = (*(begin for begin, _ in layout[1:]), shape.numel())
        pieces = tuple(
            Piece(begin, end, codec, codec.zeros(end - begin, group_size, device))
            for (begin, codec), end in zip(layout, ends, strict=True)
        )
        return cls(pieces, group_size, shape)

    @classmethod
    def encoded(cls, x: torch.Tensor, layout: Layout, group_size: int) -> Self:
        """`x` (any shape, floating point) as a moment on the same device."""
        return cls.zeros(x.shape, layout, group_size, x.device).encode_(x)

    @classmethod
    def recovered(
        cls, x: torch.Tensor, layout: Layout, group_size: int, second: "Moment | None" = None
    ) -> tuple[Self, bool]:
        """`encoded`, but in the codes that decode to `x` where there are such; and whether all groups do.

        second: the second moment, if this is a first one that may be relative to it.
        """
        moment, exact = cls.zeros(x.shape, layout, group_size, x.device).beside(second), True
        for piece, beside in moment.each_piece():
            values = x.reshape(-1)[piece.begin : piece.end]
            found, same = recovered(piece.codec, values, group_size, beside)
            piece.write_(found)
            exact = exact and same
        return moment, exact

    def beside(self, second: "Moment | None") -> Self:
        """What is stored here, as a first moment that is relative to `second`, if its codes are of that kind.

        `second` does not know of it: that is `paired`'s.
        """
        if second is None or not self.is_relative:
            return self
        return type(self)(
            self.pieces, self.group_size, self.shape, pair=Pair(self.pieces, second.pieces, shared=True)
        )

    @property
    def is_relative(self) -> bool:
        """Whether any of its codes is relative to a second moment."""
        return any(piece.codec.relative for piece in self.pieces)

    def each_piece(self) -> Iterator[tuple[Piece, Stored | None]]:
        """Its pieces, with what is stored of the other moment of a pair."""
        other = None if self.pair is None else self.pair.other(self.pieces)
        for i, piece in enumerate(self.pieces):
            yield piece, None if other is None else Stored(other[i].codec, other[i].storage)

    @property
    def arrangement(self) -> tuple[tuple[int, Codec], ...]:
        """First element and codec of each piece."""
        return tuple((piece.begin, piece.codec) for piece in self.pieces)

    @property
    def storage(self) -> Storage:
        """What is stored of a moment in one piece."""
        (piece,) = self.pieces
        return piece.storage

    @property
    def codec(self) -> Codec:
        """The codec of a moment in one piece."""
        (piece,) = self.pieces
        return piece.codec

    @property
    def is_whole(self) -> bool:
        """Whether this is all of its pieces, not a part."""
        return self.numel() == self.pieces[-1].end

    def decode(self) -> torch.Tensor:
        if self.is_whole and len(self.pieces) == 1:
            ((piece, other),) = self.each_piece()
            return piece.codec.decode(piece.storage, self.group_size, other).view(self.shape)
        x = torch.empty(self.numel(), dtype=torch.float32, device=self.device)
        for codec, part, other, within, where in self._parts():
            x[where] = codec.decode(part, self.group_size, other)[within]
        return x.view(self.shape)

    def encode_(self, x: torch.Tensor, changed: torch.Tensor | None = None) -> Self:
        """Writes `x` (same number of elements, any floating point) into what is stored.

        changed: bool, flat; groups in which it is False everywhere stay as they are stored.
        """
        x = x.reshape(-1)
        for codec, part, other, within, where in self._parts():
            values = x[where]
            if values.numel() < part.codes.numel():
                # the neighbours in the first and the last group are encoded again with the new values
                whole = codec.decode(part, self.group_size, other)
                whole[within] = values
                values = whole
            made = codec.encode(values, self.group_size, beside=other)
            if changed is not None:
                touched = torch.zeros(values.numel(), dtype=torch.bool, device=x.device)
                touched[within] = changed[where]
                made = _only_groups(part, made, touched, self.group_size)
            _overwrite(Stored(codec, part), made, other, self.group_size)
        return self

    @property
    def base(self) -> Self:
        """Itself, as a `MomentView` has what it is a view of."""
        return self

    def replay(self, flat: torch.Tensor) -> torch.Tensor:
        """The view that this is of the elements that it has."""
        return flat.view(self.shape)

    def rearranged(
        self, layout: Layout, group_size: int | None = None, second: "Moment | None" = None
    ) -> Self:
        """The same values, but for a rounding, in other pieces or groups; converted one by one.

        second: as in `recovered`.
        """
        moment = (
            type(self).zeros(self.shape, layout, group_size or self.group_size, self.device).beside(second)
        )
        for begin, end, *_ in moment.pieces:
            moment._window((end - begin,), begin).encode_(self._window((end - begin,), begin).decode())
        return moment

    def _parts(self) -> Iterator[tuple[Codec, Storage, Stored | None, slice, slice]]:
        """What holds the window: of each piece a part in whole groups, the same part of the other moment of a
        pair, where in this part the window is, and where in the window this part.
        """
        stop = self.start + self.numel()
        first = bisect_right(self.pieces, self.start, key=lambda piece: piece.begin) - 1
        for (begin, end, codec, storage), other in itertools.islice(self.each_piece(), first, None):
            low, high = max(begin, self.start), min(end, stop)
            if low >= high:
                return
            g, h = (low - begin) // self.group_size, -(-(high - begin) // self.group_size)
            part = storage.groups(g, h, self.group_size)
            if other is not None:
                other = Stored(other.codec, other.storage.groups(g, h, self.group_size))
            a = begin + g * self.group_size
            yield codec, part, other, slice(low - a, high - a), slice(low - self.start, high - self.start)

    def _window(self, shape, offset: int = 0) -> Self:
        return type(self)(self.pieces, self.group_size, shape, self.start + offset, self.pair)

    def _like(self, make) -> Self:
        """A whole moment of the same shape that stores `make` of each tensor that this one does.

        A relative first moment takes along a copy of what it is relative to.
        """
        pieces, pair = _made(self.pieces, make), None
        if self.is_relative and self.pair is not None:
            pair = Pair(pieces, _made(self.pair.second, make), shared=False)
        return type(self)(pieces, self.group_size, self.shape, pair=pair)

    def stored(self) -> Iterator[torch.Tensor]:
        """All tensors that are stored, with those that a copy took along."""
        own = self.pair is None or self.pair.shared
        pieces = self.pieces if own else self.pieces + self.pair.second
        return itertools.chain.from_iterable(piece.storage for piece in pieces)

    def __repr__(self):
        codecs = ", ".join(dict.fromkeys(piece.codec.name for piece in self.pieces))
        return f"Moment(shape={tuple(self.shape)}, codec={codecs}, device={self.device})"

    def __reduce_ex__(self, protocol):
        if not _streaming.get():
            return self.decode().cpu().__reduce_ex__(protocol)
        storage = torch.storage.TypedStorage(wrap_storage=_Decoded(self), dtype=self.dtype, _internal=True)
        # where the file says that the values are
        storage._fake_device = "cpu"
        arguments = (storage, 0, tuple(self.shape), self.stride(), False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments

    def share_memory_(self) -> Self:
        for t in self.stored():
            t.share_memory_()
        return self


class MomentView(_Stored):
    """A view of a moment whose elements are not consecutive: a column, every second row, a transpose.

    It reads as the values and writes through; what is written is encoded with the groups that it is in.

    base: the window that it is a view of
    replay: gives the same view of a plain tensor of the elements of `base`, flat
    like: the view of such a tensor, of which shape, strides and type are taken
    """

    @staticmethod
    def __new__(cls, base: Moment, replay: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=base.device,
        )

    def __init__(self, base: Moment, replay: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor):
        self.base, self.replay = base, replay

    def decode(self) -> torch.Tensor:
        return self.replay(self.base.decode().view(-1))

    def __repr__(self):
        return f"MomentView(shape={tuple(self.shape)}, strides={self.stride()}, of={self.base!r})"


class StoredMoment(Moment):
    """A moment that is pickled as it is stored, and comes back as a `Moment`. Needs `coat_ds` to be read."""

    def __reduce_ex__(self, protocol):
        moment = self if self.is_whole else self.clone()
        if not isinstance(moment, StoredMoment):
            return moment.__reduce_ex__(protocol)
        if moment.is_relative and moment.pair is None:
            return moment.decode().cpu().__reduce_ex__(protocol)
        pieces = [
            (
                piece.begin,
                piece.codec.name,
                *piece.storage,
                # the same tensors as the second moment's, of which a file holds one copy
                *((beside.codec.name, *beside.storage) if piece.codec.relative else ()),
            )
            for piece, beside in moment.each_piece()
        ]
        return _rebuild, (pieces, moment.group_size, tuple(moment.shape))


def _rebuild(pieces: list[tuple], group_size: int, shape: tuple[int, ...]) -> Moment:
    """The moment of a pickled `StoredMoment`. Raises ValueError for anything that it would not write.

    Readers of data only, such as `torch.load(weights_only=True)`, may be told to call this function: what
    the file says is not to be trusted.
    """
    sizes = OPTIMIZER_GROUP_SIZES
    _expect(type(group_size) is int and group_size in sizes, f"one of the group sizes {sizes}", group_size)
    _expect(type(shape) is tuple and all(type(n) is int and n >= 0 for n in shape), "a shape", shape)
    _expect(type(pieces) is list and pieces, "a list of pieces", pieces)
    made, second, end = [], [], 0
    for piece in pieces:
        is_piece = type(piece) is tuple and len(piece) in (5, 9)
        _expect(is_piece, "first element, codec and three tensors, of one moment or of two", piece)
        begin = piece[0]
        _expect(type(begin) is int and begin == end, f"a piece from element {end}", begin)
        codec, storage = _rebuild_stored(piece[1:5], group_size, None)
        end += storage.codes.numel()
        made.append(Piece(begin, end, codec, storage))
        if codec.relative:
            beside = _rebuild_stored(piece[5:], group_size, storage.codes.numel())
            _expect(codec.stands_beside(beside.codec), f"a second moment for {codec.name}", beside.codec.name)
            second.append(Piece(begin, end, *beside))
        else:
            _expect(len(piece) == 5, f"one moment, as {codec.name} needs", piece)
            second.append(made[-1])
    _expect(math.prod(shape) == end, f"a shape of {end} elements", shape)
    devices = {t.device for piece in (*made, *second) for t in piece.storage}
    _expect(len(devices) == 1, "all tensors on one device", devices)
    moment = Moment(tuple(made), group_size, shape)
    if moment.is_relative:
        moment.pair = Pair(moment.pieces, tuple(second), shared=False)
    return moment


def _rebuild_stored(said: tuple, group_size: int, numel: int | None) -> Stored:
    """One moment of a piece; of `numel` elements, or of any number."""
    _expect(len(said) == 4, "a codec and three tensors", said)
    name, *tensors = said
    _expect(type(name) is str and name in CODECS, f"one of {', '.join(CODECS)}", name)
    codec, storage = CODECS[name], Storage(*tensors)
    # the size of the codes is looked at once they are known to be a tensor
    _expect_vector("codes", storage.codes, codec.dtype, numel)
    groups = -(-storage.codes.numel() // group_size)
    _expect_vector("scale", storage.scale, torch.float32, groups if codec.has_scale else 0)
    _expect_vector("exponent", storage.exponent, torch.uint8, groups if codec.has_exponent else 0)
    return Stored(codec, storage)


def _expect(holds: object, expected: str, found: object) -> None:
    if not holds:
        shown = " ".join(str(found).split())[:200]
        raise ValueError(f"stored moment: expected {expected}, found {shown}")


def _expect_vector(name: str, t: object, dtype: torch.dtype, numel: int | None) -> None:
    wanted = f"{name} as a contiguous vector of {dtype}" + ("" if numel is None else f" of {numel} elements")
    _expect(type(t) is torch.Tensor and t.layout == torch.strided and not t.is_meta, wanted, type(t))
    # a tensor of stride 0 would need far more memory than its file has bytes
    found = f"{t.dtype}, shape {tuple(t.shape)}, stride {t.stride()}"
    _expect(t.dtype == dtype and t.dim() == 1 and t.is_contiguous(), wanted, found)
    _expect(numel is None or t.numel() == numel, wanted, found)


class _Decoded(torch.UntypedStorage):
    """The bytes of a moment's FP32 values, which exist once somebody asks for them on the CPU.

    `torch.save` notes all storages first, then asks for those that are on another device and writes them, one
    after the other.
    """

    def __new__(cls, moment: Moment):
        storage = super().__new__(cls, 4 * moment.numel(), device="meta")
        storage._moment = moment
        return storage

    def cpu(self) -> torch.UntypedStorage:
        return self._moment.decode().cpu().untyped_storage()


def paired(first: Moment, second: Moment) -> tuple[Moment, Moment]:
    """Both moments of a parameter, whole and in equal pieces, as a pair if the first is relative.

    Themselves, if nothing has to be done. Where either was exchanged for another, the first one's codes are
    made relative to the second that now stands beside it; its values stay.
    """
    if not first.is_relative:
        if second.pair is None:
            return first, second
        return first, Moment(second.pieces, second.group_size, second.shape)
    own, pair = first.pair, second.pair
    if own is not None and own is pair and own.other(first.pieces) is second.pieces:
        return first, second
    for (piece, old), (_, _, codec, storage) in zip(first.each_piece(), second.pieces, strict=True):
        new = Stored(codec, storage)
        if piece.codec.relative and not (old and _is_same(old, new)):
            values = piece.codec.decode(piece.storage, first.group_size, old)
            piece.write_(piece.codec.encode(values, first.group_size, beside=new))
    own = own if own is not None and own.first is first.pieces else Pair(first.pieces, (), shared=True)
    # views of the second moment hold its pair, and have to see the new first one
    pair = pair if pair is not None and pair.second is second.pieces else own
    if pair.first is not first.pieces:
        _set_free(pair, first.group_size)
    for x in (own, pair):
        x.first, x.second, x.shared = first.pieces, second.pieces, True
    return tuple(Moment(x.pieces, x.group_size, x.shape, pair=pair) for x in (first, second))


def _set_free(pair: Pair, group_size: int) -> None:
    """Encodes the first moment of a pair relative to nothing, as it is read once it is in no pair."""
    for piece, other in zip(pair.first, pair.second, strict=True):
        if piece.codec.relative:
            values = piece.codec.decode(piece.storage, group_size, Stored(other.codec, other.storage))
            piece.write_(piece.codec.encode(values, group_size))


def _is_same(a: Stored, b: Stored) -> bool:
    """Whether two stored moments are the same bits, or the same tensors."""
    if a.codec is not b.codec:
        return False
    pairs = list(zip(a.storage, b.storage, strict=True))
    return all(x is y for x, y in pairs) or all(x.device == y.device and torch.equal(x, y) for x, y in pairs)


@contextmanager
def streaming():
    """Within it `torch.save` decodes moments one at a time, each when it is written, and
    `CoatAdamW.state_dict` leaves them to it. Only for its zip format, and in this thread.
    """
    token = _streaming.set(True)
    try:
        yield
    finally:
        _streaming.reset(token)


def is_streaming() -> bool:
    return _streaming.get()


def _made(pieces: Pieces, make) -> Pieces:
    """Pieces that store `make` of each tensor."""
    return tuple(piece._replace(storage=Storage(*map(make, piece.storage))) for piece in pieces)


def _overwrite(
    old: Stored, made: Storage, other: Stored | None, group_size: int, non_blocking: bool = False
) -> None:
    """Writes `made` over what is stored. If `other` is a first moment that is relative to this one, it is
    encoded anew: its values stay."""
    is_followed = other is not None and other.codec.relative and not old.codec.relative
    if not is_followed:
        _write(old.storage, made, non_blocking)
        return
    parts = zip(*(x.parts(group_size) for x in (old.storage, made, other.storage)), strict=True)
    for (_, into), (_, new), (_, first) in parts:
        second = Stored(old.codec, into)
        kept = other.codec.decode(first, group_size, second)
        _write(into, new, non_blocking)
        _write(first, other.codec.encode(kept, group_size, beside=second))


def _write(into: Storage, new: Storage, non_blocking: bool = False) -> None:
    for old, t in zip(into, new, strict=True):
        old.copy_(t, non_blocking=non_blocking)


def _plain(x):
    return x.decode() if isinstance(x, _Stored) else x


def _is_view(func) -> bool:
    """Whether what `func` returns shares the memory of its argument, which it does not write."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _views(func, x: _Stored, *args, **kwargs):
    """Windows where the elements are consecutive, else views, one or a list of them."""
    base, inner = x.base, x.replay
    if func is aten.as_strided.default:
        # counts from where the memory begins
        window, inner = slice(base.start, base.start + base.numel()), lambda flat: x.replay(flat[window])
        base = base._window((base.pieces[-1].end,), -base.start)

    def replay(flat):
        return func(inner(flat), *args, **kwargs)

    def view(like, replay):
        if like.is_contiguous() and like.dtype == torch.float32:
            return base._window(like.shape, like.storage_offset())
        return MomentView(base, replay, like)

    likes = replay(torch.empty(base.numel(), device="meta"))
    if isinstance(likes, torch.Tensor):
        return view(likes, replay)
    return [view(like, lambda flat, i=i: replay(flat)[i]) for i, like in enumerate(likes)]


def _on_values(func, args, kwargs):
    """`func` on the decoded values; what it wrote is encoded."""
    leaves, spec = tree_flatten((args, kwargs))
    stored = [x for x in leaves if isinstance(x, _Stored)]
    # arguments that may overlap are views of one tensor here too
    windows: dict[int, Moment] = {}
    for base in (x.base for x in stored):
        known = windows.get(id(base.pieces), base)
        start = min(base.start, known.start)
        stop = max(base.start + base.numel(), known.start + known.numel())
        windows[id(base.pieces)] = base._window((stop - start,), start - base.start)
    flats = {key: window.decode() for key, window in windows.items()}
    plain = {}
    for x in stored:
        begin = x.base.start - windows[id(x.base.pieces)].start
        plain[id(x)] = x.replay(flats[id(x.base.pieces)][begin : begin + x.base.numel()])
    plain_args, plain_kwargs = tree_unflatten([plain.get(id(x), x) for x in leaves], spec)
    written = {}
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for x in tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name)):
                if isinstance(x, _Stored):
                    written[id(plain[id(x)])] = x
    touched = {id(x.base.pieces) for x in written.values()}
    before = {key: flats[key].clone() for key in touched}
    out = func(*plain_args, **plain_kwargs)
    for x in written.values():
        now = plain[id(x)]
        if (now.shape, now.stride()) != (x.shape, x.stride()):
            raise NotImplementedError(
                f"{func} changes the shape of {x!r} in place, which a state cannot. Use the op without the "
                "underscore."
            )
    # first moments last: they are encoded with the second ones that are stored then
    for key in sorted(touched, key=lambda key: windows[key].is_relative):
        windows[key].encode_(flats[key], _differ(flats[key], before[key]))
    return tree_map(lambda x: written.get(id(x), x), out)


def _differ(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Which elements of two FP32 tensors are not the same bits."""
    return x.view(torch.int32) != y.view(torch.int32)


def _only_groups(old: Storage, new: Storage, touched: torch.Tensor, group_size: int) -> Storage:
    """`new`, but `old` where a group has no element that is `touched`."""
    groups = F.pad(touched, (0, -touched.numel() % group_size)).view(-1, group_size).any(1)
    elements = groups.repeat_interleave(group_size)[: touched.numel()]
    return Storage(
        torch.where(elements, new.codes, old.codes),
        *(torch.where(groups, n, o) if n.numel() else n for n, o in zip(new[1:], old[1:], strict=True)),
    )


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
    made = Moment.zeros(x.shape, x.arrangement, x.group_size, device or x.device)
    if x.is_relative and x.pair is not None:
        second = tuple(
            piece._replace(storage=piece.codec.zeros(piece.end - piece.begin, x.group_size, made.device))
            for piece in x.pair.second
        )
        made.pair = Pair(made.pieces, second, shared=False)
    return made


def _copy_(x, source, non_blocking=False):
    same = isinstance(source, Moment) and (source.arrangement, source.group_size) == (
        x.arrangement,
        x.group_size,
    )
    if same and x.is_whole and source.is_whole and source.shape == x.shape and _may_take_codes(x, source):
        if x.is_relative and x.pair is not None:
            for old, new in zip(x.pair.second, source.pair.second, strict=True):
                old.write_(new.storage, non_blocking)
        for (piece, other), (*_, new) in zip(x.each_piece(), source.pieces, strict=True):
            _overwrite(Stored(piece.codec, piece.storage), new, other, x.group_size, non_blocking)
        return x
    values = _plain(source).to(x.device, torch.float32).expand(x.shape)
    # writing what is there leaves the codes as they are
    return x.encode_(values, _differ(values.reshape(-1), x.decode().view(-1)))


def _may_take_codes(x: Moment, source: Moment) -> bool:
    """Whether the codes of `source` mean the same in `x`, which is stored in the same way."""
    if not x.is_relative:
        return True
    if x.pair is None or source.pair is None:
        return x.pair is source.pair
    codecs, others = ([piece.codec for piece in pieces] for pieces in (x.pair.second, source.pair.second))
    return not x.pair.shared and codecs == others


_HANDLERS = {
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: _new_like(torch.empty_like),
    aten.zeros_like.default: _zeros_like,
    aten.copy_.default: _copy_,
    aten.is_pinned.default: lambda x, device=None: all(t.is_pinned() for t in x.stored() if t.numel()),
    aten._pin_memory.default: lambda x, device=None: (
        x._like(lambda t: t.pin_memory()) if x.is_whole else NotImplemented
    ),
}
