"""`head_norm` as an autograd function."""

import torch

from coat_kernels.autograd.derivatives import once_differentiable, refuse_forward_mode
from coat_kernels.device import uses_kernels
from coat_kernels.groups.reference import Grouped
from coat_kernels.head_norm.kernels import head_norm_backward_triton, head_norm_forward_triton
from coat_kernels.head_norm.reference import head_norm_backward_reference, head_norm_forward_reference
from coat_kernels.norm import NormOptions


def _forward(x, *rest):
    """Runs the kernel for CUDA tensors, else the reference."""
    run = head_norm_forward_triton if uses_kernels(x) and x.numel() else head_norm_forward_reference
    return run(x, *rest)


class _HeadNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, cos, sin, eps, zero_centered, saved_format):
        y, q, rstd = _forward(x, weight, cos, sin, eps, zero_centered, saved_format)
        ctx.zero_centered, ctx.format = zero_centered, q.format
        ctx.save_for_backward(*q.tensors, rstd, weight, cos, sin)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        codes, exponent, rstd, weight, cos, sin = ctx.saved_tensors
        q = Grouped(codes, exponent, ctx.format)
        takes_kernel = uses_kernels(grad_y) and grad_y.numel()
        run = head_norm_backward_triton if takes_kernel else head_norm_backward_reference
        grad_x, grad_weight = run(grad_y, q, rstd, weight, cos, sin, ctx.zero_centered)
        return grad_x, grad_weight.to(weight.dtype), *(None,) * 5


def head_norm(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, options: NormOptions
) -> torch.Tensor:
    """RMSNorm of every head of queries or keys, then its rotary positions. Saves x in groups of 16, and
    rstd in FP32.

    Args:
        x: [s, b, heads, d], BF16 or FP32; copied if it is not contiguous.
        weight: [d], BF16 or FP32.
        cos, sin: FP32 [s, d], d even: channel i rotates with channel i + d / 2; or [any, 0]: no rotation.

    Returns y, in x's shape and dtype. Raises ValueError for shapes that do not match.
    """
    s, d = x.shape[0], x.shape[-1]
    turns = cos.shape[-1] > 0
    if cos.shape != sin.shape or cos.ndim != 2 or (turns and (cos.shape != (s, d) or d % 2)):
        raise ValueError(
            f"head_norm: expected cosines and sines of shape [{s}, {d}], of an even number of channels, or "
            f"[any, 0]; found {list(cos.shape)} and {list(sin.shape)}"
        )
    if x.ndim != 4 or weight.shape != (d,):
        raise ValueError(
            f"head_norm: x has shape {list(x.shape)} and the weight {list(weight.shape)}; expected "
            "[s, b, heads, d] and an element of the weight for each of the d channels"
        )
    x, how = x.contiguous(), (cos, sin, options.eps, options.zero_centered, options.saved_format)
    refuse_forward_mode(x, weight)
    if not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        # the saved tensors are computed as well: without them the kernel would sum in another order
        return _forward(x, weight, *how)[0]
    return _HeadNorm.apply(x, weight, *how)
