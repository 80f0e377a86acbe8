"""Attention on torch's scaled_dot_product_attention that saves q, k, v and its output as they are or in 8
bits, in 1 x G groups along the channels.

The backward kernel is the backend's own; groups are converted back to the input's dtype before it. The output
carries its origin, which is what attention itself saves of it, so that the projection behind it saves no
second copy.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from coat_kernels.autograd.origin import Origin, note, noted, with_origin
from coat_kernels.fp8 import Fp8Format
from coat_kernels.groups.op import dequantize_groups, quantize_groups
from coat_kernels.groups.reference import DEFAULT_FORMAT, Grouped
from coat_kernels.tensorwise.quantize import Quantized, quantize_tensor

# in the order of their speed on Hopper
BACKENDS = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
_IS_ON = {
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}

# numbers to which rows of a mask are padded, so that torch's kernels take it as it lies
_ALIGNED = 16
# what is added to scores that are masked: below all scores, and finite when kernels multiply it by log2(e)
_MASKED = -(2.0**100)


def switched_on(backends: Sequence[SDPBackend]) -> list[SDPBackend]:
    """Those of `backends` that nobody has switched off, by `torch.backends.cuda.enable_cudnn_sdp(False)`
    for one, or an open `torch.nn.attention.sdpa_kernel`."""
    return [backend for backend in backends if _IS_ON[backend]()]


class _Order(NamedTuple):
    """How [b, n, s, d] lies as [tokens, channels]: `there` permutes it so, `back` undoes that. columns:
    recomputes an output that is saved as it is, for an `Origin`."""

    there: tuple[int, ...]
    back: tuple[int, ...]
    columns: Callable


def _to_tokens(x: torch.Tensor, there: tuple[int, ...]) -> torch.Tensor:
    """[b, n, s, d] as [s * b, n * d] or [b * s, n * d]; a view if memory is in that order already."""
    return x.permute(there).reshape(x.shape[0] * x.shape[2], -1)


def _columns_sequence_first(output: torch.Tensor, largest: torch.Tensor, fmt: Fp8Format) -> Quantized:
    rows = _to_tokens(output, _SEQUENCE_FIRST.there).contiguous()
    return quantize_tensor(rows, largest, fmt, rows=False, columns=True)


def _columns_batch_first(output: torch.Tensor, largest: torch.Tensor, fmt: Fp8Format) -> Quantized:
    rows = _to_tokens(output, _BATCH_FIRST.there).contiguous()
    return quantize_tensor(rows, largest, fmt, rows=False, columns=True)


# the tokens of one position together, or those of one sequence
_SEQUENCE_FIRST = _Order((2, 0, 1, 3), (1, 2, 0, 3), _columns_sequence_first)
_BATCH_FIRST = _Order((0, 2, 1, 3), (0, 2, 1, 3), _columns_batch_first)


class _Compressed:
    """Hooks that save the large tensors of one attention as groups, if `group_size` is given. Keys and values
    that were repeated for it are saved as they were before.

    torch calls only the innermost of nested hooks. The outer ones (offloading, accounting) get what is saved
    from here.
    """

    def __init__(
        self,
        group_size: int | None,
        saved_format: str,
        q: torch.Tensor,
        v: torch.Tensor,
        order: _Order,
        mask: torch.Tensor | None = None,
    ):
        self.group_size, self.saved_format, self.dtype = group_size, saved_format, q.dtype
        self.order = order
        # by address, shape and strides of what was repeated: what it is made of, and how often each head
        # stands in it. Views of other shapes, as those of the MATH backend, stay as they are.
        self.sources: dict[tuple, tuple[torch.Tensor, int]] = {}
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self.outer_pack, self.outer_unpack = outer or (_with_version, _unless_changed)
        # what else attention saves has fewer dimensions or channels, but for the mask. In a sequence as long
        # as heads are wide nothing tells the two apart, and all stays as it is.
        self.dims, self.channels = q.dim(), (q.shape[-1], v.shape[-1])
        self.mask_shape = None if mask is None else mask.shape
        self.kept: dict[int, Grouped] = {}

    def repeat(self, x: torch.Tensor, times: int) -> torch.Tensor:
        """`x` [b, groups, s, d] with each head `times` times behind itself."""
        found = _repeated(x, times)
        if found is not x:
            self.sources[_place(found)] = x.detach(), times
        return found

    def pack(self, x: torch.Tensor):
        of_heads = x.dim() == self.dims and x.shape[-1] in self.channels and x.shape[-2:] != self.mask_shape
        source, times = self.sources.get(_place(x), (x, 1)) if self.sources else (x, 1)
        if self.group_size is None or not of_heads or x.dtype != self.dtype:
            return None, times, self.outer_pack(source)
        kept = quantize_groups(
            _to_tokens(source, self.order.there).contiguous(), self.group_size, self.saved_format
        )
        self.kept[x.data_ptr()] = kept
        return source.shape, times, [self.outer_pack(t) for t in kept]

    def unpack(self, packed):
        shape, times, kept = packed
        if shape is None:
            return _repeated(self.outer_unpack(kept), times)
        rows = dequantize_groups(Grouped(*map(self.outer_unpack, kept)), self.group_size, self.dtype)
        return _repeated(rows.view([shape[i] for i in self.order.there]).permute(self.order.back), times)

    def origin_of(self, output: torch.Tensor) -> Origin | None:
        """What was kept of `output`, if autograd handed it over. To be asked once, behind the forward: then
        autograd alone holds what is saved."""
        kept = self.kept.get(output.data_ptr())
        self.kept.clear()
        self.sources.clear()
        if self.group_size is None:
            return Origin((output.detach(),), self.order.columns)
        return None if kept is None else origin_in_groups(kept, self.group_size, self.dtype)


def _with_version(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    # a non-leaf tensor that is kept by its own node, as the output, would never be freed
    return x if x.is_leaf else x.detach(), x._version


def _unless_changed(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    """The tensor of `_with_version`. torch itself asks this of what no hook packs."""
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


def origin_in_groups(kept: Grouped, group_size: int, dtype: torch.dtype) -> Origin:
    """The origin of a tensor in `dtype` that is `kept` in groups."""

    def columns(codes, exponent, largest, fmt):
        rows = dequantize_groups(Grouped(codes, exponent), group_size, dtype)
        return quantize_tensor(rows, largest, fmt, rows=False, columns=True)

    return Origin(tuple(kept), columns)


@functools.lru_cache(maxsize=2)
def _window_mask(s: int, window: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What is added to the scores [s, s], so that a token sees itself and the `window` before. One for all
    layers, as attention saves it."""
    return _added(torch.ones(s, s, dtype=torch.bool, device=device).tril_().triu_(-window), dtype)


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
    group_size: int | None = None,
    saved_format: str = DEFAULT_FORMAT,
    backends: tuple[SDPBackend, ...] = BACKENDS,
    batch_first: bool = False,
) -> torch.Tensor:
    """Causal attention with grouped queries over whole sequences.

    Args:
        q: [s, b, n, d]; k: [s, b, groups, d]; v: [s, b, groups, e], of one dtype. torch's flash attention,
            the only one that CPUs have beside MATH, needs e = d.
        scale: of the scores; 1 / sqrt(d) by default.
        dropout: probability.
        window: how many tokens before itself a token attends to; all by default. Scores outside are masked,
            not spared: a longer sequence costs as much as without, and a mask of s * s numbers, which all
            layers share. FLASH_ATTENTION takes no mask.
        group_size: keep q, k, v and the output in groups of this size; None keeps them as they are.
        saved_format: of the groups, one of `coat_kernels.groups.GROUP_FORMATS`.
        backends: of scaled_dot_product_attention, the first that works and is not switched off is taken. CPUs
            have their own.
        batch_first: the first two dimensions of inputs and output are [b, s].

    Returns [s, b, n * e], carrying its origin.
    """
    order = _BATCH_FIRST if batch_first else _SEQUENCE_FIRST
    heads = [x.permute(order.back) for x in (q, k, v)]
    mask = None
    if window is not None and (s := heads[0].shape[2]) > window + 1:
        mask = _window_mask(s, window, q.dtype, q.device)
    choice = contextlib.nullcontext()
    if q.is_cuda:
        choice = sdpa_kernel(switched_on(backends), set_priority=True)
    keeps = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    compressed = None
    hooks = contextlib.nullcontext()
    if keeps and group_size is not None:
        compressed = _Compressed(group_size, saved_format, q, v, order, mask)
        hooks = torch.autograd.graph.saved_tensors_hooks(compressed.pack, compressed.unpack)
    with choice, hooks:
        output = F.scaled_dot_product_attention(
            *heads,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    y = output.permute(order.there).flatten(2)
    origin = None
    if keeps:
        origin = compressed.origin_of(output) if compressed else Origin((output.detach(),), order.columns)
    return with_origin(y, origin) if origin else y


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean `mask` [b, n, s, t] as what is added to the scores: 0, or a very low number where it is
    False; `mask` itself where a row is False alone, or where it is no boolean one.

    torch makes one in each call of attention and saves it for backward, s * t numbers in a layer. This one is
    noted on `mask`, for all layers. Its rows lie so that torch's kernels need no copy. Rows that see nothing
    are torch's matter: beside such a number the logarithm of a sum is lost, and gradients are too large.
    """
    if mask.dtype != torch.bool:
        return mask
    name = f"additive {dtype}"
    # None in it says: the mask itself
    found = noted(mask, name)
    if found is None:
        if mask.is_cuda and torch.cuda.is_current_stream_capturing():
            # which does not let the CPU look at it
            return mask
        found = (_added(mask, dtype) if mask.any(-1).all() else None,)
        note(mask, name, found)
    return mask if found[0] is None else found[0]


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    *shape, t = mask.shape
    # an evaluation's is training's, too
    with torch.inference_mode(False):
        found = torch.zeros(*shape, -(-t // _ALIGNED) * _ALIGNED, dtype=dtype, device=mask.device)[..., :t]
        return found.masked_fill_(~mask, _MASKED)


def kept_attention(
    attend: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    times: int = 1,
    group_size: int | None = None,
    saved_format: str = DEFAULT_FORMAT,
) -> torch.Tensor:
    """The output [b, s, n * e] of attend(q, k, v): any attention by torch's operations of heads [b, n, s, d]
    and values [b, n, s, e] that gives [b, n, s, e]. The output carries its origin. Tensors of d or e channels
    are saved in groups, as in `causal_attention`. The heads of k and v are repeated `times` times for
    `attend`, and saved without that."""
    if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return attend(q, _repeated(k, times), _repeated(v, times)).transpose(1, 2).flatten(2)
    compressed = _Compressed(group_size, saved_format, q, v, _BATCH_FIRST)
    heads = q, compressed.repeat(k, times), compressed.repeat(v, times)
    hooks = contextlib.nullcontext()
    if group_size is not None or times > 1:
        hooks = torch.autograd.graph.saved_tensors_hooks(compressed.pack, compressed.unpack)
    with hooks:
        output = attend(*heads)
    y = output.transpose(1, 2).flatten(2)
    origin = compressed.origin_of(output)
    return with_origin(y, origin) if origin else y
