"""AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2) over stored moments, in plain PyTorch.

The update uses the fresh FP32 moments; only the stored values are rounded. The same pass scales the gradient,
and updates BF16 parameters either exactly (a 16-bit remainder completes
them to an FP32 master) or with stochastic rounding.

With beta2 near 1, one step reduces a second moment by less than half a code. With rounding to nearest, it
would decay only as fast as the largest value of its group. It is therefore rounded with a dither that steps
through all thresholds.

A relative code (`codecs/ratio.py`) is decoded and encoded with the root of the stored second moment: decoded
with the old root, encoded with the new one.
"""

import torch
import triton.language as tl

from coat_kernels.adamw.options import AdamWOptions
from coat_kernels.codecs.codec import GROUP_SIZE, Encoded, Storage, encode_reference

# dither: 2^32 times the fractional parts of the golden ratio and of the plastic number's inverse; their
# multiples fill an interval most evenly
STEP_KEY, LANE_KEY = tl.constexpr(0x9E3779B1), tl.constexpr(0xC13FA9A9)
# mixes the bits of the gradient into the noise of stochastic rounding
GRAD_KEY = tl.constexpr(0x85EBCA6B)
# scales an int32 to (-1/2, 1/2)
DITHER_UNIT = tl.constexpr((1 - 2**-23) * 2.0**-32)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits an FP32 master into a BF16 weight and the int16 remainder that restores the master exactly.

    The weight is the nearest BF16 (halves away from zero). The bits of the master are the bits of the weight,
    shifted, plus the signed remainder. If the weight is infinite, the restored master is infinite, too. NaN
    stays NaN, with any payload.
    """
    bits = master.contiguous().view(torch.int32)
    # for NaN, rounding could carry into the sign and truncation could leave an infinity
    weight = torch.where(master.isnan(), (bits >> 16) | 0x40, (bits + 0x8000) >> 16)
    remainder = torch.where((weight & 0x7FFF) >= 0x7F80, 0, bits)
    return weight.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


def join_master(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The FP32 master of a BF16 weight and its remainder.

    Exact for every pair that `split_master` returns. Other code may have changed the weight since.
    `split_master` never returns a zero with a negative remainder, nor a nonzero remainder with a non-finite
    weight; for such pairs the master equals the weight. So for all 2^32 pairs the master rounds to the
    visible weight. If the changed weight is compatible with the old remainder, the change cannot be detected
    and the remainder is kept: the error is at most half a BF16 step.
    """
    upper, lower = weight.view(torch.int16).int(), remainder.int()
    magnitude = upper & 0x7FFF
    is_alone = (magnitude >= 0x7F80) | ((magnitude == 0) & (lower < 0))
    return ((upper << 16) + torch.where(is_alone, 0, lower)).view(torch.float32)


def noise_reference(x: torch.Tensor, grad: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """Noise for the stochastic rounding of each element of `x`: int32 in [0, 2^16), the upper half of a
    32-bit integer hash (Wellons, lowbias32).

    x, grad: FP32, the updated parameter and the gradient of the update.

    The hash depends only on the bits of x and grad, the seed and the step. So replicas of a weight round
    alike, however each rank orders, cuts or shards its parameters. The price: within one step, elements with
    equal x and equal grad round the same way.
    """
    key = seed + step * STEP_KEY.value
    x, grad = x.view(torch.int32).long(), grad.view(torch.int32).long()
    x = (x + grad * GRAD_KEY.value + key) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return ((x ^ (x >> 16)) >> 16).int()


def dither_reference(step: int, numel: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The offset that is added to each element before rounding, in steps of codes: FP32 [numel], between
    -1/2 and 1/2.

    It depends on the step and on the element's position in its group, so codes do not depend on where tensors
    are cut. In each step it advances by the golden ratio, which fills the interval more evenly than random
    numbers: the average of an element is right after a few steps.
    """
    lane = torch.arange(numel, dtype=torch.int64, device=device) % GROUP_SIZE
    return (step * STEP_KEY.value + lane * LANE_KEY.value).int().float() * DITHER_UNIT.value


def round_stochastically(x: torch.Tensor, grad: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """FP32 to BF16: rounds away from zero with a probability equal to the fraction that truncation drops; NaN
    stays NaN."""
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
    *,
    grad_scale: torch.Tensor | None = None,
) -> None:
    """One step for one tensor in plain PyTorch, in the same order of operations as `torch.optim.AdamW`."""
    m_codec, v_codec = options.exp_avg_codec, options.exp_avg_sq_codec
    lr, beta1, beta2 = options.lr, options.beta1, options.beta2
    correction1, root_correction2 = options.bias_corrections(step)
    g = grad.reshape(-1).float()
    g = g if grad_scale is None else g * grad_scale
    g = -g if options.maximize else g
    m = m_codec.decode(exp_avg, relative_to=Encoded(v_codec, exp_avg_sq))
    v = v_codec.decode(exp_avg_sq)
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
    shift = dither_reference(int(step), p.numel(), p.device) if options.dither else None
    _overwrite(exp_avg_sq, encode_reference(v_codec, v, dither=shift))
    turn = None
    if m_codec.relative:
        m = m / Encoded(v_codec, exp_avg_sq).roots()
        # one number for the whole step, which costs the kernel nothing
        turn = dither_reference(int(step), 1, m.device).expand_as(m)
    _overwrite(exp_avg, encode_reference(m_codec, m, dither=turn))


def _overwrite(storage: Storage, made: Storage) -> None:
    for old, new in zip(storage, made, strict=True):
        old.copy_(new)
