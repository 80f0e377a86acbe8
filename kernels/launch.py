"""What the host does around each launch of a kernel: little, since a layer has dozens."""

import contextlib

import torch

_NOTHING = contextlib.nullcontext()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; `triton.cdiv` takes the host 3 us."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two of n and more; 1 of 0. As `triton.next_power_of_2`, which takes 2 us."""
    return 1 << max(n - 1, 0).bit_length()


def on_device_of(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """`torch.cuda.device_of(x)`, which does nothing where that is the current device."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device_of(x)
