"""What storing the moments costs over many steps, in which each error goes into the next step's moments.

A GPT of megatron-core learns real text with FP32 moments. Blocks of every matrix keep two more kinds of
moments: exact ones, for each beta2, from the first step on, and, once the model is partly trained, those of
every code, which start from the exact ones and get the same gradients.

- stored: relative RMS error of the Adam update by moments that are encoded once;
- applied: of the update of each step, before its moments are stored, over the last half of the steps;
- drift: mean of ln(v / exact v) at the last step, over elements that ever had a gradient; what cannot decay
  is above zero;
- stalled: the share of them whose v is off by more than a third, and their update by more than 15 %.

Codes of others are their formulas, in FP32: bitsandbytes' and torchao's 8 bits (dynamic map, blocks of 256,
to nearest) and FlashOptim's (m by softsign, the root of v linearly, groups of 32).
"""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.common.harness import Table, benchmark
from benchmarks.common.spawn import one_process
from benchmarks.common.training import BETAS, EPS, LARGE, SMALL, kind_of, train_gpt
from coat_kernels.adamw import dither_reference
from coat_kernels.codecs import Codec, Stored, get_codec
from coat_kernels.codecs.codec import encode_reference

BETA2 = (0.95, 0.99, 0.999)
# elements of a block that is followed, whole groups of every code, and blocks of a matrix
BLOCK, BLOCKS = 256, 32

# FP32 moments, and the step of which they are, as they are read back
Code = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


class Case(NamedTuple):
    bytes: float
    """A parameter, with metadata."""
    code: Code
    group_size: int


def ours(m_codec: Codec, v_codec: Codec, group_size: int, dither: bool) -> Code:
    """Two codecs, as `adamw_reference` uses them."""

    def code(m, v, step):
        shift = dither_reference(step, v.numel(), group_size, v.device) if dither else None
        second = Stored(v_codec, encode_reference(v_codec, v, group_size, dither=shift))
        turn = None
        if m_codec.relative:
            m, turn = m / second.roots(group_size), dither_reference(step, 1, 1, m.device).expand_as(m)
        first = encode_reference(m_codec, m, group_size, dither=turn)
        return m_codec.decode(first, group_size, second), v_codec.decode(second.storage, group_size)

    return code


def power_of(exponent: float, levels: int, group_size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Integers that are powers of magnitudes."""

    def code(x):
        rows = x.view(-1, group_size)
        largest = rows.abs().amax(1, keepdim=True).clamp_min(1e-30)
        y = ((rows.abs() / largest) ** exponent * levels).round() / levels
        return (y ** (1 / exponent) * largest).copysign(rows).view(-1)

    return code


def softsign(x: torch.Tensor) -> torch.Tensor:
    rows = x.view(-1, 32)
    scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-30)
    u = rows / scale
    y = (2 * u / (1 + u.abs()) * 127).round() / 127
    return (y / (2 - y.abs()) * scale).view(-1)


def dynamic_map(signed: bool) -> torch.Tensor:
    """The 256 values of bitsandbytes' `create_dynamic_map`, ascending: seven decades, each with twice as many
    values as the one below."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i + (not signed)) + 1)
        decade = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*decade.tolist(), *((-decade).tolist() if signed else ())]
    return torch.tensor(sorted(values))


def nearest_of(values: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    edges = (values[1:] + values[:-1]) / 2

    def code(x):
        rows = x.view(-1, 256)
        scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-30)
        return (values.to(x.device)[torch.bucketize(rows / scale, edges.to(x.device))] * scale).view(-1)

    return code


def apart(m_code: Callable, v_code: Callable) -> Code:
    return lambda m, v, _: (m_code(m), v_code(v))


def cases(beta2: float) -> dict[str, Case]:
    dither = 1 - beta2 < 1 / 64
    log8, root = get_codec("log8"), power_of(0.5, 127, 128)
    of_log8 = ours(get_codec("fp32"), log8, 128, dither)
    found = {
        "int8 roots, log8": Case(2 + 9 / 128, lambda m, v, step: (root(m), of_log8(m, v, step)[1]), 128),
        "bitsandbytes 8-bit": Case(
            2 + 8 / 256, apart(nearest_of(dynamic_map(True)), nearest_of(dynamic_map(False))), 256
        ),
        "FlashOptim": Case(
            2 + 4 / 32, apart(softsign, lambda v: power_of(1, 255, 32)(v.sqrt()).square()), 32
        ),
    }
    pairs = [("ratio8", "log8", size) for size in (64, 128, 256)]
    pairs += [("fp8_expanded", "fp8_expanded", 128), ("fp8_expanded", "log8", 128), ("bf16", "bf16", 128)]
    for m_name, v_name, size in pairs:
        m, v = get_codec(m_name), get_codec(v_name)
        nbytes = sum(codec.zeros(2**20, size, "meta").nbytes for codec in (m, v)) / 2**20
        name = f"{m_name}, {v_name}" + (f", groups of {size}" if size != 128 else "")
        found[name] = Case(nbytes, ours(m, v, size, dither and v.fine), size)
        if name == "ratio8, log8" and dither:
            found["ratio8, log8 to nearest"] = Case(nbytes, ours(m, v, size, False), size)
    return found


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
