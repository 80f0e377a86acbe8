"""Errors by code, a panel for each model and beta2."""

from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.common.plot import save
from benchmarks.state_loop.loop import ALL

SHOWN = (0.95, 0.999)
DEFAULT = "ratio8, log8"


def plot(rows: list[dict], path: Path) -> None:
    """The error of what is stored once and of what is applied over many steps, by code."""
    rows = [row for row in rows if row["kind"] == ALL and row["beta2"] in SHOWN]
    models = list(dict.fromkeys((row["model"], row["after"]) for row in rows))
    codes = list(dict.fromkeys(row["code"] for row in sorted(rows, key=lambda row: -row["beta2"])))
    figure, panels = plt.subplots(
        len(SHOWN),
        len(models),
        figsize=(3.5 + 2.3 * len(models), 9),
        layout="constrained",
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    for beta2, line in zip(SHOWN, panels, strict=True):
        for (model, after), axes in zip(models, line, strict=True):
            chosen = [
                row for row in rows if (row["model"], row["after"], row["beta2"]) == (model, after, beta2)
            ]
            places = [codes.index(row["code"]) for row in chosen]
            stored, applied = ([100 * row[name] for row in chosen] for name in ("stored", "applied"))
            axes.hlines(places, stored, applied, color="0.75", zorder=1)
            axes.scatter(stored, places, facecolors="white", edgecolors="C0", label="stored once")
            axes.scatter(applied, places, color="C3", label="applied, over many steps")
            axes.axhspan(codes.index(DEFAULT) - 0.5, codes.index(DEFAULT) + 0.5, color="0.93", zorder=0)
            axes.set(xscale="log", title=f"{model} after {after}, β2 {beta2}")
            axes.title.set_fontsize("medium")
            axes.grid(axis="x", alpha=0.3)
    panels[0, 0].set_yticks(range(len(codes)), codes)
    panels[0, 0].invert_yaxis()
    for axes in panels[-1]:
        axes.set_xlabel("error of the update, RMS, %")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    save(figure, path)
