"""Whether an op takes its Triton kernel or its reference."""

import functools

import torch


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU, of which torch asks CUDA each time."""
    return torch.cuda.get_device_capability(device)


def has_fp8_gemm(device: torch.device) -> bool:
    """Whether `device` multiplies FP8 in hardware: compute capability 8.9 (Ada) or newer."""
    return device.type == "cuda" and capability(device) >= (8, 9)


_emulating = False


def set_emulation(enabled: bool) -> None:
    """Whether GPUs run the reference arithmetic, as CPUs do, instead of the kernels."""
    global _emulating
    _emulating = enabled


def uses_kernels(x: torch.Tensor) -> bool:
    """Whether an op on `x` takes its kernel; otherwise it takes its reference."""
    return x.is_cuda and not _emulating


def require_fp8(device: torch.device) -> None:
    """Raises RuntimeError where `device` is a GPU without FP8. CPUs pass: they run the reference."""
    if device.type == "cuda" and not _emulating and not has_fp8_gemm(device):
        major, minor = capability(device)
        raise RuntimeError(
            f"FP8 needs a GPU of compute capability 8.9 or newer, found {torch.cuda.get_device_name(device)} "
            f'with {major}.{minor}. Use such a GPU, set "coat": {{"enabled": false}}, or, to look at the '
            'arithmetic only, "activations": {"emulate": true}.'
        )
