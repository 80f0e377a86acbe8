"""The residual addition, residual + (branch + bias), left to the norm that reads the sum.

By itself it is a pass that writes the sum, which the norm then reads. A deferred sum is computed by the norm:
its kernel reads the addends, writes the sum, and goes on with the rounded values. Any other operation
computes the sum first.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from coat_kernels.autograd import once_differentiable
from coat_kernels.deferred import Deferred, Source
from coat_kernels.device import uses_kernels
from coat_kernels.fp8 import round_to, widen
from coat_kernels.tensorwise.predicted import PredictedScale
from coat_kernels.tiles import load_tile

# smaller sums do not wait: the norm finds them in the cache (50 MB on an H200), so deferring saves no pass
# and takes 20 us of CPU time
WAITS_FROM = 1 << 24


class Addends(NamedTuple):
    """What is added: `residual` and `branch` [m, n], `bias` [n] or None, of one dtype."""

    residual: torch.Tensor | None
    branch: torch.Tensor | None
    bias: torch.Tensor | None = None


# for a tensor that exists
NO_ADDENDS = Addends(None, None)


def residual_add_reference(
    residual: torch.Tensor, branch: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum; where there is a bias, what it is added to is rounded by itself."""
    return residual + (branch if bias is None else branch + bias)


@triton.jit
def residual_add_tile(p_residual, p_branch, p_bias, o_x, m_x, o_h, m_h, EVEN: tl.constexpr):
    """The sum as FP32 values, rounded to what is stored."""
    DTYPE: tl.constexpr = p_residual.dtype.element_ty
    b_branch = widen(load_tile(p_branch, o_x, m_x, not EVEN))
    if p_bias is not None:
        b_branch = round_to(b_branch + widen(load_tile(p_bias, o_h, m_h, not EVEN))[None, :], DTYPE)
    return round_to(widen(load_tile(p_residual, o_x, m_x, not EVEN)) + b_branch, DTYPE)


class Sum(Source):
    """What a deferred sum is computed from."""

    def __init__(self, addends: Addends):
        inputs = tuple(t for t in addends if t is not None)
        residual = addends.residual
        # no GEMM reads a sum, so there is no scale to predict
        no_scale = PredictedScale(None)
        super().__init__(
            inputs, residual_add_reference, None, no_scale, tuple(residual.shape), residual.dtype
        )

    @property
    def addends(self) -> Addends:
        return Addends(*self.inputs)

    def fill(self, made: torch.Tensor) -> None:
        """Takes the sum [m, n] that a kernel has computed, and frees the addends."""
        self.release()
        self.made = made


def is_deferred_sum(x: torch.Tensor) -> bool:
    """Whether `x` is a sum that has not been computed yet."""
    return isinstance(x, Deferred) and x.is_pending and isinstance(x.source, Sum)


class _ResidualAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual, branch, bias):
        ctx.bias_shape = None if bias is None else bias.shape
        rows = [t.detach().reshape(-1, t.shape[-1]).contiguous() for t in (residual, branch)]
        return Deferred(Sum(Addends(*rows, None if bias is None else bias.detach())), residual.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        needs_residual, needs_branch, needs_bias = ctx.needs_input_grad
        return (
            grad if needs_residual else None,
            grad if needs_branch else None,
            grad.sum_to_size(ctx.bias_shape) if needs_bias else None,
        )


def may_defer_add(residual: torch.Tensor, branch: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether `deferred_add` takes these tensors: one dtype, something is trained, no model is compiled; and,
    on CUDA, whether it pays."""
    tensors = [t for t in (residual, branch, bias) if t is not None]
    return (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and any(t.requires_grad for t in tensors)
        and all(t.dtype == residual.dtype and type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors)
        and branch.shape == residual.shape
        and (bias is None or bias.shape == residual.shape[-1:])
        and (residual.numel() >= WAITS_FROM or not uses_kernels(residual))
    )


def deferred_add(
    residual: torch.Tensor, branch: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """residual + (branch + bias), computed when it is read: on CUDA by a norm that defers its output, in the
    norm's pass.

    residual, branch: [..., n]; bias: [n] or None; as `may_defer_add` wants them. They are kept until then.
    Reading raises RuntimeError if one was modified in between.
    """
    return _ResidualAdd.apply(residual, branch, bias)
