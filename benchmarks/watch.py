"""What watching costs: steps of Megatron's own loop without readings, and with one in a hundred."""

import statistics
import tempfile
from typing import NamedTuple

import torch

from benchmarks.common.harness import Table, benchmark
from benchmarks.common.memory import release
from benchmarks.common.shapes import LAYERS, SMALL_STACK, LayerShape, Stack
from benchmarks.common.spawn import one_process
from benchmarks.common.timing import mark, milliseconds, synchronize
from benchmarks.common.training import loss_of, stack_gpt

# CUDA graphs replay the first of these layers, which would wait for the CPU
STACKS = {
    "h 1024": Stack(LayerShape(1024, 2816, 16, 16, batch=4, sequence=2048), 8),
    "h 4096": Stack(LAYERS["llama-2-7b"], 2),
}


class Case(NamedTuple):
    """One row: steps from one reading to the next, 0 for none; steps of a round, and rounds. The last step of
    a round is watched, if any is."""

    every: int
    steps: int
    rounds: int


CASES = (Case(0, 100, 5), Case(100, 100, 5))
SMALL_CASES = (Case(0, 4, 1), Case(4, 4, 1))


def _run(case: Case, stack: Stack, warmup: int) -> dict[str, float]:
    """Times of the steps after `warmup` others."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from coat_ds import CoatConfig
    from megatron_ext.optimizer import patches

    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    with tempfile.TemporaryDirectory() as folder:
        block = {"enabled": True, "watch": {"every": case.every, "folder": folder}}
        patches.install(CoatConfig.from_dict(block))
        try:
            model, batch = stack_gpt(stack, "coat_layer_spec")
            settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
            wrapped = DistributedDataParallel(model.config, settings, model)
            common = {"optimizer": "adam", "lr": 1e-4, "weight_decay": 0.1, "clip_grad": 1.0, "bf16": True}
            optimizer = get_megatron_optimizer(
                OptimizerConfig(**common, use_distributed_optimizer=True), [wrapped]
            )
        finally:
            patches.uninstall()
        done = 0

        def step() -> None:
            nonlocal done
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            loss_of(wrapped, batch).backward()
            wrapped.finish_grad_sync()
            optimizer.step()
            done += 1

        # a reading brings kernels of its own, which are loaded or compiled once
        while done < warmup or (case.every and done % case.every):
            step()
        synchronize()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        marks = [mark()]
        for _ in range(case.steps * case.rounds):
            step()
            marks.append(mark())
        # takes in the last reading, too
        if optimizer.coat_watch is not None:
            optimizer.coat_watch.close()
        synchronize()
        peak = torch.cuda.max_memory_allocated() - before if torch.cuda.is_available() else 0
        times = [milliseconds(a, b) for a, b in zip(marks, marks[1:], strict=False)]
        slowest = [max(times[i : i + case.steps]) for i in range(0, len(times), case.steps)]
        last = optimizer.coat_watch and optimizer.coat_watch.last
        return {
            "mean_ms": statistics.mean(times),
            "median_ms": statistics.median(times),
            "slowest_ms": statistics.median(slowest),
            "peak_mb": peak / 1e6,
            "figures": len(last.flat()) if last else 0,
        }


@benchmark(needs_gpu=False)
def watch(arguments, table: Table) -> None:
    """Steps of Megatron's distributed optimizer and FP8 layers on one rank, watched now and then.

    Layers of h 1024 (8, as CUDA graphs) and h 4096 (2, Llama-2-7B's), 4 x 2048 tokens, with COAT's optimizer.
    Columns:
    - every: steps from one reading to the next; 0 is off;
    - mean_ms, median_ms: of a step, of five hundred; slowest_ms: of the slowest of a hundred, the median of
      five. Of a hundred with a reading that is the step which is watched. Where every step is watched layers
      would never be recorded as graphs, so that no such row says what a reading costs;
    - peak_mb: memory at its peak, over what was held before the model; figures: numbers in a reading.
    Without a GPU, or with --quick, 3 layers of h 128; on a CPU there are no peaks and times mean nothing.
    """
    from megatron_ext import cpu

    small = arguments.quick or not torch.cuda.is_available()
    stacks, cases = ({"small": SMALL_STACK}, SMALL_CASES) if small else (STACKS, CASES)
    with one_process(), cpu.no_cuda():
        for name, stack in stacks.items():
            for case in cases:
                release()
                table.add(layers=name, every=case.every, **_run(case, stack, 1 if small else 8))
