"""What recompute saves and costs: Megatron's kinds of it, and torch's and DeepSpeed's, in BF16 and in FP8."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.utils.checkpoint
from torch.nn.attention import sdpa_kernel

from benchmarks.common.attention import attention_backend
from benchmarks.common.environment import device
from benchmarks.common.errors import gradient_errors
from benchmarks.common.harness import Table, benchmark, row_or_note
from benchmarks.common.layers import TorchLayer
from benchmarks.common.memory import allocated
from benchmarks.common.plot import save
from benchmarks.common.shapes import SMALL_STACK, STACK, Stack
from benchmarks.common.spawn import one_process
from benchmarks.common.timing import measure
from benchmarks.common.training import loss_of, stack_gpt


class Passes(NamedTuple):
    """What is measured: one forward and one backward."""

    forward: Callable[[], torch.Tensor]
    grad: torch.Tensor | None
    """Of the output; None for a loss."""
    leaves: dict[str, torch.Tensor]
    """What has a gradient, by name."""

    def run(self) -> torch.Tensor:
        y = self.forward()
        y.backward(self.grad)
        return y

    def clear(self) -> None:
        """Sets gradients to zero; they stay allocated, so that passes add activations alone."""
        for t in self.leaves.values():
            t.grad = torch.zeros_like(t) if t.grad is None else t.grad.zero_()


def measured(
    passes: Passes, expected: dict[str, torch.Tensor], quick: bool
) -> tuple[dict[str, float], torch.Tensor]:
    """Columns of a row, and the output; gradients are compared with `expected`, which is filled if empty."""
    passes.clear()
    timing = measure(passes.run, *((0, 1) if quick else (3, 10)))
    passes.clear()
    y, kept = allocated(passes.forward)
    # the output is not kept for backward
    kept -= y.nbytes
    y.backward(passes.grad)
    if not expected:
        expected.update({name: t.grad.clone() for name, t in passes.leaves.items()})
    error, worst = gradient_errors((t.grad, expected[name]) for name, t in passes.leaves.items())
    return {
        "kept_mb": kept / 1e6,
        "peak_mb": timing.peak / 1e6,
        "ms": timing.median,
        "ms_p20": timing.low,
        "ms_p80": timing.high,
        "grad_error": error,
        "worst_grad_error": worst,
    }, y.detach()


# Megatron's kinds


class Case(NamedTuple):
    """One row."""

    spec: str
    config: dict
    compressed: bool = False
    """Whether inputs of recomputed regions are kept in FP8."""


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _selective(*modules: str) -> dict:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


# the reference comes first
CASES = {
    "BF16": Case("sdpa_layer_spec", {}),
    "BF16, core_attn": Case("sdpa_layer_spec", _selective("core_attn")),
    "BF16, mlp": Case("sdpa_layer_spec", _selective("mlp")),
    "BF16, full": Case("sdpa_layer_spec", FULL),
    "BF16, full, FP8 inputs": Case("sdpa_layer_spec", FULL, True),
    "COAT": Case("coat_layer_spec", {}),
    "COAT, full": Case("coat_layer_spec", FULL),
    "COAT, full, FP8 inputs": Case("coat_layer_spec", FULL, True),
}


@contextlib.contextmanager
def _compressed(wanted: bool) -> Iterator[None]:
    from megatron_ext import recompute as seam

    if wanted:
        seam.install()
    try:
        yield
    finally:
        seam.uninstall()


def _gpt_row(case: Case, stack: Stack, expected: dict[str, torch.Tensor], quick: bool) -> dict:
    with _compressed(case.compressed):
        model, batch = stack_gpt(stack, case.spec, **case.config)
        forward = functools.partial(loss_of, model, batch)
        row, loss = measured(Passes(forward, None, dict(model.named_parameters())), expected, quick)
    return row | {"tokens_per_s": stack.layer.tokens / row["ms"] * 1e3, "loss": loss.item()}


def plot_gpt(rows: list[dict], path: Path) -> None:
    """Peak memory against tokens per second; without a GPU there is none, and what is kept stands for it."""
    column = "peak_mb" if torch.cuda.is_available() else "kept_mb"
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for row in rows:
        if "tokens_per_s" in row:
            point = row[column], row["tokens_per_s"]
            axes.scatter(*point, color="C0" if row["recompute"].startswith("BF16") else "C1")
            axes.annotate(row["recompute"], point, xytext=(6, 4), textcoords="offset points", fontsize=8)
    kind = "peak" if column == "peak_mb" else "kept for backward"
    axes.set_xlabel(f"{kind}, 10^6 bytes over weights and gradients")
    axes.set_ylabel("tokens per second, forward and backward")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.margins(x=0.2)
    save(figure, path)


@benchmark(needs_gpu=False)
def recompute(arguments, table: Table) -> None:
    """24 layers of Megatron's GPTModel in BF16 and with COAT's layers, under Megatron's kinds of recompute.

    h 2048, 4 x 2048 tokens, a vocabulary of 1024, so that layers are what counts. core_attn, mlp: selective
    recompute of that module; full: of each layer; FP8 inputs: what is recomputed from is kept in FP8 groups
    of 128 (megatron_ext.recompute). Columns:
    - kept_mb: allocated after a forward over that before; peak_mb: the most during both passes; 10^6 bytes;
    - ms, ms_p20, ms_p80, tokens_per_s: forward and backward, median and percentiles, by device events;
    - loss, grad_error: of the same weights and tokens; relative RMS error of all gradients together, against
      the first row's.
    Without a GPU, or with --quick, 3 layers of h 128. On a CPU there are no peaks, times mean nothing, and
    the random state of each region counts as kept.
    """
    small = arguments.quick or not torch.cuda.is_available()
    stack = SMALL_STACK if small else STACK
    expected: dict[str, torch.Tensor] = {}
    with one_process():
        for name, case in CASES.items():
            row = row_or_note(functools.partial(_gpt_row, case, stack, expected, small))
            table.add(recompute=name, layers=stack.layers, hidden=stack.layer.hidden, **row)
    plot_gpt(table.rows, table.path.with_suffix(".png"))


# torch's and DeepSpeed's


class Way(NamedTuple):
    """One row: how a layer is called, and the context of a forward pass."""

    run: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
    context: Callable[[], contextlib.AbstractContextManager]


def ways() -> dict[str, Way]:
    """By name; the reference comes first."""
    from deepspeed import checkpointing as deepspeed_checkpointing

    from coat_ds import compressed_checkpoints
    from coat_ds.zero.recompute import compressed

    by_torch = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    group_size = 128
    return {
        "none": Way(lambda layer, x: layer(x), contextlib.nullcontext),
        "torch": Way(by_torch, contextlib.nullcontext),
        "torch, FP8": Way(by_torch, functools.partial(compressed_checkpoints, group_size)),
        "DeepSpeed": Way(deepspeed_checkpointing.checkpoint, contextlib.nullcontext),
        "DeepSpeed, FP8": Way(deepspeed_checkpointing.checkpoint, functools.partial(compressed, group_size)),
    }


def torch_stack(stack: Stack) -> tuple[torch.nn.ModuleList, torch.Tensor, torch.Tensor]:
    """Layers in plain torch with random weights, an input and a gradient of the output; all BF16."""
    torch.manual_seed(0)
    with torch.device(device()):
        layers = torch.nn.ModuleList(TorchLayer(stack.layer) for _ in range(stack.layers)).bfloat16()
        sizes = (stack.layer.batch, stack.layer.sequence, stack.layer.hidden)
        return layers, torch.randn(sizes).bfloat16().requires_grad_(), torch.randn(sizes).bfloat16()


def _stack_row(
    way: Way,
    stack: Stack,
    layers: torch.nn.ModuleList,
    x: torch.Tensor,
    grad: torch.Tensor,
    expected: dict[str, torch.Tensor],
    quick: bool,
) -> dict:
    def forward() -> torch.Tensor:
        # computed, as an embedding's output is: nobody else holds the first layer's input
        y = x * 1
        with way.context():
            for layer in layers:
                y = way.run(layer, y)
        return y

    leaves = {"input": x, **dict(layers.named_parameters())}
    row, _ = measured(Passes(forward, grad, leaves), expected, quick)
    per_layer = 1e6 * row["kept_mb"] / (stack.layer.tokens * stack.layers)
    return row | {"bytes_per_token_and_layer": per_layer, "kept_h": per_layer / stack.layer.hidden}


def plot_stack(rows: list[dict], path: Path) -> None:
    """Kept bytes, peak and time of each row."""
    shown = [row for row in rows if "kept_h" in row]
    columns = {
        "kept_h": "kept for backward, h bytes per token and layer",
        "peak_mb": "peak, 10^6 bytes",
        "ms": "forward and backward, ms",
    }
    names = [row["checkpointing"] for row in shown]
    figure, panels = plt.subplots(1, len(columns), figsize=(12, 3.5), layout="constrained", sharey=True)
    for axes, (column, label) in zip(panels, columns.items(), strict=True):
        bars = axes.barh(names, [row[column] for row in shown], color=[f"C{i}" for i in range(len(shown))])
        axes.bar_label(bars, fmt="%.3g", padding=2)
        axes.margins(x=0.18)
        axes.set_xlabel(label)
    panels[0].invert_yaxis()
    save(figure, path)


@benchmark(needs_gpu=False)
def checkpointing(arguments, table: Table) -> None:
    """24 decoder layers of plain torch, each recomputed by torch or DeepSpeed, inputs kept in BF16 or FP8.

    h 2048, 4 x 2048 tokens, BF16; torch's recompute is the non-reentrant one. FP8: E4M3 in groups of 128
    by coat_ds.compressed_checkpoints, or by coat_ds.zero.recompute under DeepSpeed. Columns:
    - kept_mb, bytes_per_token_and_layer, kept_h: allocated after a forward over that before, without the
      output; in 10^6 bytes, and per token and layer in bytes and in bytes per element of h;
    - peak_mb: of both passes over what is held before them, weights and their gradients;
    - ms, ms_p20, ms_p80: forward and backward, median and percentiles, by device events;
    - grad_error, worst_grad_error: relative RMS error of all gradients together and of the worst tensor,
      against those without recompute. Rows without FP8 show what the order of sums does.
    Without a GPU, or with --quick, 3 layers of h 128. On a CPU there are no peaks, times mean nothing, and
    the random state of each region counts as kept.
    """
    small = arguments.quick or not torch.cuda.is_available()
    stack = SMALL_STACK if small else STACK
    expected: dict[str, torch.Tensor] = {}
    with sdpa_kernel(attention_backend(stack.layer)):
        tensors = torch_stack(stack)
        for name, way in ways().items():
            row = row_or_note(functools.partial(_stack_row, way, stack, *tensors, expected, small))
            sizes = {"layers": stack.layers, "hidden": stack.layer.hidden, "tokens": stack.layer.tokens}
            table.add(checkpointing=name, **sizes, **row)
    plot_stack(table.rows, table.path.with_suffix(".png"))
