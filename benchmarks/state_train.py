"""Losses with each code of moments, and with each way to keep weights between steps.

Quickstart's GPT learns real text. Layers compute in FP32 with weights that are rounded to BF16, so that what
is kept is all that differs. A seed decides weights, batches and what is held out.

Phases:

- quickstart: its learning rates and steps, 2e-3 down to a tenth;
- long: the same, more steps;
- tail: goes on from `long` with FP32 moments and exact masters, of the same seed, at learning rates that end
  at a thousandth of the quickstart's, where an update is far less than a step of a BF16 weight;
- plateau: goes on from `long` in the same way, for as long as second moments with beta2 0.999 remember, at
  learning rates so low that a difference grows little.

Ways to keep weights, all with the same BF16 weights for forward and backward:

- exact: FP32;
- 24 bits: BF16 and 8 more bits, to nearest;
- stochastic, nearest: BF16 alone, rounded so;
- to exp_avg: what is rounded off goes into the first moment (ECO, arXiv 2601.22101), so that later steps
  put it back.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.nn.utils import parameters_to_vector

from benchmarks.common.harness import Table, benchmark
from benchmarks.common.pairs import paired, show
from benchmarks.common.spawn import one_process
from benchmarks.common.state_codes import Code, cases
from benchmarks.common.training import BETAS, EPS, SMALL, WEIGHT_DECAY, gpt, loss_of
from coat_kernels.adamw.reference import round_stochastically
from coat_launch.data import Corpus, load_corpus
from coat_launch.split import Batch

BATCH, VALIDATIONS = 4, 32


class Phase(NamedTuple):
    steps: int
    lr: float
    lowest: float
    """Learning rate at the end of a cosine."""
    after: str | None = None
    """The phase, with FP32 moments and exact masters, that it goes on from; without one it warms up."""

    def lr_of(self, step: int) -> float:
        """Of a step, counted from 1."""
        warmup = 0 if self.after else self.steps // 10
        if step <= warmup:
            return self.lr * step / warmup
        turn = math.cos(math.pi * (step - warmup) / (self.steps - warmup))
        return self.lowest + (self.lr - self.lowest) * (1 + turn) / 2


PHASES = {
    "quickstart": Phase(120, 2e-3, 2e-4),
    "long": Phase(300, 2e-3, 2e-4),
    "tail": Phase(200, 2e-4, 2e-6, after="long"),
    "plateau": Phase(1500, 2e-4, 2e-5, after="long"),
}
QUICK = {name: phase._replace(steps=2) for name, phase in PHASES.items()}
# the last one takes three times as long as these
SHORT_PHASES = list(PHASES)[:3]


class Masters(NamedTuple):
    bytes: float
    """A parameter, beside the BF16 weight."""
    kept: Callable[[torch.Tensor, int], torch.Tensor]
    """FP32 weights and the step -> what is left of them, FP32."""
    feedback: bool = False
    """Whether the rest goes into the first moment."""


def nearest(p: torch.Tensor, step: int = 0) -> torch.Tensor:
    return p.bfloat16().float()


def stochastic(p: torch.Tensor, step: int) -> torch.Tensor:
    # places stand in for gradients, so that equal weights have noise of their own
    places = torch.arange(p.numel(), dtype=torch.float32, device=p.device).view_as(p)
    return round_stochastically(p, places, 0, step).float()


def in_24_bits(p: torch.Tensor, step: int = 0) -> torch.Tensor:
    return ((p.view(torch.int32) + 0x80) & ~0xFF).view(torch.float32)


MASTERS = {
    "exact": Masters(2, lambda p, step: p),
    "24 bits": Masters(1, in_24_bits),
    "stochastic": Masters(0, stochastic),
    "stochastic, to exp_avg": Masters(0, stochastic, feedback=True),
    "nearest": Masters(0, nearest),
    "nearest, to exp_avg": Masters(0, nearest, feedback=True),
}


class Arm(NamedTuple):
    moments: str
    """FP32, or a code of `benchmarks.common.state_codes`."""
    masters: str


FP32, FP32_BYTES = "fp32, fp32", 8
BASELINE = Arm(FP32, "exact")
ARMS = {
    "baseline": [BASELINE],
    "moments": [Arm(moments, "exact") for moments in ("ratio8, log8", "fp8_expanded, fp8_expanded")],
    "four bits": [Arm(moments, "exact") for moments in ("ratio4, log8", "ratio4, log6")],
    "masters": [
        *(Arm(FP32, masters) for masters in list(MASTERS)[1:]),
        Arm("ratio8, log8", "stochastic"),
    ],
}


@dataclass
class State:
    """What is kept of all weights, one after the other, matrices first."""

    weights: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: int = 0


def update(
    state: State,
    g: torch.Tensor,
    lr: float,
    *,
    beta2: float,
    masters: Masters = MASTERS["exact"],
    code: Code | None = None,
    coded: int,
) -> None:
    """A step of AdamW by gradients `g`; what it keeps are new tensors.

    code: of the moments of the first `coded` elements, FP32 without one. They alone decay.
    """
    beta1 = BETAS[0]
    state.step += 1
    m = state.exp_avg.lerp(g, 1 - beta1)
    v = state.exp_avg_sq * beta2 + (1 - beta2) * g * g
    scale = lr / (1 - beta1**state.step) / ((v / (1 - beta2**state.step)).sqrt() + EPS)
    p = state.weights - scale * m
    p[:coded] -= lr * WEIGHT_DECAY * state.weights[:coded]
    state.weights = masters.kept(p, state.step)
    if masters.feedback:
        m += (1 - 1 / beta1) * (p - state.weights) / scale
    if code is not None:
        m[:coded], v[:coded] = code(m[:coded], v[:coded], state.step)
    state.exp_avg, state.exp_avg_sq = m, v


class Learner:
    """A GPT whose weights come as one vector, matrices first."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.parameters = sorted(model.parameters(), key=lambda p: p.dim() < 2)
        # their moments are coded and they decay; no group holds elements of two, by their sizes
        self.matrices = sum(p.numel() for p in self.parameters if p.dim() > 1)

    @torch.no_grad()
    def show(self, weights: torch.Tensor) -> None:
        """Gives it FP32 weights, rounded to BF16."""
        parts = nearest(weights).split([p.numel() for p in self.parameters])
        for p, part in zip(self.parameters, parts, strict=True):
            p.copy_(part.view_as(p))

    def gradients(self, batch: Batch) -> torch.Tensor:
        """FP32, clipped."""
        loss_of(self.model, batch).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        g = torch.cat([p.grad.view(-1) for p in self.parameters]).float()
        self.model.zero_grad()
        return g


