"""What storing does to the moments of `CoatAdamW`, measured in a step that is watched.

Before the step a sample of groups is decoded and the gradients of its elements are read. From these the fresh
moments m and v of the step follow, in FP32, as the reference computes them. After the step the same groups
are decoded again: m' and v' are what the next step will find. With u = m / (sqrt(v) / sqrt(1 - beta2^t) +
eps) and u' the same of m' and v', over the sampled elements of a tensor:

- update error: sqrt(sum (u' - u)^2 / sum u^2)
- stalled: 1 - sum ln(v0 / v') / sum ln(v0 / v), within 0 and 1, over the elements that were to shrink (v is
  below v0, what was stored before). It is 1 where rounding undoes every decay, and about 0 where rounding
  is right on average, even if most codes stay where they are in a single step. Where
  second moments are rounded stochastically, v' is here the mean over `DITHERS` thresholds: a step has but one
  for each element, which says little.
- underflowed: the share of elements with v > 0 that are stored as zero, or as the lowest code at more than
  twice their value
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from coat_ds.optim.moment import Moment
from coat_ds.optim.narrow_grad import narrow_and_scale
from coat_ds.optim.optimizer import CoatAdamW
from coat_ds.optim.options import rounds_stochastically
from coat_ds.optim.shards import local, shard_of
from coat_kernels.codecs import Codec, Storage, Stored
from coat_kernels.codecs.codec import decode_reference, encode_reference

# groups of a tensor that are looked at
GROUPS = 16
DITHERS = 64
# of each tensor: squared error and size of the update, decay due and done, underflowed and positive elements
SUMS = 6

Places = Mapping[torch.Tensor, Sequence[tuple[str, int, int]]]
"""Of each tensor of an optimizer: what it holds, as (name, first element, number of elements)."""


class _Sample(NamedTuple):
    """Groups of one piece of a tensor, before the step. FP32 [groups, group size] but for the indices."""

    group: dict[str, Any]
    param: torch.Tensor
    piece: int
    rows: torch.Tensor
    names: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor


class StateSampler:
    """Measures the steps of an optimizer between `open` and `close`.

    names: of all tensors, in an order that is the same on all ranks.
    places: gives what each of the optimizer's tensors holds. Asked for once.
    """

    def __init__(self, optimizer: CoatAdamW, names: Iterable[str], places: Callable[[], Places]):
        self.optimizer = optimizer
        self.index = {name: i for i, name in enumerate(names)}
        self._places_of = places
        self._places: Places | None = None
        self._rows: dict[tuple, tuple[torch.Tensor, torch.Tensor] | None] = {}
        self._hooks: list = []
        self._samples: list[_Sample] = []
        self._sums: torch.Tensor | None = None

    def open(self) -> None:
        """From now on measures each step."""
        if self._places is None:
            self._places = self._places_of()
        optimizer = self.optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def close(self) -> torch.Tensor | None:
        """Ends measuring. Sums by tensor, FP64 [names, SUMS] on the optimizer's device; None if there was no
        step."""
        for hook in self._hooks:
            hook.remove()
        sums, self._sums, self._hooks, self._samples = self._sums, None, [], []
        return sums

    @torch.no_grad()
    def _before(self, optimizer: CoatAdamW, args: tuple, kwargs: dict) -> None:
        self._samples = []
        scale = kwargs.get("grad_scale")
        factors = [] if scale is None else [scale]
        if getattr(optimizer, "grad_scale", None) is not None:
            factors.append(1 / optimizer.grad_scale.float())
        for group in optimizer.param_groups:
            for p in group["params"]:
                grad = p.grad if p.grad is not None else getattr(p, "decoupled_grad", None)
                held = [local(optimizer.state.get(p, {}).get(name)) for name in ("exp_avg", "exp_avg_sq")]
                if grad is None or p not in self._places or not all(isinstance(x, Moment) for x in held):
                    continue
                self._take(group, p, *held, *narrow_and_scale(shard_of(grad, p)), factors)

    def _take(self, group, p, m: Moment, v: Moment, grad, own_scale, factors) -> None:
        size, flat = m.group_size, grad.reshape(-1)
        for i, piece in enumerate(m.pieces):
            chosen = self._chosen(p, i, m)
            if chosen is None:
                continue
            rows, names = chosen
            whole = (piece.end - piece.begin) // size
            g = flat[piece.begin : piece.begin + whole * size].view(-1, size).index_select(0, rows).float()
            for factor in (own_scale, *factors):
                if factor is not None:
                    g = g * factor.to(g.device)
            sample = group, p, i, rows, names, *_decoded(m, v, i, rows), g
            self._samples.append(_Sample(*sample))

    def _chosen(self, p: torch.Tensor, i: int, m: Moment) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Groups of a piece, evenly spread over each tensor in it, and whose they are."""
        key = p, i, m.arrangement
        if key not in self._rows:
            piece, size = m.pieces[i], m.group_size
            rows, names = [], []
            for name, start, numel in self._places[p] if piece.codec.dtype != torch.float32 else ():
                first = -(-(max(start, piece.begin) - piece.begin) // size)
                last = (min(start + numel, piece.end) - piece.begin) // size
                if last > first:
                    taken = min(GROUPS, last - first)
                    rows += [first + (last - first) * k // taken for k in range(taken)]
                    names += [self.index[name]] * taken
            made = (torch.tensor(t, device=m.device) for t in (rows, names))
            self._rows[key] = tuple(made) if rows else None
        return self._rows[key]

    @torch.no_grad()
    def _after(self, optimizer: CoatAdamW, args: tuple, kwargs: dict) -> None:
        for sample in self._samples:
            sums = _measured(sample, optimizer.state[sample.param])
            if (found_inf := getattr(optimizer, "found_inf", None)) is not None:
                # the step was skipped
                sums = sums * (found_inf.to(sums.device) == 0)
            if self._sums is None:
                self._sums = sums.new_zeros(len(self.index), SUMS)
            self._sums.index_add_(0, sample.names, sums)
        self._samples = []


def _decoded(m: Moment, v: Moment, i: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of a piece of both moments, FP32 [groups, group size]."""
    size = m.group_size
    first, second = _gather(m.pieces[i].storage, rows, size), _gather(v.pieces[i].storage, rows, size)
    exp_avg = decode_reference(m.pieces[i].codec, first, size)
    if m.pieces[i].codec.relative:
        exp_avg = exp_avg * Stored(v.pieces[i].codec, second).roots(size)
    exp_avg_sq = decode_reference(v.pieces[i].codec, second, size)
    return exp_avg.view(-1, size), exp_avg_sq.view(-1, size)


def _gather(storage: Storage, rows: torch.Tensor, size: int) -> Storage:
    whole = storage.codes.numel() // size
    codes = storage.codes[: whole * size].view(-1, size).index_select(0, rows).view(-1)
    return Storage(codes, *(t.index_select(0, rows) if t.numel() else t for t in storage[1:]))


def _measured(sample: _Sample, state: dict[str, Any]) -> torch.Tensor:
    """FP64 [groups, SUMS]."""
    group, (beta1, beta2) = sample.group, sample.group["betas"]
    m, v = local(state["exp_avg"]), local(state["exp_avg_sq"])
    stored_m, stored_v = _decoded(m, v, sample.piece, sample.rows)
    codes = _gather(v.pieces[sample.piece].storage, sample.rows, m.group_size).codes.view_as(stored_v)
    g = -sample.grad if group["maximize"] else sample.grad
    old = sample.exp_avg_sq
    fresh_m = torch.lerp(sample.exp_avg, g, 1 - beta1)
    fresh_v = old * beta2 + g * g * (1 - beta2)
    root = (1 - beta2 ** state["step"]) ** 0.5

    def update(m, v):
        return m / (v.sqrt() / root + group["eps"])

    exact, stored = update(fresh_m, fresh_v), update(stored_m, stored_v)
    known = exact.isfinite()
    shrinks = (fresh_v < old) & (fresh_v > 0) & (stored_v > 0)
    codec = v.pieces[sample.piece].codec
    kept = stored_v.log()
    if rounds_stochastically(group, codec):
        kept = _mean_log(codec, fresh_v)
        shrinks &= kept.isfinite()
    positive = fresh_v > 0
    bits = codes.view(torch.uint8 if codes.element_size() == 1 else torch.int16)
    lost = positive & ((stored_v == 0) | ((bits == 1) & (stored_v > 2 * fresh_v)))
    sums = (
        torch.where(known, (stored - exact).square(), 0),
        torch.where(known, exact.square(), 0),
        torch.where(shrinks, (old / fresh_v).log(), 0),
        torch.where(shrinks, old.log() - kept, 0),
        lost,
        positive,
    )
    return torch.stack([x.sum(1, dtype=torch.float64) for x in sums], 1)


def _mean_log(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """The mean logarithm of what `x` [groups, group size] may be stored as, over thresholds of the dither."""
    lanes = torch.arange(x.shape[1], device=x.device) * 0.618034
    shifts = torch.arange(DITHERS, device=x.device)[:, None] / DITHERS
    dither = (((lanes + shifts) % 1 - 0.5) * (1 - 2**-20))[:, None].expand(-1, *x.shape)
    repeated = x.expand(DITHERS, *x.shape).reshape(-1)
    storage = encode_reference(codec, repeated, x.shape[1], dither=dither.reshape(-1))
    return decode_reference(codec, storage, x.shape[1]).view(DITHERS, *x.shape).log().mean(0)


def figures(sums: Sequence[float]) -> dict[str, float]:
    """What the SUMS numbers of a tensor, or of several, say; without what they say nothing of."""
    error, size, due, done, lost, positive = sums
    found = {}
    if size > 0:
        found["update_error"] = (error / size) ** 0.5
    if due > 0:
        found["stalled"] = min(max(1 - done / due, 0.0), 1.0)
    if positive > 0:
        found["underflowed"] = lost / positive
    return found
