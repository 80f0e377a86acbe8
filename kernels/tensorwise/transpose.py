"""Column-major codes: the transpose of an operand. FP8 GEMMs sum along its rows."""

import torch
import triton
import triton.language as tl

from coat_kernels.device import uses_kernels
from coat_kernels.fp8 import ALIGNMENT
from coat_kernels.prepared import PreparedKernel, cdiv

# tile of a program that transposes
COLUMNS_TILE, BOTH_TILE = (128, 128), (64, 128)


@triton.jit
def store_words(p_columns, b_words, o_word, o_n, n, padded_m, EVEN: tl.constexpr = False, pitch=None):
    """Stores the codes of a tile transposed, into [n, padded_m] viewed as words of four rows. `pitch`: bytes
    between the starts of two columns, padded_m by default.

    b_words: int32 [words, columns], the codes of rows 4 w to 4 w + 3, the first in the lowest byte; 0 past
    the end. Threads exchange whole words, because each byte would take an instruction.
    EVEN: every tile lies inside.
    """
    words = padded_m // 4
    step = words if pitch is None else pitch // 4
    p_words = p_columns + o_n.to(tl.int64)[:, None] * step + o_word[None, :]
    if EVEN:
        tl.store(p_words, tl.trans(b_words))
    else:
        tl.store(p_words, tl.trans(b_words), mask=(o_n[:, None] < n) & (o_word[None, :] < words))


def empty_columns(m: int, n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised codes for the transpose of [m, n]."""
    return torch.empty(n, m + -m % ALIGNMENT, dtype=dtype, device=device)


@PreparedKernel
@triton.jit
def transpose_kernel(p_rows, p_columns, m, n, padded_m, M: tl.constexpr, N: tl.constexpr):
    o_word = tl.program_id(1) * (M // 4) + tl.arange(0, M // 4)
    o_n = tl.program_id(0) * N + tl.arange(0, N)
    b_words = tl.zeros([M // 4, N], dtype=tl.int32)
    for i in tl.static_range(4):
        o_m = o_word.to(tl.int64) * 4 + i
        m_x = (o_m[:, None] < m) & (o_n[None, :] < n)
        b_codes = tl.load(p_rows + o_m[:, None] * n + o_n[None, :], mask=m_x, other=0)
        b_words |= b_codes.to(tl.int32) << (8 * i)
    store_words(p_columns, b_words, o_word, o_n, n, padded_m)


def transpose_codes_reference(codes: torch.Tensor) -> torch.Tensor:
    """Codes [m, n] as column-major codes [n, m'], as in `Quantized`."""
    m, n = codes.shape
    columns = torch.zeros(n, m + -m % ALIGNMENT, dtype=codes.dtype, device=codes.device)
    columns[:, :m] = codes.t()
    return columns


def transpose_codes_triton(codes: torch.Tensor) -> torch.Tensor:
    """`transpose_codes_reference` as a kernel."""
    m, n = codes.shape
    columns = empty_columns(m, n, codes.dtype, codes.device)
    tile_m, tile_n = COLUMNS_TILE
    grid = max(cdiv(n, tile_n), 1), max(cdiv(columns.shape[1], tile_m), 1)
    transpose_kernel[grid](
        codes.view(torch.uint8), columns.view(torch.int32), m, n, columns.shape[1], M=tile_m, N=tile_n
    )
    return columns


def transpose_codes(codes: torch.Tensor) -> torch.Tensor:
    """Contiguous codes [m, n] as column-major codes; by the kernel on CUDA."""
    return (transpose_codes_triton if uses_kernels(codes) else transpose_codes_reference)(codes)
