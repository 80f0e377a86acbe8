"""A step of Megatron's own loop: data parallel wrapper and distributed optimizer, with each Adam inside."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.common.harness import Table, benchmark, row_or_note
from benchmarks.common.memory import held_bytes, release
from benchmarks.common.shapes import SMALL_STACK, STACK, Stack
from benchmarks.common.spawn import one_process
from benchmarks.common.timing import measure
from benchmarks.common.training import loss_of, stack_gpt

PRECISION_AWARE = {"use_precision_aware_optimizer": True}


class Case(NamedTuple):
    """One row."""

    ours: bool
    config: dict
    """Fields of Megatron's OptimizerConfig."""


CASES = {
    "Megatron's Adam": Case(False, {}),
    "Megatron's Adam, precision aware, FP8 states": Case(
        False, PRECISION_AWARE | {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
    ),
    "COAT": Case(True, {}),
    "COAT, precision aware": Case(True, PRECISION_AWARE),
}


def _parts(
    stack: Stack, config: dict
) -> tuple[Callable[[], None], Callable[[], None], torch.optim.Optimizer]:
    """Forward and backward of a fresh model, the optimizer's step, and the optimizer inside."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model, batch = stack_gpt(stack, "coat_layer_spec")
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(model.config, settings, model)
    common = {"optimizer": "adam", "lr": 1e-4, "weight_decay": 0.1, "clip_grad": 1.0, "bf16": True}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(**common, use_distributed_optimizer=True, **config), [wrapped]
    )

    def passes() -> None:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        loss_of(wrapped, batch).backward()
        wrapped.finish_grad_sync()

    return passes, lambda: optimizer.step(), optimizer.optimizer


def _run(case: Case, stack: Stack, warmup: int, repeats: int) -> dict:
    from megatron_ext.optimizer import patches

    release()
    before = held_bytes()
    if case.ours:
        patches.install()
    try:
        passes, step, adam = _parts(stack, case.config)
        parameters = sum(p.numel() for group in adam.param_groups for p in group["params"])
        passes()
        stepping = measure(step, warmup, repeats)
        # every step after the first one reads gradients that were clipped before: as fast as fresh ones
        held = held_bytes() - before
        whole = measure(lambda: (passes(), step()), warmup, repeats)
    finally:
        patches.uninstall()
    return {
        "adam": f"{type(adam).__module__}.{type(adam).__name__}",
        "parameters": parameters,
        "held_bytes_per_parameter": held / parameters,
        "step_ms": stepping.median,
        "step_ms_p20": stepping.low,
        "step_ms_p80": stepping.high,
        "step_peak_bytes_per_parameter": stepping.peak / parameters,
        "whole_ms": whole.median,
        "whole_peak_mb": whole.peak / 1e6,
    }


@benchmark(needs_gpu=False)
def megatron_step(arguments, table: Table) -> None:
    """Megatron's distributed optimizer on one rank with TransformerEngine's FusedAdam and with CoatAdamW.

    24 COAT layers of h 2048 (1.2 billion parameters), 4 x 2048 tokens, FP32 gradients, clipping to 1.
    Megatron's Adam is TransformerEngine's where that imports, else apex's or torch's. Columns:
    - held_bytes_per_parameter: weights, gradients, masters and states together, between steps;
    - step_ms: optimizer.step() as a whole: copies, clipping, AdamW, weights; median and percentiles;
    - step_peak_bytes_per_parameter: how far that rises above what is held;
    - whole_ms, whole_peak_mb: forward, backward and that step.
    Without a GPU, or with --quick, 3 layers of h 128; on a CPU there are no peaks and times mean nothing.
    """
    from megatron_ext import cpu

    small = arguments.quick or not torch.cuda.is_available()
    stack = SMALL_STACK if small else STACK
    with one_process(), cpu.no_cuda():
        for name, case in CASES.items():
            # one fails without TransformerEngine
            row = row_or_note(functools.partial(_run, case, stack, *((0, 1) if small else (3, 20))))
            table.add(optimizer=name, **row)
