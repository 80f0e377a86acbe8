"""Attention inside of the documents of a batch, and in sliding windows, by torch's FlashAttention and, for
long documents, cuDNN. It makes no mask.

Both are called by their operators in ATen. `torch.nn.attention.varlen` has no backward that takes an output
with sinks. torch's cuDNN attention for documents builds a plan in every call, so long documents are whole
sequences here, one after another.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from coat_kernels.attention.saved import packed_order, run_attention
from coat_kernels.attention.whole import BACKENDS, causal_attention, switched_on
from coat_kernels.autograd.derivatives import once_differentiable
from coat_kernels.autograd.origin import origin_of, with_origin

# Tokens from which cuDNN computes a document, in launches of its own. No smaller number was measured.
LONG = 2048
# cuDNN has a plan for each number of tokens, so that numbers are rounded up to one of this many in an octave
_LENGTHS_PER_OCTAVE = 8


class Documents(NamedTuple):
    """Documents that follow one another in the tokens of a batch. A token attends to itself and to earlier
    tokens of its document."""

    cu_seqlens: torch.Tensor
    """The first token of each document, and the number of tokens: int32 [documents + 1], on the device."""
    max_seqlen: int
    """Number of tokens of the longest document, or more."""
    window: int | None = None
    """Number of tokens before itself that a token attends to; None means all of its document."""
    cu_seqlens_cpu: tuple[int, ...] | None = None
    """`cu_seqlens` on the CPU, if it is there."""

    @classmethod
    def of(cls, first: torch.Tensor, device: torch.device) -> "Documents":
        """The documents of a batch. first: bool [b, s] on any device, whether a document begins at a token.
        The CPU waits for the device of `first` once."""
        found = first.cpu().flatten().nonzero().flatten()
        return cls.between([*found.tolist(), first.numel()], device)

    @classmethod
    def between(cls, borders: list[int], device: torch.device) -> "Documents":
        """The documents between these tokens, in ascending order."""
        # training may use documents that an evaluation found
        with torch.inference_mode(False):
            cu_seqlens = torch.tensor(borders, dtype=torch.int32).to(device, non_blocking=True)
        max_seqlen = max(end - start for start, end in itertools.pairwise(borders))
        return cls(cu_seqlens, max_seqlen, cu_seqlens_cpu=tuple(borders))

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def whole(b: int, s: int, device: torch.device) -> "Documents":
        """`b` sequences of `s` tokens as documents."""
        with torch.inference_mode(False):
            return Documents(torch.arange(0, b * s + 1, s, dtype=torch.int32, device=device), s)

    def positions(self, tokens: int) -> torch.Tensor:
        """The position of each token in its document: int32 [tokens]."""
        numbers = torch.arange(tokens, dtype=self.cu_seqlens.dtype, device=self.cu_seqlens.device)
        return numbers - self.cu_seqlens[torch.searchsorted(self.cu_seqlens, numbers, right=True) - 1]

    def mask(self, b: int, s: int) -> torch.Tensor:
        """Which keys each token of the batch attends to: bool [b, 1, s, s]."""
        cu_seqlens = self.cu_seqlens
        tokens = torch.arange(b * s, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
        document = torch.searchsorted(cu_seqlens, tokens, right=True).view(b, 1, s)
        seen = (document[..., :, None] == document[..., None, :]).tril()
        return seen if self.window is None else seen.triu(-self.window)


def takes_packed(dtype: torch.dtype, device: torch.device, d: int, e: int) -> bool:
    """Whether `packed_attention` takes queries and keys of `d` channels and values of `e` channels. On GPUs
    it is FlashAttention."""
    if device.type == "cpu":
        return True
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and d == e <= 256 and d % 8 == 0


class Part(NamedTuple):
    """The documents from number `first` to `last`, which have the tokens from `start` to `end`."""

    start: int
    end: int
    first: int
    last: int
    max_seqlen: int

    @property
    def is_long(self) -> bool:
        """Whether this is one long document."""
        return self.max_seqlen >= LONG

    def documents(self, cu_seqlens: torch.Tensor) -> Documents:
        """The documents of these tokens alone. cu_seqlens: of all documents."""
        return Documents(cu_seqlens[self.first : self.last + 1] - self.start, self.max_seqlen)

    def sequence(self, x: torch.Tensor) -> torch.Tensor:
        """The tokens of a long document in x [tokens, n, d] as a sequence [1, n, s, d] of a rounded length.
        Tokens that follow it fill the sequence up, else zeros: causal attention never reads them."""
        step = 2 ** (self.max_seqlen - 1).bit_length() // 2 // _LENGTHS_PER_OCTAVE
        s = -(-self.max_seqlen // step) * step
        rows = x[self.start : self.start + s]
        return F.pad(rows, (0, 0, 0, 0, 0, s - len(rows))).transpose(0, 1)[None]


def parts_of(borders: Sequence[int]) -> list[Part]:
    """Long documents by themselves, and the documents between them."""
    parts: list[Part] = []
    for number, (start, end) in enumerate(itertools.pairwise(borders)):
        part = Part(start, end, number, number + 1, end - start)
        if parts and not (part.is_long or parts[-1].is_long):
            before = parts.pop()
            part = part._replace(
                start=before.start, first=before.first, max_seqlen=max(part.max_seqlen, before.max_seqlen)
            )
        parts.append(part)
    # Megatron's borders may end in documents without tokens
    return [part for part in parts if part.max_seqlen]


def _parts(
    q: torch.Tensor, v: torch.Tensor, packed: Documents, backends: tuple[SDPBackend, ...]
) -> list[Part] | None:
    """The parts that cuDNN and FlashAttention take in turn; None if one kernel takes all documents."""
    if (
        packed.cu_seqlens_cpu is None
        or packed.max_seqlen < LONG
        or not q.is_cuda
        or max(q.shape[-1], v.shape[-1]) > 128
        # cuDNN adds up gradients in any order
        or torch.are_deterministic_algorithms_enabled()
        or SDPBackend.CUDNN_ATTENTION not in switched_on(backends)
    ):
        return None
    return parts_of(packed.cu_seqlens_cpu)


class _Packed(torch.autograd.Function):
    """Packed attention from a forward that returns the output and the logarithm of the sum of each row's
    exponentials, `lse`, and from its backward. It saves what FlashAttention and cuDNN save, `lse` for each
    part.

    A sink is one more score of each row, without a value. It makes the sum of a row larger, lse' =
    log(e^lse + e^sink), and the output smaller, o' = o e^(lse - lse'). Backward computes the probabilities
    p = e^(score - lse') and the gradients of scores, p (grad v - grad o'). Given o' and lse', it therefore
    returns the gradients of attention with the sink. With v = 0, the gradient of the sink is the sum of
    -e^(sink - lse') (grad o') over the rows.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, cu_seqlens, packed: Documents, parts: list[Part] | None, scale: float):
        if parts is None:
            output, *lse = (_flash if q.is_cuda else _reference)(q, k, v, packed, scale)
        else:
            output, lse = _in_parts(q, k, v, cu_seqlens, parts, scale)
        if sinks is not None:
            whole = torch.logaddexp(lse[0], sinks[:, None].to(lse[0].dtype))
            output = (output * (lse[0] - whole).exp().t()[..., None]).to(q.dtype)
            lse = [whole]
        ctx.save_for_backward(q, k, v, sinks, cu_seqlens, output, *lse)
        ctx.how = packed.max_seqlen, packed.window, parts, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, sinks, cu_seqlens, output, *lse = ctx.saved_tensors
        max_seqlen, window, parts, scale = ctx.how
        if parts is None:
            packed = Documents(cu_seqlens, max_seqlen, window)
            backward = _flash_backward if q.is_cuda else _reference_backward
            grads = backward(grad, q, k, v, output, lse[0], packed, scale)
        else:
            grads = _in_parts_backward(grad, q, k, v, output, lse, cu_seqlens, parts, scale)
        of_sinks = None
        if sinks is not None:
            along = (grad.to(lse[0].dtype) * output).sum(-1).t()
            of_sinks = -((sinks[:, None] - lse[0]).exp() * along).sum(1).to(sinks.dtype)
        return *grads, of_sinks, None, None, None, None


