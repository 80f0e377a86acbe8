"""A plan as stacked bars."""

from collections.abc import Sequence
from pathlib import Path

from coat_ds.plan.advice import Choice
from coat_ds.plan.errors import PlanError

# from what stays to what comes and goes
COLORS = {
    "weights": "#30506f",
    "masters": "#4f7ba3",
    "states": "#c8553d",
    "gradients": "#588b8b",
    "saved": "#e9a03b",
    "logits": "#f2d388",
    "gathered": "#8d6a9f",
    "buffers": "#9aa5b1",
    "copies": "#6b9a4e",
    "graphs": "#b3875f",
    "temporaries": "#d5d9de",
}
OVER = "#b00020"


def draw(choices: Sequence[Choice], title: str, limit: float, path: str | Path) -> None:
    """Writes a PNG: a bar for each system at its peak, and the GPU's memory, `limit` bytes, as a line.

    Raises PlanError where matplotlib is not installed, and where the file cannot be written.
    """
    try:
        import matplotlib

        matplotlib.use("agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise PlanError(
            "picture: matplotlib is not installed. pip install matplotlib, or drop the option."
        ) from error
    figure, axes = plt.subplots(figsize=(9.5, 1.6 + 0.5 * len(choices)), layout="constrained")
    rows = range(len(choices))
    left = [0.0] * len(choices)
    # what cannot be seen has no name in the legend
    least = 0.003 * max(choice.prediction.peak.total for choice in choices)
    used = [role for role in COLORS if any(getattr(c.prediction.peak, role) > least for c in choices)]
    hidden = [role for role in COLORS if role not in used]
    for role in (*used, *hidden):
        values = [getattr(choice.prediction.peak, role) / 1e9 for choice in choices]
        axes.barh(rows, values, left=left, color=COLORS[role], edgecolor="white", linewidth=0.5)
        left = [a + b for a, b in zip(left, values, strict=True)]
    most = max([limit / 1e9, *left])
    axes.axvline(limit / 1e9, color=OVER, linestyle="--", linewidth=1.2)
    for row, choice in zip(rows, choices, strict=True):
        text = f"{left[row]:.1f} GB, {choice.tokens_per_second:,.0f} tokens/s at best"
        axes.text(
            left[row] + 0.008 * most,
            row,
            text,
            va="center",
            size=8,
            color="black" if left[row] <= limit / 1e9 else OVER,
            # over the line
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )
    axes.annotate(
        f"{limit / 1e9:.0f} GB",
        (limit / 1e9, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        size=8,
        color=OVER,
    )
    axes.set_yticks(rows, [choice.system.name for choice in choices])
    axes.invert_yaxis()
    # room for the texts
    axes.set(xlabel="predicted peak of the fullest GPU, GB", xlim=(0, 1.38 * most))
    figure.suptitle(title, size=11)
    axes.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[role]) for role in used]
    figure.legend(
        handles, used, loc="outside lower center", ncols=min(6, len(used)), fontsize="small", frameon=False
    )
    try:
        figure.savefig(path, dpi=130)
    # a ValueError names a format that matplotlib does not know
    except (OSError, ValueError) as error:
        raise PlanError(
            f"picture: cannot write {path} ({error}). Name a PNG in a folder that can be written."
        ) from error
    finally:
        plt.close(figure)
