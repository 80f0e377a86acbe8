"""Attention over whole sequences by torch's scaled_dot_product_attention, and any attention with a mask."""

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from coat_kernels.attention.saved import BATCH_FIRST, SEQUENCE_FIRST, run_attention
from coat_kernels.autograd.origin import ADDITIVE, note, noted, with_origin

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


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    saved_format: str | None = None,
    backends: tuple[SDPBackend, ...] = BACKENDS,
    batch_first: bool = False,
) -> torch.Tensor:
    """Causal attention with grouped queries over whole sequences.

    Args:
        q: [s, b, n, d]; k: [s, b, groups, d]; v: [s, b, groups, e], of one dtype. On CPUs torch has only
            flash attention and MATH; flash attention needs e = d.
        scale: of the scores; 1 / sqrt(d) by default.
        dropout: probability.
        saved_format: of q, k, v and the output, one of `coat_kernels.groups.GROUP_FORMATS`; None saves them
            unquantized.
        backends: of scaled_dot_product_attention; the first one that works and is not switched off runs. CPUs
            have their own.
        batch_first: the first two dimensions of inputs and output are [b, s].

    Returns [s, b, n * e] with its origin.
    """
    order = BATCH_FIRST if batch_first else SEQUENCE_FIRST
    heads = [x.permute(order.back) for x in (q, k, v)]
    attend = functools.partial(
        F.scaled_dot_product_attention,
        dropout_p=dropout,
        is_causal=True,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    choice = contextlib.nullcontext()
    if q.is_cuda:
        choice = sdpa_kernel(switched_on(backends), set_priority=True)
    with choice:
        output, origin = run_attention(attend, *heads, order, saved_format=saved_format)
    y = output.permute(order.there).flatten(2)
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


def custom_attention(
    attend: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    times: int = 1,
    saved_format: str | None = None,
) -> torch.Tensor:
    """Returns the output [b, s, n * e] of attend(q, k, v), with its origin. attend: any attention in torch
    operations of heads [b, n, s, d] and values [b, n, s, e] that returns [b, n, s, e]. Tensors of d or e
    channels are saved in groups, as in `causal_attention`. The heads of k and v are repeated `times` times
    for `attend`, and saved unrepeated."""
    output, origin = run_attention(attend, q, k, v, BATCH_FIRST, saved_format=saved_format, times=times)
    y = output.transpose(1, 2).flatten(2)
    return with_origin(y, origin) if origin else y
