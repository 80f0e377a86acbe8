"""Peaks under ZeRO and those of `coat plan`, also of gradients that are added up in FP32."""

import argparse
import json
from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks.common.environment import device
from benchmarks.common.harness import Table, benchmark
from benchmarks.common.memory import held_bytes, peak_bytes, release
from benchmarks.common.spawn import Rank, join_deepspeed, run_ranks
from coat_ds.plan import from_deepspeed, predict
from coat_ds.plan.read import from_values
from coat_ds.plan.systems import coat

FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
# what graphs hold is not measured here
BLOCK = {"activations": {"cuda_graphs": False}}
# the first step makes the optimizer's states
STEPS = 2


class Size(NamedTuple):
    """What is trained."""

    name: str
    fields: dict[str, int]
    """Of a LlamaConfig."""
    micro_batch: int
    sequence: int
    bucket: int
    """Elements of DeepSpeed's buckets."""


FULL = Size(
    "a Llama of 10 layers, h 2048",
    {
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_hidden_layers": 10,
        "num_attention_heads": 16,
        "vocab_size": 32000,
    },
    micro_batch=4,
    sequence=1024,
    bucket=50_000_000,
)
TINY = Size(
    "a tiny Llama",
    {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
    },
    micro_batch=2,
    sequence=32,
    bucket=10_000,
)


class Case(NamedTuple):
    """One row."""

    stage: int
    micro_batches: int
    keys: dict
    """Keys of the DeepSpeed JSON, in addition to those of all rows."""

    def config(self, size: Size) -> dict:
        """The DeepSpeed JSON."""
        zero = {"stage": self.stage, "reduce_bucket_size": size.bucket, "allgather_bucket_size": size.bucket}
        return {
            "train_micro_batch_size_per_gpu": size.micro_batch,
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
            "coat": {"enabled": True, **BLOCK},
            **self.keys,
            "zero_optimization": zero,
        }


CASES = [
    Case(1, 1, {}),
    Case(1, 2, {}),
    *(Case(2, 1, keys) for keys in ({}, FP32)),
    Case(2, 2, FP32),
    *(Case(3, 1, keys) for keys in ({}, FP32)),
]


def predicted(case: Case, size: Size, ranks: int, **fields) -> dict[str, float]:
    """MB by `coat plan`: the highest peak of all, and the optimizer step's. `fields`: of the Layout."""
    sizes = from_values({"model_type": "llama", **size.fields})
    spread = from_deepspeed(case.config(size), sizes, gpus=ranks, sequence=size.sequence, **fields)
    found = predict(sizes, spread, coat("COAT, launched", BLOCK))
    step = next(memory for memory in found.moments if memory.moment == "step")
    return {"all_predicted_mb": found.peak.total / 1e6, "step_predicted_mb": step.total / 1e6}


def run_case(case: Case, size: Size) -> dict[str, float]:
    """What the last step's passes and the optimizer's step took at their peak on this rank, in MB."""
    import deepspeed
    import transformers

    import coat_ds

    before = held_bytes()
    torch.manual_seed(0)
    # without a cache of keys and values layers run as fused blocks
    config = transformers.LlamaConfig(**size.fields, use_cache=False)
    with torch.device(device()):
        model = transformers.LlamaForCausalLM(config).bfloat16()
    coat_ds.install()
    engine, *_ = deepspeed.initialize(model=model, config=case.config(size))
    # the same on all ranks, whatever has drawn numbers until here
    drawn = torch.Generator().manual_seed(0)
    shape = size.micro_batch, size.sequence
    tokens = torch.randint(size.fields["vocab_size"], shape, generator=drawn).to(device())

    def peak() -> float:
        found = peak_bytes()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        return max(0, found - before) / 1e6

    losses = []
    for _ in range(STEPS):
        peak()
        passes, step = 0.0, 0.0
        for _ in range(case.micro_batches):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            passes = max(passes, peak())
            engine.step()
            # of the last micro-batch: earlier ones make no step
            step = peak()
        losses.append(loss.item())
    row = {"loss_first": losses[0], "loss": losses[-1]}
    row |= {"peak_mb": max(passes, step), "step_peak_mb": step}
    engine.destroy()
    return row


def measure(place: Rank, case: Case, size: Size) -> Iterator[dict]:
    """This rank's row."""
    join_deepspeed(place)
    # GEMMs take a workspace for good, which is no row's memory
    run_case(CASES[0], TINY)
    release()
    yield run_case(case, size)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2, help="processes; no more than there are GPUs")


@benchmark(needs_gpu=False, options=options)
def zero_gradients(arguments, table: Table) -> None:
    """Peaks under ZeRO 1 to 3, also with gradients in FP32, and `coat plan`'s.

    A Llama of transformers with 10 layers of h 2048, random weights, 4 x 1024 random tokens a micro-batch,
    buckets of 5e7 elements, COAT without CUDA graphs. keys: what the row's DeepSpeed JSON adds to that
    of all rows. A row for each rank, of the second step; the fullest is predicted. In 10^6 bytes, over what
    was held before the model, which are the workspaces of GEMMs that predictions count:
    - peak_mb, all_predicted_mb: of forward, backward and the optimizer's step;
    - step_peak_mb, step_predicted_mb: of the latter alone.
    loss_first, loss: of the first and second step. They may differ from process to process, as cuDNN's
    attention does (docs/optimizer.md).
    Without a GPU, or with --quick, a tiny model; without a GPU gloo, and no peaks.
    """
    on_gpu = torch.cuda.is_available()
    size = TINY if arguments.quick or not on_gpu else FULL
    ranks = min(arguments.ranks, torch.cuda.device_count()) if on_gpu else arguments.ranks
    for case in CASES:
        # in processes of its own, where no other case has left anything
        written, failure = run_ranks(measure, ranks, case, size)
        for rank, rows in enumerate(written):
            row = rows[0] if rows else {"note": failure or "no row"}
            table.add(
                model=size.name,
                system="COAT, launched",
                ranks=ranks,
                rank=rank,
                stage=case.stage,
                micro_batches=case.micro_batches,
                keys=json.dumps(case.keys),
                **row,
                **predicted(case, size, ranks),
            )
