"""Tensors whose values are stored as codes, and how operations of torch on them are carried out."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

aten = torch.ops.aten


class StoredTensor(torch.Tensor):
    """What torch calls on a `Moment`, its only subclass, which has `decode`, `encode_` and `window`."""

    decode: Callable[..., torch.Tensor]
    handlers: ClassVar[dict[Any, Callable]] = {}
    """Functions for operations that need not decode, called with the operation's arguments. A function that
    returns NotImplemented leaves the call to the decoded values."""
    # DeepSpeed's NVMe swapper must not treat it as an FP32 buffer
    swappable = False
    # torch's own way to disable this hook; torch's type stubs lack it
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:
        """Another view of the stored tensors."""
        return self.detach()

    @data.setter
    def data(self, x: torch.Tensor) -> None:
        # torch would replace the outer tensor without its codes
        if x.device != self.device or x.shape != self.shape:
            raise ValueError(
                f"cannot assign {tuple(x.shape)} on {x.device} to the .data of {self!r}. "
                "Put a tensor into the optimizer's state instead; the next step encodes it."
            )
        self.copy_(x)

    def tolist(self) -> list:
        return self.decode().tolist()

    def numpy(self, *, force: bool = False):
        """A read-only copy of the values: writes to it would not reach the codes."""
        array = self.decode().numpy(force=force)
        array.flags.writeable = False
        return array

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
        # the result shares the memory of an argument, and nothing is written
        if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
            return _windows(func, *args, **kwargs)
        return _on_values(func, args, kwargs)


def _windows(func, x: Any, *args, **kwargs):
    """The view `func` of a moment as one or several windows. Raises NotImplementedError for other views."""

    def window(like: torch.Tensor):
        if func is aten.as_strided.default or not like.is_contiguous() or like.dtype != torch.float32:
            raise NotImplementedError(
                f"{func} of {x!r}: expected a view of consecutive elements in FP32, which share codes, found "
                f"shape {tuple(like.shape)}, strides {like.stride()}, {like.dtype}. Use decode() to read "
                "others; copy_ the changed values into the moment to write them."
            )
        return x.window(like.shape, int(like.storage_offset()))

    likes = func(torch.empty(x.shape, device="meta"), *args, **kwargs)
    return window(likes) if isinstance(likes, torch.Tensor) else [window(like) for like in likes]


def _on_values(func, args, kwargs):
    """Runs `func` on the decoded values and encodes the tensors that it wrote."""
    leaves, spec = tree_flatten((args, kwargs))
    stored = [x for x in leaves if isinstance(x, StoredTensor)]
    # arguments that may overlap become views of one decoded tensor
    windows: dict[int, StoredTensor] = {}
    for x in stored:
        known = windows.get(id(x.pieces), x)
        start = min(x.start, known.start)
        stop = max(x.start + x.numel(), known.start + known.numel())
        windows[id(x.pieces)] = x.window((stop - start,), start - x.start)
    flats = {key: window.decode() for key, window in windows.items()}
    plain = {}
    for x in stored:
        begin = x.start - windows[id(x.pieces)].start
        plain[id(x)] = flats[id(x.pieces)][begin : begin + x.numel()].view(x.shape)
    plain_args, plain_kwargs = tree_unflatten([plain.get(id(x), x) for x in leaves], spec)
    written = {}
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for x in tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name)):
                if isinstance(x, StoredTensor):
                    written[id(plain[id(x)])] = x
    touched = {id(x.pieces) for x in written.values()}
    out = func(*plain_args, **plain_kwargs)
    for x in written.values():
        now = plain[id(x)]
        if (now.shape, now.stride()) != (x.shape, x.stride()):
            raise NotImplementedError(
                f"{func} changes the shape of {x!r} in place, which a state cannot. Use the op without the "
                "underscore."
            )
    # first moments last: they are encoded relative to the second moments stored by then
    for key in sorted(touched, key=lambda key: windows[key].has_relative_codes):
        windows[key].encode_(flats[key], only_changed=True)
    return tree_map(lambda x: written.get(id(x), x), out)


def differ(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Which elements of two FP32 tensors differ in any bit."""
    return x.view(torch.int32) != y.view(torch.int32)
