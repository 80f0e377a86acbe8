"""A stack of decoder layers, each checkpointed, with what checkpoints keep in BF16 and in FP8."""

import contextlib
import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.utils.checkpoint
from torch.nn.attention import sdpa_kernel

from benchmarks.decoder_layers import LayerShape, TorchLayer, device
from benchmarks.harness import Table, benchmark, measure, reason
from benchmarks.layer import attention_backend
from benchmarks.memory import allocated

LARGE, LARGE_LAYERS = LayerShape(2048, 5632, 16, 16, batch=4, sequence=2048), 24
SMALL, SMALL_LAYERS = LayerShape(128, 192, 2, 2, batch=2, sequence=64), 3
REFERENCE = "none"


class Case(NamedTuple):
    """One row: how a layer is called, and the context of a forward pass."""

    run: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
    context: Callable[[], contextlib.AbstractContextManager]


def cases() -> dict[str, Case]:
    """By name; the reference comes first."""
    from deepspeed import checkpointing as deepspeed_checkpointing

    from coat_ds import compressed_checkpoints
    from coat_ds.zero.recompute import compressed

    by_torch = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    group_size = 128
    return {
        REFERENCE: Case(lambda layer, x: layer(x), contextlib.nullcontext),
        "torch": Case(by_torch, contextlib.nullcontext),
        "torch, FP8": Case(by_torch, functools.partial(compressed_checkpoints, group_size)),
        "DeepSpeed": Case(deepspeed_checkpointing.checkpoint, contextlib.nullcontext),
        "DeepSpeed, FP8": Case(deepspeed_checkpointing.checkpoint, functools.partial(compressed, group_size)),
    }


class Stack:
    """The layers with random weights, an input and a gradient of the output."""

    def __init__(self, shape: LayerShape, layers: int):
        torch.manual_seed(0)
        with torch.device(device()):
            self.layers = torch.nn.ModuleList(TorchLayer(shape) for _ in range(layers)).bfloat16()
            sizes = (shape.batch, shape.sequence, shape.hidden)
            self.x = torch.randn(sizes).bfloat16().requires_grad_()
            self.grad = torch.randn(sizes).bfloat16()
        # there before anything is measured: what passes add are activations alone
        for t in self.leaves().values():
            t.grad = torch.zeros_like(t)

    def leaves(self) -> dict[str, torch.Tensor]:
        """What has a gradient, by name."""
        return {"input": self.x, **dict(self.layers.named_parameters())}

    def clear(self) -> None:
        for t in self.leaves().values():
            t.grad.zero_()

    def forward(self, case: Case) -> torch.Tensor:
        # computed, as an embedding's output is: nobody else holds the first layer's input
        x = self.x * 1
        with case.context():
            for layer in self.layers:
                x = case.run(layer, x)
        return x

    def both(self, case: Case) -> None:
        self.forward(case).backward(self.grad)


def gradient_errors(stack: Stack, expected: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Relative RMS error of all gradients together, and that of the worst tensor."""
    error, size, worst = 0.0, 0.0, 0.0
    for name, leaf in stack.leaves().items():
        difference = (leaf.grad.float() - expected[name].float()).double().square().sum().item()
        own = expected[name].double().square().sum().item()
        error, size, worst = error + difference, size + own, max(worst, (difference / own) ** 0.5)
    return (error / size) ** 0.5, worst


def run_case(
    case: Case, stack: Stack, expected: dict[str, torch.Tensor], warmup: int, repeats: int
) -> dict[str, float]:
    """Measures of one row; fills `expected` if it is empty."""
    shape = stack.layers[0].shape
    timing = measure(functools.partial(stack.both, case), warmup, repeats)
    stack.clear()
    y, kept = allocated(lambda: stack.forward(case))
    # the last layer's output is not kept for backward
    kept -= y.nbytes
    y.backward(stack.grad)
    del y
    if not expected:
        expected.update({name: leaf.grad.clone() for name, leaf in stack.leaves().items()})
    error, worst = gradient_errors(stack, expected)
    per_layer = kept / (shape.tokens * len(stack.layers))
    return {
        "kept_mb": kept / 1e6,
        "bytes_per_token_and_layer": per_layer,
        "kept_h": per_layer / shape.hidden,
        "peak_mb": timing.peak / 1e6,
        "ms": timing.median,
        "ms_p20": timing.low,
        "ms_p80": timing.high,
        "grad_error": error,
        "worst_grad_error": worst,
    }


def plot(rows: list[dict], path: Path) -> None:
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
    figure.savefig(path, dpi=120)
    plt.close(figure)


@benchmark(needs_gpu=False)
def checkpointing(arguments, table: Table) -> None:
    """24 decoder layers of plain torch, each checkpointed by torch or DeepSpeed, kept in BF16 or FP8.

    h 2048, 4 x 2048 tokens, BF16; torch's checkpointing is the non-reentrant one. FP8: E4M3 in groups of 128
    by coat_ds.compressed_checkpoints, or by coat_ds.zero.recompute under DeepSpeed. Columns:
    - kept_mb, bytes_per_token_and_layer, kept_h: allocated after a forward over that before, without the
      output; in 10^6 bytes, and per token and layer in bytes and in bytes per element of h;
    - peak_mb: of both passes over what is held before them, weights and their gradients;
    - ms, ms_p20, ms_p80: forward and backward, median and percentiles, by device events;
    - grad_error, worst_grad_error: relative RMS error of all gradients together and of the worst tensor,
      against those without checkpointing. Rows without FP8 show what the order of sums does.
    Without a GPU, or with --quick, 3 layers of h 128. On a CPU there are no peaks, times mean nothing, and
    the random state of each region counts as kept.
    """
    small = arguments.quick or not torch.cuda.is_available()
    shape, layers = (SMALL, SMALL_LAYERS) if small else (LARGE, LARGE_LAYERS)
    expected: dict[str, torch.Tensor] = {}
    with sdpa_kernel(attention_backend(shape)):
        stack = Stack(shape, layers)
        for name, case in cases().items():
            try:
                row = run_case(case, stack, expected, *((0, 1) if small else (2, 10)))
            # one that fails leaves the others standing
            except Exception as error:
                row = {"note": reason(error)}
            table.add(checkpointing=name, layers=layers, hidden=shape.hidden, tokens=shape.tokens, **row)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    table.path.parent.mkdir(parents=True, exist_ok=True)
    plot(table.rows, table.path.with_suffix(".png"))
