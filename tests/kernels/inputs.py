"""Inputs that have broken quantizers before."""

import dataclasses

import pytest
import torch

from coat_kernels.adamw import AdamWOptions
from tests.kernels.agreement import summed

SIZES = (1, 127, 128, 129, 1000)
SHAPES = ((1, 1), (3, 16), (5, 33), (13, 300), (130, 96))


def wide(*shape: int, sigma: float = 2.0) -> torch.Tensor:
    """Log-normally distributed magnitudes with signs, like gradients."""
    return torch.randn(shape) * torch.exp(sigma * torch.randn(shape))


def check_sums(sums: torch.Tensor, x: torch.Tensor) -> None:
    """Asserts that `sums`, FP32 [n], are the sums of the columns of `x` [m, n]."""
    assert sums.dtype == torch.float32 and sums.shape == x.shape[1:]
    assert summed(sums, x) <= 1


def hard(n: int, signed: bool = True) -> dict[str, torch.Tensor]:
    """Named FP32 vectors of n elements: zeros, constants, wide ranges, extremes, non-finite values.

    With signed=False, the magnitudes of the same vectors, for codecs that store no sign.
    """
    some_zeros = wide(n)
    some_zeros[::3] = 0
    extremes = wide(n)
    extremes[:: max(n // 4, 1)] = torch.tensor([3e38, 1e-38, -1e-45, -3e38, 1e-30])[
        : len(extremes[:: max(n // 4, 1)])
    ]
    broken = wide(n)
    broken[0], broken[n // 2] = torch.nan, -torch.inf
    cases = {
        "wide": wide(n),
        "narrow": 1 + 0.01 * torch.rand(n),
        "zeros": torch.zeros(n),
        "some_zeros": some_zeros,
        "constant": torch.full((n,), -0.3),
        "tiny": wide(n) * 1e-30,
        "extremes": extremes,
        "broken": broken,
    }
    return cases if signed else {case: x.abs() for case, x in cases.items()}


def with_options(step):
    """`step`, a function that takes `AdamWOptions`, with the fields of the options as additional keywords."""
    names = {f.name for f in dataclasses.fields(AdamWOptions)}

    def call(*tensors, **keywords):
        options = AdamWOptions(**{name: keywords.pop(name) for name in names & keywords.keys()})
        return step(*tensors, options=options, **keywords)

    return call


EPS = 1e-5
LAYER_NORM = pytest.mark.parametrize("layer_norm", [False, True], ids=["rms", "layer"])
