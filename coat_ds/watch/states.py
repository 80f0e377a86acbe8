"""Errors of stored moments of `CoatAdamW`, measured in a step that is watched.

A sample of groups is copied before the step, with the gradients of its elements, and again after the step.
`coat_kernels.adamw.storing` defines the sums over these groups. They give for each tensor:

- update error: sqrt(sum (u' - u)^2 / sum u^2). u is the update by exact moments, u' by stored moments.
- stalled: 1 - sum ln(v0 / v') / sum ln(v0 / v), within 0 and 1, over the elements that should shrink. It is 1
  if rounding undoes every decay. It is about 0 if rounding is right on average, even if a single step leaves
  most codes unchanged.
- underflowed: the share of elements with v > 0 that are stored as zero, or at more than twice their value.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from coat_ds.optim.moment import Moment
from coat_ds.optim.narrow_grad import narrow_and_scale
from coat_ds.optim.optimizer import CoatAdamW
from coat_ds.optim.options import rounds_stochastically
from coat_ds.optim.shards import is_distributed, local, shard_of
from coat_ds.watch.codes import sent
from coat_kernels.adamw import AdamWOptions
from coat_kernels.adamw.storing import SUMS, Moments, storing_sums
from coat_kernels.codecs import GROUP_SIZE, Codec, Storage

# number of groups in the sample of a tensor
GROUPS = 16


class _Groups(NamedTuple):
    """A sample of `count` groups of one parameter, `stride` apart, in a piece of a tensor's moments."""

    row: int
    tensor: torch.Tensor
    piece: int
    first: int
    stride: int
    count: int

    def of(self, flat: torch.Tensor, width: int, begin: int = 0) -> torch.Tensor:
        """A view [count, width] of the groups that a flat, contiguous tensor has from element `begin` on."""
        offset = flat.storage_offset() + begin + self.first * width
        return flat.as_strided((self.count, width), (self.stride * width, 1), offset)

    def stored(self, state: Mapping[str, Any]) -> list[torch.Tensor]:
        """Views of what is stored of both moments: codes, scales and exponents of the one, then the other."""
        views = []
        for moment in (local(state["exp_avg"]), local(state["exp_avg_sq"])):
            codes, *statistics = moment.pieces[self.piece].storage
            views.append(self.of(codes, GROUP_SIZE))
            views += [self.of(x, 1) if x.numel() else x for x in statistics]
        return views


class _Sample(NamedTuple):
    """Groups that are stored and updated by the same options, before the step."""

    options: AdamWOptions
    places: list[_Groups]
    stored: Moments
    grad: torch.Tensor
    """FP32 [groups, GROUP_SIZE], as the step takes it."""


