"""What is trained: variants, runs and their names, and what makes runs comparable."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common.training import CONFIGS
from benchmarks.common.whole_models import SYSTEMS, System

BF16 = "bf16"
# the paper's format of both moments
_PAPER = {"exp_avg_format": "fp8_expanded", "exp_avg_sq_format": "fp8_expanded"}
VARIANTS = {
    BF16: SYSTEMS["BF16"],
    "coat": SYSTEMS["COAT"],
    "coat-paper": System({"optimizer": _PAPER}),
    "coat-optimizer": System({"activations": {"enabled": False}}),
    "coat-activations": System({"optimizer": {"enabled": False}}),
    "coat-fastest": SYSTEMS["COAT, fastest"],
    "coat-smallest": SYSTEMS["COAT, smallest"],
}
# stored runs of plain FP8 in place of dynamic range expansion, which was removed
REMOVED = ("coat-no-expansion",)
# from one to the other after half of the steps
CHANGES = {"bf16-to-coat": (BF16, "coat"), "coat-to-bf16": ("coat", BF16)}
# the most telling first, should there be time for some only
RUNS = [f"{variant}-seed{seed}" for seed in (1, 2, 3) for variant in (BF16, "coat")]
RUNS += [f"{kind}-seed1" for kind in (*list(VARIANTS)[2:], *CHANGES)]
# of larger models
CONFIGURATIONS = [BF16, "coat", "coat-fastest", "coat-smallest"]
# what moments are stored in, activations in BF16: asked for by name, with beta2 0.95 and with 0.999
_STORED = {
    "coat-optimizer": {},
    "coat-optimizer-paper": _PAPER,
    "coat-optimizer-fp32": {"exp_avg_format": "fp32", "exp_avg_sq_format": "fp32"},
}
LONG_MEMORY, LONG_BETAS = "-beta2-0.999", (0.9, 0.999)
VARIANTS |= {
    name + memory: System({"optimizer": formats, "activations": {"enabled": False}})
    for name, formats in _STORED.items()
    for memory in ("", LONG_MEMORY)
}
# the same with COAT's layers, which are faster
VARIANTS["coat" + LONG_MEMORY] = SYSTEMS["COAT"]
VARIANTS["coat-paper" + LONG_MEMORY] = System({"optimizer": _PAPER})
VARIANTS["coat-fp32" + LONG_MEMORY] = System({"optimizer": _STORED["coat-optimizer-fp32"]})
VARIANTS["coat-recomputed-attention"] = SYSTEMS["COAT, recomputed attention"]
VARIANTS["coat-e4m3"] = System({"activations": {"backward_format": "e4m3"}})
# each part of "smallest" alone
VARIANTS["coat-8bit-attention"] = SYSTEMS["COAT, 8-bit attention"]
VARIANTS["coat-no-masters"] = System({"optimizer": {"bf16_params": "stochastic"}}, bf16_masters=True)
VALIDATIONS = 10


class Recipe(NamedTuple):
    """What is trained, and how."""

    shape_file: Path | None
    """The file that has the model's sizes; None for a model without one."""
    vocabulary: int
    seq_length: int
    batch: int
    """Sequences in a step."""
    micro_batch: int
    """Sequences in a pass."""
    held_out: int
    """Sequences in a validation."""
    tokens: int
    """In a run, rounded up to whole steps."""
    text: int
    """Bytes of text at most."""
    lr: float
    clip: float = 1.0
    warmup: float = 0.1
    """Share of the steps; then half a cosine down to a tenth."""

    @property
    def steps(self) -> int:
        return -(-self.tokens // (self.batch * self.seq_length))


RECIPES = {
    "125m": Recipe(
        CONFIGS / "model_125m.json",
        vocabulary=32768,
        seq_length=1024,
        batch=64,
        micro_batch=64,
        held_out=512,
        tokens=150_000_000,
        text=1 << 30,
        lr=6e-4,
    ),
    "1b": Recipe(
        CONFIGS / "model_1b.json",
        vocabulary=32768,
        seq_length=2048,
        batch=64,
        micro_batch=16,
        held_out=256,
        tokens=100_000_000,
        text=8 << 30,
        lr=2e-4,
        # a few hundred steps in all: a shorter warm-up is unstable in BF16, too (docs/numerics.md)
        warmup=0.5,
    ),
}
TINY = Recipe(
    CONFIGS / "model_quickstart.json",
    vocabulary=512,
    seq_length=32,
    batch=4,
    micro_batch=4,
    held_out=8,
    tokens=768,
    text=2 << 20,
    lr=2e-3,
)


class Run(NamedTuple):
    kind: str
    variants: tuple[str, ...]
    """One after the other, for equal shares of the steps."""
    seed: int

    @classmethod
    def parse(cls, name: str) -> "Run":
        """Raises ValueError, naming the known ones, for a name that is none."""
        stem, seed = re.fullmatch(r"(.+?)(?:-seed(\d+))?", name).groups()
        if stem not in (*VARIANTS, *CHANGES, *REMOVED):
            known = ", ".join([*VARIANTS, *CHANGES])
            raise ValueError(f"--runs {name}: expected one of {known}, optionally followed by -seedN")
        return cls(stem, CHANGES.get(stem, (stem,)), int(seed or 1))

    @property
    def name(self) -> str:
        return f"{self.kind}-seed{self.seed}"

    def phase(self, step: int, steps: int) -> tuple[str, int]:
        """What is trained after `step` steps, and the step at which that ends."""
        count = len(self.variants)
        index = min(step * count // steps, count - 1)
        return self.variants[index], -(-(index + 1) * steps // count)


def no_scores(setup, model, data, step: int) -> dict[str, float]:
    return {}


class Task(NamedTuple):
    """What a run trains, on what, and what it is judged by; `setup` is a `Setup`.

    Other processes get it: its functions are those of modules, or partial ones of them.
    """

    build: Callable[..., torch.nn.Module]
    """build(setup, run, coat, data): the model; a `coat_ds.CoatConfig` says which layers it is to have."""
    load: Callable[..., Any]
    """load(setup, seed): data as `corpus.TokenizedText` has it; the seed decides the order alone."""
    loss: Callable[..., torch.Tensor]
    """loss(model, batch): the mean over a batch of the data."""
    facts: Callable[..., dict[str, object]]
    """facts(model, batch): of a model that was trained, by names of columns."""
    scores: Callable[..., dict[str, float]] = no_scores
    """scores(setup, model, data, step): of a model in evaluation, with each validation.
    Columns are those of the first and of the last one."""


class Setup(NamedTuple):
    """What is the same for all runs of a call."""

    task: Task
    recipe: Recipe
    data: Path
    """Folder of the data, as `corpus.prepare` makes it."""
    runs: Path
    """Where unfinished runs stay: their lines, and checkpoints of their own."""
    output: Path
    """Folder that gets the files of each run."""
    deadline: float
    """By `time.monotonic`."""


def conditions_of(recipe: Recipe) -> dict[str, object]:
    """What runs have to share to be compared, in addition to their data."""
    return recipe._asdict() | {"shape_file": recipe.shape_file and recipe.shape_file.name}
