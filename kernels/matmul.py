"""FP8 matrix products: into a tensor of their own, or added to one that is there.

Weight gradients are summed over micro-batches in FP32. Added by the product itself, they are neither rounded
to BF16 nor written and read once more. The kernel that does so sums within the tensor cores, which on Hopper
keep about 14 bits; where sums must keep more, cuBLASLt's product and a pass that adds it are faster.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from coat_kernels.fp8 import INTERPRET, capability, cast, uses_kernels, widen
from coat_kernels.launch import PreparedKernel, cdiv, on_device_of
from coat_kernels.ops import compilable

# of `out`, and of the dimension that is summed at a time
N_TILE, K_TILE, T_TILE = 128, 256, 128
# rows of tiles that neighbours in time share
GROUP = 8
# what a multiprocessor has to have before small tiles of cuBLASLt's, which spread further, are not better
TILES_PER_PROCESSOR = 2
# elements of a program that adds
BLOCK = 4096


def scaled_matmul_reference(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`a` [m, k] times `b` [n, k] transposed, both FP8, accumulated in FP32, rounded once to `dtype`."""
    with torch.autocast(a.device.type, enabled=False):
        return ((a.float() @ b.float().t()) * (scale_a * scale_b)).to(dtype)


@compilable(
    lambda a, b, scale_a, scale_b, bias, dtype, fast: a.new_empty(a.shape[0], b.shape[0], dtype=dtype)
)
def scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """`scaled_matmul_reference` plus `bias` [n], on CUDA by cuBLASLt; `fast` as in `LinearFormats`."""
    kernels = uses_kernels(a)
    in_epilogue = kernels and bias is not None and bias.dtype == dtype == torch.bfloat16
    if kernels:
        epilogue = bias if in_epilogue else None
        y = torch._scaled_mm(a, b.t(), scale_a, scale_b, bias=epilogue, out_dtype=dtype, use_fast_accum=fast)
    else:
        y = scaled_matmul_reference(a, b, scale_a, scale_b, dtype)
    return y if bias is None or in_epilogue else y.add_(bias)


def accumulate_matmul_reference(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.Tensor
) -> None:
    """Adds `a` [n, t] times `b` [k, t] transposed, both FP8, to `out` [n, k], FP32."""
    out.add_(scaled_matmul_reference(a, b, scale_a, scale_b, torch.float32))


@triton.jit
def accumulate_kernel(d_a, d_b, d_out, p_scale_a, p_scale_b, n, k, t, PROGRAMS: tl.constexpr,
                      N: tl.constexpr, K: tl.constexpr, T: tl.constexpr,
                      GROUP: tl.constexpr):  # fmt: skip
    """The descriptors' blocks are [N, T], [K, T] and [N, K // 4]; PROGRAMS go over the tiles of `out`."""
    # without it the path around the loop makes ptxas wait for every instruction of the products (C7515)
    tl.assume(t > 0)
    scale = tl.load(p_scale_a) * tl.load(p_scale_b)
    down = tl.cdiv(n, N)
    across = tl.cdiv(k, K)
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
        # a group of rows goes column by column
        first = tile // (GROUP * across) * GROUP
        height = tl.minimum(down - first, GROUP)
        o_n = (first + tile % (GROUP * across) % height) * N
        o_k = (tile % (GROUP * across) // height) * K
        b_sum = tl.zeros((N, K), dtype=tl.float32)
        for o_t in tl.range(0, t, T):
            b_sum = tl.dot(d_a.load([o_n, o_t]), d_b.load([o_k, o_t]).T, b_sum)
        # leaves in four parts, to need less shared memory beside the next tile's operands
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
    """Adds a tile in the L2 cache; what lies past the end is left out."""
    if INTERPRET:
        # which lacks the reduction
        d_out.store([o_n, o_k], d_out.load([o_n, o_k]) + b_x)
    else:
        d_out.atomic_add([o_n, o_k], b_x)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Those of a GPU; the interpreter is one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def accumulate_matmul_triton(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.Tensor
) -> None:
    """`accumulate_matmul_reference` as a kernel, for Hopper, with fast sums; subnormal results may become 0.

    All are contiguous, none is empty; t is a multiple of 16, k of 4, and `out` begins at one of 16 bytes.
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
        )


@PreparedKernel
@triton.jit
def add_kernel(p_out, p_x, n, BLOCK: tl.constexpr):
    o_x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < n
    b_sum = widen(tl.load(p_out + o_x, mask=m_x, other=0.0)) + widen(tl.load(p_x + o_x, mask=m_x, other=0.0))
    tl.store(p_out + o_x, cast(b_sum, p_out.dtype.element_ty), mask=m_x)


def add_triton(out: torch.Tensor, x: torch.Tensor) -> None:
    """`out.add_(x)`, bit for bit, of contiguous tensors of one shape; torch is slower where types differ."""
    add_kernel[(cdiv(out.numel(), BLOCK),)](out, x, out.numel(), BLOCK=BLOCK, num_warps=8)


def add_into(out: torch.Tensor, x: torch.Tensor) -> None:
    """Adds `x` to `out` of the same shape, of any floating-point types; on CUDA by the kernel."""
    if uses_kernels(out) and out.is_contiguous():
        add_triton(out, x)
    else:
        out.add_(x)


def _adds_itself(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the product is added to `out` without being written."""
    if out.dtype != torch.float32 or not uses_kernels(a):
        return out.dtype == torch.float32
    tiles = cdiv(a.shape[0], N_TILE) * cdiv(b.shape[0], K_TILE)
    return (
        capability(out.device)[0] == 9
        and tiles >= TILES_PER_PROCESSOR * multiprocessors(out.device)
        and a.shape[1] > 0
        and out.is_contiguous()
        # parameters that Megatron packs behind one of odd size
        and out.data_ptr() % 16 == 0
    )


@compilable(lambda *_: None, mutates=("out",))
def accumulate_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out: torch.Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> None:
    """`accumulate_matmul_reference` to `out` of any floating-point type; `fast` as in `LinearFormats`.

    With fast sums, Hopper adds large products to FP32 as they leave the tensor cores. All others are rounded
    to `dtype` first.
    """
    if fast and _adds_itself(a, b, out):
        accumulate = accumulate_matmul_triton if uses_kernels(a) else accumulate_matmul_reference
        accumulate(a, b, scale_a, scale_b, out)
    else:
        add_into(out, scaled_matmul(a, b, scale_a, scale_b, None, dtype, fast))
