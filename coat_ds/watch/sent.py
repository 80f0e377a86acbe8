"""Numbers for the device, without waiting for it."""

from collections.abc import Sequence

import torch


def sent(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A vector on `device`. The CPU does not wait for what runs there."""
    here = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)
