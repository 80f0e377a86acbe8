"""What a stored moment owes to the exact one.

The bound. With M and m the largest and smallest non-zero magnitude of a group, k = floor(16 s) / 16 with
s = log2(448^2 / 2) / log2(M / m), and y = 448 (|x| / M)^k, so that y >= 448 / (448^2 / 2) = 0.0045. E4M3
rounds y by at most 2^-4 y where it is normal and by 2^-10 where it is subnormal, which the root turns into
a factor of at most (1 + r)^(1/k) or (1 - r)^(1/k), r = max(2^-4, 2^-10 / y). Magnitudes below 2^-120 count
as 2^-120 in all of this, or as M where that is smaller.
"""

import math

import torch

GROUP = 128
FLOOR = 2.0**-120
SPAN = math.log2(448**2 / 2)
# log2 and exp2 of FP32, 2^-22 together, times 16, the largest 1 / k, with room
FP32_NOISE = 1e-5


def raised(x: torch.Tensor) -> torch.Tensor:
    """`x` (flat, FP64) with the magnitudes that count as larger than they are."""
    out = []
    for group in x.split(GROUP):
        largest = torch.where(group.isfinite(), group.abs(), 0).max()
        floor = torch.minimum(largest, torch.tensor(FLOOR, dtype=x.dtype))
        out.append(torch.where(group == 0, group, torch.maximum(group.abs(), floor).copysign(group)))
    return torch.cat(out)


def relative_bound(x: torch.Tensor) -> torch.Tensor:
    """Largest relative error with which each element of `x` (flat) may be stored; infinite where x is not."""
    bound = torch.empty(x.numel(), dtype=torch.float64)
    for i in range(0, x.numel(), GROUP):
        magnitude = x[i : i + GROUP].double().abs()
        known = magnitude[(magnitude > 0) & magnitude.isfinite()]
        if known.numel() == 0:
            bound[i : i + GROUP] = 0
            continue
        ratio = torch.log2(known.max() / known.min()).item()
        k = min(max(math.floor(16 * SPAN / ratio) if ratio else 255, 1), 255) / 16
        y = 448 * (magnitude / known.max()) ** k
        r = torch.clamp(2.0**-10 / y, min=2.0**-4)
        up, down = (1 + r) ** (1 / k) - 1, 1 - (1 - r.clamp(max=1)) ** (1 / k)
        bound[i : i + GROUP] = torch.maximum(up, down) + FP32_NOISE
    return bound


def assert_faithful(stored: torch.Tensor, exact: torch.Tensor) -> None:
    """Zeros stay, nothing else becomes zero, signs survive, non-finite values show, errors are bounded."""
    stored, exact = stored.reshape(-1).double().cpu(), exact.reshape(-1).double().cpu()
    good = exact.isfinite()
    assert stored[~good].isnan().all(), "a non-finite value is hidden"
    assert stored[good].isfinite().all(), "a finite value was lost"
    assert (stored[exact == 0] == 0).all(), "a zero became something else"
    assert (stored[good & (exact != 0)] != 0).all(), "a non-zero value became zero"
    assert torch.equal(stored[good].sign(), exact[good].sign()), "a sign was lost"
    nonzero, exact = good & (exact != 0), raised(exact)
    error = (stored[nonzero] / exact[nonzero] - 1).abs()
    assert (error <= relative_bound(exact)[nonzero]).all(), f"relative error {error.max():.3g}"


def ratio_bound(exact: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Largest error with which each element of a first moment may be stored as "ratio8" with `second`, as
    that is stored.

    Half the distance of the two largest codes, (1 - (126 / 127)^(3/2)) / 2, of the group's largest ratio, of
    which the scale is off by 2^-13 at most. It holds for parts of a group too, each with its own largest.
    """
    pad = -exact.numel() % GROUP
    m, v = (
        torch.nn.functional.pad(x.reshape(-1).double(), (0, pad)).view(-1, GROUP) for x in (exact, second)
    )
    usable = (v > 0) & v.isfinite()
    # zero counts as a level less than the smallest, which are half an octave apart at most; alone, as one
    smallest = torch.where(usable, v, torch.inf).amin(1, keepdim=True) / 2**0.5
    roots = torch.where(usable, v, torch.where(smallest.isinf(), 1, smallest)).clamp_min(FLOOR / 2).sqrt()
    ratio = (m / roots).abs().nan_to_num(0.0, 0.0, 0.0).amax(1, keepdim=True)
    bound = ratio * roots * ((1 - (126 / 127) ** 1.5) / 2 + 2**-12) + 2.0**-110 * roots
    return bound.view(-1)[: exact.numel()].view(exact.shape)


def assert_ratio_faithful(stored: torch.Tensor, exact: torch.Tensor, second: torch.Tensor) -> None:
    """Zeros stay, signs survive in what does not become zero, non-finite values show, errors are bounded."""
    good = exact.isfinite()
    assert stored[~good].isnan().all(), "a non-finite value is hidden"
    assert stored[good].isfinite().all(), "a finite value was lost"
    assert (stored[exact == 0] == 0).all(), "a zero became something else"
    assert (stored[good] * exact[good].sign() >= 0).all(), "a sign was lost"
    error, bound = (stored - exact).abs().double(), ratio_bound(exact, second)
    assert (error <= bound)[good].all(), f"{(error / bound)[good].max():.3g} of the bound"


def assert_second_faithful(stored: torch.Tensor, exact: torch.Tensor) -> None:
    """As `assert_faithful`, for a second moment as "log8", to nearest: it is off by half a step. 253 steps
    span the group, each a whole number of 256ths of an octave."""
    good = exact.isfinite() & (exact >= 0)
    assert stored[~good].isnan().all(), "a value that no second moment has is hidden"
    assert ((stored == 0) == (exact == 0))[good].all(), "a zero came or went"
    groups = (x.reshape(-1).double().split(GROUP) for x in (stored, raised(exact.reshape(-1).double())))
    for a, b in zip(*groups, strict=True):
        live = b.isfinite() & (b > 0)
        if live.any():
            octaves = (b[live].log2().max() - b[live].log2().min()).item()
            step = (math.floor(octaves * 256 / 253) + 1) / 256
            assert ((a[live].log2() - b[live].log2()).abs() <= step / 2 + 2**-13).all()