class StateSampler:
    """Measures the steps of an optimizer between `open` and `close`.

    row_of: the row of each parameter of the model in the sums, the same on all ranks.
    rows: how many there are on all ranks.
    """

    def __init__(self, optimizer: CoatAdamW, row_of: Mapping[torch.Tensor, int], rows: int):
        self.optimizer, self._row_of, self._rows = optimizer, row_of, rows
        self._chosen: dict[tuple, list[_Groups]] = {}
        self._hooks: list = []
        self._samples: list[_Sample] = []
        self._sums: torch.Tensor | None = None

    def open(self) -> None:
        """From now on measures each step."""
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
        ]

    def close(self) -> torch.Tensor | None:
        """Ends measuring. Sums by parameter, FP64 [rows, SUMS] on the optimizer's device; None without a
        step."""
        for hook in self._hooks:
            hook.remove()
        sums, self._sums, self._hooks, self._samples = self._sums, None, [], []
        return sums

    @torch.no_grad()
    def _before(self, optimizer: CoatAdamW, args: tuple, kwargs: dict) -> None:
        # by options and device: places and the gradients of their elements
        taken: dict[tuple[AdamWOptions, torch.device], tuple[list[_Groups], list[torch.Tensor]]] = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                grad = p.grad if p.grad is not None else getattr(p, "decoupled_grad", None)
                state = optimizer.state.get(p, {})
                m, v = (local(state.get(name)) for name in ("exp_avg", "exp_avg_sq"))
                if grad is None or not (isinstance(m, Moment) and isinstance(v, Moment)):
                    continue
                flat, own_scale = narrow_and_scale(shard_of(grad, p))
                flat = flat.reshape(-1).contiguous()
                for i, piece in enumerate(m.pieces):
                    if chosen := self._choose(p, i, m):
                        options = _options(group, piece.codec, v.pieces[i].codec)
                        places, grads = taken.setdefault((options, m.device), ([], []))
                        places += chosen
                        rows = [place.of(flat, GROUP_SIZE, piece.begin) for place in chosen]
                        if own_scale is not None:
                            rows = [x.float() * own_scale.to(x.device) for x in rows]
                        grads += rows
        scale = kwargs.get("grad_scale")
        if is_distributed(scale):
            scale = scale.full_tensor()
        factors = [] if scale is None else [scale]
        if getattr(optimizer, "grad_scale", None) is not None:
            factors.append(1 / optimizer.grad_scale.float())
        self._samples = []
        for (options, device), (places, grads) in taken.items():
            grad = torch.cat(grads).float()
            for factor in factors:
                grad = grad * factor.to(grad.device)
            stored = _copied(places, optimizer.state)
            self._samples.append(_Sample(options, places, stored, grad.to(device)))

    def _choose(self, p: torch.Tensor, i: int, m: Moment) -> list[_Groups]:
        """Groups of a piece, evenly spread over each parameter in it."""
        key = p, i, m.piece_layout
        if key not in self._chosen:
            piece, size = m.pieces[i], GROUP_SIZE
            chosen = []
            for param, start, numel in self.optimizer.layouts.parts_of(p):
                first = -(-(max(start, piece.begin) - piece.begin) // size)
                last = (min(start + numel, piece.end) - piece.begin) // size
                is_compressed = piece.codec.dtype != torch.float32
                if is_compressed and param in self._row_of and last > first:
                    count = min(GROUPS, last - first)
                    stride = (last - first) // count
                    if stride > 2:
                        # odd: an even one is often whole rows, which would be the same columns every time
                        stride -= 1 - stride % 2
                    chosen.append(_Groups(self._row_of[param], p, i, first, stride, count))
            self._chosen[key] = chosen
        return self._chosen[key]

    @torch.no_grad()
    def _after(self, optimizer: CoatAdamW, args: tuple, kwargs: dict) -> None:
        for options, places, stored, grad in self._samples:
            after, step = _copied(places, optimizer.state), _steps(places, optimizer.state, grad.device)
            sums = storing_sums(stored, after, grad, step, options)
            if (found_inf := getattr(optimizer, "found_inf", None)) is not None:
                # the step was skipped
                sums = torch.where(found_inf.to(sums.device) == 0, sums, 0)
            if self._sums is None:
                self._sums = sums.new_zeros(self._rows, SUMS)
            rows = [place.row for place in places for _ in range(place.count)]
            self._sums.index_add_(0, sent(rows, torch.int64, self._sums.device), sums.to(self._sums.device))


def _options(group: Mapping[str, Any], first: Codec, second: Codec) -> AdamWOptions:
    """The options by which groups are stored and updated. Groups with equal options are measured together."""
    beta1, beta2 = group["betas"]
    return AdamWOptions(
        exp_avg_codec=first,
        exp_avg_sq_codec=second,
        lr=0.0,
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=0.0,
        maximize=group["maximize"],
        dither=rounds_stochastically(group, second),
    )


def _copied(places: Sequence[_Groups], state: Mapping[torch.Tensor, Any]) -> Moments:
    """Copies of the stored groups, made by one operation for all samples."""
    fields = zip(*(place.stored(state[place.tensor]) for place in places), strict=True)
    copied = [torch.cat(views).view(-1) for views in fields]
    return Moments(Storage(*copied[:3]), Storage(*copied[3:]))


def _steps(
    places: Sequence[_Groups], state: Mapping[torch.Tensor, Any], device: torch.device
) -> torch.Tensor:
    """For each group the number of steps that its tensor has taken, FP64 [groups]."""
    steps = [state[place.tensor]["step"] for place in places]
    # on the device already where a group is capturable, or a gradient scaler may skip the step
    if all(step.is_cpu for step in steps):
        known = sent(torch.stack(steps).tolist(), torch.float64, device)
    else:
        known = torch.stack([step.to(device) for step in steps]).double()
    return torch.cat([x.expand(place.count) for x, place in zip(known, places, strict=True)])


def figures(sums: Sequence[float]) -> dict[str, float]:
    """The figures in the SUMS numbers of a tensor, or of several; without those that nothing was counted
    for."""
    error, size, due, done, lost, positive = sums
    found = {}
    if size > 0:
        found["update_error"] = (error / size) ** 0.5
    if due > 0:
        found["stalled"] = min(max(1 - done / due, 0.0), 1.0)
    if positive > 0:
        found["underflowed"] = lost / positive
    return found
