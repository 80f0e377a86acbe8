"""FP8 in groups of 1 x G along the last dimension, each with a power-of-two scale of one byte.

This is how activations are kept for the backward of non-linear layers (COAT, section 5.1: mixed
granularity). A power-of-two scale loses nothing against an arbitrary one, since FP8 is itself a floating
point format, and its stored exponent e, scale = 2^(e - 127), takes 1/G of a byte per element. e is the
smallest that keeps the group's largest finite magnitude within the format, and at least 1.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from coat_kernels.fp8 import E4M3, Fp8Format, cast, from_fp8, round_to_fp8, to_fp8, uses_kernels


class Grouped(NamedTuple):
    """`codes` FP8 [rows, columns]; `exponent` uint8 [rows, ceil(columns / G)], scale = 2^(exponent - 127)."""

    codes: torch.Tensor
    exponent: torch.Tensor


def _split(x: torch.Tensor, group_size: int) -> torch.Tensor:
    padding = -x.shape[1] % group_size
    return torch.nn.functional.pad(x, (0, padding)).unflatten(1, (-1, group_size))


def quantize_groups_reference(x: torch.Tensor, group_size: int, fmt: Fp8Format = E4M3) -> Grouped:
    """`x` [rows, columns] in groups of `group_size` along its columns."""
    groups = _split(x.float(), group_size)
    largest = torch.where(groups.isfinite(), groups.abs(), 0).amax(2)
    mantissa, power = torch.frexp(largest)
    # fmt.max is 0.875 * 2^m: `power - m` suffices up to that mantissa, one more is needed beyond
    _, m = torch.frexp(torch.tensor(fmt.max))
    exponent = power - m + (mantissa > 0.875) + 127
    exponent = torch.where(largest > 0, exponent, 1).clamp(1, 254)
    codes = round_to_fp8(torch.ldexp(groups, 127 - exponent[..., None]), fmt)
    return Grouped(codes.flatten(1)[:, : x.shape[1]].contiguous(), exponent.to(torch.uint8))


def dequantize_groups_reference(q: Grouped, group_size: int) -> torch.Tensor:
    """FP32 [rows, columns]."""
    groups = _split(q.codes.float(), group_size)
    scale = torch.exp2(q.exponent.float() - 127)
    return (groups * scale[..., None]).flatten(1)[:, : q.codes.shape[1]]


@triton.jit
def quantize_groups_tile(b_x, E5M2: tl.constexpr, G: tl.constexpr):
    """An FP32 tile [rows, columns] as (codes, exponent [rows, columns / G])."""
    ROWS: tl.constexpr = b_x.shape[0]
    COLUMNS: tl.constexpr = b_x.shape[1]
    b_groups = tl.reshape(b_x, [ROWS, COLUMNS // G, G])
    # NaN where not finite, in one instruction; maxima pass it over, and the codes keep it
    b_groups += b_groups * 0.0
    b_max = tl.maximum(tl.max(tl.abs(b_groups), axis=2), 0.0)
    # the exponent of the largest magnitude, off its bits; 0x600000 is the mantissa of 1.75
    b_bits = b_max.to(tl.int32, bitcast=True)
    b_exponent = (b_bits >> 23) - (15 if E5M2 else 8) + ((b_bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    b_exponent = tl.maximum(b_exponent, 1)
    b_inverse = ((254 - b_exponent) << 23).to(tl.float32, bitcast=True)
    b_codes = to_fp8(b_groups * b_inverse[:, :, None], E5M2)
    return tl.reshape(b_codes, [ROWS, COLUMNS]), b_exponent.to(tl.uint8)


@triton.jit
def dequantize_groups_tile(b_codes, b_exponent, E5M2: tl.constexpr, G: tl.constexpr):
    """Codes [rows, columns] and exponent [rows, columns / G] as FP32."""
    ROWS: tl.constexpr = b_codes.shape[0]
    COLUMNS: tl.constexpr = b_codes.shape[1]
    b_groups = tl.reshape(from_fp8(b_codes, E5M2), [ROWS, COLUMNS // G, G])
    b_scale = (b_exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return tl.reshape(b_groups * b_scale[:, :, None], [ROWS, COLUMNS])


@triton.jit
def store_groups(b_x, p_codes, p_exponent, o_row, o_column, m_x, columns,
                 E5M2: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """Quantizes and stores a tile whose columns `o_column` begin a group; masked elements must be zero."""
    b_codes, b_exponent = quantize_groups_tile(b_x, E5M2, G)
    tl.store(p_codes + o_row[:, None] * columns + o_column[None, :], b_codes, mask=m_x)
    o_group, m_group, groups = group_offsets(o_row, o_column, m_x, columns, G)
    tl.store(p_exponent + o_row[:, None] * groups + o_group[None, :], b_exponent, mask=m_group)


@triton.jit
def load_groups(p_codes, p_exponent, o_row, o_column, m_x, columns, E5M2: tl.constexpr, G: tl.constexpr):
    """A stored tile as FP32; masked elements are zero."""
    b_codes = tl.load(p_codes + o_row[:, None] * columns + o_column[None, :], mask=m_x, other=0)
    o_group, m_group, groups = group_offsets(o_row, o_column, m_x, columns, G)
    b_exponent = tl.load(p_exponent + o_row[:, None] * groups + o_group[None, :], mask=m_group, other=1)
    return dequantize_groups_tile(b_codes, b_exponent, E5M2, G)


@triton.jit
def group_offsets(o_row, o_column, m_x, columns, G: tl.constexpr):
    """The group columns under a tile, their mask, and the groups in a row."""
    ROWS: tl.constexpr = m_x.shape[0]
    COLUMNS: tl.constexpr = m_x.shape[1]
    o_group = tl.min(tl.reshape(o_column, [COLUMNS // G, G]), axis=1) // G
    m_group = tl.max(tl.reshape(m_x.to(tl.int32), [ROWS, COLUMNS // G, G]), axis=2) > 0
    return o_group, m_group, tl.cdiv(columns, G)


@triton.jit
def quantize_groups_kernel(p_x, p_codes, p_exponent, rows, columns, stride,
                           E5M2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                           G: tl.constexpr):  # fmt: skip
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_x = (o_row[:, None] < rows) & (o_column[None, :] < columns)
    b_x = tl.load(p_x + o_row[:, None] * stride + o_column[None, :], mask=m_x, other=0.0).to(tl.float32)
    store_groups(b_x, p_codes, p_exponent, o_row, o_column, m_x, columns, E5M2, G)


@triton.jit
def dequantize_groups_kernel(p_codes, p_exponent, p_x, rows, columns,
                             E5M2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                             G: tl.constexpr):  # fmt: skip
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_x = (o_row[:, None] < rows) & (o_column[None, :] < columns)
    b_x = load_groups(p_codes, p_exponent, o_row, o_column, m_x, columns, E5M2, G)
    tl.store(p_x + o_row[:, None] * columns + o_column[None, :], cast(b_x, p_x.dtype.element_ty), mask=m_x)


def empty_grouped(rows: int, columns: int, group_size: int, fmt: Fp8Format, device: torch.device) -> Grouped:
    """Uninitialised storage for [rows, columns]."""
    return Grouped(
        torch.empty(rows, columns, dtype=fmt.dtype, device=device),
        torch.empty(rows, triton.cdiv(columns, group_size), dtype=torch.uint8, device=device),
    )


def quantize_groups_triton(x: torch.Tensor, group_size: int, fmt: Fp8Format = E4M3) -> Grouped:
    """`quantize_groups_reference` as a kernel, bit for bit."""
    rows, columns = x.shape
    out = empty_grouped(rows, columns, group_size, fmt, x.device)
    with torch.cuda.device_of(x):
        quantize_groups_kernel[(triton.cdiv(rows, 8), triton.cdiv(columns, 256))](
            x,
            out.codes.view(torch.uint8),
            out.exponent,
            rows,
            columns,
            x.stride(0),
            E5M2=fmt.is_e5m2,
            ROWS=8,
            COLUMNS=256,
            G=group_size,
        )
    return out


def dequantize_groups_triton(q: Grouped, group_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`dequantize_groups_reference` as a kernel, rounded to `dtype`."""
    rows, columns = q.codes.shape
    x = torch.empty(rows, columns, dtype=dtype, device=q.codes.device)
    with torch.cuda.device_of(x):
        dequantize_groups_kernel[(triton.cdiv(rows, 8), triton.cdiv(columns, 256))](
            q.codes.view(torch.uint8),
            q.exponent,
            x,
            rows,
            columns,
            E5M2=q.codes.dtype == torch.float8_e5m2,
            ROWS=8,
            COLUMNS=256,
            G=group_size,
        )
    return x


def quantize_groups(x: torch.Tensor, group_size: int, fmt: Fp8Format = E4M3) -> Grouped:
    """`x` [rows, columns], contiguous, in groups along its columns; on CUDA by the kernel."""
    return (quantize_groups_triton if uses_kernels(x) else quantize_groups_reference)(x, group_size, fmt)


def dequantize_groups(q: Grouped, group_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values [rows, columns] in `dtype`; on CUDA by the kernel."""
    if uses_kernels(q.codes):
        return dequantize_groups_triton(q, group_size, dtype)
    return dequantize_groups_reference(q, group_size).to(dtype)
