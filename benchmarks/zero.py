"""ZeRO 0 to 3 under stock AdamW and under COAT: the bytes that each rank holds, and the predicted ones.

N parameters in BF16 on R ranks. The shard S is N at stage 0 and N / R elsewhere. Bytes:

| | stock | COAT | COAT, BF16 masters |
|---|---|---|---|
| weights | 2 N; 2 S at stage 3 | same | same |
| masters | 4 S | same | 2 S |
| states | 8 S | 2.070 S | 4.070 S: 16 more bits of every master |
| gradients | 2 N at stages 0 and 1, 2 S at 2 and 3 | same | same |

Norms keep FP32 moments. After a step the gradients are gone, except at stage 3, which has a buffer for them
and a bucket of 2 bytes an element.
"""

import argparse
import statistics
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.common.environment import device
from benchmarks.common.harness import Table, benchmark, reason
from benchmarks.common.layers import TorchLayer
from benchmarks.common.memory import held_bytes, peak_bytes, release
from benchmarks.common.shapes import LayerShape
from benchmarks.common.spawn import Rank, join_deepspeed, run_ranks
from benchmarks.common.timing import mark, milliseconds, synchronize
from coat_ds.plan.model_states import stepped_bytes
from coat_ds.plan.systems import System, coat

WARMUP = 2


class Size(NamedTuple):
    shape: LayerShape
    layers: int
    vocabulary: int
    bucket: int
    """Elements of DeepSpeed's buckets, which hold the largest tensor: 5e8 would be larger than the model."""


FULL = Size(
    LayerShape(1536, 4096, 12, 12, batch=1, sequence=512), layers=12, vocabulary=16384, bucket=30_000_000
)
TINY = Size(LayerShape(128, 384, 4, 4, batch=1, sequence=64), layers=2, vocabulary=512, bucket=100_000)


class Case(NamedTuple):
    """One row."""

    stage: int
    optimizer: str

    @property
    def is_coat(self) -> bool:
        return self.optimizer != STOCK

    @property
    def has_bf16_masters(self) -> bool:
        return self.optimizer == COAT_BF16_MASTERS

    def config(self, bucket: int) -> dict:
        """The DeepSpeed JSON."""
        params = {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}
        # torch's fused AdamW: DeepSpeed's keeps the same states and wants a compiler
        stock = {"torch_adam": True, "fused": True}
        masters = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        coat = {"enabled": True, "activations": {"enabled": False}}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            "bf16": {"enabled": True, **(masters if self.has_bf16_masters else {})},
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket,
                # norms alone are whole on every rank at stage 3
                "stage3_param_persistence_threshold": 10_000,
            },
            "optimizer": {"type": "AdamW", "params": params if self.is_coat else params | stock},
            **({"coat": coat} if self.is_coat else {}),
        }


STOCK, COAT, COAT_BF16_MASTERS = "stock AdamW", "COAT", "COAT, BF16 masters"
CASES = [
    Case(stage, optimizer)
    for stage in range(4)
    for optimizer in (STOCK, COAT, COAT_BF16_MASTERS)
    if stage == 1 or optimizer != COAT_BF16_MASTERS
]


