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
from coat_ds.optim.shards import is_distributed, local, shard_of
from coat_ds.watch.sent import sent
from coat_kernels.codecs import Codec, Storage, Stored
from coat_kernels.codecs.codec import decode_reference, encode_reference

# groups of a tensor that are looked at
GROUPS = 16
# elements that are measured at once, of any number of tensors: the dither makes `DITHERS` copies of each. A
# CPU is slower where they do not fit into its cache
AT_ONCE, AT_ONCE_ON_CPU = 2**18, 2**13
DITHERS = 64
# of each tensor: squared error and size of the update, decay due and done, underflowed and positive elements
SUMS = 6

Places = Mapping[torch.Tensor, Sequence[tuple[str, int, int]]]
"""Of each tensor of an optimizer: what it holds, as (name, first element, number of elements)."""


class _Place(NamedTuple):
    """Groups of one tensor, within a piece of a parameter's moments: `count` of them, `stride` apart."""

    name: int
    param: torch.Tensor
    piece: int
    first: int
    stride: int
    count: int

    def rows(self, flat: torch.Tensor, width: int, begin: int = 0) -> torch.Tensor:
        """A view of those rows [count, width] that a flat, contiguous tensor has from element `begin` on."""
        offset = flat.storage_offset() + begin + self.first * width
        return flat.as_strided((self.count, width), (self.stride * width, 1), offset)

    def stored(self, state: Mapping[str, Any]) -> list[torch.Tensor]:
        """Views of what is stored of both moments: codes, scales and exponents of the one, then the other."""
        m, v = local(state["exp_avg"]), local(state["exp_avg_sq"])
        views = []
        for moment in (m, v):
            codes, *statistics = moment.pieces[self.piece].storage
            views.append(self.rows(codes, moment.group_size))
            views += [self.rows(x, 1) if x.numel() else x for x in statistics]
        return views


class _Moments(NamedTuple):
    """What is stored of some groups of both moments."""

    exp_avg: Storage
    exp_avg_sq: Storage

    @classmethod
    def of(cls, places: Sequence[_Place], state: Mapping[torch.Tensor, Any]) -> "_Moments":
        """Copied as it is now, in one operation for all places."""
        fields = zip(*(place.stored(state[place.param]) for place in places), strict=True)
        copied = [torch.cat(views).view(-1) for views in fields]
        return cls(Storage(*copied[:3]), Storage(*copied[3:]))

    def groups(self, first: int, last: int, size: int) -> "_Moments":
        return _Moments(*(storage.groups(first, last, size) for storage in self))


class _Rule(NamedTuple):
    """What decides how groups are stored and updated. Those of one rule are measured together."""

    codecs: tuple[Codec, Codec]
    size: int
    """Of a group."""
    betas: tuple[float, float]
    eps: float
    maximize: bool
    is_dithered: bool
    """Whether second moments are rounded stochastically."""
    counts_on_device: bool
    """Whether the number of steps is a tensor after the step."""
    device: torch.device

    @classmethod
    def of(cls, group: Mapping[str, Any], is_scaled: bool, m: Moment, v: Moment, i: int) -> "_Rule":
        """is_scaled: whether a gradient scaler may skip the step."""
        codecs = m.pieces[i].codec, v.pieces[i].codec
        beta1, beta2 = group["betas"]
        return cls(
            codecs,
            m.group_size,
            (beta1, beta2),
            group["eps"],
            group["maximize"],
            rounds_stochastically(group, codecs[1]),
            group["capturable"] or is_scaled,
            m.device,
        )

    def decode(self, stored: _Moments) -> tuple[torch.Tensor, torch.Tensor]:
        """Both moments, FP32 [groups, group size]."""
        first, second = self.codecs
        exp_avg = decode_reference(first, stored.exp_avg, self.size)
        if first.relative:
            exp_avg = exp_avg * Stored(second, stored.exp_avg_sq).roots(self.size)
        exp_avg_sq = decode_reference(second, stored.exp_avg_sq, self.size)
        return exp_avg.view(-1, self.size), exp_avg_sq.view(-1, self.size)


