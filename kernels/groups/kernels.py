"""Groups of 1 x G in kernels: as separate kernels, and as tiles that other kernels read and write.

A tile's rows are `o_row`; its first column is `column`, a multiple of G. EVEN: every tile lies inside the
tensor. Otherwise elements past `rows` and `columns` are masked, and read as zero. `stride_x` and
`stride_exponent` are the elements from row to row.
"""

import torch
import triton
import triton.language as tl

from coat_kernels.fast_math import fast_sqrt, with_sign_of
from coat_kernels.fp8 import cast, from_fp8, to_fp8
from coat_kernels.groups.reference import DEFAULT_FORMAT, NAN_CODE, TIES_UP, Grouped, empty_grouped
from coat_kernels.prepared import PreparedKernel, cdiv
from coat_kernels.tiles import load_tile, store_tile, tile_mask


@triton.jit
def quantize_groups_tile(b_x, ROOTS: tl.constexpr, G: tl.constexpr):
    """An FP32 tile [rows, columns] as (bytes of codes, exponent [rows, columns / G])."""
    ROWS: tl.constexpr = b_x.shape[0]
    COLUMNS: tl.constexpr = b_x.shape[1]
    # exponent and mantissa bits of the format's largest magnitude
    POWER: tl.constexpr = 13 if ROOTS else 8
    LIMIT: tl.constexpr = 0x7E0000 if ROOTS else 0x600000
    b_groups = tl.reshape(b_x, [ROWS, COLUMNS // G, G])
    # NaN for non-finite values, in one instruction; maxima ignore NaN, and the codes store it
    b_groups += b_groups * 0.0
    b_max = tl.maximum(tl.max(tl.abs(b_groups), axis=2), 0.0)
    # the exponent of the amax, from its bits
    b_bits = b_max.to(tl.int32, bitcast=True)
    b_exponent = (b_bits >> 23) - POWER + ((b_bits & 0x7FFFFF) > LIMIT).to(tl.int32)
    b_exponent = tl.maximum(b_exponent, 1)
    b_inverse = ((254 - b_exponent) << 23).to(tl.float32, bitcast=True)
    b_y = b_groups * b_inverse[:, :, None]
    b_codes = to_roots(b_y) if ROOTS else to_fp8(b_y, False)
    return tl.reshape(b_codes, [ROWS, COLUMNS]), b_exponent.to(tl.uint8)


@triton.jit
def to_roots(b_y):
    """Scaled values as sqrt8 codes, the bytes of signed integers."""
    b_root = with_sign_of(fast_sqrt(tl.abs(b_y)), b_y)
    # adding 1.5 * 2^23 rounds to nearest and leaves the integer in the lowest bits
    b_bits = (b_root * TIES_UP + 12582912.0).to(tl.int32, bitcast=True)
    return tl.where(b_y == b_y, b_bits, NAN_CODE).to(tl.uint8)


@triton.jit
def from_roots(b_codes):
    """The bytes of sqrt8 codes as scaled FP32 values."""
    b_root = b_codes.to(tl.int8, bitcast=True).to(tl.float32)
    return tl.where(b_root == NAN_CODE, float("nan"), b_root * tl.abs(b_root))


@triton.jit
def dequantize_groups_tile(b_codes, b_exponent, ROOTS: tl.constexpr, G: tl.constexpr):
    """Bytes of codes [rows, columns] and exponent [rows, columns / G] as FP32."""
    ROWS: tl.constexpr = b_codes.shape[0]
    COLUMNS: tl.constexpr = b_codes.shape[1]
    b_y = from_roots(b_codes) if ROOTS else from_fp8(b_codes, False)
    b_groups = tl.reshape(b_y, [ROWS, COLUMNS // G, G])
    b_scale = (b_exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return tl.reshape(b_groups * b_scale[:, :, None], [ROWS, COLUMNS])


@triton.jit
def store_group_tile(b_x, p_codes, p_exponent, o_row, column, rows, columns, stride_x, stride_exponent,
                     ROOTS: tl.constexpr, G: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Quantizes and stores an FP32 tile; masked elements must be zero."""
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


@PreparedKernel
@triton.jit
def quantize_groups_kernel(p_x, p_codes, p_exponent, rows, columns, stride,
                           ROOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                           G: tl.constexpr):  # fmt: skip
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS
    o_column = column + tl.arange(0, COLUMNS)
    m_x = tile_mask(o_row, o_column, rows, columns)
    b_x = tl.load(p_x + o_row[:, None] * stride + o_column[None, :], mask=m_x, other=0.0).to(tl.float32)
    store_group_tile(b_x, p_codes, p_exponent, o_row, column, rows, columns, columns, tl.cdiv(columns, G),
                     ROOTS, G, False)  # fmt: skip


@PreparedKernel
@triton.jit
def dequantize_groups_kernel(p_codes, p_exponent, p_x, rows, columns,
                             ROOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                             G: tl.constexpr):  # fmt: skip
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS
    o_column = column + tl.arange(0, COLUMNS)
    m_x = tile_mask(o_row, o_column, rows, columns)
    b_x = load_group_tile(p_codes, p_exponent, o_row, column, rows, columns, columns, tl.cdiv(columns, G),
                          COLUMNS, ROOTS, G, False)  # fmt: skip
    tl.store(p_x + o_row[:, None] * columns + o_column[None, :], cast(b_x, p_x.dtype.element_ty), mask=m_x)


def quantize_groups_triton(x: torch.Tensor, group_size: int, fmt: str = DEFAULT_FORMAT) -> Grouped:
    """`quantize_groups_reference` as a kernel, bit for bit."""
    rows, columns = x.shape
    out = empty_grouped(rows, columns, group_size, fmt, x.device)
    quantize_groups_kernel[(cdiv(rows, 8), cdiv(columns, 256))](
        x,
        out.codes.view(torch.uint8),
        out.exponent,
        rows,
        columns,
        x.stride(0),
        ROOTS=out.holds_roots,
        ROWS=8,
        COLUMNS=256,
        G=group_size,
    )
    return out


def dequantize_groups_triton(q: Grouped, group_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`dequantize_groups_reference` as a kernel, rounded to `dtype`."""
    rows, columns = q.codes.shape
    x = torch.empty(rows, columns, dtype=dtype, device=q.codes.device)
    dequantize_groups_kernel[(cdiv(rows, 8), cdiv(columns, 256))](
        q.codes.view(torch.uint8),
        q.exponent,
        x,
        rows,
        columns,
        ROOTS=q.holds_roots,
        ROWS=8,
        COLUMNS=256,
        G=group_size,
    )
    return x
