"""The residual addition, residual + (branch + bias), in the pass of the norm that reads the sum.

The norm's kernel reads the addends, writes the sum, and normalizes the rounded values.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from coat_kernels.fp8 import round_to, widen
from coat_kernels.tiles import load_tile


class Addends(NamedTuple):
    """The addends: `residual` and `branch` [m, n], `bias` [n] or None, of one dtype."""

    residual: torch.Tensor | None
    branch: torch.Tensor | None
    bias: torch.Tensor | None = None


# stands for an x that already exists and needs no addition
NO_ADDENDS = Addends(None, None)


def residual_add_reference(
    residual: torch.Tensor, branch: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum; with a bias, branch + bias is rounded first."""
    return residual + (branch if bias is None else branch + bias)


@triton.jit
def residual_add_tile(p_residual, p_branch, p_bias, o_x, m_x, o_h, m_h, EVEN: tl.constexpr):
    """The sum as FP32 values, rounded to the stored dtype."""
    DTYPE: tl.constexpr = p_residual.dtype.element_ty
    b_branch = widen(load_tile(p_branch, o_x, m_x, not EVEN))
    if p_bias is not None:
        b_branch = round_to(b_branch + widen(load_tile(p_bias, o_h, m_h, not EVEN))[None, :], DTYPE)
    return round_to(widen(load_tile(p_residual, o_x, m_x, not EVEN)) + b_branch, DTYPE)
