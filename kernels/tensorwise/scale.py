"""The amax of a tensor, and the scale that follows from it.

The amax is found in two stages (COAT, section 5.2: group scaling). First the maxima of parts of the tensor
are written, by the kernel that produces it or else by a separate pass; then the largest of the maxima is
found. value = code * scale. The scale is 2^e over the format's largest magnitude, so 8/7 of a power of two,
and depends on the amax alone:

- E4M3: the smallest e with amax <= 2^e. Such a scale seldom changes, so it can be predicted. It costs no
  precision, only up to one binade at the lower end of the range. The factor 8/7 avoids ties: with scales of
  2^e, one BF16 value in 16 lies half way between two E4M3 codes, which gives 0.4 % more error.
- E5M2, whose normal numbers span 30 binades: e is also rounded up to a multiple of four. Gradients seldom
  need the whole range.

A zero tensor has scale 1. The scale's exponent is at least -126: scales and their inverses are normal
numbers.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from coat_kernels.autograd.origin import maxima_of
from coat_kernels.device import uses_kernels
from coat_kernels.fp8 import Fp8Format
from coat_kernels.ops import compilable
from coat_kernels.prepared import PreparedKernel, cdiv
from coat_kernels.tiles import finite_max

# elements per program of a pass along memory
BLOCK = 16384
# programs of a second launch, one for each multiprocessor of an H200; each reads all maxima
CORRECTING_PROGRAMS = 132
# maxima that a program reads at a time
FOUND = tl.constexpr(4096)


def maxima_reference(x: torch.Tensor) -> torch.Tensor:
    """The maxima of `x` (any shape), FP32; here the whole tensor is one part."""
    magnitude = x.float().abs()
    return amax_of_maxima_reference(torch.where(magnitude.isfinite(), magnitude, 0))


def row_maxima(y: torch.Tensor) -> torch.Tensor:
    """The amax of each row, FP32."""
    return torch.where(y.isfinite(), y.float().abs(), 0).amax(1)


def amax_of_maxima_reference(maxima: torch.Tensor) -> torch.Tensor:
    """The largest of `maxima` (any shape), FP32 [1]; 0 if there are none."""
    return maxima.amax().reshape(1) if maxima.numel() else maxima.new_zeros(1)


@PreparedKernel
@triton.jit
def maxima_kernel(p_x, p_maxima, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    o_x = pid * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_maxima + pid, finite_max(tl.load(p_x + o_x, mask=o_x < n, other=0.0)))


def maxima_triton(x: torch.Tensor) -> torch.Tensor:
    """`maxima_reference` with one maximum per block of a contiguous tensor."""
    maxima = torch.empty(cdiv(x.numel(), BLOCK), dtype=torch.float32, device=x.device)
    maxima_kernel[(len(maxima),)](x, maxima, x.numel(), BLOCK=BLOCK, num_warps=8)
    return maxima


@PreparedKernel
@triton.jit
def amax_kernel(p_maxima, p_amax, n, BLOCK: tl.constexpr):
    b_amax = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        o_maxima = start + tl.arange(0, BLOCK)
        b_amax = tl.maximum(b_amax, tl.load(p_maxima + o_maxima, mask=o_maxima < n, other=0.0))
    tl.store(p_amax, tl.max(b_amax, axis=0))


def amax_triton(maxima: torch.Tensor) -> torch.Tensor:
    """The largest of `maxima`, FP32 [1], by one program: torch's own reduction takes three times as long."""
    amax = torch.empty(1, dtype=torch.float32, device=maxima.device)
    amax_kernel[(1,)](maxima, amax, len(maxima), BLOCK=8192, num_warps=16)
    return amax


def amax_of_maxima(maxima: torch.Tensor) -> torch.Tensor:
    """The largest of `maxima`, FP32 [1]; by the kernel on CUDA."""
    return (amax_triton if uses_kernels(maxima) else amax_of_maxima_reference)(maxima)


@compilable(lambda x: x.new_empty(1, dtype=torch.float32))
def compute_amax(x: torch.Tensor) -> torch.Tensor:
    """The amax of a contiguous tensor, FP32 [1], found by a pass over it."""
    return amax_of_maxima(maxima_triton(x) if uses_kernels(x) else maxima_reference(x))


