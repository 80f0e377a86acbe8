"""What storing does to the moments of `CoatAdamW`, measured in a step that is watched.

Before the step a sample of groups is copied, with the gradients of its elements, and after the step the same
groups are. `coat_kernels.adamw.storing` says what is summed over them. Of a tensor this gives

- update error: sqrt(sum (u' - u)^2 / sum u^2), of the update u of fresh moments and u' of stored ones;
- stalled: 1 - sum ln(v0 / v') / sum ln(v0 / v), within 0 and 1, over the elements that were to shrink. It is
  1 where rounding undoes every decay, and about 0 where rounding is right on average, even if most codes stay
  where they are in a single step;
- underflowed: the share of elements with v > 0 that are stored as zero, or as the lowest code at more than
  twice their value.
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
from coat_kernels.adamw import AdamWOptions
from coat_kernels.adamw.storing import SUMS, Moments, storing_sums
from coat_kernels.codecs import Codec, Storage

# groups of a tensor that are looked at
GROUPS = 16

Places = Mapping[torch.Tensor, Sequence[tuple[str, int, int]]]
"""What each tensor of an optimizer holds, as (name, first element, number of elements)."""


class _Place(NamedTuple):
    """Groups of one tensor, within a piece of a parameter's moments: `count` of them, `stride` apart."""

    name: int
    param: torch.Tensor
    piece: int
    first: int
    stride: int
    count: int

    def rows(self, flat: torch.Tensor, width: int, begin: int = 0) -> torch.Tensor:
        """A view [count, width] of the rows that a flat, contiguous tensor has from element `begin` on."""
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


def _copied(places: Sequence[_Place], state: Mapping[torch.Tensor, Any]) -> Moments:
    """What is stored now, copied in one operation for all places."""
    fields = zip(*(place.stored(state[place.param]) for place in places), strict=True)
    copied = [torch.cat(views).view(-1) for views in fields]
    return Moments(Storage(*copied[:3]), Storage(*copied[3:]))


class _Rule(NamedTuple):
    """What decides how groups are stored and updated. Those of one rule are measured together."""

    step: AdamWOptions
    device: torch.device

    @classmethod
    def of(
        cls, group: Mapping[str, Any], first: Codec, second: Codec, group_size: int, device: torch.device
    ) -> "_Rule":
        beta1, beta2 = group["betas"]
        step = AdamWOptions(
            exp_avg_codec=first,
            exp_avg_sq_codec=second,
            group_size=group_size,
            lr=0.0,
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=0.0,
            maximize=group["maximize"],
            dither=rounds_stochastically(group, second),
        )
        return cls(step, device)


class _Sample(NamedTuple):
    """Groups of one rule before the step."""

    places: list[_Place]
    stored: Moments
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
        known_rules: dict[tuple, tuple[list[_Place], list[torch.Tensor]]] = {}
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
                    codecs = piece.codec, v.pieces[i].codec
                    # asked for by identity first: the hash of a rule is one of many fields
                    key = id(group), *map(id, codecs), m.group_size, m.device
                    if key not in known_rules:
                        rule = _Rule.of(group, *codecs, m.group_size, m.device)
                        known_rules[key] = taken.setdefault(rule, ([], []))
                    places, grads = known_rules[key]
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
            self._samples[rule] = _Sample(places, _copied(places, optimizer.state), grad.to(rule.device))

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
            after = _copied(sample.places, optimizer.state)
            step = _steps(rule, sample.places, optimizer.state)
            sums = storing_sums(sample.stored, after, sample.grad, step, rule.step)
            if (found_inf := getattr(optimizer, "found_inf", None)) is not None:
                # the step was skipped
                sums = torch.where(found_inf.to(sums.device) == 0, sums, 0)
            if self._sums is None:
                self._sums = sums.new_zeros(len(self.index), SUMS)
            device = self._sums.device
            numbers = [place.name for place in sample.places for _ in range(place.count)]
            self._sums.index_add_(0, sent(numbers, torch.int64, device), sums.to(device))


def _steps(rule: _Rule, places: Sequence[_Place], state: Mapping[torch.Tensor, Any]) -> torch.Tensor:
    """For each group the number of steps that its tensor has taken, FP64 [groups]."""
    steps = [state[place.param]["step"] for place in places]
    # on the device already where a group is capturable, or a gradient scaler may skip the step
    if all(step.is_cpu for step in steps):
        known = sent(torch.stack(steps).tolist(), torch.float64, rule.device)
    else:
        known = torch.stack([step.to(rule.device) for step in steps]).double()
    return torch.cat([x.expand(place.count) for x, place in zip(known, places, strict=True)])


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
