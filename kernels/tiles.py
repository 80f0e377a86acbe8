"""Loads and stores of tiles in kernels, and the amax of tiles."""

import triton
import triton.language as tl

from coat_kernels.fp8 import cast, finite_or_nan, widen


@triton.jit
def load_tile(p_x, o_x, m_x, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(p_x + o_x, mask=m_x, other=0)
    return tl.load(p_x + o_x)


@triton.jit
def store_tile(p_x, o_x, b_x, m_x, MASKED: tl.constexpr):
    if MASKED:
        tl.store(p_x + o_x, b_x, mask=m_x)
    else:
        tl.store(p_x + o_x, b_x)


@triton.jit
def tile_mask(o_row, o_column, rows, columns):
    return (o_row[:, None] < rows) & (o_column[None, :] < columns)


@triton.jit
def finite_abs(b_x):
    """The magnitudes of an FP32 tile, with NaN for non-finite values; tl.maximum ignores NaN."""
    return tl.abs(finite_or_nan(b_x))


@triton.jit
def finite_max(b_x):
    """The amax of a tile, FP32."""
    b_abs = tl.abs(b_x.to(tl.float32))
    return tl.max(tl.ravel(tl.where(b_abs < float("inf"), b_abs, 0.0)), axis=0)


@triton.jit
def stored_max(b_x, DTYPE: tl.constexpr):
    """The amax of an FP32 tile after rounding to DTYPE, FP32.

    Rounding keeps the order, so the rounded amax is the amax of the rounded values. A value that is finite in
    FP32 but not in BF16 counts as BF16's largest.
    """
    amax = widen(cast(finite_max(b_x), DTYPE))
    return tl.minimum(amax, 3.3895313892515355e38) if DTYPE == tl.bfloat16 else amax
