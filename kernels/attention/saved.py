"""What attention saves: q, k, v and its output, unquantized or in groups of channels."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from coat_kernels.autograd.origin import Origin
from coat_kernels.fp8 import Fp8Format
from coat_kernels.groups.op import dequantize_groups, quantize_groups
from coat_kernels.groups.reference import GROUP_FORMATS, GROUP_SIZE, Grouped
from coat_kernels.tensorwise.quantize import Quantized, quantize_tensor


class Order(NamedTuple):
    """The order in memory of [b, n, s, d], or of [b * s, n, d], as [tokens, channels]: permuting by `there`
    produces it, `back` undoes it."""

    there: tuple[int, ...]
    back: tuple[int, ...]
    batch: int = 1
    """b, if `there` permutes [b, s, n, d] and heads are [b * s, n, d]."""

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Heads as [tokens, channels]; a view if memory already has that order."""
        if self.batch > 1:
            x = x.unflatten(0, (self.batch, -1))
        return x.permute(self.there).flatten(-2).flatten(0, -2)

    def heads(self, rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The reverse, for heads of this shape."""
        if self.batch > 1:
            shape = (self.batch, shape[0] // self.batch, *shape[1:])
        x = rows.view([shape[i] for i in self.there]).permute(self.back)
        return x.flatten(0, 1) if self.batch > 1 else x

    def columns(self, output: torch.Tensor, amax: torch.Tensor, fmt: Fp8Format) -> Quantized:
        """Recomputes an output that is saved unquantized, for an `Origin`."""
        return quantize_tensor(self.rows(output).contiguous(), amax, fmt, rows=False, columns=True)


# tokens of one position are adjacent, or tokens of one sequence
SEQUENCE_FIRST = Order((2, 0, 1, 3), (1, 2, 0, 3))
BATCH_FIRST = Order((0, 2, 1, 3), (0, 2, 1, 3))
_PACKED = Order((0, 1, 2), (0, 1, 2))


def packed_order(b: int, batch_first: bool) -> Order:
    """The order of the tokens [b * s, n, d] of packed attention, whose input is [b, s] or [s, b]."""
    return _PACKED if batch_first or b == 1 else Order((1, 0, 2, 3), (1, 0, 2, 3), b)


class _Compressed:
    """Hooks that save the large tensors of one attention call as groups, if `saved_format` is given. Keys and
    values that were repeated for attention are saved unrepeated.

    torch calls only the innermost of nested hooks. These hooks therefore pass what they save to the outer
    ones (offloading, accounting).
    """

    def __init__(self, saved_format: str | None, q: torch.Tensor, v: torch.Tensor, order: Order):
        self.saved_format, self.dtype, self.order = saved_format, q.dtype, order
        # from address, shape and strides of a repeated tensor to its source and the number of repeats of each
        # head. Views of other shapes, such as those of the MATH backend, are saved repeated.
        self.sources: dict[tuple, tuple[torch.Tensor, int]] = {}
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self.outer_pack, self.outer_unpack = outer or (_with_version, _unless_changed)
        # the other tensors that attention saves have fewer dimensions or channels
        self.dims, self.channels = q.dim(), (q.shape[-1], v.shape[-1])
        self.grouped: dict[int, Grouped] = {}

    def repeat(self, x: torch.Tensor, times: int) -> torch.Tensor:
        """`x` [b, groups, s, d] with each head repeated `times` times in a row."""
        found = _repeated(x, times)
        if found is not x:
            self.sources[_place(found)] = x.detach(), times
        return found

    def pack(self, x: torch.Tensor):
        of_heads = x.dim() == self.dims and x.shape[-1] in self.channels
        source, times = self.sources.get(_place(x), (x, 1)) if self.sources else (x, 1)
        if self.saved_format is None or not of_heads or x.dtype != self.dtype:
            return None, times, self.outer_pack(source)
        saved = quantize_groups(self.order.rows(source).contiguous(), GROUP_SIZE, self.saved_format)
        self.grouped[x.data_ptr()] = saved
        return source.shape, times, [self.outer_pack(t) for t in saved.tensors]

    def unpack(self, packed):
        shape, times, saved = packed
        if shape is None:
            return _repeated(self.outer_unpack(saved), times)
        q = Grouped(*map(self.outer_unpack, saved), GROUP_FORMATS[self.saved_format])
        rows = dequantize_groups(q, GROUP_SIZE, self.dtype)
        return _repeated(self.order.heads(rows, shape), times)

    def origin_of(self, output: torch.Tensor) -> Origin | None:
        """The origin of `output`, from the copy that autograd saved; None if there is none. Call it once,
        after the forward: from then on only autograd holds the saved tensors."""
        saved = self.grouped.get(output.data_ptr())
        self.grouped.clear()
        self.sources.clear()
        if self.saved_format is None:
            return Origin((output.detach(),), self.order.columns)
        return None if saved is None else origin_in_groups(saved, self.dtype)


def _with_version(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    # a non-leaf tensor that its own node holds, such as the output, would never be freed
    return x if x.is_leaf else x.detach(), x._version


def _unless_changed(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    """The tensor of `_with_version`. Without hooks torch makes the same check."""
    x, version = packed
    if x._version != version:
        raise RuntimeError(
            f"attention saved a tensor {list(x.shape)} for backward, such as its mask, that was modified by "
            "an in-place operation since. Give each forward a tensor of its own."
        )
    return x


def _place(x: torch.Tensor) -> tuple:
    return x.data_ptr(), x.shape, x.stride()


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    if times == 1:
        return x
    b, groups, s, d = x.shape
    return x[:, :, None].expand(b, groups, times, s, d).reshape(b, groups * times, s, d)


def origin_in_groups(saved: Grouped, dtype: torch.dtype) -> Origin:
    """The origin of a tensor in `dtype` that is saved in groups, `saved`."""
    saved_format = saved.format

    def columns(codes, exponent, amax, fmt):
        rows = dequantize_groups(Grouped(codes, exponent, saved_format), GROUP_SIZE, dtype)
        return quantize_tensor(rows, amax, fmt, rows=False, columns=True)

    return Origin(saved.tensors, columns)


def run_attention(
    attend: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    order: Order,
    *,
    saved_format: str | None,
    times: int = 1,
) -> tuple[torch.Tensor, Origin | None]:
    """The output of attend(q, k, v), which saves its tensors in groups if `saved_format` is given, and its
    origin; no origin without gradients. `times`: how often heads of k and v are repeated for `attend`."""
    if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return attend(q, _repeated(k, times), _repeated(v, times)), None
    if saved_format is None and times == 1:
        output = attend(q, k, v)
        return output, Origin((output.detach(),), order.columns)
    compressed = _Compressed(saved_format, q, v, order)
    k, v = compressed.repeat(k, times), compressed.repeat(v, times)
    with torch.autograd.graph.saved_tensors_hooks(compressed.pack, compressed.unpack):
        output = attend(q, k, v)
    return output, compressed.origin_of(output)
