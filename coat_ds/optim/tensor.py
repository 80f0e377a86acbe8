"""Tensors whose values are stored as codes, and how operations of torch on them are carried out."""

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

aten = torch.ops.aten


class StoredTensor(torch.Tensor):
    """A tensor whose values are all or some of a moment's."""

    handlers: ClassVar[dict[Any, Callable]] = {}
    """Operations that need not decode: called with the operation's arguments, or NotImplemented."""
    # DeepSpeed's NVMe swapper must not take it for an FP32 buffer
    swappable = False
    # torch's own way to have no such hook, which its types do not know
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def without_memory(cls, shape: tuple[int, ...], **how: Any) -> Self:
        """For `__new__`. C++ that asks for its memory gets an error in place of a null pointer."""
        made = torch.Tensor._make_wrapper_subclass(cls, shape, **how)
        torch._C._set_throw_on_mutable_data_ptr(made)
        return made

    def decode(self) -> torch.Tensor:
        """The values as a plain tensor of the same shape, type and device."""
        raise NotImplementedError

    @property
    def data(self) -> torch.Tensor:
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
        handler = args[0].handlers.get(func) if args and isinstance(args[0], StoredTensor) else None
        if handler is not None:
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if _is_view(func):
            return _views(func, *args, **kwargs)
        return _on_values(func, args, kwargs)


def _is_view(func) -> bool:
    """Whether what `func` returns shares the memory of its argument, which it does not write."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _views(func, x: Any, *args, **kwargs):
    """Windows where the elements are consecutive, else views, one or a list of them."""
    base, inner = x.base, x.replay
    if func is aten.as_strided.default:
        # counts from where the memory begins
        window, inner = slice(base.start, base.start + base.numel()), lambda flat: x.replay(flat[window])
        base = base.window((base.pieces[-1].end,), -base.start)

    def replay(flat):
        return func(inner(flat), *args, **kwargs)

    likes = replay(torch.empty(base.numel(), device="meta"))
    if isinstance(likes, torch.Tensor):
        return base.view_of(replay, likes)
    return [base.view_of(lambda flat, i=i: replay(flat)[i], like) for i, like in enumerate(likes)]


def _on_values(func, args, kwargs):
    """`func` on the decoded values; what it wrote is encoded."""
    leaves, spec = tree_flatten((args, kwargs))
    stored = [x for x in leaves if isinstance(x, StoredTensor)]
    # arguments that may overlap are views of one tensor here too
    windows: dict[int, StoredTensor] = {}
    for base in (x.base for x in stored):
        known = windows.get(id(base.pieces), base)
        start = min(base.start, known.start)
        stop = max(base.start + base.numel(), known.start + known.numel())
        windows[id(base.pieces)] = base.window((stop - start,), start - base.start)
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
                if isinstance(x, StoredTensor):
                    written[id(plain[id(x)])] = x
    touched = {id(x.base.pieces) for x in written.values()}
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
        windows[key].encode_(flats[key], only_changed=True)
    return tree_map(lambda x: written.get(id(x), x), out)


def differ(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Which elements of two FP32 tensors are not the same bits."""
    return x.view(torch.int32) != y.view(torch.int32)
