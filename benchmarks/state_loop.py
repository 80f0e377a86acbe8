"""What storing the moments costs over many steps, in which each error goes into the next step's moments.

A GPT of megatron-core learns real text with FP32 moments. Blocks of every matrix keep two more kinds of
moments: exact ones, for each beta2, from the first step on, and, once the model is partly trained, those of
every code, which start from the exact ones and get the same gradients.

- stored: relative RMS error of the Adam update by moments that are encoded once;
- applied: of the update of each step, before its moments are stored, over the last half of the steps;
- drift: mean of ln(v / exact v) at the last step, over elements that ever had a gradient; what cannot decay
  is above zero;
- stalled: the share of them whose v is off by more than a third, and their update by more than 15 %.

Which codes: `benchmarks.common.state_codes`.
"""

import math
from collections import defaultdict
from typing import NamedTuple

import torch

from benchmarks.common.harness import Table, benchmark
from benchmarks.common.spawn import one_process
from benchmarks.common.state_codes import cases
from benchmarks.common.training import BETAS, EPS, LARGE, SMALL, kind_of, train_gpt

BETA2 = (0.95, 0.99, 0.999)
# elements of a block that is followed, whole groups of every code, and blocks of a matrix
BLOCK, BLOCKS = 256, 32


class Followed(NamedTuple):
    """Blocks of a matrix."""

    kind: str
    where: torch.Tensor
    """Elements."""
    exact: dict[float, tuple[torch.Tensor, torch.Tensor]]
    """FP32 moments, by beta2."""


def follow(model: torch.nn.Module) -> dict[torch.nn.Parameter, Followed]:
    generator, found = torch.Generator().manual_seed(0), {}
    for name, p in model.named_parameters():
        if p.dim() < 2:
            continue
        blocks = torch.randperm(p.numel() // BLOCK, generator=generator)[:BLOCKS].sort().values
        where = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).view(-1).to(p.device)
        zeros = {b: (torch.zeros(where.numel(), device=p.device),) * 2 for b in BETA2}
        found[p] = Followed(kind_of(name), where, zeros)
    return found


def averaged(
    m: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta2: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return m.lerp(g, 1 - BETAS[0]), v * beta2 + (1 - beta2) * g * g


def update(m: torch.Tensor, v: torch.Tensor, beta2: float, step: int) -> torch.Tensor:
    return m / (1 - BETAS[0] ** step) / ((v / (1 - beta2**step)).sqrt() + EPS)


class Loop:
    """The moments of every code, from the step on when they start."""

    def __init__(self, followed: dict[torch.nn.Parameter, Followed], start: int, steps: int):
        self.followed, self.start, self.end = followed, start, start + steps
        self.cases = {beta2: cases(beta2) for beta2 in BETA2}
        self.held: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}
        self.sums: dict[tuple, torch.Tensor] = defaultdict(lambda: torch.zeros(7, dtype=torch.float64))

    def step(self, step: int) -> None:
        """Counts from 1; gradients lie at the parameters."""
        for p, (kind, where, exact) in self.followed.items():
            g = p.grad.reshape(-1)[where]
            for beta2 in BETA2:
                before = exact[beta2]
                exact[beta2] = m, v = averaged(*before, g, beta2)
                if step <= self.start:
                    continue
                expected = update(m, v, beta2, step)
                for name, case in self.cases[beta2].items():
                    key = (p, beta2, name)
                    held = self.held.get(key) or case.code(*before, step - 1)
                    mine = averaged(*held, g, beta2)
                    self.held[key] = case.code(*mine, step)
                    once = case.code(m, v, step) if step == self.start + 1 else None
                    for of in (kind, "all"):
                        self.count(self.sums[name, beta2, of], step, mine, (m, v), once, expected, beta2)

    def count(self, sums, step, mine, exact, once, expected, beta2) -> None:
        if once is not None:
            sums[0] += (update(*once, beta2, step) - expected).double().square().sum().cpu()
            sums[1] += expected.double().square().sum().cpu()
        if step > (self.start + self.end) / 2:
            sums[2] += (update(*mine, beta2, step) - expected).double().square().sum().cpu()
            sums[3] += expected.double().square().sum().cpu()
        if step == self.end:
            live = exact[1] > 0
            off = (mine[1][live] / exact[1][live]).double().log()
            sums[4:] += torch.stack([off.sum(), (off.abs() > math.log(4 / 3)).sum(), live.sum()]).cpu()

    def report(self, table: Table) -> None:
        for (name, beta2, kind), (stored, size, applied, sizes, drift, stalled, live) in self.sums.items():
            case = self.cases[beta2][name]
            table.add(
                code=name,
                beta2=beta2,
                kind=kind,
                bytes=case.bytes,
                stored=(stored / size).sqrt().item(),
                applied=(applied / sizes).sqrt().item(),
                drift=(drift / live).item(),
                stalled=(stalled / live).item(),
                after=self.start,
                steps=self.end - self.start,
            )


def options(parser) -> None:
    parser.add_argument("--after", type=int, default=300, help="steps before the codes start")
    parser.add_argument("--steps", type=int, default=1000, help="steps of the codes")


@benchmark(needs_gpu=False, options=options)
def state_loop(arguments, table: Table) -> None:
    """Errors of stored moments over many steps on a GPT that learns; the small one without a GPU."""
    after, steps = (3, 4) if arguments.quick else (arguments.after, arguments.steps)
    small = arguments.quick or not torch.cuda.is_available()
    found: list[Loop] = []

    @torch.no_grad()
    def look(model: torch.nn.Module, step: int) -> None:
        if not found:
            found.append(Loop(follow(model), after, steps))
        found[0].step(step)

    with one_process():
        train_gpt(SMALL if small else LARGE, after + steps, look=look)
    found[0].report(table)
