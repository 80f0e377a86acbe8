"""The error that storing adds to a step: errors of the update and of second moments, summed per group.

The input are groups copied before a step, their gradients, and the same groups copied after the step. m and v
are the fresh FP32 moments of the step, as `adamw_reference` computes them. v0 is the second moment stored
before the step; m' and v' are the moments stored after it. With u = m / (sqrt(v) / sqrt(1 - beta2^t) + eps),
and u' the same expression in m' and v', the sums of a group are

- the sums of (u' - u)^2 and of u^2, where u is finite;
- the sums of ln(v0 / v) and of ln(v0 / v'), over elements that should shrink (v < v0) and are above zero
  before and after. With dither, ln v' is the mean over `DITHERS` thresholds, because a step has only one
  threshold per element, which is too small a sample;
- the number of elements with v > 0 that are stored as zero, or as more than 2 v;
- the number of elements with v > 0.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from coat_kernels.adamw.options import AdamWOptions
from coat_kernels.adamw.step import constants_of
from coat_kernels.codecs.codec import (
    GROUP_SIZE,
    Codec,
    Encoded,
    Storage,
    decode_reference,
    encode_reference,
    load_metadata,
)
from coat_kernels.device import uses_kernels
from coat_kernels.fp8 import cast
from coat_kernels.prepared import FUSED
from coat_kernels.tiles import load_tile

SUMS = 6
DITHERS = 64
# elements that the reference processes at a time; it makes `DITHERS` copies of each, which should fit into a
# cache
AT_ONCE = 2**13


class Moments(NamedTuple):
    """The stored codes, scales and exponents of some groups of both moments."""

    exp_avg: Storage
    exp_avg_sq: Storage

    def groups(self, first: int, last: int) -> "Moments":
        """A view of the groups from `first` to `last`, exclusive."""
        return Moments(*(storage.groups(first, last) for storage in self))

    def decode(self, options: AdamWOptions) -> tuple[torch.Tensor, torch.Tensor]:
        """Both moments, FP32 [groups, GROUP_SIZE]."""
        second = options.exp_avg_sq_codec
        relative_to = Encoded(second, self.exp_avg_sq)
        exp_avg = options.exp_avg_codec.decode(self.exp_avg, relative_to=relative_to)
        return exp_avg.view(-1, GROUP_SIZE), second.decode(self.exp_avg_sq).view(-1, GROUP_SIZE)


def storing_sums(
    before: Moments, after: Moments, grad: torch.Tensor, step: torch.Tensor, options: AdamWOptions
) -> torch.Tensor:
    """The sums of each group, FP64 [groups, SUMS].

    before, after: the stored moments before and after the step.
    grad: FP32 [groups, GROUP_SIZE], the gradient that the step used, scaled.
    step: FP64 [groups], the step count of each group's tensor, including this step.
    options: of the step; lr and weight_decay are not used.
    """
    if uses_kernels(grad, fp8=False):
        return storing_sums_triton(before, after, grad, step, options)
    at_once = AT_ONCE // GROUP_SIZE
    sums = [step.new_empty(0, SUMS)]
    for first in range(0, len(grad), at_once):
        part = slice(first, min(first + at_once, len(grad)))
        stored = (moments.groups(part.start, part.stop) for moments in (before, after))
        sums.append(storing_sums_reference(*stored, grad[part], step[part], options))
    return torch.cat(sums)


def storing_sums_reference(
    before: Moments, after: Moments, grad: torch.Tensor, step: torch.Tensor, options: AdamWOptions
) -> torch.Tensor:
    """`storing_sums` in plain PyTorch."""
    beta1, beta2 = options.beta1, options.beta2
    old_m, old = before.decode(options)
    stored_m, stored_v = after.decode(options)
    g = -grad if options.maximize else grad
    fresh_m = torch.lerp(old_m, g, 1 - beta1)
    fresh_v = old * beta2 + g * g * (1 - beta2)
    root = _roots(step, beta2)[:, None]

    def update(m, v):
        return m / (v.sqrt() / root + options.eps)

    exact, stored = update(fresh_m, fresh_v), update(stored_m, stored_v)
    known = exact.isfinite()
    shrinks = (fresh_v < old) & (fresh_v > 0) & (stored_v > 0)
    stored_log = stored_v.log()
    if options.dither:
        stored_log = _mean_log(options.exp_avg_sq_codec, fresh_v)
        shrinks &= stored_log.isfinite()
    positive = fresh_v > 0
    lost = positive & ((stored_v == 0) | (stored_v > 2 * fresh_v))
    sums = (
        torch.where(known, (stored - exact).square(), 0),
        torch.where(known, exact.square(), 0),
        torch.where(shrinks, (old / fresh_v).log(), 0),
        torch.where(shrinks, old.log() - stored_log, 0),
        lost,
        positive,
    )
    return torch.stack([x.sum(1, dtype=torch.float64) for x in sums], 1)


def _roots(step: torch.Tensor, beta2: float) -> torch.Tensor:
    """The bias-correction divisors of the roots of second moments, FP32."""
    return (1 - beta2**step).sqrt().float()


@functools.cache
def _thresholds(device: torch.device) -> torch.Tensor:
    """The dithers of a group, evenly spread for each element: FP32 [DITHERS, GROUP_SIZE] in (-1/2, 1/2)."""
    lanes, shifts = (torch.arange(n, dtype=torch.float32, device=device) for n in (GROUP_SIZE, DITHERS))
    lanes, shifts = lanes * 0.618034, shifts[:, None] / DITHERS
    return ((lanes + shifts) % 1 - 0.5) * (1 - 2**-20)


def _mean_log(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """The mean logarithm of the values that `x` [groups, GROUP_SIZE] may be stored as."""
    dither = _thresholds(x.device)[:, None].expand(-1, *x.shape)
    repeated = x.expand(DITHERS, *x.shape).reshape(-1)
    storage = encode_reference(codec, repeated, dither=dither.reshape(-1))
    return decode_reference(codec, storage).view(DITHERS, *x.shape).log().mean(0)


@triton.jit
def decode_tile(p_m, p_m_scale, p_m_exponent, p_v, p_v_scale, p_v_exponent, o_x, m_x, o_row, m_row,
                M_FROM: tl.constexpr, M_SCALE: tl.constexpr, M_EXPONENT: tl.constexpr,
                V_FROM: tl.constexpr, V_SCALE: tl.constexpr, V_EXPONENT: tl.constexpr,
                V_ROOTS: tl.constexpr, RELATIVE: tl.constexpr):  # fmt: skip
    """Both moments of a tile, FP32."""
    b_m_codes, b_v_codes = load_tile(p_m, o_x, m_x, True), load_tile(p_v, o_x, m_x, True)
    b_scale, b_exponent = load_metadata(p_m_scale, p_m_exponent, o_row, m_row, M_SCALE, M_EXPONENT, True)
    b_m = M_FROM(b_m_codes, b_scale, b_exponent, True)
    b_scale, b_exponent = load_metadata(p_v_scale, p_v_exponent, o_row, m_row, V_SCALE, V_EXPONENT, True)
    if RELATIVE:
        b_m *= V_ROOTS(b_v_codes, b_scale, b_exponent)
    return b_m, V_FROM(b_v_codes, b_scale, b_exponent, False)


@triton.jit
def store_sum(p_sums, o_row, m_row, b_x, COLUMN: tl.constexpr, SUMS: tl.constexpr):
    tl.store(p_sums + o_row * SUMS + COLUMN, tl.sum(b_x.to(tl.float64), axis=1), mask=m_row)


@triton.jit
def storing_kernel(
    p_grad, p_root, p_thresholds, p_sums,
    # the stored moments before and after the step
    p_old_m, p_old_m_scale, p_old_m_exponent, p_old_v, p_old_v_scale, p_old_v_exponent,
    p_m, p_m_scale, p_m_exponent, p_v, p_v_scale, p_v_exponent,
    groups, rate1, beta2, rate2, eps,
    M_FROM: tl.constexpr, M_SCALE: tl.constexpr, M_EXPONENT: tl.constexpr,
    V_FROM: tl.constexpr, V_SCALE: tl.constexpr, V_EXPONENT: tl.constexpr,
    V_ROOTS: tl.constexpr, RELATIVE: tl.constexpr,
    V_STATISTICS: tl.constexpr, V_TO: tl.constexpr, DITHERS: tl.constexpr,
    MAXIMIZE: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < groups
    o_lane = tl.arange(0, G)[None, :]
    o_x = o_row[:, None] * G + o_lane
    m_x = o_x < groups * G
    b_old_m, b_old = decode_tile(
        p_old_m, p_old_m_scale, p_old_m_exponent, p_old_v, p_old_v_scale, p_old_v_exponent,
        o_x, m_x, o_row, m_row, M_FROM, M_SCALE, M_EXPONENT,
        V_FROM, V_SCALE, V_EXPONENT, V_ROOTS, RELATIVE)  # fmt: skip
    b_m, b_v = decode_tile(
        p_m, p_m_scale, p_m_exponent, p_v, p_v_scale, p_v_exponent,
        o_x, m_x, o_row, m_row, M_FROM, M_SCALE, M_EXPONENT,
        V_FROM, V_SCALE, V_EXPONENT, V_ROOTS, RELATIVE)  # fmt: skip
    b_g = load_tile(p_grad, o_x, m_x, True)
    if MAXIMIZE:
        b_g = -b_g
    b_fresh_m = b_old_m + rate1 * (b_g - b_old_m)
    b_fresh = b_old * beta2 + b_g * b_g * rate2
    b_root = tl.load(p_root + o_row, mask=m_row, other=1.0)[:, None]
    b_exact = b_fresh_m / (tl.sqrt(b_fresh) / b_root + eps)
    b_error = b_m / (tl.sqrt(b_v) / b_root + eps) - b_exact
    b_known = tl.abs(b_exact) < float("inf")
    b_shrinks = (b_fresh < b_old) & (b_fresh > 0.0) & (b_v > 0.0)
    if DITHERS > 0:
        b_scale, b_exponent = V_STATISTICS(b_fresh, False)
        b_stored_log = tl.zeros([ROWS, G], tl.float32)
        for i in range(DITHERS):
            b_dither = tl.load(p_thresholds + i * G + o_lane)
            b_codes = V_TO(b_fresh, b_scale[:, None], b_exponent[:, None], b_dither, False, True)
            b_codes = cast(b_codes, p_v.dtype.element_ty)
            b_stored_log += tl.log(V_FROM(b_codes, b_scale[:, None], b_exponent[:, None], False))
        b_stored_log /= DITHERS
        b_shrinks &= tl.abs(b_stored_log) < float("inf")
    else:
        b_stored_log = tl.log(b_v)
    b_positive = b_fresh > 0.0
    b_lost = b_positive & ((b_v == 0.0) | (b_v > 2.0 * b_fresh))
    store_sum(p_sums, o_row, m_row, tl.where(b_known, b_error * b_error, 0.0), 0, SUMS)
    store_sum(p_sums, o_row, m_row, tl.where(b_known, b_exact * b_exact, 0.0), 1, SUMS)
    store_sum(p_sums, o_row, m_row, tl.where(b_shrinks, tl.log(b_old / b_fresh), 0.0), 2, SUMS)
    store_sum(p_sums, o_row, m_row, tl.where(b_shrinks, tl.log(b_old) - b_stored_log, 0.0), 3, SUMS)
    store_sum(p_sums, o_row, m_row, b_lost, 4, SUMS)
    store_sum(p_sums, o_row, m_row, b_positive, 5, SUMS)


def storing_sums_triton(
    before: Moments, after: Moments, grad: torch.Tensor, step: torch.Tensor, options: AdamWOptions
) -> torch.Tensor:
    """`storing_sums` by the Triton kernel, in one launch."""
    constants = constants_of(options)
    sums = torch.empty(len(grad), SUMS, dtype=torch.float64, device=grad.device)
    if len(grad):
        with torch.cuda.device_of(grad):
            storing_kernel[(triton.cdiv(len(grad), constants["ROWS"]),)](
                grad,
                _roots(step, options.beta2),
                _thresholds(grad.device),
                sums,
                *before.exp_avg,
                *before.exp_avg_sq,
                *after.exp_avg,
                *after.exp_avg_sq,
                len(grad),
                1 - options.beta1,
                options.beta2,
                1 - options.beta2,
                options.eps,
                DITHERS=DITHERS if options.dither else 0,
                SUMS=SUMS,
                **{name: value for name, value in constants.items() if name in storing_kernel.arg_names},
                **FUSED,
            )
    return sums
