"""Whether torch's CUDA allocator returns memory to the GPU during training.

When memory is fragmented and no free block fits a tensor, the allocator synchronizes with the GPU, frees its
cache and allocates again. If that happens in every step, a smaller micro-batch is faster.
"""

from collections.abc import Callable

import torch

# steps between two checks; a check takes a tenth of a millisecond
STEPS = 50


def times_given_back(device: torch.device) -> int:
    """How often torch's allocator has freed its cache on `device` since the process began; 0 unless a GPU."""
    return torch.cuda.memory_stats(device)["num_alloc_retries"] if device.type == "cuda" else 0


class GivenBack:
    """Checks every `STEPS` steps, after the first `STEPS`. `count` returns how often memory was returned."""

    def __init__(self, count: Callable[[torch.device], int] = times_given_back):
        self._count = count
        self._steps, self._before = 0, 0
        self._said = False

    def end_step(self, device: torch.device) -> str | None:
        """The line to log after a step, or None. Returned once, if every recent step returned memory."""
        self._steps += 1
        if self._said or self._steps % STEPS:
            return None
        found = self._count(device)
        times, self._before = found - self._before, found
        if self._steps == STEPS or times < STEPS:
            return None
        self._said = True
        return (
            f"torch's allocator gave memory back to the GPU {times} times in the last {STEPS} steps, which "
            "takes time. A smaller micro-batch is likely faster; so may be ZeRO's stage 2 in place of 1, or "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
        )
