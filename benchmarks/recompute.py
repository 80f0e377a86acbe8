"""A GPT of megatron-core under every kind of recompute: what layers keep, against tokens per second."""

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch

from benchmarks.harness import Table, benchmark, measure, reason
from benchmarks.memory import allocated
from benchmarks.training import one_process

VOCABULARY = 1024
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class Size(NamedTuple):
    layers: int
    hidden: int
    ffn: int
    heads: int
    batch: int
    sequence: int


LARGE, SMALL = Size(24, 2048, 5632, 16, 4, 2048), Size(3, 128, 192, 2, 2, 64)


class Case(NamedTuple):
    """One row."""

    spec: str
    config: dict
    compressed: bool = False
    """Whether inputs of recomputed regions are kept in FP8."""


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


def _error(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> float:
    """Relative RMS error of all gradients together."""
    error = size = 0.0
    for name, p in model.named_parameters():
        error += (p.grad.float() - expected[name].float()).double().square().sum().item()
        size += expected[name].double().square().sum().item()
    return (error / size) ** 0.5


def _run(case: Case, size: Size, expected: dict[str, torch.Tensor], warmup: int, repeats: int) -> dict:
    """Measures of one row; fills `expected` if it is empty."""
    from megatron_ext import layer_specs
    from megatron_ext.model import ModelShape, build_gpt

    shape = ModelShape(size.layers, size.hidden, size.ffn, size.heads, size.heads)
    spec = getattr(layer_specs, case.spec)
    model = build_gpt(shape, spec, seq_length=size.sequence, vocab_size=VOCABULARY, **case.config).train()
    device = next(model.parameters()).device
    tokens = torch.randint(
        0, VOCABULARY, (size.batch, size.sequence), generator=torch.Generator().manual_seed(0)
    ).to(device)
    positions = torch.arange(size.sequence, device=device).expand_as(tokens)
    # there before anything is measured: what passes add are activations alone
    for p in model.parameters():
        p.grad = torch.zeros_like(p)

    def forward() -> torch.Tensor:
        return model(tokens, positions, None, labels=tokens).mean()

    timing = measure(lambda: forward().backward(), warmup, repeats)
    model.zero_grad(set_to_none=False)
    loss, kept = allocated(forward)
    loss.backward()
    if not expected:
        expected.update({name: p.grad.clone() for name, p in model.named_parameters()})
    return {
        "kept_mb": kept / 1e6,
        "peak_mb": timing.peak / 1e6,
        "ms": timing.median,
        "ms_p20": timing.low,
        "ms_p80": timing.high,
        "tokens_per_s": tokens.numel() / timing.median * 1e3,
        "loss": loss.item(),
        "grad_error": _error(model, expected),
    }


def plot(rows: list[dict], path: Path) -> None:
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
    figure.savefig(path, dpi=120)
    plt.close(figure)


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
    size = SMALL if small else LARGE
    expected: dict[str, torch.Tensor] = {}
    with one_process():
        for name, case in CASES.items():
            try:
                with _compressed(case.compressed):
                    row = _run(case, size, expected, *((0, 1) if small else (3, 10)))
            # one that fails leaves the others standing
            except Exception as error:
                row = {"note": reason(error)}
            table.add(recompute=name, layers=size.layers, hidden=size.hidden, **row)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    table.path.parent.mkdir(parents=True, exist_ok=True)
    plot(table.rows, table.path.with_suffix(".png"))
