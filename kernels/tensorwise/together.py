"""Several tensors quantized in one launch, each with its own scale.

All weights of a fused block exist before it starts, and each launch costs the CPU the same time, whatever the
size of the weight. The codes are the same as for separately quantized tensors.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from coat_kernels.fp8 import ALIGNMENT, Fp8Format
from coat_kernels.prepared import PreparedKernel, cdiv, tiling
from coat_kernels.tensorwise.predicted import PredictedScale
from coat_kernels.tensorwise.quantize import Quantized, to_tensor_codes, to_tensor_words
from coat_kernels.tensorwise.scale import BLOCK, CORRECTING_PROGRAMS, scale_and_tiles, tensor_scale
from coat_kernels.tensorwise.transpose import COLUMNS_TILE, empty_columns, store_words
from coat_kernels.tiles import finite_max

# maximum number of tensors per launch
SLOTS = 4
# number of elements between the scales of two slots: cuBLASLt needs scales at multiples of 16 bytes
APART = tl.constexpr(4)


@triton.jit
def of_slot(slot, a, b, c, d):
    """The scalar or pointer of `slot`, out of four."""
    return tl.where(slot < 2, tl.where(slot == 0, a, b), tl.where(slot == 2, c, d))


@triton.jit
def slot_of(tile, tiles_0, tiles_1, tiles_2):
    """The slot of a tile, if the tiles of all slots are counted one after the other, and the first tile of
    the slot."""
    start_2 = tiles_0 + tiles_1
    start_3 = start_2 + tiles_2
    slot = (tile >= tiles_0).to(tl.int32) + (tile >= start_2).to(tl.int32) + (tile >= start_3).to(tl.int32)
    return slot, of_slot(slot, 0, tiles_0, start_2, start_3)


@PreparedKernel
@triton.jit
def rows_together_kernel(p_x_0, p_x_1, p_x_2, p_x_3, p_rows_0, p_rows_1, p_rows_2, p_rows_3,
                         p_predicted_0, p_predicted_1, p_predicted_2, p_predicted_3,
                         p_true, p_amax, n_0, n_1, n_2, n_3,
                         SLOTS: tl.constexpr, CORRECTS: tl.constexpr, E5M2: tl.constexpr,
                         BLOCK: tl.constexpr):  # fmt: skip
    """Both launches of `Scales`. The first has one program per tile; the second, CORRECTS, has the same
    number of programs per slot. `p_true` points to the true scales, APART elements from each other, followed
    by the used scales, one per slot, and the maxima of all tiles."""
    tiles_0, tiles_1 = tl.cdiv(n_0, BLOCK), tl.cdiv(n_1, BLOCK)
    tiles_2, tiles_3 = tl.cdiv(n_2, BLOCK), tl.cdiv(n_3, BLOCK)
    first = tl.program_id(0)
    if CORRECTS:
        slot = tl.program_id(1)
        start = of_slot(slot, 0, tiles_0, tiles_0 + tiles_1, tiles_0 + tiles_1 + tiles_2)
    else:
        slot, start = slot_of(first, tiles_0, tiles_1, tiles_2)
        first -= start
    tiles = of_slot(slot, tiles_0, tiles_1, tiles_2, tiles_3)
    p_x = of_slot(slot, p_x_0, p_x_1, p_x_2, p_x_3)
    p_rows = of_slot(slot, p_rows_0, p_rows_1, p_rows_2, p_rows_3)
    p_predicted = of_slot(slot, p_predicted_0, p_predicted_1, p_predicted_2, p_predicted_3)
    n = of_slot(slot, n_0, n_1, n_2, n_3)
    p_used = p_true + APART * SLOTS + slot
    p_maxima = p_true + (APART + 1) * SLOTS + start
    p_found = p_maxima if CORRECTS else None
    scale, todo = scale_and_tiles(p_predicted, p_used, p_found, tiles, p_amax + slot,
                                  p_true + APART * slot, tiles, E5M2)  # fmt: skip
    for tile in range(first, todo, tl.num_programs(0)):
        o_x = tl.cast(tile, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        b_x = tl.load(p_x + o_x, mask=o_x < n, other=0.0).to(tl.float32)
        tl.store(p_rows + o_x, to_tensor_codes(b_x, scale, E5M2), mask=o_x < n)
        if not CORRECTS:
            tl.store(p_maxima + tile, finite_max(b_x))


@PreparedKernel
@triton.jit
def columns_together_kernel(p_x_0, p_x_1, p_x_2, p_x_3, p_columns_0, p_columns_1, p_columns_2, p_columns_3,
                            p_amax_0, p_amax_1, p_amax_2, p_amax_3, p_scale,
                            m_0, m_1, m_2, m_3, n_0, n_1, n_2, n_3,
                            ALIGNMENT: tl.constexpr, E5M2: tl.constexpr,
                            M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """One program per tile. The scales of the slots lie at `p_scale`, APART elements from each other."""
    tiles_0, tiles_1 = tl.cdiv(m_0, M) * tl.cdiv(n_0, N), tl.cdiv(m_1, M) * tl.cdiv(n_1, N)
    slot, start = slot_of(tl.program_id(0), tiles_0, tiles_1, tl.cdiv(m_2, M) * tl.cdiv(n_2, N))
    tile = tl.program_id(0) - start
    p_x = of_slot(slot, p_x_0, p_x_1, p_x_2, p_x_3)
    p_columns = of_slot(slot, p_columns_0, p_columns_1, p_columns_2, p_columns_3)
    p_amax = of_slot(slot, p_amax_0, p_amax_1, p_amax_2, p_amax_3)
    m = of_slot(slot, m_0, m_1, m_2, m_3)
    n = of_slot(slot, n_0, n_1, n_2, n_3)
    scale = tensor_scale(tl.load(p_amax), E5M2)
    # every program of a slot stores the same scale
    tl.store(p_scale + APART * slot, scale)
    across = tl.cdiv(n, N)
    o_word = (tile // across) * (M // 4) + tl.arange(0, M // 4)
    o_n = (tile % across) * N + tl.arange(0, N)
    b_words = tl.zeros([M // 4, N], dtype=tl.int32)
    for i in tl.static_range(4):
        o_m = o_word.to(tl.int64) * 4 + i
        m_x = (o_m[:, None] < m) & (o_n[None, :] < n)
        b_x = tl.load(p_x + o_m[:, None] * n + o_n[None, :], mask=m_x, other=0.0).to(tl.float32)
        b_words |= to_tensor_words(b_x, scale, E5M2) << (8 * i)
    store_words(p_columns, b_words, o_word, o_n, n, tl.cdiv(m, ALIGNMENT) * ALIGNMENT)


def rows_together(
    xs: Sequence[torch.Tensor], predictions: Sequence[PredictedScale], fmt: Fp8Format
) -> list[tuple[Quantized, torch.Tensor]]:
    """Each of `xs` quantized row-major by a kernel, as by `quantize_tensor_reference`, and its amax, FP32
    [1]; with one read where the predicted scales are right.

    xs: up to four tensors [m, n], contiguous, not empty, of one dtype and on one device.
    """
    count, device, spare = len(xs), xs[0].device, SLOTS - len(xs)
    sizes = [x.numel() for x in xs]
    tiles = 0
    for n in sizes:
        tiles += cdiv(n, BLOCK)
    rows = [torch.empty(x.shape, dtype=fmt.dtype, device=device) for x in xs]
    # one tensor holds the true scales, the used scales and the maxima
    numbers = torch.empty((APART.value + 1) * SLOTS + tiles, dtype=torch.float32, device=device)
    # a separate tensor, because it is saved for backward
    amax = torch.empty(count, dtype=torch.float32, device=device)
    codes = [x.view(torch.uint8) for x in rows]
    predicted = [prediction.on(device) for prediction in predictions]
    # unused slots repeat the first slot
    args = (
        *xs,
        *xs[:1] * spare,
        *codes,
        *codes[:1] * spare,
        *predicted,
        *predicted[:1] * spare,
        numbers,
        amax,
        *sizes,
        *sizes[:1] * spare,
    )
    constants = {"E5M2": fmt.is_e5m2, "BLOCK": BLOCK, "num_warps": 8}
    rows_together_kernel[(tiles,)](*args, SLOTS=SLOTS, CORRECTS=False, **constants)
    rows_together_kernel[CORRECTING_PROGRAMS, count](*args, SLOTS=SLOTS, CORRECTS=True, **constants)
    return [
        (Quantized(x, None, scale), most)
        for x, scale, most in zip(rows, _apart(numbers, count), amax.chunk(count), strict=True)
    ]


def _apart(numbers: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """The first `count` scales of `numbers`, FP32 [1] each."""
    return numbers.as_strided((count, 1), (APART.value, 1)).unbind(0)


def columns_together(
    xs: Sequence[torch.Tensor], amaxes: Sequence[torch.Tensor], fmt: Fp8Format
) -> list[Quantized]:
    """Each of `xs`, as in `rows_together` with the amaxes found there, quantized column-major."""
    device, (tile_m, tile_n), spare = xs[0].device, COLUMNS_TILE, SLOTS - len(xs)
    tiles, columns, words, heights, widths = 0, [], [], [], []
    for x in xs:
        m, n = x.shape
        down, across = tiling(m, n, tile_m, tile_n)
        tiles += down * across
        columns.append(empty_columns(m, n, fmt.dtype, device))
        words.append(columns[-1].view(torch.int32))
        heights.append(m)
        widths.append(n)
    scales = torch.empty(APART.value * len(xs), dtype=torch.float32, device=device)
    columns_together_kernel[(tiles,)](
        *xs,
        *xs[:1] * spare,
        *words,
        *words[:1] * spare,
        *amaxes,
        *amaxes[:1] * spare,
        scales,
        *heights,
        *heights[:1] * spare,
        *widths,
        *widths[:1] * spare,
        ALIGNMENT=ALIGNMENT,
        E5M2=fmt.is_e5m2,
        M=tile_m,
        N=tile_n,
        num_warps=4,
    )
    return [
        Quantized(None, codes, scale) for codes, scale in zip(columns, _apart(scales, len(xs)), strict=True)
    ]
