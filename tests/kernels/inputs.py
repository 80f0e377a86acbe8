"""Inputs that have broken quantizers before."""

import dataclasses

import torch

from coat_kernels.adamw import AdamWOptions

SIZES = (1, 127, 128, 129, 1000)
SHAPES = ((1, 1), (3, 16), (5, 33), (13, 300), (130, 96))


def gaussian_rounding_rms(mantissa_bits: int) -> float:
    """Relative RMS of rounding Gaussian values to nearest: errors uniform in half a step of each value."""
    x = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    step = torch.exp2(x.abs().log2().floor() - mantissa_bits)
    return (step.square().mean() / 12 / x.square().mean()).sqrt().item()


def gaussian_root_rms(group_size: int = 16) -> float:
    """Relative RMS of rounding the roots of Gaussian values, scaled so that the largest of a group is 90 to
    127: errors uniform in half a step, which is 2 r of a value r^2."""
    x = torch.randn(2**16, group_size, generator=torch.Generator().manual_seed(0)).abs()
    _, power = torch.frexp(x.amax(1, keepdim=True))
    step = torch.ldexp(2 * torch.ldexp(x, 14 - power).sqrt(), power - 14)
    return (step.square().mean() / 12 / x.square().mean()).sqrt().item()


# 0.0266, 0.0531 and 0.0072
E4M3_RMS, E5M2_RMS = gaussian_rounding_rms(3), gaussian_rounding_rms(2)
SQRT8_RMS = gaussian_root_rms()
# of the formats in which activations are kept
ROUNDING = {"sqrt8": SQRT8_RMS, "e4m3": E4M3_RMS}


def wide(*shape: int, sigma: float = 2.0) -> torch.Tensor:
    """Log-normally spread magnitudes with signs, as gradients have them."""
    return torch.randn(shape) * torch.exp(sigma * torch.randn(shape))


def check_sums(sums: torch.Tensor, x: torch.Tensor) -> None:
    """That `sums`, FP32 [n], are those of the columns of `x` [m, n]: each of m additions rounds by at most
    2^-24 of the sum of magnitudes, in whatever order. What is not finite shows, in its own columns alone.
    """
    x = x.detach().double()
    exact, size = x.sum(0), x.abs().sum(0)
    assert sums.dtype == torch.float32 and sums.shape == exact.shape
    finite = size.isfinite()
    torch.testing.assert_close(sums[~finite].double(), exact[~finite], rtol=0, atol=0, equal_nan=True)
    # on the way to a sum that FP32 holds, others may not be
    fits = size < 2.0**127
    assert ((sums - exact).abs() <= len(x) * 2.0**-24 * size)[fits].all()
    assert fits.any()


def hard(n: int, signed: bool = True) -> dict[str, torch.Tensor]:
    """Named FP32 vectors of n elements: zeros, constants, wide ranges, extremes, non-finite values.

    Without signs for codecs that store none: their magnitudes, the same cases.
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
    """`step`, one of those that take `AdamWOptions`, with the options as keywords beside its own."""
    names = {f.name for f in dataclasses.fields(AdamWOptions)}

    def call(*tensors, **keywords):
        options = AdamWOptions(**{name: keywords.pop(name) for name in names & keywords.keys()})
        return step(*tensors, options=options, **keywords)

    return call
