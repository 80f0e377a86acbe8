"""Attention by torch's scaled_dot_product_attention, or by torch's variable-length attention for packed
documents and sliding windows. It saves q, k, v and its output unquantized or in 8 bits, in 1 x G groups along
the channels.

The backward kernel is the backend's own; before it runs, groups are converted back to the input's dtype. The
output carries its origin, which is the copy that attention saves of it, so the next projection saves no
second copy.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from coat_kernels.autograd.derivatives import once_differentiable
from coat_kernels.autograd.origin import ADDITIVE, Origin, note, noted, with_origin
from coat_kernels.fp8 import Fp8Format
from coat_kernels.groups.op import dequantize_groups, quantize_groups
from coat_kernels.groups.reference import DEFAULT_FORMAT, GROUP_FORMATS, Grouped
from coat_kernels.tensorwise.quantize import Quantized, quantize_tensor

# fastest on Hopper first
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

# rows of a mask are padded to a multiple of this number, so torch's kernels read the mask without a copy
_ALIGNED = 16
# the number added to masked scores: below all scores, and still finite after kernels multiply it by log2(e)
_MASKED = -(2.0**100)


def switched_on(backends: Sequence[SDPBackend]) -> list[SDPBackend]:
    """The `backends` that are not switched off, for example by `torch.backends.cuda.enable_cudnn_sdp(False)`
    or an open `torch.nn.attention.sdpa_kernel`."""
    return [backend for backend in backends if _IS_ON[backend]()]


class _Order(NamedTuple):
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

    def columns(self, output: torch.Tensor, largest: torch.Tensor, fmt: Fp8Format) -> Quantized:
        """Recomputes an output that is saved unquantized, for an `Origin`."""
        return quantize_tensor(self.rows(output).contiguous(), largest, fmt, rows=False, columns=True)


# tokens of one position are adjacent, or tokens of one sequence
_SEQUENCE_FIRST = _Order((2, 0, 1, 3), (1, 2, 0, 3))
_BATCH_FIRST = _Order((0, 2, 1, 3), (0, 2, 1, 3))
_PACKED = _Order((0, 1, 2), (0, 1, 2))


def _packed_order(b: int, batch_first: bool) -> _Order:
    """The order of the tokens [b * s, n, d] of packed attention, whose input is [b, s] or [s, b]."""
    return _PACKED if batch_first or b == 1 else _Order((1, 0, 2, 3), (1, 0, 2, 3), b)


class _Compressed:
    """Hooks that save the large tensors of one attention call as groups, if `group_size` is given. Keys and
    values that were repeated for attention are saved unrepeated.

    torch calls only the innermost of nested hooks. These hooks therefore pass what they save to the outer
    ones (offloading, accounting).
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
        # from address, shape and strides of a repeated tensor to its source and the number of repeats of each
        # head. Views of other shapes, such as those of the MATH backend, are saved repeated.
        self.sources: dict[tuple, tuple[torch.Tensor, int]] = {}
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self.outer_pack, self.outer_unpack = outer or (_with_version, _unless_changed)
        # The other tensors that attention saves have fewer dimensions or channels; the only exception is the
        # mask. If the sequence length equals the head dimension, mask and heads have the same shape, and
        # nothing is saved in groups.
        self.dims, self.channels = q.dim(), (q.shape[-1], v.shape[-1])
        self.mask_shape = None if mask is None else mask.shape
        self.kept: dict[int, Grouped] = {}

    def repeat(self, x: torch.Tensor, times: int) -> torch.Tensor:
        """`x` [b, groups, s, d] with each head repeated `times` times in a row."""
        found = _repeated(x, times)
        if found is not x:
            self.sources[_place(found)] = x.detach(), times
        return found

    def pack(self, x: torch.Tensor):
        of_heads = x.dim() == self.dims and x.shape[-1] in self.channels and x.shape[-2:] != self.mask_shape
        source, times = self.sources.get(_place(x), (x, 1)) if self.sources else (x, 1)
        if self.group_size is None or not of_heads or x.dtype != self.dtype:
            return None, times, self.outer_pack(source)
        kept = quantize_groups(self.order.rows(source).contiguous(), self.group_size, self.saved_format)
        self.kept[x.data_ptr()] = kept
        return source.shape, times, [self.outer_pack(t) for t in kept.tensors]

    def unpack(self, packed):
        shape, times, kept = packed
        if shape is None:
            return _repeated(self.outer_unpack(kept), times)
        q = Grouped(*map(self.outer_unpack, kept), GROUP_FORMATS[self.saved_format])
        rows = dequantize_groups(q, self.group_size, self.dtype)
        return _repeated(self.order.heads(rows, shape), times)

    def origin_of(self, output: torch.Tensor) -> Origin | None:
        """The origin of `output`, from the copy that autograd saved; None if there is none. Call it once,
        after the forward: from then on only autograd holds the saved tensors."""
        kept = self.kept.get(output.data_ptr())
        self.kept.clear()
        self.sources.clear()
        if self.group_size is None:
            return Origin((output.detach(),), self.order.columns)
        return None if kept is None else origin_in_groups(kept, self.group_size, self.dtype)


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