class GPT(torch.nn.Module):
    """Decoder layers in plain torch between an embedding and a head; gives the loss of its input."""

    def __init__(self, size: Size):
        super().__init__()
        hidden = size.shape.hidden
        self.embedding = torch.nn.Embedding(size.vocabulary, hidden)
        self.layers = torch.nn.Sequential(*(TorchLayer(size.shape) for _ in range(size.layers)))
        self.final_layernorm = torch.nn.RMSNorm(hidden)
        self.head = torch.nn.Linear(hidden, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[b, s + 1] -> mean loss of the next token."""
        logits = self.head(self.final_layernorm(self.layers(self.embedding(tokens[:, :-1]))))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Predicted(NamedTuple):
    """Bytes on one rank."""

    weights: float
    masters: float
    states: float
    gradients: float
    held: float
    """After a step."""


def predict(case: Case, compressed: int, kept: int, ranks: int, bucket: int) -> Predicted:
    """By the table above; COAT keeps FP32 moments for `kept` parameters and 8-bit ones for `compressed`."""
    total, shards = compressed + kept, ranks if case.stage else 1
    weights = 2 * total / (ranks if case.stage == 3 else 1)
    system = coat("COAT", bf16_masters=case.has_bf16_masters) if case.is_coat else System(name="stock")
    masters, states = stepped_bytes(compressed / shards, kept / shards, system)
    gradients = 2 * total / (ranks if case.stage >= 2 else 1)
    held = weights + masters + states + (gradients + 2 * bucket if case.stage == 3 else 0)
    return Predicted(weights, masters, states, gradients, held)


class Run(NamedTuple):
    engine: torch.nn.Module
    first_loss: torch.Tensor
    marks: list[tuple]
    peak: int
    """The peak of the last step, absolute."""


def train(case: Case, size: Size, steps: int, tokens: torch.Tensor) -> Run:
    """Builds the model and an engine, and makes `steps` steps on the same tokens."""
    import deepspeed

    import coat_ds

    torch.manual_seed(0)
    with torch.device(device()):
        model = GPT(size).bfloat16()
    coat_ds.install()
    engine, *_ = deepspeed.initialize(model=model, config=case.config(size.bucket))
    marks, losses = [], []
    for _ in range(steps):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        start = mark()
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        marks.append((start, mark()))
        losses.append(loss.detach())
    synchronize()
    return Run(engine, losses[0], marks, peak_bytes())


def mean_over_ranks(value: torch.Tensor) -> float:
    value = value.detach().float().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def run_case(case: Case, size: Size, steps: int) -> dict[str, float]:
    """A row, of this rank."""
    from coat_ds import state_bytes

    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    batch = (size.shape.batch, size.shape.sequence + 1)
    tokens = torch.randint(size.vocabulary, batch, generator=generator).to(device())
    before = held_bytes()
    run = train(case, size, steps, tokens)
    held = held_bytes() - before
    states = state_bytes(run.engine)["bytes"]
    with torch.no_grad():
        loss = mean_over_ranks(run.engine(tokens))
    # ZeRO-3 has emptied the tensors and noted their sizes
    sizes = {n: getattr(p, "ds_numel", p.numel()) for n, p in run.engine.module.named_parameters()}
    kept = sum(numel for name, numel in sizes.items() if "norm" in name)
    expected = predict(case, sum(sizes.values()) - kept, kept, ranks, size.bucket)
    row = {
        "parameters": sum(sizes.values()),
        "loss_first": mean_over_ranks(run.first_loss),
        "loss": loss,
        "state_mb": states / 1e6,
        "state_predicted_mb": expected.states / 1e6,
        "held_mb": held / 1e6,
        "held_predicted_mb": expected.held / 1e6,
        "held_difference_mb": (held - expected.held) / 1e6,
        "peak_mb": max(0, run.peak - before) / 1e6,
        "all_predicted_mb": sum(expected[:4]) / 1e6,
        "step_ms": statistics.median(milliseconds(*pair) for pair in run.marks[WARMUP:] or run.marks),
    }
    run.engine.destroy()
    return row


def warm_up(size: Size) -> None:
    """GEMMs take a workspace for good, which is no row's memory."""
    with torch.device(device()):
        model = GPT(size._replace(layers=1)).bfloat16()
        model(torch.zeros(1, size.shape.sequence + 1, dtype=torch.long)).backward()


def measure(place: Rank, cases: list[Case], size: Size, steps: int) -> Iterator[dict]:
    """This rank's row of each case; ends at the first that fails."""
    join_deepspeed(place)
    warm_up(size)
    for case in cases:
        release()
        try:
            row = run_case(case, size, steps)
        except Exception as error:
            yield {"note": reason(error)}
            # the others may wait for this rank: all start again after this case
            raise
        yield row
        if place.rank == 0:
            print(f"stage {case.stage}, {case.optimizer}: {row}", flush=True)


def run_cases(cases: list[Case], ranks: int, size: Size, steps: int) -> list[list[dict]]:
    """Rows of the cases, by rank. Processes are started once, and again after each case that fails."""
    done: list[list[dict]] = []
    while len(done) < len(cases):
        written, failure = run_ranks(measure, ranks, cases[len(done) :], size, steps)
        finished = 0
        while all(len(rows) > finished and "note" not in rows[finished] for rows in written):
            done.append([rows[finished] for rows in written])
            finished += 1
        if len(done) < len(cases):
            missing = {"note": failure or "no row"}
            done.append([rows[finished] if len(rows) > finished else missing for rows in written])
    return done


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2, help="processes; no more than there are GPUs")
    parser.add_argument("--steps", type=int, default=8)


@benchmark(needs_gpu=False, options=options)
def zero(arguments, table: Table) -> None:
    """ZeRO 0 to 3 on several ranks, stock AdamW and COAT: losses, bytes and the predicted ones, time.

    A GPT of 390M parameters in plain torch, BF16, 1 x 512 random tokens a rank, the same in every step,
    clipping at 1.0, buckets of 3e7 elements. Stock is torch's fused AdamW. A row for each rank. Columns:
    - loss_first, loss: mean over ranks, of the first step and after the last; loss_to_stock: relative
      difference of the latter to stock AdamW's at the same stage;
    - state_mb, state_predicted_mb: states of the optimizer (coat_ds.state_bytes), in 10^6 bytes;
    - held_mb, held_predicted_mb, held_difference_mb: allocated after the last step over before the model;
    - peak_mb: of the last step; all_predicted_mb: weights, masters, states and gradients together. What is
      above are buckets, temporaries, activations and FP32 gradients that a step makes;
    - step_ms: forward, backward and step, median without the first two.
    Predictions are by the table at the top of benchmarks/zero.py. Without a GPU, or with --quick, a tiny
    model; without a GPU gloo, no peaks, and times that mean nothing.
    """
    on_gpu = torch.cuda.is_available()
    size = TINY if arguments.quick or not on_gpu else FULL
    ranks = min(arguments.ranks, torch.cuda.device_count()) if on_gpu else arguments.ranks
    stock: dict[int, float] = {}
    for case, rows in zip(CASES, run_cases(CASES, ranks, size, arguments.steps), strict=True):
        for rank, row in enumerate(rows):
            if "loss" in row:
                if not case.is_coat:
                    stock[case.stage] = row["loss"]
                if case.stage in stock:
                    row = row | {"loss_to_stock": row["loss"] / stock[case.stage] - 1}
            table.add(stage=case.stage, optimizer=case.optimizer, ranks=ranks, rank=rank, **row)
