"""Errors by code, a panel for each model and beta2."""

import statistics
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.common.plot import save
from benchmarks.state_loop.loop import ALL

SHOWN = (0.95, 0.999)
DEFAULT = "ratio8, log8"
# per cent: what is above stands at the edge, and what is applied with its figure
EDGE = 200
STYLES = {
    "stored once": {"facecolors": "white", "edgecolors": "C0"},
    "applied, over many steps": {"color": "C3"},
}


def plot(rows: list[dict], path: Path) -> None:
    """The error of what is stored once and of what is applied over many steps, the least above."""
    rows = [row for row in rows if row["kind"] == ALL and row["beta2"] in SHOWN]
    models = list(dict.fromkeys((row["model"], row["after"]) for row in rows))

    def usual(code: str) -> float:
        return statistics.median(row["applied"] for row in rows if row["code"] == code)

    codes = sorted({row["code"] for row in rows}, key=usual)
    size = 3.5 + 2.4 * len(models), 9
    figure, panels = plt.subplots(
        len(SHOWN), len(models), figsize=size, layout="constrained", squeeze=False, sharex=True, sharey=True
    )
    for beta2, line in zip(SHOWN, panels, strict=True):
        for model, axes in zip(models, line, strict=True):
            axes.axhspan(codes.index(DEFAULT) - 0.4, codes.index(DEFAULT) + 0.4, color="0.92", zorder=0)
            for row in rows:
                if (row["model"], row["after"], row["beta2"]) == (*model, beta2):
                    _mark(axes, codes.index(row["code"]), 100 * row["stored"], 100 * row["applied"])
            axes.set(xscale="log", xlim=(0.1, EDGE * 1.5))
            axes.set_title(f"{model[0]}, after {model[1]}, β2 {beta2}", fontsize="medium")
            axes.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
            axes.grid(axis="x", alpha=0.3)
    panels[0, 0].set_yticks(range(len(codes)), codes)
    panels[0, 0].invert_yaxis()
    figure.supxlabel("error of the update, RMS, %", fontsize="medium")
    for label, style in STYLES.items():
        panels[0, 0].scatter([], [], label=label, **style)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    save(figure, path)


def _mark(axes: Axes, place: int, stored: float, applied: float) -> None:
    """A code's two errors, per cent."""
    axes.hlines(place, min(stored, EDGE), min(applied, EDGE), color="0.75", zorder=1)
    for value, style in zip((stored, applied), STYLES.values(), strict=True):
        axes.scatter(min(value, EDGE), place, **style)
    if applied > EDGE:
        place = {"xy": (EDGE, place), "xytext": (-6, 0), "textcoords": "offset points"}
        axes.annotate(f"{applied:,.0f}", **place, ha="right", va="center", fontsize="small")