def origin_in_groups(kept: Grouped, group_size: int, dtype: torch.dtype) -> Origin:
    """The origin of a tensor in `dtype` that is `kept` in groups."""
    saved_format = kept.format

    def columns(codes, exponent, largest, fmt):
        rows = dequantize_groups(Grouped(codes, exponent, saved_format), group_size, dtype)
        return quantize_tensor(rows, largest, fmt, rows=False, columns=True)

    return Origin(kept.tensors, columns)


@functools.lru_cache(maxsize=2)
def _window_mask(s: int, window: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The mask [s, s] that is added to the scores, so that a token sees itself and the `window` tokens before
    it. All layers share one, because attention saves it."""
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
        q: [s, b, n, d]; k: [s, b, groups, d]; v: [s, b, groups, e], of one dtype. On CPUs torch has only
            flash attention and MATH; flash attention needs e = d.
        scale: of the scores; 1 / sqrt(d) by default.
        dropout: probability.
        window: number of tokens before itself that a token attends to; all by default. Scores outside the
            window are masked, but still computed: the cost is that of full attention, plus a mask of s * s
            numbers that all layers share. FLASH_ATTENTION takes no mask.
        group_size: save q, k, v and the output in groups of this size; None saves them unquantized.
        saved_format: of the groups, one of `coat_kernels.groups.GROUP_FORMATS`.
        backends: of scaled_dot_product_attention; the first one that works and is not switched off runs. CPUs
            have their own.
        batch_first: the first two dimensions of inputs and output are [b, s].

    Returns [s, b, n * e] with its origin.
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


class Packed(NamedTuple):
    """Documents that follow one another in the tokens of a batch. A token attends to itself and to earlier
    tokens of its document."""

    starts: torch.Tensor
    """The first token of each document, and the number of tokens: int32 [documents + 1], on the device."""
    longest: int
    """Number of tokens of the longest document, or more."""
    window: int | None = None
    """Number of tokens before itself that a token attends to; None means all of its document."""

    @classmethod
    def of(cls, first: torch.Tensor) -> "Packed":
        """The documents of a batch. first: bool [b, s], whether a document begins at a token. The CPU waits
        for the device."""
        # training may use documents that an evaluation found
        with torch.inference_mode(False):
            starts = first.flatten().nonzero().flatten()
            starts = torch.cat([starts, starts.new_tensor([first.numel()])]).to(torch.int32)
            return cls(starts, int(starts.diff().max()))

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def whole(b: int, s: int, device: torch.device) -> "Packed":
        """`b` sequences of `s` tokens as documents."""
        with torch.inference_mode(False):
            return Packed(torch.arange(0, b * s + 1, s, dtype=torch.int32, device=device), s)

    def positions(self, tokens: int) -> torch.Tensor:
        """The position of each token in its document: int32 [tokens]."""
        numbers = torch.arange(tokens, dtype=self.starts.dtype, device=self.starts.device)
        return numbers - self.starts[torch.searchsorted(self.starts, numbers, right=True) - 1]

    def mask(self, b: int, s: int) -> torch.Tensor:
        """Which keys each token of the batch attends to: bool [b, 1, s, s]."""
        starts = self.starts
        tokens = torch.arange(b * s, dtype=starts.dtype, device=starts.device)
        document = torch.searchsorted(starts, tokens, right=True).view(b, 1, s)
        seen = (document[..., :, None] == document[..., None, :]).tril()
        return seen if self.window is None else seen.triu(-self.window)


@functools.cache
def _varlen() -> Callable | None:
    """torch's variable-length attention; None in a torch without windows for it, before 2.11."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    parameters = inspect.signature(varlen_attn).parameters
    if "window_size" not in parameters:
        return None
    # before torch 2.12 grouped queries need no argument
    return functools.partial(varlen_attn, enable_gqa=True) if "enable_gqa" in parameters else varlen_attn


def takes_packed(dtype: torch.dtype, device: torch.device, d: int, e: int) -> bool:
    """Whether `packed_attention` takes queries and keys of `d` channels and values of `e` channels. On GPUs
    it is FlashAttention, which torch has since 2.11 with windows."""
    if device.type == "cpu":
        return True
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and d == e <= 256 and d % 8 == 0 and _varlen() is not None


class _Packed(torch.autograd.Function):
    """Packed attention from a forward that returns the output and the logarithm of the sum of each row's
    exponentials, `lse`, and from its backward. It saves what FlashAttention saves.

    A sink is one more score of each row, without a value. It makes the sum of a row larger, lse' =
    log(e^lse + e^sink), and the output smaller, o' = o e^(lse - lse'). Backward computes the probabilities
    p = e^(score - lse') and the gradients of scores, p (grad v - grad o'). Given o' and lse', it therefore
    returns the gradients of attention with the sink. With v = 0, the gradient of the sink is the sum of
    -e^(sink - lse') (grad o') over the rows.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, starts, packed: Packed, scale: float):
        output, lse = (_flash if q.is_cuda else _reference)(q, k, v, packed, scale)
        if sinks is not None:
            whole = torch.logaddexp(lse, sinks[:, None].to(lse.dtype))
            output = (output * (lse - whole).exp().t()[..., None]).to(q.dtype)
            lse = whole
        ctx.save_for_backward(q, k, v, sinks, starts, output, lse)
        ctx.how = packed.longest, packed.window, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, sinks, starts, output, lse = ctx.saved_tensors
        longest, window, scale = ctx.how
        packed, backward = (
            Packed(starts, longest, window),
            _flash_backward if q.is_cuda else _reference_backward,
        )
        grads = backward(grad, q, k, v, output, lse, packed, scale)
        of_sinks = None
        if sinks is not None:
            along = (grad.to(lse.dtype) * output).sum(-1).t()
            of_sinks = -((sinks[:, None] - lse).exp() * along).sum(1).to(sinks.dtype)
        return *grads, of_sinks, None, None, None


def _flash(q, k, v, packed: Packed, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and lse [heads, tokens], by torch's variable-length attention."""
    from torch.nn.attention.varlen import AuxRequest

    return _varlen()(
        q, k, v, *_borders(packed), scale=scale, window_size=_sides(packed), return_aux=AuxRequest(lse=True)
    )


def _flash_backward(grad, q, k, v, output, lse, packed: Packed, scale: float) -> tuple[torch.Tensor, ...]:
    """The gradients of q, k and v. torch's variable-length attention has no other function for it."""
    # the state of random numbers, which dropout would read
    state, unused = (torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device))
    earlier, later = _sides(packed)
    return torch.ops.aten._flash_attention_backward(
        grad.contiguous(), q, k, v, output, lse, *_borders(packed), 0.0, earlier < 0, state, unused,
        scale=scale, window_size_left=earlier, window_size_right=later,
    )  # fmt: skip


