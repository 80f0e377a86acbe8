"""An FP8 GEMM that adds its result to a tensor, and an addition of two dtypes.

Weight gradients are summed over micro-batches in FP32. A GEMM that adds to the sum does not round its result
to BF16, and saves one write and one read of it. This kernel accumulates inside the tensor cores, which on
Hopper keep about 14 bits. If accumulation must keep more bits, cuBLASLt's GEMM and a separate addition are
faster.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from coat_kernels.fp8 import INTERPRET, cast, widen
from coat_kernels.prepared import FUSED, PreparedKernel, cdiv, on_device_of

# tile sizes of `out`, and of the summed dimension
N_TILE, K_TILE, T_TILE = 128, 256, 128
# rows of tiles that are processed together, to share operands in the cache
GROUP = 8
# with fewer tiles per multiprocessor, cuBLASLt's smaller tiles are faster
TILES_PER_PROCESSOR = 2
# elements per program of the addition
BLOCK = 4096


@triton.jit
def accumulate_kernel(d_a, d_b, d_out, p_scale_a, p_scale_b, n, k, t, PROGRAMS: tl.constexpr,
                      N: tl.constexpr, K: tl.constexpr, T: tl.constexpr,
                      GROUP: tl.constexpr):  # fmt: skip
    """The descriptors' blocks are [N, T], [K, T] and [N, K // 4]; PROGRAMS programs loop over the tiles of
    `out`."""
    # without this, the path that skips the loop makes ptxas wait after every MMA (C7515)
    tl.assume(t > 0)
    scale = tl.load(p_scale_a) * tl.load(p_scale_b)
    down = tl.cdiv(n, N)
    across = tl.cdiv(k, K)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
        # within a group of rows of tiles, go column by column
        first = tile // (GROUP * across) * GROUP
        height = tl.minimum(down - first, GROUP)
        o_n = (first + tile % (GROUP * across) % height) * N
        o_k = (tile % (GROUP * across) // height) * K
        b_sum = tl.zeros((N, K), dtype=tl.float32)
        for o_t in tl.range(0, t, T):
            b_sum = tl.dot(d_a.load([o_n, o_t]), d_b.load([o_k, o_t]).T, b_sum)
        # stored in four parts, because the next tile's operands need shared memory at the same time
        b_left, b_right = halves(b_sum * scale, N, K)
        b_0, b_1 = halves(b_left, N, K // 2)
        b_2, b_3 = halves(b_right, N, K // 2)
        reduce_add(d_out, o_n, o_k, b_0)
        reduce_add(d_out, o_n, o_k + K // 4, b_1)
        reduce_add(d_out, o_n, o_k + K // 2, b_2)
        reduce_add(d_out, o_n, o_k + 3 * K // 4, b_3)


@triton.jit
def halves(b_x, N: tl.constexpr, K: tl.constexpr):
    """The left and the right columns of a tile [N, K]."""
    return b_x.reshape(N, 2, K // 2).permute(0, 2, 1).split()


@triton.jit
def reduce_add(d_out, o_n, o_k, b_x):
    """Adds a tile in the L2 cache; elements past the end are skipped."""
    if INTERPRET:
        # the interpreter lacks the reduction
        d_out.store([o_n, o_k], d_out.load([o_n, o_k]) + b_x)
    else:
        d_out.atomic_add([o_n, o_k], b_x)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def accumulate_matmul_triton(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.Tensor
) -> None:
    """`accumulate_matmul_reference` as a kernel, for Hopper, with fast sums; subnormal results may become 0.

    All tensors are contiguous and not empty; t is a multiple of 16, k of 4, and the address of `out` is a
    multiple of 16 bytes.
    """
    (n, t), (k, _) = a.shape, b.shape
    tiles = cdiv(n, N_TILE) * cdiv(k, K_TILE)
    programs = multiprocessors(out.device)
    with on_device_of(out):
        accumulate_kernel[(min(programs, tiles),)](
            TensorDescriptor.from_tensor(a, [N_TILE, T_TILE]),
            TensorDescriptor.from_tensor(b, [K_TILE, T_TILE]),
            TensorDescriptor.from_tensor(out, [N_TILE, K_TILE // 4]),
            scale_a,
            scale_b,
            n,
            k,
            t,
            PROGRAMS=programs,
            N=N_TILE,
            K=K_TILE,
            T=T_TILE,
            GROUP=GROUP,
            num_warps=8,
            num_stages=3,
            **FUSED,
        )


@PreparedKernel
@triton.jit
def add_kernel(p_out, p_x, n, BLOCK: tl.constexpr):
    o_x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < n
    b_sum = widen(tl.load(p_out + o_x, mask=m_x, other=0.0)) + widen(tl.load(p_x + o_x, mask=m_x, other=0.0))
    tl.store(p_out + o_x, cast(b_sum, p_out.dtype.element_ty), mask=m_x)


def add_triton(out: torch.Tensor, x: torch.Tensor) -> None:
    """`out.add_(x)`, bit for bit, for contiguous tensors of one shape; torch is slower if dtypes differ."""
    add_kernel[(cdiv(out.numel(), BLOCK),)](out, x, out.numel(), BLOCK=BLOCK, num_warps=8)