class Trial:
    """A seed's model and text, and how its phases end."""

    def __init__(self, seed: int, phases: dict[str, Phase], beta2: float):
        self.phases, self.beta2, self.cases = phases, beta2, cases(beta2)
        self.corpus: Corpus = load_corpus(seq_length=SMALL.seq_length, seed=seed)
        self.learner = Learner(gpt(SMALL, self.corpus.vocab_size, seed))
        self.first = nearest(parameters_to_vector(self.learner.parameters).detach())
        self.baselines: dict[str, State] = {}

    def end(self, phase: str, arm: Arm) -> State:
        """How an arm ends a phase."""
        if arm == BASELINE and phase in self.baselines:
            return self.baselines[phase]
        state = self.start(phase)
        self.train(self.phases[phase], state, arm, self.learner)
        if arm == BASELINE:
            self.baselines[phase] = state
        return state

    def start(self, phase: str) -> State:
        """How every arm begins a phase."""
        before = self.phases[phase].after
        if before is None:
            return State(self.first, *self.first.new_zeros(2, self.first.numel()))
        return replace(self.end(before, BASELINE))

    def train(self, phase: Phase, state: State, arm: Arm, learner: Learner) -> None:
        code = None if arm.moments == FP32 else self.cases[arm.moments].code
        kept = {"masters": MASTERS[arm.masters], "code": code, "coded": learner.matrices}
        for i in range(1, phase.steps + 1):
            learner.show(state.weights)
            batch = range(state.step * BATCH, (state.step + 1) * BATCH)
            g = learner.gradients(self.corpus.train.batch(batch))
            update(state, g, phase.lr_of(i), beta2=self.beta2, **kept)

    def moment_bytes(self, arm: Arm) -> float:
        """A parameter."""
        return FP32_BYTES if arm.moments == FP32 else self.cases[arm.moments].bytes

    @torch.no_grad()
    def val_loss(self, state: State, learner: Learner) -> float:
        learner.show(state.weights)
        batches = (range(i * BATCH, (i + 1) * BATCH) for i in range(VALIDATIONS))
        losses = [loss_of(learner.model, self.corpus.validation.batch(batch)) for batch in batches]
        return torch.stack(losses).mean().item()


def summary(rows: list[dict]) -> list[dict]:
    """Each arm beside FP32 moments and exact masters of the same seeds."""
    by, baseline = (*Arm._fields, "bytes"), (*BASELINE, FP32_BYTES + MASTERS[BASELINE.masters].bytes)
    return paired(rows, ("phase", "steps", "beta2"), by, baseline)


def options(parser) -> None:
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 1 on (default %(default)s)")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=SHORT_PHASES)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="what differs")
    parser.add_argument("--beta2", type=float, default=BETAS[1], help="(default %(default)s)")


@benchmark(needs_gpu=False, options=options)
def state_train(arguments, table: Table) -> None:
    """Losses of a small GPT with each code of moments and each way to keep weights, over seeds.

    `to_baseline`: validation loss less that of FP32 moments and exact masters of the same seed, mean over
    seeds; `error`: its standard error; `bytes`: moments and masters, a parameter. The file has single runs.
    """
    phases, seeds = PHASES, arguments.seeds
    if arguments.quick:
        phases, seeds = QUICK, 1
    with one_process():
        for seed in range(1, seeds + 1):
            trial = Trial(seed, phases, arguments.beta2)
            for phase, kind in itertools.product(arguments.phases, arguments.arms):
                for arm in ARMS[kind]:
                    loss = trial.val_loss(trial.end(phase, arm), trial.learner)
                    table.add(
                        phase=phase,
                        **arm._asdict(),
                        bytes=MASTERS[arm.masters].bytes + trial.moment_bytes(arm),
                        beta2=arguments.beta2,
                        seed=seed,
                        steps=phases[phase].steps,
                        val_loss=loss,
                    )
    show(summary(table.rows))