def tensor_amax(x: torch.Tensor) -> torch.Tensor:
    """The amax of `x`, FP32 [1]; from its producer's maxima if there are any."""
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    maxima = maxima_of(x)
    return compute_amax(x.contiguous()) if maxima is None else amax_of_maxima(maxima)


def tensor_scale_reference(amax: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """The scale of a tensor whose amax is `amax`, FP32 [1]."""
    mantissa, power = torch.frexp(amax)
    # both formats' largest magnitude is 7/8 * 2^m, and a power of two has mantissa 1/2
    _, m = math.frexp(fmt.max)
    e = power - (mantissa == 0.5).int() - m
    if fmt.is_e5m2:
        e = (e + 3) // 4 * 4
    return torch.where(amax > 0, torch.ldexp(torch.full_like(amax, 8 / 7), e.clamp_min(-126)), 1.0)


@triton.jit
def tensor_scale(amax, E5M2: tl.constexpr):
    """`tensor_scale_reference` of a scalar."""
    # 127 + the scale's exponent, from the bits of the amax
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - (16 if E5M2 else 9) + ((bits & 0x7FFFFF) > 0).to(tl.int32)
    if E5M2:
        # the bit operation rounds down, negative numbers too
        exponent = ((exponent - 127 + 3) & -4) + 127
    # 0x124925 is the mantissa of 8/7
    scale = ((tl.maximum(exponent, 1) << 23) | 0x124925).to(tl.float32, bitcast=True)
    return tl.where(amax > 0.0, scale, 1.0)


class Scales(NamedTuple):
    """What a launch that writes codes reads and writes besides them, in the order of `scale_and_tiles`.

    | launch | fields | what it does |
    |---|---|---|
    | first of two | predicted, used | quantizes with `predicted`, copies it to `used`, and finds maxima |
    | second of two | all | finds the scale, and writes the codes again if `used` differs from it |
    | single (`known`) | maxima to true | finds the scale, and quantizes with it |

    Scales are FP32 [1], and `maxima` FP32 [count]. The launches that find the scale write it to `true` and,
    if there is one, to `predicted`; and the amax to `amax`, which may be None.
    """

    predicted: torch.Tensor | None = None
    used: torch.Tensor | None = None
    maxima: torch.Tensor | None = None
    count: int | None = None
    amax: torch.Tensor | None = None
    true: torch.Tensor | None = None

    @classmethod
    def known(cls, maxima: torch.Tensor, true: torch.Tensor, amax: torch.Tensor | None = None) -> "Scales":
        """The scales for a single launch, whose maxima exist."""
        return cls(None, None, maxima, maxima.numel(), amax, true)

    @property
    def corrects(self) -> bool:
        """Whether this is the second of two launches."""
        return self.maxima is not None and self.used is not None

    def programs(self, tiles: int) -> int:
        """Number of programs of a launch over `tiles`; each loops over the tiles that `scale_and_tiles`
        returns."""
        if tiles > CORRECTING_PROGRAMS and self.corrects:
            return CORRECTING_PROGRAMS
        return tiles or 1


# for a launch that writes no codes
NO_SCALES = Scales()


@triton.jit
def scale_and_tiles(p_predicted, p_used, p_found, found, p_amax, p_true, tiles, E5M2: tl.constexpr):
    """The scale of a launch, and the number of tiles to write. Every program stores the same scale."""
    todo = tiles
    if p_found is not None:
        if found == 1:
            # `found` is known at compile time, so there is no loop
            amax = tl.load(p_found)
        else:
            b_amax = tl.zeros([FOUND], dtype=tl.float32)
            for start in range(0, found, FOUND):
                o_found = start + tl.arange(0, FOUND)
                b_found = tl.load(p_found + o_found, mask=o_found < found, other=0.0)
                b_amax = tl.maximum(b_amax, b_found)
            amax = tl.max(b_amax, axis=0)
        scale = tensor_scale(amax, E5M2)
        tl.store(p_true, scale)
        if p_amax is not None:
            tl.store(p_amax, amax)
        if p_predicted is not None:
            tl.store(p_predicted, scale)
            todo = tl.where(tl.load(p_used) == scale, 0, tiles)
    elif p_predicted is not None:
        scale = tl.load(p_predicted)
        tl.store(p_used, scale)
    else:
        scale = 1.0
    return scale, todo
