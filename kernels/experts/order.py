"""Rows in the order of their experts.

Nothing here synchronizes with the GPU: the number of rows of each expert is known there alone.
"""

import torch

from coat_kernels.fp8 import ALIGNMENT


def by_expert(chosen: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For the experts `chosen` [t, k] of each token, the rows in the order of the `count` experts: the
    position of each row in `chosen`, flattened, [n]; the expert of each row, [n]; the end of each expert,
    int32 [count]."""
    expert, order = chosen.flatten().sort(stable=True)
    experts = torch.arange(count, device=chosen.device)
    return order, expert, torch.searchsorted(expert, experts, right=True, out_int32=True)


def padded(ends: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where GEMMs that sum over the `n` rows of each expert find them: each expert has a multiple of 16
    places, at least 16, because not every GEMM writes an empty sum.

    Returns the row of each place, int32 [p], which is n for places without a row; and the end of each
    expert's places, int32 [e]. p is the largest number of places that the experts may need.
    """
    rows = ends.diff(prepend=ends.new_zeros(1))
    places = (rows.clamp_min(1) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    place_ends = places.cumsum(0, dtype=torch.int32)
    # an expert without rows has 16 places, and any other at most 15 without a row
    most = (n + ALIGNMENT * len(ends)) // ALIGNMENT * ALIGNMENT
    place = torch.arange(most, dtype=torch.int32, device=ends.device)
    # places past the last expert's count as its own, and lie past its end
    expert = torch.searchsorted(place_ends, place, right=True).clamp_max_(len(ends) - 1)
    row = place + (ends - rows - place_ends + places)[expert]
    return torch.where(row < ends[expert], row, n), place_ends