def _borders(packed: Packed) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return packed.starts, packed.starts, packed.longest, packed.longest


def _sides(packed: Packed) -> tuple[int, int]:
    """The numbers of earlier and of later tokens that a token attends to; -1 means all."""
    return -1 if packed.window is None else packed.window, 0


def _reference(q, k, v, packed: Packed, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`_flash` in plain PyTorch: the specification, and the path of CPUs. Scores are at least FP32."""
    scores, values = _scores(q, k, v, packed, scale)
    lse = scores.logsumexp(-1)
    output = torch.einsum("htu,uhe->the", (scores - lse[..., None]).exp(), values)
    return output.to(q.dtype).contiguous(), lse


def _reference_backward(grad, q, k, v, output, lse, packed: Packed, scale: float) -> tuple[torch.Tensor, ...]:
    scores, values = _scores(q, k, v, packed, scale)
    p, grad, groups = (scores - lse[..., None]).exp(), grad.to(scores.dtype), k.shape[1]
    dv = torch.einsum("htu,the->uhe", p, grad)
    dp = torch.einsum("the,uhe->htu", grad, values)
    ds = p * (dp - (grad * output).sum(-1).t()[..., None]) * scale
    keys = k.to(scores.dtype).repeat_interleave(q.shape[1] // groups, 1)
    dq = torch.einsum("htu,uhd->thd", ds, keys)
    dk = torch.einsum("htu,thd->uhd", ds, q.to(scores.dtype))
    dk, dv = (t.unflatten(1, (groups, -1)).sum(2) for t in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q, k, v, packed: Packed, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The masked scores [heads, tokens, tokens] and the values of all heads, at least in FP32."""
    wide, times = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
    q, k, v = q.to(wide), *(t.to(wide).repeat_interleave(times, 1) for t in (k, v))
    hidden = ~packed.mask(1, len(q))[0]
    return (torch.einsum("thd,uhd->htu", q, k) * scale).masked_fill(hidden, -torch.inf), v


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packed: Packed,
    *,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    group_size: int | None = None,
    saved_format: str = DEFAULT_FORMAT,
    batch_first: bool = False,
) -> torch.Tensor:
    """Causal attention with grouped queries inside of each document, without a mask. A sliding window costs
    what it computes.

    Args:
        q: [s, b, n, d]; k: [s, b, groups, d]; v: [s, b, groups, e], of one dtype, which `takes_packed`.
        packed: documents of the b * s tokens, one sequence after another. They cover all tokens.
        sinks: [n], a score of each head that every row's softmax counts, and that has no value.
        scale, group_size, saved_format, batch_first: as in `causal_attention`.

    Returns [s, b, n * e] with its origin.
    """
    if not batch_first:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    b, s, n, d = q.shape
    scale = d**-0.5 if scale is None else scale
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    keeps = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    order, compressed, hooks = _packed_order(b, batch_first), None, contextlib.nullcontext()
    if keeps and group_size is not None:
        compressed = _Compressed(group_size, saved_format, q, v, order)
        hooks = torch.autograd.graph.saved_tensors_hooks(compressed.pack, compressed.unpack)
    with hooks:
        if q.is_cuda and sinks is None:
            output = _varlen()(q, k, v, *_borders(packed), scale=scale, window_size=_sides(packed))
        else:
            output = _Packed.apply(q, k, v, sinks, packed.starts, packed, scale)
    y = output.view(b, s, -1)
    if not batch_first:
        # a view of one sequence, else a copy
        y = y.transpose(0, 1).contiguous()
    if not keeps:
        return y
    origin = compressed.origin_of(output) if compressed else Origin((output.detach(),), order.columns)
    return with_origin(y, origin) if origin else y


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts a boolean `mask` [b, n, s, t] to the numbers that are added to the scores: 0, or a very low
    number where it is False. Returns `mask` itself if it is not boolean or if one of its rows is all False.

    Without this, torch converts the mask in each call of attention and saves the result for backward, s * t
    numbers per layer. This result is noted on `mask`, for all layers. Its row stride lets torch's kernels
    read it without a copy. Rows that are all False are left to torch: with such a low number in a whole row
    the logarithm of the sum loses its precision, and gradients are too large.
    """
    if mask.dtype != torch.bool:
        return mask
    name = ADDITIVE, dtype
    # a noted (None,) means: use the mask unchanged
    found = noted(mask, name)
    if found is None:
        if mask.is_cuda and torch.cuda.is_current_stream_capturing():
            # the CPU cannot read the mask during capture
            return mask
        found = (_added(mask, dtype) if mask.any(-1).all() else None,)
        note(mask, name, found)
    return mask if found[0] is None else found[0]


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    *shape, t = mask.shape
    # training may use a mask that an evaluation converted
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
    """Returns the output [b, s, n * e] of attend(q, k, v), with its origin. attend: any attention in torch
    operations of heads [b, n, s, d] and values [b, n, s, e] that returns [b, n, s, e]. Tensors of d or e
    channels are saved in groups, as in `causal_attention`. The heads of k and v are repeated `times` times
    for `attend`, and saved unrepeated."""
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