class _Sample(NamedTuple):
    """Groups of one rule before the step."""

    places: list[_Place]
    stored: _Moments
    grad: torch.Tensor
    """FP32 [groups, group size], as the step takes it."""


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
        self._chosen: dict[tuple, list[_Place]] = {}
        self._hooks: list = []
        self._samples: dict[_Rule, _Sample] = {}
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
        sums, self._sums, self._hooks, self._samples = self._sums, None, [], {}
        return sums

    @torch.no_grad()
    def _before(self, optimizer: CoatAdamW, args: tuple, kwargs: dict) -> None:
        taken: dict[_Rule, tuple[list[_Place], list[torch.Tensor]]] = {}
        is_scaled = getattr(optimizer, "found_inf", None) is not None
        for group in optimizer.param_groups:
            for p in group["params"]:
                grad = p.grad if p.grad is not None else getattr(p, "decoupled_grad", None)
                state = optimizer.state.get(p, {})
                m, v = (local(state.get(name)) for name in ("exp_avg", "exp_avg_sq"))
                known = isinstance(m, Moment) and isinstance(v, Moment) and p in self._places
                if grad is None or not known:
                    continue
                flat, own_scale = narrow_and_scale(shard_of(grad, p))
                flat = flat.reshape(-1).contiguous()
                for i, piece in enumerate(m.pieces):
                    if not (chosen := self._choose(p, i, m)):
                        continue
                    places, grads = taken.setdefault(_Rule.of(group, is_scaled, m, v, i), ([], []))
                    places += chosen
                    rows = [place.rows(flat, m.group_size, piece.begin) for place in chosen]
                    grads += rows if own_scale is None else [x.float() * own_scale.to(x.device) for x in rows]
        scale = kwargs.get("grad_scale")
        if is_distributed(scale):
            scale = scale.full_tensor()
        factors = [] if scale is None else [scale]
        if getattr(optimizer, "grad_scale", None) is not None:
            factors.append(1 / optimizer.grad_scale.float())
        self._samples = {}
        for rule, (places, grads) in taken.items():
            grad = torch.cat(grads).float()
            for factor in factors:
                grad = grad * factor.to(grad.device)
            self._samples[rule] = _Sample(places, _Moments.of(places, optimizer.state), grad)

    def _choose(self, p: torch.Tensor, i: int, m: Moment) -> list[_Place]:
        """Groups of a piece, evenly spread over each tensor in it."""
        key = p, i, m.arrangement
        if key not in self._chosen:
            piece, size = m.pieces[i], m.group_size
            chosen = []
            for name, start, numel in self._places[p] if piece.codec.dtype != torch.float32 else ():
                first = -(-(max(start, piece.begin) - piece.begin) // size)
                last = (min(start + numel, piece.end) - piece.begin) // size
                if last > first:
                    count = min(GROUPS, last - first)
                    stride = (last - first) // count
                    if stride > 2:
                        # odd: an even one is often whole rows, which would be the same columns every time
                        stride -= 1 - stride % 2
                    chosen.append(_Place(self.index[name], p, i, first, stride, count))
            self._chosen[key] = chosen
        return self._chosen[key]

    @torch.no_grad()
    def _after(self, optimizer: CoatAdamW, args: tuple, kwargs: dict) -> None:
        for rule, sample in self._samples.items():
            after = _Moments.of(sample.places, optimizer.state)
            numbers = [place.name for place in sample.places for _ in range(place.count)]
            names = sent(numbers, torch.int64, rule.device)
            step = _steps(rule, sample.places, optimizer.state)
            at_once = (AT_ONCE_ON_CPU if rule.device.type == "cpu" else AT_ONCE) // rule.size
            for first in range(0, len(names), at_once):
                last = min(first + at_once, len(names))
                part = slice(first, last)
                stored = (moments.groups(first, last, rule.size) for moments in (sample.stored, after))
                sums = _measured(rule, *stored, sample.grad[part], step[part, None])
                if (found_inf := getattr(optimizer, "found_inf", None)) is not None:
                    # the step was skipped
                    sums = torch.where(found_inf.to(sums.device) == 0, sums, 0)
                if self._sums is None:
                    self._sums = sums.new_zeros(len(self.index), SUMS)
                device = self._sums.device
                self._sums.index_add_(0, names[part].to(device), sums.to(device))
        self._samples = {}


def _steps(rule: _Rule, places: Sequence[_Place], state: Mapping[torch.Tensor, Any]) -> torch.Tensor:
    """Of each group, the number of steps that its tensor has taken, FP64 [groups]."""
    counted = [(state[place.param]["step"], place.count) for place in places]
    if rule.counts_on_device:
        return torch.cat([step.reshape(1).expand(count) for step, count in counted]).double()
    return sent([step for step, count in counted for _ in range(count)], torch.float64, rule.device)


def _measured(
    rule: _Rule, before: _Moments, after: _Moments, grad: torch.Tensor, step: torch.Tensor
) -> torch.Tensor:
    """FP64 [groups, SUMS]. grad: FP32 [groups, group size]; step: FP64 [groups, 1], steps up to this one."""
    beta1, beta2 = rule.betas
    old_m, old = rule.decode(before)
    stored_m, stored_v = rule.decode(after)
    g = -grad if rule.maximize else grad
    fresh_m = torch.lerp(old_m, g, 1 - beta1)
    fresh_v = old * beta2 + g * g * (1 - beta2)
    root = (1 - beta2**step).sqrt().float()

    def update(m, v):
        return m / (v.sqrt() / root + rule.eps)

    exact, stored = update(fresh_m, fresh_v), update(stored_m, stored_v)
    known = exact.isfinite()
    shrinks = (fresh_v < old) & (fresh_v > 0) & (stored_v > 0)
    kept = stored_v.log()
    if rule.is_dithered:
        kept = _mean_log(rule.codecs[1], fresh_v)
        shrinks &= kept.isfinite()
    positive = fresh_v > 0
    codes = after.exp_avg_sq.codes.view_as(stored_v)
    bits = codes.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[codes.element_size()])
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
