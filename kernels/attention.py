"""Attention on torch's scaled_dot_product_attention, keeping q, k, v and its output as they are or in 8 bits,
1 x G groups along the channels.

The backward kernel is the backend's own; groups are widened to the input's dtype in front of it. The output
carries its origin, what attention itself keeps of it, so that the projection behind it keeps no second copy.
"""

import contextlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from coat_kernels.fp8 import Fp8Format
from coat_kernels.groups import DEFAULT_FORMAT, Grouped, dequantize_groups, quantize_groups
from coat_kernels.origin import Origin, with_origin
from coat_kernels.tensorwise import Quantized, quantize_tensor

# in the order of their speed on Hopper
BACKENDS = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


# of [b, n, s, d], as [tokens, channels]: the tokens of one position together, or those of one sequence
_SEQUENCES_LAST, _BATCH_FIRST = (2, 0, 1, 3), (0, 2, 1, 3)


def _to_tokens(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """[b, n, s, d] as [s * b, n * d] or [b * s, n * d]; a view if memory is in that order already."""
    return x.permute(order).reshape(x.shape[0] * x.shape[2], -1)


def _origin(output: torch.Tensor, order: tuple[int, ...]) -> Origin:
    """The origin of an output that is kept as it is."""

    def columns(output, largest, fmt: Fp8Format) -> Quantized:
        return quantize_tensor(_to_tokens(output, order).contiguous(), largest, fmt, rows=False, columns=True)

    return Origin((output.detach(),), columns)


class _Compressed:
    """Hooks that keep the large tensors of one attention as groups.

    Of nested hooks torch calls the innermost; those around (offloading, accounting) get the groups from here.
    """

    def __init__(
        self,
        group_size: int,
        saved_format: str,
        shape: torch.Size,
        dtype: torch.dtype,
        order: tuple[int, ...],
    ):
        self.group_size, self.saved_format, self.dtype = group_size, saved_format, dtype
        self.order, self.back = order, [order.index(i) for i in range(4)]
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self.outer_pack, self.outer_unpack = outer or (lambda x: x, lambda x: x)
        # what attention keeps beside q, k, v and its output has fewer dimensions or channels
        self.dims, self.channels = len(shape), shape[-1]
        self.kept: dict[int, Grouped] = {}

    def pack(self, x: torch.Tensor):
        if x.dim() != self.dims or x.shape[-1] != self.channels or x.dtype != self.dtype:
            return None, self.outer_pack(x)
        kept = quantize_groups(_to_tokens(x, self.order).contiguous(), self.group_size, self.saved_format)
        self.kept[x.data_ptr()] = kept
        return x.shape, [self.outer_pack(t) for t in kept]

    def unpack(self, packed):
        shape, kept = packed
        if shape is None:
            return self.outer_unpack(kept)
        rows = dequantize_groups(Grouped(*map(self.outer_unpack, kept)), self.group_size, self.dtype)
        return rows.view([shape[i] for i in self.order]).permute(self.back)

    def origin_of(self, output: torch.Tensor) -> Origin | None:
        """What was kept of `output`, if autograd handed it over."""
        if output.data_ptr() not in self.kept:
            return None
        return origin_in_groups(self.kept.pop(output.data_ptr()), self.group_size, self.dtype)


def origin_in_groups(kept: Grouped, group_size: int, dtype: torch.dtype) -> Origin:
    """The origin of a tensor in `dtype` that is `kept` in groups."""

    def columns(codes, exponent, largest, fmt):
        rows = dequantize_groups(Grouped(codes, exponent), group_size, dtype)
        return quantize_tensor(rows, largest, fmt, rows=False, columns=True)

    return Origin(tuple(kept), columns)


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    group_size: int | None = None,
    saved_format: str = DEFAULT_FORMAT,
    backends: tuple[SDPBackend, ...] = BACKENDS,
    batch_first: bool = False,
) -> torch.Tensor:
    """Causal attention with grouped queries over whole sequences.

    Args:
        q: [s, b, n, d]; k, v: [s, b, groups, d], of one dtype.
        scale: of the scores; 1 / sqrt(d) by default.
        dropout: probability.
        group_size: keep q, k, v and the output in groups of this size; None keeps them as they are.
        saved_format: of the groups, one of `coat_kernels.groups.GROUP_FORMATS`.
        backends: of scaled_dot_product_attention, the first that works is taken. CPUs have their own.
        batch_first: the first two dimensions of inputs and output are [b, s].

    Returns [s, b, n * d], carrying its origin.
    """
    order = _BATCH_FIRST if batch_first else _SEQUENCES_LAST
    back = [order.index(i) for i in range(4)]
    q, k, v = (x.permute(back) for x in (q, k, v))
    with sdpa_kernel(list(backends), set_priority=True) if q.is_cuda else contextlib.nullcontext():
        return kept_attention(
            lambda: F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            ),
            (q, k, v),
            group_size=group_size,
            saved_format=saved_format,
            batch_first=batch_first,
        )


def kept_attention(
    attend: Callable[[], torch.Tensor],
    qkv: tuple[torch.Tensor, ...],
    *,
    group_size: int | None = None,
    saved_format: str = DEFAULT_FORMAT,
    batch_first: bool = False,
) -> torch.Tensor:
    """The output [b, n, s, d] of attend(), any attention of `qkv` by torch's operations, as [s, b, n * d] or
    [b, s, n * d], carrying its origin. What autograd keeps of tensors of that many channels is in groups, as
    of `causal_attention`.
    """
    order = _BATCH_FIRST if batch_first else _SEQUENCES_LAST
    keeps = torch.is_grad_enabled() and any(t.requires_grad for t in qkv)
    compressed = None
    hooks = contextlib.nullcontext()
    if keeps and group_size is not None:
        compressed = _Compressed(group_size, saved_format, qkv[0].shape, qkv[0].dtype, order)
        hooks = torch.autograd.graph.saved_tensors_hooks(compressed.pack, compressed.unpack)
    with hooks:
        output = attend()
    y = output.permute(order).flatten(2)
    origin = None
    if keeps:
        origin = compressed.origin_of(output) if compressed else _origin(output, order)
    return with_origin(y, origin) if origin else y
