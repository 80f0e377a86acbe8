"""Blocks of every matrix whose moments are followed, exact and by every code, over the steps of a model that
learns.

Blocks of all matrices lie one after the other in one tensor, so that a code is one call for all of them.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks.common.state_codes import Case, cases
from benchmarks.common.training import BETAS, EPS, kind_of

BETA2 = (0.95, 0.99, 0.999)
# elements of a block, whole groups of every code, and blocks of a matrix
BLOCK, BLOCKS = 256, 32
# elements over which errors are summed: no row of an embedding shares one with another
PIECE = 64
# rows of an embedding with gradients in fewer than one of so many steps
RARE = 50
RARE_ROWS = "rare rows"
ALL = "all"


class Moments(NamedTuple):
    """Of the blocks, FP32."""

    m: torch.Tensor
    v: torch.Tensor

    def after(self, g: torch.Tensor, beta2: float) -> "Moments":
        return Moments(self.m.lerp(g, 1 - BETAS[0]), self.v * beta2 + (1 - beta2) * g * g)

    def update(self, beta2: float, step: int) -> torch.Tensor:
        return self.m / (1 - BETAS[0] ** step) / ((self.v / (1 - beta2**step)).sqrt() + EPS)


class Blocks:
    """The exact moments of a model's matrices, which are whole, and the blocks that codes are tried on."""

    def __init__(self, model: torch.nn.Module):
        named = {name: p for name, p in model.named_parameters() if p.dim() > 1}
        self.matrices = list(named.values())
        self.sizes = [p.numel() for p in self.matrices]
        device = self.matrices[0].device
        generator, begin, where, self.kinds = torch.Generator().manual_seed(0), 0, [], []
        for name, p in named.items():
            blocks = torch.randperm(p.numel() // BLOCK, generator=generator)[:BLOCKS].sort().values
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

    def exact(self, beta2: float) -> Moments:
        return Moments(self.m[self.where], self.v[beta2][self.where])

    def largest(self, beta2: float) -> Moments:
        """Of the matrix that each element belongs to: the largest magnitudes of both exact moments."""
        return Moments(*(self._largest(x) for x in (self.m, self.v[beta2])))

    def _largest(self, x: torch.Tensor) -> torch.Tensor:
        norms = torch._foreach_norm(x.split(self.sizes), ord=math.inf)
        return torch.stack(norms).clamp_min(1e-30)[self.tensor]


class Sums:
    """Of one code, over the elements of each piece."""

    def __init__(self, pieces: int, device: torch.device):
        def zeros() -> torch.Tensor:
            return torch.zeros(pieces, dtype=torch.float64, device=device)

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

    def row(self, of: torch.Tensor) -> dict[str, float]:
        """Of the pieces that `of` names."""

        def ratio(part: torch.Tensor, whole: torch.Tensor) -> float:
            return (part[of].sum() / whole[of].sum()).item()

        return {
            "stored": ratio(self.stored, self.stored_size) ** 0.5,
            "applied": ratio(self.applied, self.applied_size) ** 0.5,
            "drift": ratio(self.drift, self.kept),
            "stalled": ratio(self.stalled, self.live),
        }


def in_pieces(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, PIECE).sum(1).double()


def coded(case: Case, moments: Moments, largest: Moments, step: int) -> Moments:
    """Moments as they are read back."""
    if not case.per_tensor:
        return Moments(*case.code(*moments, step))
    m, v = case.code(moments.m / largest.m, moments.v / largest.v, step)
    return Moments(m * largest.m, v * largest.v)


class Loop:
    """The moments by every code, from the exact ones after `start` steps on."""

    def __init__(self, blocks: Blocks, start: int, steps: int):
        self.blocks, self.start, self.end = blocks, start, start + steps
        self.cases = {beta2: cases(beta2) for beta2 in BETA2}
        self.held: dict[tuple[float, str], Moments] = {}
        pieces, device = blocks.pieces, blocks.where.device
        self.sums = {(beta2, name): Sums(pieces, device) for beta2 in BETA2 for name in self.cases[beta2]}
        self.hits = torch.zeros(pieces, dtype=torch.int64, device=device)

    def step(self, step: int, g: torch.Tensor) -> None:
        """Behind `Blocks.step`, which returned `g`; counts from 1."""
        if not self.start <= step <= self.end:
            return
        if step > self.start:
            self.hits += (g != 0).view(-1, PIECE).any(1)
        late = step > (self.start + self.end) / 2
        for beta2 in BETA2:
            exact, largest = self.blocks.exact(beta2), self.blocks.largest(beta2)
            expected = exact.update(beta2, step)
            size = in_pieces(expected.square())
            for name, case in self.cases[beta2].items():
                sums = self.sums[beta2, name]
                mine = exact if step == self.start else self.held[beta2, name].after(g, beta2)
                if late:
                    sums.applied += in_pieces((mine.update(beta2, step) - expected).square())
                    sums.applied_size += size
                if step == self.end:
                    sums.compare(mine, exact)
                self.held[beta2, name] = stored = coded(case, mine, largest, step)
                if step == self.start:
                    sums.stored += in_pieces((stored.update(beta2, step) - expected).square())
                    sums.stored_size += size

    def rows(self) -> Iterator[dict[str, object]]:
        """One for each code, beta2 and kind of matrix."""
        kinds = {kind: torch.tensor([k == kind for k in self.blocks.kinds]) for kind in self.blocks.kinds}
        rare = kinds["embedding"] & (self.hits.cpu() * RARE < self.end - self.start)
        if rare.any():
            kinds[RARE_ROWS] = rare
        kinds[ALL] = torch.ones(self.blocks.pieces, dtype=torch.bool)
        for (beta2, name), sums in self.sums.items():
            for kind, of in kinds.items():
                row = {"after": self.start, "steps": self.end - self.start, "code": name, "beta2": beta2}
                yield row | {"kind": kind, "bytes": self.cases[beta2][name].bytes, **sums.row(of)}
