"""Eight bits an element in groups of 1 x G along the last dimension, each with a power-of-two scale.

This is how activations are kept for the backward of non-linear layers (COAT, section 5.1: mixed
granularity). The stored exponent e, scale = 2^(e - 127), takes 1/G of a byte per element; it is the smallest
that keeps the group's largest finite magnitude within the format, and at least 1. An element x is stored as
one of, with y = x / scale,

- e4m3: y rounded to FP8, as the paper has it. A power-of-two scale loses nothing in a floating-point format.
- sqrt8: c = sign(y) round(sqrt(|y|)), an integer of which c |c| is y again. Its steps grow with the root of a
  value, where FP8's grow with the value itself: a Gaussian comes back within 0.7 % (relative RMS) instead of
  2.7, and beside an outlier of 1000 an element of 1 within 14 %, where plain integers would lose it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from coat_kernels.fast_math import fast_sqrt, with_sign_of
from coat_kernels.fp8 import E4M3, cast, from_fp8, round_to_fp8, to_fp8, uses_kernels
from coat_kernels.launch import PreparedKernel, cdiv


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """How elements are stored: `max` is the largest magnitude, over the scale, that is not saturated."""

    name: str
    dtype: torch.dtype
    max: float


GROUP_FORMATS = {
    # beyond 127.5^2 a root would round to 128
    "sqrt8": GroupFormat("sqrt8", torch.int8, 16256.0),
    "e4m3": GroupFormat("e4m3", E4M3.dtype, E4M3.max),
}
DEFAULT_FORMAT = "sqrt8"
# what sqrt8 stores for NaN and infinities
NAN_CODE = tl.constexpr(-128)
# roots half way between two integers go up, whatever the last bits of a fast square root are
TIES_UP = tl.constexpr(1 + 2.0**-20)


class Grouped(NamedTuple):
    """`codes` [rows, columns], whose dtype tells the format: int8 or FP8; `exponent` uint8
    [rows, ceil(columns / G)], scale = 2^(exponent - 127).
    """

    codes: torch.Tensor
    exponent: torch.Tensor

    @property
    def holds_roots(self) -> bool:
        """The flag by which the kernels choose between the two formats."""
        return self.codes.dtype == torch.int8


def _split(x: torch.Tensor, group_size: int) -> torch.Tensor:
    padding = -x.shape[1] % group_size
    return torch.nn.functional.pad(x, (0, padding)).unflatten(1, (-1, group_size))


def quantize_groups_reference(x: torch.Tensor, group_size: int, fmt: str = DEFAULT_FORMAT) -> Grouped:
    """`x` [rows, columns] in groups of `group_size` along its columns, in the format called `fmt`."""
    groups, form = _split(x.float(), group_size), GROUP_FORMATS[fmt]
    largest = torch.where(groups.isfinite(), groups.abs(), 0).amax(2)
    mantissa, power = torch.frexp(largest)
    # `power - m` suffices up to the mantissa of fmt.max, one more is needed beyond
    limit, m = torch.frexp(torch.tensor(form.max))
    exponent = power - m + (mantissa > limit) + 127
    exponent = torch.where(largest > 0, exponent, 1).clamp(1, 254)
    y = torch.ldexp(groups, 127 - exponent[..., None])
    codes = _roots(y) if form.dtype == torch.int8 else round_to_fp8(y, E4M3)
    return Grouped(codes.flatten(1)[:, : x.shape[1]].contiguous(), exponent.to(torch.uint8))


def _roots(y: torch.Tensor) -> torch.Tensor:
    codes = y.sign() * (y.abs().sqrt() * TIES_UP.value).round()
    return torch.where(y.isfinite(), codes, NAN_CODE.value).to(torch.int8)


def dequantize_groups_reference(q: Grouped, group_size: int) -> torch.Tensor:
    """FP32 [rows, columns]."""
    y = q.codes.float()
    if q.holds_roots:
        y = torch.where(y == NAN_CODE.value, torch.nan, y * y.abs())
    scale = torch.exp2(q.exponent.float() - 127)
    return (_split(y, group_size) * scale[..., None]).flatten(1)[:, : q.codes.shape[1]]


@triton.jit
def quantize_groups_tile(b_x, ROOTS: tl.constexpr, G: tl.constexpr):
    """An FP32 tile [rows, columns] as (bytes of codes, exponent [rows, columns / G])."""
    ROWS: tl.constexpr = b_x.shape[0]
    COLUMNS: tl.constexpr = b_x.shape[1]
    # the exponent and the mantissa's bits of the format's largest magnitude
    POWER: tl.constexpr = 13 if ROOTS else 8
    LIMIT: tl.constexpr = 0x7E0000 if ROOTS else 0x600000
    b_groups = tl.reshape(b_x, [ROWS, COLUMNS // G, G])
    # NaN where not finite, in one instruction; maxima pass it over, and the codes keep it
    b_groups += b_groups * 0.0
    b_max = tl.maximum(tl.max(tl.abs(b_groups), axis=2), 0.0)
    # the exponent of the largest magnitude, off its bits
    b_bits = b_max.to(tl.int32, bitcast=True)
    b_exponent = (b_bits >> 23) - POWER + ((b_bits & 0x7FFFFF) > LIMIT).to(tl.int32)
    b_exponent = tl.maximum(b_exponent, 1)
    b_inverse = ((254 - b_exponent) << 23).to(tl.float32, bitcast=True)
    b_y = b_groups * b_inverse[:, :, None]
    b_codes = to_roots(b_y) if ROOTS else to_fp8(b_y, False)
    return tl.reshape(b_codes, [ROWS, COLUMNS]), b_exponent.to(tl.uint8)


@triton.jit
def to_roots(b_y):
    """Scaled values as sqrt8, the bytes of signed integers."""
    b_root = with_sign_of(fast_sqrt(tl.abs(b_y)), b_y)
    # adding 1.5 * 2^23 rounds to nearest and leaves the integer in the lowest bits
    b_bits = (b_root * TIES_UP + 12582912.0).to(tl.int32, bitcast=True)
    return tl.where(b_y == b_y, b_bits, NAN_CODE).to(tl.uint8)


@triton.jit
def from_roots(b_codes):
    """The bytes of sqrt8 as scaled FP32 values."""
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
def store_groups(b_x, p_codes, p_exponent, o_row, o_column, m_x, columns,
                 ROOTS: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """Quantizes and stores a tile whose columns `o_column` begin a group; masked elements must be zero."""
    b_codes, b_exponent = quantize_groups_tile(b_x, ROOTS, G)
    tl.store(p_codes + o_row[:, None] * columns + o_column[None, :], b_codes, mask=m_x)
    o_group, m_group, groups = group_offsets(o_row, o_column, m_x, columns, G)
    tl.store(p_exponent + o_row[:, None] * groups + o_group[None, :], b_exponent, mask=m_group)


@triton.jit
def load_groups(p_codes, p_exponent, o_row, o_column, m_x, columns, ROOTS: tl.constexpr, G: tl.constexpr):
    """A stored tile as FP32; masked elements are zero."""
    b_codes = tl.load(p_codes + o_row[:, None] * columns + o_column[None, :], mask=m_x, other=0)
    o_group, m_group, groups = group_offsets(o_row, o_column, m_x, columns, G)
    b_exponent = tl.load(p_exponent + o_row[:, None] * groups + o_group[None, :], mask=m_group, other=1)
    return dequantize_groups_tile(b_codes, b_exponent, ROOTS, G)


@triton.jit
def group_offsets(o_row, o_column, m_x, columns, G: tl.constexpr):
    """The group columns under a tile, their mask, and the groups in a row."""
    ROWS: tl.constexpr = m_x.shape[0]
    COLUMNS: tl.constexpr = m_x.shape[1]
    o_group = tl.min(tl.reshape(o_column, [COLUMNS // G, G]), axis=1) // G
    m_group = tl.max(tl.reshape(m_x.to(tl.int32), [ROWS, COLUMNS // G, G]), axis=2) > 0
    return o_group, m_group, tl.cdiv(columns, G)


@PreparedKernel
@triton.jit
def quantize_groups_kernel(p_x, p_codes, p_exponent, rows, columns, stride,
                           ROOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                           G: tl.constexpr):  # fmt: skip
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_x = (o_row[:, None] < rows) & (o_column[None, :] < columns)
    b_x = tl.load(p_x + o_row[:, None] * stride + o_column[None, :], mask=m_x, other=0.0).to(tl.float32)
    store_groups(b_x, p_codes, p_exponent, o_row, o_column, m_x, columns, ROOTS, G)


@PreparedKernel
@triton.jit
def dequantize_groups_kernel(p_codes, p_exponent, p_x, rows, columns,
                             ROOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                             G: tl.constexpr):  # fmt: skip
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_x = (o_row[:, None] < rows) & (o_column[None, :] < columns)
    b_x = load_groups(p_codes, p_exponent, o_row, o_column, m_x, columns, ROOTS, G)
    tl.store(p_x + o_row[:, None] * columns + o_column[None, :], cast(b_x, p_x.dtype.element_ty), mask=m_x)


def empty_grouped(rows: int, columns: int, group_size: int, fmt: str, device: torch.device) -> Grouped:
    """Uninitialised storage for [rows, columns]."""
    return Grouped(
        torch.empty(rows, columns, dtype=GROUP_FORMATS[fmt].dtype, device=device),
        torch.empty(rows, cdiv(columns, group_size), dtype=torch.uint8, device=device),
    )


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


def quantize_groups(x: torch.Tensor, group_size: int, fmt: str = DEFAULT_FORMAT) -> Grouped:
    """`x` [rows, columns], contiguous, in groups along its columns; on CUDA by the kernel."""
    return (quantize_groups_triton if uses_kernels(x) else quantize_groups_reference)(x, group_size, fmt)


def dequantize_groups(q: Grouped, group_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values [rows, columns] in `dtype`; on CUDA by the kernel."""
    if uses_kernels(q.codes):
        return dequantize_groups_triton(q, group_size, dtype)
    return dequantize_groups_reference(q, group_size).to(dtype)
