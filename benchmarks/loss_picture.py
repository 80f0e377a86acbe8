"""The picture of docs/numerics.md: losses of BF16 and COAT during training, and how far apart they are."""

import statistics
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.common.harness import RESULTS
from benchmarks.common.plot import save
from coat_launch.report import read_metrics

PICTURE = RESULTS.parents[1] / "docs/images/losses.png"
SEEDS = (1, 2, 3)
BF16, COAT = "#80868b", "#d9480f"
# title, the files of a run, million tokens of the last step, color
RUNS = (
    ("Pre-training, 125M, 300M tokens", "converge_300m/{}-seed{}.jsonl", 300, COAT),
    ("Pre-training, 1B, 46M tokens", "converge_1b_warmup/{}-seed{}.jsonl", 46, "#4f76a3"),
    ("Fine-tuning, 135M, 50M tokens", "finetune/hf-{}-seed{}.jsonl", 50, "#2b8a3e"),
)
CLAIM = 0.01


def drawn(results: Path) -> list:
    """For each run and seed: steps, and validation losses of BF16 and COAT at these."""
    found = []
    for _, files, _, _ in RUNS:
        for seed in SEEDS:
            bf16, coat = (_losses(results / files.format(run, seed)) for run in ("bf16", "coat"))
            steps = sorted(bf16.keys() & coat.keys())
            found.append([steps, *([losses[step] for step in steps] for losses in (bf16, coat))])
    return found


def _losses(path: Path) -> dict[int, float]:
    return {line["step"]: line["val_loss"] for line in read_metrics(path) if "val_loss" in line}


def plot(results: Path, path: Path) -> None:
    data = drawn(results)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    title, _, tokens, _ = RUNS[0]
    for seed in range(len(SEEDS)):
        steps, *losses = data[seed]
        for run, color, name in zip(losses, (BF16, COAT), ("BF16", "COAT"), strict=True):
            places = [step / steps[-1] * tokens for step in steps[1:]]
            left.plot(places, run[1:], color=color, lw=1.2, label="" if seed else f"{name}, 3 seeds")
    left.set(title=title, xlabel="million tokens", ylabel="validation loss, nats")
    for index, (title, _, _, color) in enumerate(RUNS):
        seeds = data[index * len(SEEDS) : (index + 1) * len(SEEDS)]
        steps = seeds[0][0]
        apart = [statistics.mean(coat[i] - bf16[i] for _, bf16, coat in seeds) for i in range(len(steps))]
        right.plot([100 * step / steps[-1] for step in steps], apart, "o-", ms=3, color=color, label=title)
    right.axhline(0, color="black", lw=1)
    right.axhline(CLAIM, color="black", lw=1, ls="--")
    right.text(100, CLAIM - 0.0017, "claim: at most 0.01", ha="right")
    right.set(title="COAT above BF16, mean of 3 seeds", xlabel="% of the training", ylabel="nats")
    right.set_ylim(-0.012, 0.032)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    save(figure, path, data)
