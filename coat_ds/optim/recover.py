"""The stored codes of moments, recovered from their FP32 values alone.

Checkpoints hold moments as FP32 tensors, as AdamW's do, without codes, scales or exponents.
Re-encoding decoded values does not give the same codes: the exponent of a group comes from its smallest
magnitude, which the first encoding has rounded. That rounding moves the exponent by a few steps at most, and
the largest magnitude is stored exactly. So `_recovered` tries the neighbouring exponents and takes the one
that decodes to the same values. It is the stored exponent, or one that represents the same numbers.
"""

import itertools

import torch
import torch.nn.functional as F

from coat_ds.optim.pieces import write
from coat_kernels.codecs import GROUP_SIZE, Codec, Encoded, Storage
from coat_kernels.codecs.codec import encode_reference

# decoding on another device differs by a few FP32 roundings (2^-24) times at most 16, the largest 1 / k;
# neighbouring codes differ by at least 2^-4 / 16. Any threshold between the two separates them.
SAME_VALUE = 1e-4
# how far a rounded smallest magnitude moves an exponent e: E4M3 holds it with an error of at most a third
# (stochastically rounded from 2.29 to 3 of its smallest steps), 0.4 of the 16.6 octaves that groups are
# stretched to; log8 has smaller errors. The rounding of each exponent adds to this.
RELATIVE, ABSOLUTE = 0.03, 2


def recover_(
    into: Encoded,
    values: torch.Tensor,
    second: Encoded | None = None,
    worker: torch.device | None = None,
) -> bool:
    """Overwrites `into` by `values` (one for each code, any floating point, on any device), in codes that
    decode to exactly them where such codes exist. Other groups are encoded as new values. It works in parts,
    because comparing takes several times the memory of the values.

    second: the second moment, already recovered, to which a relative code is relative.
    worker: the device that encodes the parts, by default that of `into`.

    Returns whether such codes exist for all groups. Differences by FP32 rounding, from decoding on another
    device, are allowed.
    """
    codec, exact, values = into.codec, True, values.detach().reshape(-1)
    seconds = itertools.repeat(None) if second is None else second.parts()
    for (where, own), roots in zip(into.storage.parts(), seconds, strict=False):
        part = values[where].to(worker or own.codes.device, torch.float32)
        roots = None if roots is None else roots.to(part.device)
        if codec.relative:
            # re-encoding the decoded values gives the same codes (codecs/ratio.py)
            found = codec.encode(part, relative_to=roots)
            same = bool((_differences(codec.decode(found, relative_to=roots), part) <= SAME_VALUE).all())
        else:
            rows = F.pad(part, (0, -part.numel() % GROUP_SIZE)).view(-1, GROUP_SIZE)
            found, same = _recovered(codec, rows)
        write(own, found._replace(codes=found.codes.view(-1)[: part.numel()]))
        exact = exact and same
    return exact


def _recovered(codec: Codec, rows: torch.Tensor) -> tuple[Storage, bool]:
    """The codes of whole groups, FP32 [groups, GROUP_SIZE], and whether they decode to all groups, except for
    FP32 rounding."""
    best = codec.encode(rows)
    first, reach = Storage(*(t.clone() for t in best)), _reach(best, len(rows))
    errors = _errors(codec, best, rows)
    # the nearest exponents first, up and down
    steps = (sign * distance for distance in itertools.count(1) for sign in (1, -1))
    while True:
        step = next(steps)
        left = ((errors > 0) & (reach >= abs(step))).nonzero().squeeze(1)
        if not left.numel():
            return best, bool((errors <= SAME_VALUE).all())
        moved = _moved(first, left, step)
        tried = encode_reference(codec, rows[left].view(-1), moved)
        found = _errors(codec, tried, rows[left])
        better = (found < errors[left]) & (found <= SAME_VALUE)
        where = left[better]
        errors[where] = found[better]
        best.codes.view_as(rows)[where] = tried.codes.view(-1, GROUP_SIZE)[better]
        for old, new in zip(best[1:], tried[1:], strict=True):
            if old.numel():
                old[where] = new[better]


def _reach(stored: Storage, groups: int) -> torch.Tensor:
    """By how many steps the exponent of each group may differ from that of `stored`, int32 [groups]."""
    if not stored.exponent.numel():
        return stored.codes.new_zeros(groups, dtype=torch.int32)
    return (RELATIVE * stored.exponent.int()).ceil().int() + ABSOLUTE


def _moved(stored: Storage, groups: torch.Tensor, step: int) -> Storage:
    """The scales of `groups`, and their exponents, `step` steps from those of `stored`."""
    moved = (stored.exponent[groups].int() + step).clamp(1, 255).to(torch.uint8)
    return stored._replace(scale=stored.scale[groups], exponent=moved)


def _errors(codec: Codec, storage: Storage, rows: torch.Tensor) -> torch.Tensor:
    """The largest relative error of each group, FP32 [groups]; infinite if only one value is zero or NaN."""
    return _differences(codec.decode(storage).view_as(rows), rows).amax(1)


def _differences(decoded: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Relative differences; infinite where only one of the two values is zero or NaN."""
    same = (decoded == values) | (decoded.isnan() & ~values.isfinite())
    error = ((decoded - values) / values).abs().nan_to_num(torch.inf, torch.inf)
    return torch.where(same, 0, error)
