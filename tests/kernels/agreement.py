"""Bounds for the difference between a kernel and its reference. Functions return an error as a share of its
bound: 1 is the bound. Infinity means that rounding cannot explain the error."""

import torch

from coat_kernels.codecs import Codec
from coat_kernels.fp8 import E4M3
from coat_kernels.groups import Grouped

# FP32 arithmetic of a kernel and of its reference: ten operations in another order or fused, approximate
# exponentials and roots of 2^-21, sums of thousands of terms; relative to the largest value of a tensor
FP32 = 2.0**-16
# relative error per term of Hopper's fast accumulation in FP8 GEMMs: 2^-13 for each step of 32 terms
FAST_TERM = 2.0**-13 / 32
# (relative, absolute) tolerance of each of `storing_sums` of a group of 128. Values that a kernel decodes are
# off by up to 2^-18. Storing, like rounding to BF16, moves a value by at least 2^-9, so this error is known
# to 2^-9 and its square to 2^-8. A logarithm is off by 2^-18. At each threshold where the two round
# differently, it is also off by a 64th of a code, at most 2^-9; that happens at one or two of the 64 times
# 128 thresholds of a group. The last two sums are counts: of elements at a limit, and of all elements.
STORING = (
    (2.0**-8, 0.0),
    (2.0**-16, 0.0),
    (2.0**-10, 128 * 2.0**-17),
    (2.0**-10, 128 * 2.0**-17 + 2 * 2.0**-9),
    (0.0, 1.0),
    (0.0, 0.0),
)


def gaussian_rounding_rms(mantissa_bits: int) -> float:
    """Relative RMS of rounding Gaussian values to nearest: errors uniform in half a step of each value."""
    x = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    step = torch.exp2(x.abs().log2().floor() - mantissa_bits)
    return (step.square().mean() / 12 / x.square().mean()).sqrt().item()


# 0.0266, 0.0531 and 0.0017
E4M3_RMS, E5M2_RMS, BF16_RMS = map(gaussian_rounding_rms, (3, 2, 7))
# RMS of the rounding of each saved format of activations, for Gaussian values in groups of 16. Errors of
# sqrt8 are uniform in half a step. The step of a value r^2 is 2 r, and the root of an amax is 90 to 127
ROUNDING = {"sqrt8": 0.00714, "e4m3": 0.02657}

# Roundings of the experts' output to E4M3: the input's and the weight's, in gate and in up; the activation at
# most doubles gate's. Then those of the second GEMM's operands. In quadrature 2 (4 + 1) + 2. To BF16: gate's,
# doubled, and up's; after the activation, after the second GEMM and after the sum. 4 + 1 + 3.
EXPERTS_FORWARD = (12 * E4M3_RMS**2 + 8 * BF16_RMS**2) ** 0.5
# Backward reads gate and up as forward computed them, with one more rounding each, and doubles gate's. All
# GEMMs round the output's gradient; that with the first weight also the second weight, the gate's gradient,
# and its other operand: 10 + 4. It rounds to BF16 at most as often as forward.
EXPERTS_BACKWARD = {
    fmt: (14 * E4M3_RMS**2 + 5 * rms**2 + 16 * BF16_RMS**2) ** 0.5 for fmt, rms in ROUNDING.items()
}


def rel_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of `actual - expected` over that of `expected`, in FP64. NaN never passes a bound."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert actual.shape == expected.shape, f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}"
    error, size = (actual - expected).square().mean().sqrt(), expected.square().mean().sqrt()
    if size == 0:
        return 0.0 if error == 0 else float("inf")
    return (error / size).item()


# Kernels and references differ by the order of FP32 sums, fused products and a few other roundings of FP32,
# then in the last bit of BF16 on a tie.
KERNEL_RMS = 1e-3


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts equal values; NaN equals NaN."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts that a kernel's result is its reference's: equal where it is not finite, within `KERNEL_RMS`
    elsewhere."""
    finite = expected.isfinite()
    same(actual.masked_fill(finite, 0), expected.masked_fill(finite, 0))
    assert rel_rms(actual.masked_fill(~finite, 0), expected.masked_fill(~finite, 0)) < KERNEL_RMS


def finite_max(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isfinite(), x.float().abs(), 0).amax()


def exact(found: torch.Tensor, expected: torch.Tensor) -> float:
    """0 for tensors with the same values; NaN equals NaN, of any payload."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return torch.inf
    a, e = found.double(), expected.double()
    return 0.0 if bool(((a == e) | (a.isnan() & e.isnan())).all()) else torch.inf


