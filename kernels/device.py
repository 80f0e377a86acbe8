"""Whether an op runs its Triton kernel or its reference."""

import functools
import logging
import os

import torch

log = logging.getLogger(__name__)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU, cached because torch queries CUDA on each call."""
    return torch.cuda.get_device_capability(device)


def has_fp8_gemm(device: torch.device) -> bool:
    """Whether `device` multiplies FP8 in hardware: compute capability 8.9 (Ada) or newer."""
    return device.type == "cuda" and capability(device) >= (8, 9)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory per block of threads: 99 KiB on Ada and workstation Blackwell, 227 KiB on
    Hopper. The interpreter has no limit and reports Hopper's."""
    if device.type != "cuda":
        return 227 << 10
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.cache
def _has_fp8(index: int) -> bool:
    """`has_fp8_gemm` of a GPU by its index, for frequent callers."""
    return has_fp8_gemm(torch.device("cuda", index))


def uses_kernels(x: torch.Tensor, fp8: bool = True) -> bool:
    """Whether an op on `x` runs its Triton kernel: on a GPU; if `fp8`, on a GPU with FP8 instructions.
    Otherwise it runs its reference."""
    if x.is_cuda:
        return not fp8 or _has_fp8(x.get_device())
    if fp8 and x.device.type == "cpu" and not torch.compiler.is_compiling():
        _log_emulation()
    return False


@functools.cache
def _log_emulation() -> None:
    """Logs once per process, on rank 0, that FP8 is emulated. If there is a GPU, CPU tensors are offloaded
    ones, and nothing is logged."""
    if os.environ.get("RANK", "0") == "0" and not torch.cuda.is_available():
        log.warning("no GPU: FP8 is emulated by the plain-PyTorch reference, slow, for tests only")


def require_fp8(device: torch.device) -> None:
    """Raises RuntimeError if `device` is a GPU without FP8. CPUs pass, because they run the
    references."""
    if device.type == "cuda" and not has_fp8_gemm(device):
        major, minor = capability(device)
        raise RuntimeError(
            f"FP8 needs a GPU of compute capability 8.9 or newer, found {torch.cuda.get_device_name(device)} "
            f'with {major}.{minor}. Use such a GPU, or set "activations" to false for 8-bit states alone.'
        )
