"""Gradients that appear as FP32 and are stored in BF16 or FP16.

ZeRO copies a rank's gradients to FP32 for the step. The copy takes 4 bytes per parameter of the partition
(stages 1 and 2), often at the peak of memory, or of a part of the partition (stage 3). CoatAdamW's kernels
need no copy: they widen and scale gradients while they read them, with the same bits as result.
"""

import torch
from torch.utils._pytree import tree_map

aten = torch.ops.aten


class _Content:
    """The data that a narrow gradient shares with tensors that were detached from it."""

    def __init__(self, narrow: torch.Tensor):
        # narrow, and FP32 after an operation that needs FP32
        self.values, self.is_wide = narrow, False
        # a factor for the values that is not applied yet: FP32, one element, or None
        self.scale: torch.Tensor | None = None

    def multiply(self, factor: torch.Tensor | float) -> None:
        if not isinstance(factor, torch.Tensor):
            factor = torch.full((), factor, dtype=torch.float32, device=self.values.device)
        self.scale = factor.float() if self.scale is None else self.scale * factor

    def widen(self) -> torch.Tensor:
        if not self.is_wide:
            self.values, self.is_wide = self.values.float(), True
            if self.scale is not None:
                self.values *= self.scale
                self.scale = None
        return self.values


class NarrowGrad(torch.Tensor):
    """A tensor of BF16 or FP16 values that is FP32 to every caller except CoatAdamW.

    Multiplying it in place by one number is deferred to the step. Any other operation converts it to FP32
    first.
    """

    # torch's own way to disable this hook; torch's type stubs lack it
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, content: _Content):
        held = content.values
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=torch.float32, device=held.device
        )

    def __init__(self, content: _Content):
        self._content = content

    @classmethod
    def of(cls, narrow: torch.Tensor) -> "NarrowGrad":
        return cls(_Content(narrow.detach()))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        content = args[0]._content if isinstance(args[0], cls) else None
        if content is not None and not content.is_wide:
            if func is aten.detach.default:
                return cls(content)
            if func in (aten.mul_.Scalar, aten.mul_.Tensor) and _is_number(args[1]):
                content.multiply(args[1])
                return args[0]

        def plain(x):
            return x._content.widen() if isinstance(x, cls) else x

        result = func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
        # an in-place operation returns its first argument
        return args[0] if content is not None and result is content.values else result

    def __repr__(self):
        return f"NarrowGrad({tuple(self.shape)})"


def _is_number(factor) -> bool:
    return not isinstance(factor, torch.Tensor) or (factor.numel() == 1 and type(factor) is torch.Tensor)


def narrow_and_scale(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The stored values of a gradient, and the FP32 factor to multiply them by, or None."""
    if not isinstance(grad, NarrowGrad):
        return grad, None
    content = grad._content
    return content.values, content.scale
