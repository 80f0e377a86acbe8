"""Tiles of tensors kept in groups of 1 x G, as kernels that make or use such a tensor on their way read and
write them.

A tile's rows are `o_row`, its first column is `column`, a multiple of G. Of an EVEN tensor every tile lies
inside; otherwise what lies past `rows` and `columns` is masked, and reads as zero. `stride_x` and
`stride_exponent` are elements from row to row.
"""

import triton
import triton.language as tl

from coat_kernels.codecs.codec import load_tile, store_tile
from coat_kernels.fp8 import cast, widen
from coat_kernels.groups import dequantize_groups_tile, quantize_groups_tile
from coat_kernels.tensorwise import finite_max


@triton.jit
def tile_mask(o_row, o_column, rows, columns):
    return (o_row[:, None] < rows) & (o_column[None, :] < columns)


@triton.jit
def stored_max(b_x, DTYPE: tl.constexpr):
    """The largest finite magnitude of an FP32 tile once it is rounded to DTYPE, FP32.

    It is the rounded maximum, since rounding keeps the order, and saves reading rounded values back. What is
    finite in FP32 and not in BF16 counts as BF16's largest.
    """
    largest = widen(cast(finite_max(b_x), DTYPE))
    return tl.minimum(largest, 3.3895313892515355e38) if DTYPE == tl.bfloat16 else largest


@triton.jit
def store_group_tile(b_x, p_codes, p_exponent, o_row, column, rows, columns, stride_x, stride_exponent,
                     ROOTS: tl.constexpr, G: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Quantizes and stores an FP32 tile, whose masked elements must be zero."""
    COLUMNS: tl.constexpr = b_x.shape[1]
    o_x = column + tl.arange(0, COLUMNS)
    o_group = column // G + tl.arange(0, COLUMNS // G)
    m_x = tile_mask(o_row, o_x, rows, columns)
    m_group = tile_mask(o_row, o_group, rows, tl.cdiv(columns, G))
    b_codes, b_exponent = quantize_groups_tile(b_x, ROOTS, G)
    store_tile(p_codes, o_row[:, None] * stride_x + o_x[None, :], b_codes, m_x, not EVEN)
    o_exponent = o_row[:, None] * stride_exponent + o_group[None, :]
    store_tile(p_exponent, o_exponent, b_exponent, m_group, not EVEN)


@triton.jit
def load_group_tile(p_codes, p_exponent, o_row, column, rows, columns, stride_x, stride_exponent,
                    COLUMNS: tl.constexpr, ROOTS: tl.constexpr, G: tl.constexpr,
                    EVEN: tl.constexpr):  # fmt: skip
    """A tile as FP32."""
    o_x = column + tl.arange(0, COLUMNS)
    o_group = column // G + tl.arange(0, COLUMNS // G)
    m_x = tile_mask(o_row, o_x, rows, columns)
    m_group = tile_mask(o_row, o_group, rows, tl.cdiv(columns, G))
    b_codes = load_tile(p_codes, o_row[:, None] * stride_x + o_x[None, :], m_x, not EVEN)
    o_exponent = o_row[:, None] * stride_exponent + o_group[None, :]
    b_exponent = load_tile(p_exponent, o_exponent, m_group, not EVEN)
    return dequantize_groups_tile(b_codes, b_exponent, ROOTS, G)
