"""Groups of 1 x G in kernels: as separate kernels, and as tiles that other kernels read and write.

A tile's rows are `o_row`; its first column is `column`, a multiple of G. EVEN: every tile lies inside the
tensor. Otherwise elements past `rows` and `columns` are masked, and read as zero. `stride_x` and
`stride_exponent` are the elements from row to row.
"""

import torch
import triton
import triton.language as tl

from coat_kernels.fp8 import cast
from coat_kernels.groups.reference import DEFAULT_FORMAT, Grouped, empty_grouped
from coat_kernels.prepared import PreparedKernel, cdiv
from coat_kernels.tiles import load_tile, store_tile, tile_mask


@triton.jit
def quantize_groups_tile(b_x, TO_CODES: tl.constexpr, G: tl.constexpr):
    """An FP32 tile [rows, columns] as (codes, exponent [rows, columns / G])."""
    ROWS: tl.constexpr = b_x.shape[0]
    COLUMNS: tl.constexpr = b_x.shape[1]
    b_codes, b_exponent = TO_CODES(tl.reshape(b_x, [ROWS, COLUMNS // G, G]))
    return tl.reshape(b_codes, [ROWS, COLUMNS]), b_exponent.to(tl.uint8)


@triton.jit
def dequantize_groups_tile(b_codes, b_exponent, FROM_CODES: tl.constexpr, G: tl.constexpr):
    """Codes [rows, columns] and exponent [rows, columns / G] as FP32."""
    ROWS: tl.constexpr = b_codes.shape[0]
    COLUMNS: tl.constexpr = b_codes.shape[1]
    b_groups = tl.reshape(FROM_CODES(b_codes), [ROWS, COLUMNS // G, G])
    b_scale = (b_exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return tl.reshape(b_groups * b_scale[:, :, None], [ROWS, COLUMNS])


@triton.jit
def store_group_tile(b_x, p_codes, p_exponent, o_row, column, rows, columns, stride_x, stride_exponent,
                     TO_CODES: tl.constexpr, G: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Quantizes and stores an FP32 tile; masked elements must be zero."""
    COLUMNS: tl.constexpr = b_x.shape[1]
    o_x = column + tl.arange(0, COLUMNS)
    o_group = column // G + tl.arange(0, COLUMNS // G)
    m_x = tile_mask(o_row, o_x, rows, columns)
    m_group = tile_mask(o_row, o_group, rows, tl.cdiv(columns, G))
    b_codes, b_exponent = quantize_groups_tile(b_x, TO_CODES, G)
    store_tile(p_codes, o_row[:, None] * stride_x + o_x[None, :], b_codes, m_x, not EVEN)
    o_exponent = o_row[:, None] * stride_exponent + o_group[None, :]
    store_tile(p_exponent, o_exponent, b_exponent, m_group, not EVEN)


@triton.jit
def load_group_tile(p_codes, p_exponent, o_row, column, rows, columns, stride_x, stride_exponent,
                    COLUMNS: tl.constexpr, FROM_CODES: tl.constexpr, G: tl.constexpr,
                    EVEN: tl.constexpr):  # fmt: skip
    """A tile as FP32."""
    o_x = column + tl.arange(0, COLUMNS)
    o_group = column // G + tl.arange(0, COLUMNS // G)
    m_x = tile_mask(o_row, o_x, rows, columns)
    m_group = tile_mask(o_row, o_group, rows, tl.cdiv(columns, G))
    b_codes = load_tile(p_codes, o_row[:, None] * stride_x + o_x[None, :], m_x, not EVEN)
    o_exponent = o_row[:, None] * stride_exponent + o_group[None, :]
    b_exponent = load_tile(p_exponent, o_exponent, m_group, not EVEN)
    return dequantize_groups_tile(b_codes, b_exponent, FROM_CODES, G)


@PreparedKernel
@triton.jit
def quantize_groups_kernel(p_x, p_codes, p_exponent, rows, columns, stride,
                           TO_CODES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                           G: tl.constexpr):  # fmt: skip
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS
    o_column = column + tl.arange(0, COLUMNS)
    m_x = tile_mask(o_row, o_column, rows, columns)
    b_x = tl.load(p_x + o_row[:, None] * stride + o_column[None, :], mask=m_x, other=0.0).to(tl.float32)
    store_group_tile(b_x, p_codes, p_exponent, o_row, column, rows, columns, columns, tl.cdiv(columns, G),
                     TO_CODES, G, False)  # fmt: skip


@PreparedKernel
@triton.jit
def dequantize_groups_kernel(p_codes, p_exponent, p_x, rows, columns,
                             FROM_CODES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                             G: tl.constexpr):  # fmt: skip
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS
    o_column = column + tl.arange(0, COLUMNS)
    m_x = tile_mask(o_row, o_column, rows, columns)
    b_x = load_group_tile(p_codes, p_exponent, o_row, column, rows, columns, columns, tl.cdiv(columns, G),
                          COLUMNS, FROM_CODES, G, False)  # fmt: skip
    tl.store(p_x + o_row[:, None] * columns + o_column[None, :], cast(b_x, p_x.dtype.element_ty), mask=m_x)


def quantize_groups_triton(x: torch.Tensor, group_size: int, fmt: str = DEFAULT_FORMAT) -> Grouped:
    """`quantize_groups_reference` as a kernel, bit for bit."""
    rows, columns = x.shape
    out = empty_grouped(rows, columns, group_size, fmt, x.device)
    quantize_groups_kernel[(cdiv(rows, 8), cdiv(columns, 256))](
        x,
        out.codes,
        out.exponent,
        rows,
        columns,
        x.stride(0),
        TO_CODES=out.format.to_codes_tile,
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
        q.codes,
        q.exponent,
        x,
        rows,
        columns,
        FROM_CODES=q.format.from_codes_tile,
        ROWS=8,
        COLUMNS=256,
        G=group_size,
    )
    return x