def _in_parts(q, k, v, cu_seqlens, parts: list[Part], scale) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output, and lse of each part."""
    output, found = q.new_empty(*q.shape[:2], v.shape[2]), []
    for part in parts:
        tokens = slice(part.start, part.end)
        if part.is_long:
            y, lse = _cudnn(*(part.sequence(x) for x in (q, k, v)), scale)
            y = y[0].transpose(0, 1)[: part.max_seqlen]
        else:
            y, lse = _flash(*(x[tokens] for x in (q, k, v)), part.documents(cu_seqlens), scale)
        output[tokens] = y
        found.append(lse)
    return output, found


def _in_parts_backward(grad, q, k, v, output, lses, cu_seqlens, parts: list[Part], scale: float):
    """The gradients of q, k and v."""
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    for part, lse in zip(parts, lses, strict=True):
        tokens = slice(part.start, part.end)
        if part.is_long:
            # the output's gradient of tokens that follow the document is zero
            of_output = part._replace(start=0).sequence(grad[tokens])
            found = _cudnn_backward(of_output, *(part.sequence(x) for x in (q, k, v, output)), lse, scale)
            found = [x[0].transpose(0, 1)[: part.max_seqlen] for x in found]
        else:
            given = (x[tokens] for x in (q, k, v, output))
            found = _flash_backward(grad[tokens], *given, lse, part.documents(cu_seqlens), scale)
        for whole, of_part in zip(grads, found, strict=True):
            whole[tokens] = of_part
    return grads


def _cudnn(q, k, v, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and lse [1, heads, s, 1], of causal attention of a sequence [1, heads, s, d] by cuDNN."""
    output, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, scale=scale
    )
    return output, lse