def ranks(q: Grouped) -> torch.Tensor:
    """The codes as integers in the order of their values: neighbours differ by 1, and NaN is far from all."""
    values = q.format.from_codes(torch.arange(256, dtype=torch.uint8))
    _, rank = values.nan_to_num(torch.inf).unique(return_inverse=True)
    return rank.masked_fill(values.isnan(), 2**16).to(q.codes.device)[q.codes.long()]


def grouped(found: Grouped, expected: Grouped, dtype: torch.dtype = torch.bfloat16) -> float:
    """The error of saving values of `dtype`. Only FP32 values in sqrt8 may get another code: next to
    a tie either of two, since a kernel's root is off by up to 2^-22."""
    near = found.format.name == "sqrt8" and dtype == torch.float32
    codes = (rounded if near else exact)(ranks(found), ranks(expected))
    return max(codes, exact(found.exponent, expected.exponent))


def rounded(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The error of results that are computed in FP32 and then rounded to the dtype of both tensors, for
    example integer codes.

    A value is off by FP32's error. If this error carries the value over a tie, it is also off by one step of
    its dtype. Ties are rare: FP32's usual error, 2^-22, is 2^-13 of a step of BF16. More than one value in
    256, plus eight, cannot be explained by ties.
    """
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return torch.inf
    a, e = found.double(), expected.double()
    finite = e.isfinite()
    if exact(a[~finite], e[~finite]):
        return torch.inf
    if not finite.any():
        return 0.0
    a, e = a[finite], e[finite]
    if found.is_floating_point():
        about, info = FP32 * e.abs().max(), torch.finfo(found.dtype)
        size = torch.maximum(a.abs(), e.abs()).clamp_min(info.tiny)
        step = info.eps * size.log2().floor().exp2()
    else:
        about, step = 0.0, 1.0
    error = (a - e).abs()
    tipped = (error > about).sum().item() / (error.numel() / 256 + 8)
    worst = (error / (about + step).clamp_min(1e-300) if found.is_floating_point() else error).max().item()
    # NaN must fail, and comparisons with NaN are false
    return max(worst, tipped) if worst == worst else torch.inf


def summed(sums: torch.Tensor, x: torch.Tensor, again: bool = False) -> float:
    """The error of the column sums of `x` [m, n]: each of m additions rounds by at most 2^-24 of the sum of
    magnitudes, in any order. Non-finite values must appear in their own columns and in no others.

    again: the kernel that sums recomputes `x`, within `rounded` of it.
    """
    eps, x = torch.finfo(x.dtype).eps, x.detach().double()
    total, size = x.sum(0), x.abs().sum(0)
    finite = size.isfinite()
    if exact(sums[~finite].double(), total[~finite]):
        return torch.inf
    # partial sums may exceed FP32 even if the final sum does not
    fits = size < 2.0**127
    bound = len(x) * 2.0**-24 * size
    if again and len(x):
        bound += (len(x) / 256 + 8) * eps * x.abs().amax(0) + len(x) * FP32 * x.abs().amax()
    bound = bound.clamp_min(1e-300)
    error = ((sums - total).abs() / bound)[fits]
    return torch.inf if error.isnan().any() else error.max().item() if error.numel() else 0.0


def comparable(codec: Codec, codes: torch.Tensor) -> torch.Tensor:
    """Codes in a form in which equal values compare equal: FP8 has two zeros and many NaN, the other formats
    one each."""
    if codec.dtype != torch.uint8 or not codec.signed:
        return codes
    return codes.view(E4M3.dtype)


GROUP = 128


def log2_error_bound(storage, x):
    """Largest |log2(decoded / x)| that rounding may cause, for each element of x.

    A code y is rounded by at most half a step: 2^-(mantissa bits + 1) of itself, or half the smallest
    subnormal. The 1/k-th root divides the logarithm by k. Raising a value to the smallest code costs less
    than the lower half step of it. FP32 arithmetic adds about k * 2^-18 before the root (a logarithm of
    up to 150 times k, each to 2^-24) and 2^-18 after it.
    """
    k = storage.exponent.float().repeat_interleave(GROUP)[: len(x)] / 16
    amax = storage.scale.repeat_interleave(GROUP)[: len(x)]
    y = E4M3.max * torch.exp2(k * (x.abs().log2() - amax.log2()))
    relative = torch.maximum(torch.full_like(y, 2**-4), E4M3.tiny / 2 / y).clamp_max(1 - 2**-6)
    return -torch.log2(1 - relative) / k + 2**-16
