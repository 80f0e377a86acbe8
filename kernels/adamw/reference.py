"""AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2) over stored moments, in plain PyTorch.

The update uses the fresh FP32 moments; only what is stored is rounded. The same pass scales the gradient,
writes a BF16 copy of the weight, and updates BF16 parameters exactly (with a remainder of 16 bits that makes
an FP32 master) or with stochastic rounding.

With beta2 near 1 a second moment decays by less than half a code in a step. Rounded to nearest it would decay
with the largest of its group alone, so it is rounded with a dither that steps through all thresholds
("dither").

A relative code (`codecs/ratio.py`) is decoded and encoded with the root of the second moment stored beside
it: decoded with the old one, encoded with the new one.
"""

import torch
import triton.language as tl

from coat_kernels.adamw.options import AdamWOptions
from coat_kernels.codecs.codec import Storage, Stored, encode_reference

# dither: 2^32 times the fractional parts of the golden ratio and of the plastic number's inverse, whose
# multiples fill an interval most evenly
STEP_KEY, LANE_KEY = tl.constexpr(0x9E3779B1), tl.constexpr(0xC13FA9A9)
# spreads the bits of gradients over the noise of stochastic rounding
GRAD_KEY = tl.constexpr(0x85EBCA6B)
# scales an int32 to (-1/2, 1/2)
DITHER_UNIT = tl.constexpr((1 - 2**-23) * 2.0**-32)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An FP32 master as a BF16 weight and the int16 remainder that makes it exact again.

    The weight is the nearest BF16 (halves away from zero); its bits, shifted, plus the signed remainder are
    the master's. Where the weight is infinite, so is the master from now on; NaN stays NaN, of any payload.
    """
    bits = master.contiguous().view(torch.int32)
    # rounding would carry a NaN into its sign, and truncation may leave an infinity
    weight = torch.where(master.isnan(), (bits >> 16) | 0x40, (bits + 0x8000) >> 16)
    remainder = torch.where((weight & 0x7FFF) >= 0x7F80, 0, bits)
    return weight.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


def join_master(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The FP32 master of a BF16 weight and its remainder.

    Exact for every pair that `split_master` gives. Somebody may have edited the weight since. In pairs that
    `split_master` cannot give, zeros with a negative remainder and non-finite weights, the weight alone
    counts. So for all 2^32 pairs the master rounds to the visible weight. An edited weight that could have
    this remainder cannot be told from an unedited one, and keeps it: at most half a BF16 step.
    """
    upper, lower = weight.view(torch.int16).int(), remainder.int()
    magnitude = upper & 0x7FFF
    is_alone = (magnitude >= 0x7F80) | ((magnitude == 0) & (lower < 0))
    return ((upper << 16) + torch.where(is_alone, 0, lower)).view(torch.float32)


def noise_reference(x: torch.Tensor, grad: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """Noise for the stochastic rounding of each element of `x`: int32 in [0, 2^16), the upper half of a
    32-bit integer hash (Wellons, lowbias32).

    x, grad: FP32, a parameter after the update and the gradient of the update.

    The hash depends on the bits of both, the seed and the step, and on nothing else. So replicas of a weight
    are rounded alike, however each rank's list of parameters is ordered, cut or sharded. The price: within
    one step, elements that are equal in both are rounded the same way.
    """
    key = seed + step * STEP_KEY.value
    x, grad = x.view(torch.int32).long(), grad.view(torch.int32).long()
    x = (x + grad * GRAD_KEY.value + key) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return ((x ^ (x >> 16)) >> 16).int()


def dither_reference(step: int, numel: int, group_size: int, device: torch.device | str) -> torch.Tensor:
    """What is added, in steps of codes, to each element before it is rounded: FP32 [numel] in (-1/2, 1/2).

    It depends on the step and on the element's place in its group, so codes do not depend on where tensors
    are cut. From step to step it advances by the golden ratio, which fills the interval more evenly than
    random numbers: after few steps an element is right on average.
    """
    lane = torch.arange(numel, dtype=torch.int64, device=device) % group_size
    return (step * STEP_KEY.value + lane * LANE_KEY.value).int().float() * DITHER_UNIT.value


def round_stochastically(x: torch.Tensor, grad: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """FP32 as BF16: away from zero with the probability of what truncation would drop; NaN stays NaN."""
    bits = (x.view(torch.int32) + noise_reference(x, grad, seed, step)) >> 16
    return torch.where(x.isnan(), torch.nan, bits.to(torch.int16).view(torch.bfloat16))


def adamw_reference(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: Storage,
    exp_avg_sq: Storage,
    step: float,
    options: AdamWOptions,
    remainder: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    *,
    grad_scale: torch.Tensor | None = None,
) -> None:
    """One step for one tensor in plain PyTorch, operation by operation as `torch.optim.AdamW` does it."""
    m_codec, v_codec, group_size = options.exp_avg_codec, options.exp_avg_sq_codec, options.group_size
    lr, beta1, beta2 = options.lr, options.beta1, options.beta2
    correction1, root_correction2 = options.bias_corrections(step)
    g = grad.reshape(-1).float()
    g = g if grad_scale is None else g * grad_scale
    g = -g if options.maximize else g
    m = m_codec.decode(exp_avg, group_size, Stored(v_codec, exp_avg_sq))
    v = v_codec.decode(exp_avg_sq, group_size)
    p = (param if remainder is None else join_master(param, remainder)).reshape(-1).float()

    p = p * (1 - lr * options.weight_decay)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = (v.sqrt() / root_correction2).add_(options.eps)
    p.addcdiv_(m, denominator, value=-lr / correction1)

    if remainder is not None:
        for old, new in zip((param, remainder), split_master(p), strict=True):
            old.copy_(new.view_as(old))
    elif options.stochastic:
        param.copy_(round_stochastically(p, g, options.seed, int(step)).view_as(param))
    else:
        param.copy_(p.view_as(param))
    if weight is not None:
        weight.copy_(p.view_as(weight))
    shift = dither_reference(int(step), p.numel(), group_size, p.device) if options.dither else None
    _overwrite(exp_avg_sq, encode_reference(v_codec, v, group_size, dither=shift))
    turn = None
    if m_codec.relative:
        m = m / Stored(v_codec, exp_avg_sq).roots(group_size)
        # one number for the whole step, which costs the kernel nothing
        turn = dither_reference(int(step), 1, 1, m.device).expand_as(m)
    _overwrite(exp_avg, encode_reference(m_codec, m, group_size, dither=turn))


def _overwrite(storage: Storage, made: Storage) -> None:
    for old, new in zip(storage, made, strict=True):
        old.copy_(new)
