"""Distances between tensors."""

import math
from collections.abc import Iterable

import torch


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of `actual - expected` over that of `expected`, in FP64."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return ((actual - expected).norm() / expected.norm()).item()


def gradient_errors(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
    """Relative RMS error of all pairs (actual, expected) together, and that of the worst one, in FP64."""
    error, size, worst = 0.0, 0.0, 0.0
    for actual, expected in pairs:
        difference = (actual.float() - expected.float()).double().square().sum().item()
        own = expected.double().square().sum().item()
        ratio = difference / own if own else math.inf if difference else 0.0
        error, size, worst = error + difference, size + own, max(worst, ratio**0.5)
    return (error / size) ** 0.5, worst
