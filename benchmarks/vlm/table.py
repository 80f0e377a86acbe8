"""Rows and plot of complete runs."""

import json
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.common.harness import Table
from benchmarks.common.plot import save
from benchmarks.converge.recipe import Run
from benchmarks.converge.table import beside, rows_of
from coat_launch.report import read_metrics

PANELS = {
    "loss": "training loss, nats per digit",
    "val_loss": "held-out loss, nats per digit",
    "exact": "held-out numbers read without a mistake",
}


def plot(runs: dict[str, Path], path: Path) -> None:
    """Losses and exact matches over pictures."""
    figure, panels = plt.subplots(1, len(PANELS), figsize=(14, 4.5), layout="constrained")
    kinds = list(dict.fromkeys(Run.parse(name).kind for name in runs))
    drawn = set()
    for name, stem in runs.items():
        kind = Run.parse(name).kind
        batch = json.loads(beside(stem, ".json").read_text())["conditions"]["batch"]
        records = read_metrics(beside(stem, ".jsonl"))
        label = {} if kind in drawn else {"label": kind}
        drawn.add(kind)
        for axes, key in zip(panels, PANELS, strict=True):
            curve = {batch * r["step"] / 1e3: r[key] for r in records if key in r}
            style = {"linewidth": 0.8} if key == "loss" else {"marker": "."}
            axes.plot(
                curve.keys(), curve.values(), color=f"C{kinds.index(kind)}", alpha=0.8, **style, **label
            )
    for axes, title in zip(panels, PANELS.values(), strict=True):
        axes.set(xlabel="10^3 pictures", ylabel=title)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    save(figure, path)


def publish(folder: Path, table: Table) -> None:
    """Adds a row for each complete run in the folder, and draws them all."""
    runs = {path.stem: path.with_suffix("") for path in sorted(folder.glob("*.json"))}
    for row in rows_of(runs):
        # of a loss that goes to zero
        table.add(**{name: value for name, value in row.items() if not name.startswith("to_bf16")})
    if runs:
        plot(runs, table.path.with_suffix(".png"))
