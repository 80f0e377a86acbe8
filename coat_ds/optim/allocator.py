"""Whether torch's CUDA allocator gives memory back to the GPU while training goes on.

It does so where it finds no room for a tensor in one piece: it waits for the GPU, gives back all that is
free, and takes it anew. Where that happens in each step, a micro-batch that wants less memory is faster.
"""

from collections.abc import Callable

import torch

# a look takes a tenth of a millisecond
STEPS = 50


def times_given_back(device: torch.device) -> int:
    """By torch's allocator for `device`, since the process began; 0 for what is no GPU."""
    return torch.cuda.memory_stats(device)["num_alloc_retries"] if device.type == "cuda" else 0


class GivenBack:
    """Looks every `STEPS` steps, behind the first that many. `count` says how often memory was given back."""

    def __init__(self, count: Callable[[torch.device], int] = times_given_back):
        self._count = count
        self._steps, self._before = 0, 0
        self._said = False

    def end_step(self, device: torch.device) -> str | None:
        """What to say after a step: once, where memory was given back in each step of late."""
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
