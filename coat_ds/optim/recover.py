"""The very codes of moments, from their FP32 values alone.

Checkpoints of Megatron and DeepSpeed's universal ones hold moments as FP32 tensors and nothing beside them.
Encoding decoded values again does not give the same codes: the exponent of a group comes from its smallest
magnitude, which the first encoding has rounded. That rounding moves the exponent by a few steps at most, and
the largest magnitude is stored exactly. So `recovered` tries the neighbouring exponents and takes the one
that decodes to the same values. It is the stored one, or one that stands for the same numbers.
"""

import itertools

import torch
import torch.nn.functional as F

from coat_kernels.codecs import AT_ONCE, Codec, Storage, Stored

# decoding on another device differs by a few FP32 roundings (2^-24) times at most 16, the largest 1 / k;
# the nearest codes differ by 2^-4 / 16 at least. Anything between the two tells them apart.
SAME_VALUE = 1e-4
# how far a rounded smallest magnitude moves an exponent e: E4M3 holds it with an error of at most a third
# (stochastically rounded from 2.29 to 3 of its smallest steps), 0.4 of the 16.6 octaves that groups are
# stretched to; E5M2 and log8 with less. To that come a rounding of each exponent.
RELATIVE, ABSOLUTE = 0.03, 2


def recovered(
    codec: Codec, values: torch.Tensor, group_size: int, beside: Stored | None = None
) -> tuple[Storage, bool]:
    """`values` (any shape; taken as FP32, flat) as `codec` stores them, in the codes that decode to them if
    there are such.

    beside: the second moment, recovered already, that a relative code is relative to.

    Returns also whether all groups do. Groups that were decoded on another device differ by FP32 roundings
    and get their codes all the same; others are encoded as new ones.
    """
    values = values.detach().reshape(-1)
    stored, exact = codec.zeros(values.numel(), group_size, values.device), True
    # comparing takes several times their size
    for begin in range(0, values.numel(), AT_ONCE):
        part = values[begin : begin + AT_ONCE].float()
        rows = F.pad(part, (0, -part.numel() % group_size)).view(-1, group_size)
        first = begin // group_size
        if codec.relative:
            second = beside and Stored(
                beside.codec, beside.storage.groups(first, first + len(rows), group_size)
            )
            # encoding what it decoded gives its codes (codecs/ratio.py)
            found = codec.encode(part, group_size, beside=second)
            same = not _differences(codec.decode(found, group_size, second), part).any()
        else:
            found, same = _recovered(codec, rows)
        exact = exact and same
        stored.codes[begin : begin + AT_ONCE] = found.codes.view(-1)[: part.numel()]
        groups = slice(first, first + len(rows))
        for old, new in zip(stored[1:], found[1:], strict=True):
            old[groups] = new
    return stored, exact


def _recovered(codec: Codec, rows: torch.Tensor) -> tuple[Storage, bool]:
    """`recovered` of whole groups, FP32 [groups, group_size]."""
    group_size = rows.shape[1]
    best = codec.encode(rows, group_size)
    first, reach = Storage(*(t.clone() for t in best)), _reach(codec, best, len(rows))
    errors = _errors(codec, best, rows)
    # the nearest first, up and down
    steps = (sign * distance for distance in itertools.count(1) for sign in (1, -1))
    while True:
        step = next(steps)
        left = ((errors > 0) & (reach >= abs(step))).nonzero().squeeze(1)
        if not left.numel():
            return best, not errors.any()
        tried = codec.encode(rows[left], group_size, _moved(codec, first, left, step))
        found = _errors(codec, tried, rows[left])
        better = (found < errors[left]) & (found <= SAME_VALUE)
        where = left[better]
        errors[where] = found[better]
        best.codes.view_as(rows)[where] = tried.codes.view(-1, group_size)[better]
        for old, new in zip(best[1:], tried[1:], strict=True):
            if old.numel():
                old[where] = new[better]


def _reach(codec: Codec, stored: Storage, groups: int) -> torch.Tensor:
    """How many steps from `stored` each group may have been, int32 [groups]."""
    if codec.has_exponent:
        return (RELATIVE * stored.exponent.int()).ceil().int() + ABSOLUTE
    # a scale is the largest magnitude times a constant, rounded twice on its way
    return stored.codes.new_full((groups,), int(codec.has_scale), dtype=torch.int32)


def _moved(codec: Codec, stored: Storage, groups: torch.Tensor, step: int) -> Storage:
    """Scales and exponents of `groups`, `step` steps from those of `stored`."""
    if codec.has_exponent:
        moved = (stored.exponent[groups].int() + step).clamp(1, 255).to(torch.uint8)
        return stored._replace(scale=stored.scale[groups], exponent=moved)
    scale = stored.scale[groups]
    return stored._replace(scale=scale.nextafter(torch.full_like(scale, torch.inf if step > 0 else 0)))


def _errors(codec: Codec, storage: Storage, rows: torch.Tensor) -> torch.Tensor:
    """The largest relative error of each group, FP32 [groups]; infinite where one of two is zero or NaN."""
    return _differences(codec.decode(storage, rows.shape[1]).view_as(rows), rows).amax(1)


def _differences(decoded: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Relative ones; infinite where one of two is zero or NaN."""
    same = (decoded == values) | (decoded.isnan() & ~values.isfinite())
    error = ((decoded - values) / values).abs().nan_to_num(torch.inf, torch.inf)
    return torch.where(same, 0, error)