def _cudnn_backward(grad, q, k, v, output, lse, scale: float) -> tuple[torch.Tensor, ...]:
    """The gradients of q, k and v."""
    # the state of random numbers, which only dropout reads
    state = torch.empty((), dtype=torch.int64, device=q.device)
    s = q.shape[2]
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, output, lse, state, state, None, None, None, s, s, 0.0, True, scale=scale
    )


def _flash(q, k, v, packed: Documents, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and lse [heads, tokens], by torch's FlashAttention."""
    earlier, later = _sides(packed)
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *_borders(packed), 0.0, earlier < 0, False,
        scale=scale, window_size_left=earlier, window_size_right=later,
    )  # fmt: skip
    return output, lse


def _flash_backward(grad, q, k, v, output, lse, packed: Documents, scale: float) -> tuple[torch.Tensor, ...]:
    """The gradients of q, k and v."""
    earlier, later = _sides(packed)
    # the state of random numbers, which only dropout reads
    state, unused = (torch.empty(n, dtype=torch.uint64, device=q.device) for n in (2, 0))
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, output, lse, *_borders(packed), 0.0, earlier < 0, state, unused,
        scale=scale, window_size_left=earlier, window_size_right=later,
    )  # fmt: skip


def _borders(packed: Documents) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return packed.cu_seqlens, packed.cu_seqlens, packed.max_seqlen, packed.max_seqlen


def _sides(packed: Documents) -> tuple[int, int]:
    """The numbers of earlier and of later tokens that a token attends to; -1 means all."""
    return -1 if packed.window is None else packed.window, 0


def _reference(q, k, v, packed: Documents, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`_flash` in plain PyTorch: the specification, and the path of CPUs. Scores are at least FP32."""
    scores, values = _scores(q, k, v, packed, scale)
    lse = scores.logsumexp(-1)
    output = torch.einsum("htu,uhe->the", (scores - lse[..., None]).exp(), values)
    return output.to(q.dtype).contiguous(), lse


def _reference_backward(grad, q, k, v, output, lse, packed: Documents, scale) -> tuple[torch.Tensor, ...]:
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


def _scores(q, k, v, packed: Documents, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The masked scores [heads, tokens, tokens] and the values of all heads, at least in FP32."""
    wide, times = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
    q, k, v = q.to(wide), *(t.to(wide).repeat_interleave(times, 1) for t in (k, v))
    hidden = ~packed.mask(1, len(q))[0]
    return (torch.einsum("thd,uhd->htu", q, k) * scale).masked_fill(hidden, -torch.inf), v


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packed: Documents,
    *,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    saved_format: str | None = None,
    backends: tuple[SDPBackend, ...] = BACKENDS,
    batch_first: bool = False,
) -> torch.Tensor:
    """Causal attention with grouped queries inside of each document, without a mask. A sliding window costs
    what it computes. Documents of one length, such as one document, are whole sequences to
    `causal_attention`, which is faster.

    Long documents run on cuDNN, too, if `packed.cu_seqlens_cpu` are known.

    Args:
        q: [s, b, n, d]; k: [s, b, groups, d]; v: [s, b, groups, e], of one dtype, which `takes_packed`.
        packed: documents of the b * s tokens, one sequence after another. They cover all tokens.
        sinks: [n], a score of each head that every row's softmax counts, and that has no value.
        backends: of whole sequences.
        scale, saved_format, batch_first: as in `causal_attention`.

    Returns [s, b, n * e] with its origin.
    """
    how = {"saved_format": saved_format}
    if not batch_first:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    b, s, _, d = q.shape
    documents = len(packed.cu_seqlens) - 1
    if (
        # then no document is shorter than the longest
        documents * packed.max_seqlen == b * s
        and sinks is None
        and packed.window is None
        and (batch_first or b == 1)
    ):
        rows = (x.reshape(documents, -1, *x.shape[2:]) for x in (q, k, v))
        y = causal_attention(*rows, scale=scale, backends=backends, batch_first=True, **how)
        origin = origin_of(y)
        y = y.reshape(b, s, -1) if batch_first else y.reshape(s, b, -1)
        return with_origin(y, origin) if origin else y
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scale = d**-0.5 if scale is None else scale
    plain = sinks is None and packed.window is None
    parts = _parts(q, v, packed, backends) if plain else None

    def attend(q, k, v):
        return _Packed.apply(q, k, v, sinks, packed.cu_seqlens, packed, parts, scale)

    order = packed_order(b, batch_first)
    output, origin = run_attention(attend, q, k, v, order, **how)
    y = output.view(b, s, -1)
    if not batch_first:
        # a view of one sequence, else a copy
        y = y.transpose(0, 1).contiguous()
    return with_origin(y, origin) if origin else y
