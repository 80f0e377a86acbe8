"""Blocks of every matrix whose moments are followed, exact and by every code, over the steps of a model that
learns.

Blocks of all matrices, and of all beta2 that have the same codes, lie one after the other in one tensor: a
code is one call a step for all of them.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks.common.state_codes import Case, cases
from benchmarks.common.training import BETAS, EPS, kind_of

BETA2 = (0.95, 0.99, 0.999)
# elements of a block, whole groups of every code, and blocks of a matrix and of all
BLOCK, BLOCKS, BLOCKS_IN_ALL = 256, 32, 2048
# elements over which errors are summed: no row of an embedding shares one with another
PIECE = 64
# rows of an embedding with gradients in fewer than one step of this number
RARE = 50
RARE_ROWS = "rare rows"
ALL = "all"


class Moments(NamedTuple):
    """Moments of the blocks by some beta2, FP32 [betas, elements]."""

    m: torch.Tensor
    v: torch.Tensor


class Decay:
    """What Adam does to moments by each of some beta2."""

    def __init__(self, betas: tuple[float, ...], device: torch.device):
        self.exact = torch.tensor(betas, dtype=torch.float64, device=device)[:, None]
        self.beta2, self.rest = self.exact.float(), (1 - self.exact).float()

    def after(self, moments: Moments, g: torch.Tensor) -> Moments:
        """The moments after a step; g FP32 [elements]."""
        return Moments(moments.m.lerp(g, 1 - BETAS[0]), moments.v * self.beta2 + self.rest * (g * g))

    def update(self, moments: Moments, step: int) -> torch.Tensor:
        correction = (1 - self.exact**step).float()
        return moments.m / (1 - BETAS[0] ** step) / ((moments.v / correction).sqrt() + EPS)


class Blocks:
    """The exact moments of a model's matrices, which are whole, and the blocks that codes are tried on."""

    def __init__(self, model: torch.nn.Module):
        named = {name: p for name, p in model.named_parameters() if p.dim() > 1}
        self.matrices = list(named.values())
        self.sizes = [p.numel() for p in self.matrices]
        device = self.matrices[0].device
        count = min(BLOCKS, BLOCKS_IN_ALL // len(named))
        generator, begin, where, self.kinds = torch.Generator().manual_seed(0), 0, [], []
        for name, p in named.items():
            blocks = torch.randperm(p.numel() // BLOCK, generator=generator)[:count].sort().values
            where.append((begin + blocks[:, None] * BLOCK + torch.arange(BLOCK)).view(-1))
            self.kinds += [kind_of(name)] * (len(where[-1]) // PIECE)
            begin += p.numel()
        counts = torch.tensor([len(one) for one in where])
        self.where = torch.cat(where).to(device)
        self.tensor = torch.arange(len(counts)).repeat_interleave(counts).to(device)
        self.m = torch.zeros(begin, device=device)
        self.v = {beta2: torch.zeros(begin, device=device) for beta2 in BETA2}

    @property
    def pieces(self) -> int:
        return len(self.kinds)

    def step(self) -> torch.Tensor:
        """Takes the gradients that lie at the parameters. Returns those of the blocks."""
        g = torch.cat([p.grad.view(-1) for p in self.matrices])
        self.m.lerp_(g, 1 - BETAS[0])
        for beta2, v in self.v.items():
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        return g[self.where]

    def exact(self, betas: tuple[float, ...]) -> Moments:
        m = self.m[self.where]
        return Moments(torch.stack([m] * len(betas)), torch.stack([self.v[b][self.where] for b in betas]))

    def largest(self, betas: tuple[float, ...]) -> Moments:
        """The largest magnitudes of both exact moments in the matrix that each element belongs to."""
        m = self._largest(self.m)
        return Moments(torch.stack([m] * len(betas)), torch.stack([self._largest(self.v[b]) for b in betas]))

    def _largest(self, x: torch.Tensor) -> torch.Tensor:
        norms = torch._foreach_norm(x.split(self.sizes), ord=math.inf)
        return torch.stack(norms).clamp_min(1e-30)[self.tensor]


class Sums:
    """Sums of one code, over the elements of each piece, FP64 [betas, pieces]."""

    def __init__(self, betas: int, pieces: int, device: torch.device):
        def zeros() -> torch.Tensor:
            return torch.zeros(betas, pieces, dtype=torch.float64, device=device)

        self.stored, self.stored_size, self.applied, self.applied_size = (zeros() for _ in range(4))
        self.drift, self.kept, self.stalled, self.live = (zeros() for _ in range(4))

    def compare(self, mine: Moments, exact: Moments) -> None:
        """Second moments at the last step, where an exact one is above zero. What is flushed has no drift."""
        off = (mine.v / exact.v).log()
        live, kept = exact.v > 0, (exact.v > 0) & (mine.v > 0)
        self.drift += in_pieces(torch.where(kept, off, 0))
        self.kept += in_pieces(kept)
        self.stalled += in_pieces(live & (off.abs() > math.log(4 / 3)))
        self.live += in_pieces(live)

    def row(self, i: int, of: torch.Tensor) -> dict[str, float]:
        """The row of the beta2 number `i` and the pieces that `of` names."""

        def ratio(part: torch.Tensor, whole: torch.Tensor) -> float:
            return (part[i, of].sum() / whole[i, of].sum()).item()

        return {
            "stored": ratio(self.stored, self.stored_size) ** 0.5,
            "applied": ratio(self.applied, self.applied_size) ** 0.5,
            "drift": ratio(self.drift, self.kept),
            "stalled": ratio(self.stalled, self.live),
        }


def in_pieces(x: torch.Tensor) -> torch.Tensor:
    return x.view(len(x), -1, PIECE).sum(2).double()


def coded(case: Case, moments: Moments, largest: Moments, step: int) -> Moments:
    """Moments as they are read back."""
    if case.per_tensor:
        moments = Moments(moments.m / largest.m, moments.v / largest.v)
    found = case.code(moments.m.view(-1), moments.v.view(-1), step)
    m, v = (x.view_as(moments.m) for x in found)
    return Moments(m * largest.m, v * largest.v) if case.per_tensor else Moments(m, v)


class Codes:
    """The moments by every code, for those beta2 that have the same codes."""

    def __init__(self, betas: tuple[float, ...], blocks: Blocks, start: int, end: int):
        self.betas, self.blocks, self.start, self.end = betas, blocks, start, end
        device = blocks.where.device
        self.decay, self.cases = Decay(betas, device), cases(betas[0])
        self.held: dict[str, Moments] = {}
        self.sums = {name: Sums(len(betas), blocks.pieces, device) for name in self.cases}

    def step(self, step: int, g: torch.Tensor) -> None:
        exact, largest = self.blocks.exact(self.betas), self.blocks.largest(self.betas)
        expected = self.decay.update(exact, step)
        size = in_pieces(expected.square())

        def error(moments: Moments) -> torch.Tensor:
            return in_pieces((self.decay.update(moments, step) - expected).square())

        for name, case in self.cases.items():
            sums = self.sums[name]
            mine = exact if step == self.start else self.decay.after(self.held[name], g)
            if step > (self.start + self.end) / 2:
                sums.applied += error(mine)
                sums.applied_size += size
            if step == self.end:
                sums.compare(mine, exact)
            self.held[name] = coded(case, mine, largest, step)
            if step == self.start:
                sums.stored += error(self.held[name])
                sums.stored_size += size


class Loop:
    """The moments by every code and beta2, from the exact ones after `start` steps on."""

    def __init__(self, blocks: Blocks, start: int, steps: int):
        self.blocks, self.start, self.end = blocks, start, start + steps
        # some codes dither near 1 alone, and there are more of them
        groups = itertools.groupby(BETA2, key=lambda beta2: tuple(cases(beta2)))
        self.codes = [Codes(tuple(betas), blocks, start, self.end) for _, betas in groups]
        self.hits = torch.zeros(blocks.pieces, dtype=torch.int64, device=blocks.where.device)

    def step(self, step: int, g: torch.Tensor) -> None:
        """Call it after `Blocks.step`, which returned `g`; `step` counts from 1."""
        if not self.start <= step <= self.end:
            return
        if step > self.start:
            self.hits += (g != 0).view(-1, PIECE).any(1)
        for codes in self.codes:
            codes.step(step, g)

    def rows(self) -> Iterator[dict[str, object]]:
        """One for each code, beta2 and kind of matrix."""
        kinds = {kind: torch.tensor([k == kind for k in self.blocks.kinds]) for kind in self.blocks.kinds}
        rare = kinds["embedding"] & (self.hits.cpu() * RARE < self.end - self.start)
        if rare.any():
            kinds[RARE_ROWS] = rare
        kinds[ALL] = torch.ones(self.blocks.pieces, dtype=torch.bool)
        for codes in self.codes:
            for (i, beta2), (name, sums) in itertools.product(enumerate(codes.betas), codes.sums.items()):
                for kind, of in kinds.items():
                    row = {"after": self.start, "steps": self.end - self.start, "code": name, "beta2": beta2}
                    yield row | {"kind": kind, "bytes": codes.cases[name].bytes, **sums.row(i, of)}
