"""Time against what layers keep."""

from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.common.plot import save


def plot(rows: list[dict], path: Path) -> None:
    """Time against saved bytes, a panel for each shape and a point for each layer."""
    timed = [row for row in rows if "saved_h" in row]
    shapes = list(dict.fromkeys(row["shape"] for row in timed))
    names = list(dict.fromkeys(row["layer"] for row in timed))
    markers = {"BF16": "s", "torchao": "^", "TE": "D", "ours": "o"}
    points = {}
    figure, panels = plt.subplots(
        1, len(shapes), figsize=(4 * len(shapes) + 2.5, 4), layout="constrained", squeeze=False
    )
    for row in timed:
        name, axes = row["layer"], panels[0][shapes.index(row["shape"])]
        marker = next(m for maker, m in markers.items() if name.startswith(maker))
        color = plt.cm.tab20(names.index(name))
        points[name] = axes.scatter(row["saved_h"], row["ms"], marker=marker, color=color)
    for shape, axes in zip(shapes, panels[0], strict=True):
        axes.set(title=shape, xlabel="saved for backward, h bytes per token", xlim=(0, None), ylim=(0, None))
    panels[0][0].set_ylabel("forward and backward, ms")
    figure.legend(points.values(), points, loc="outside right center", fontsize="small")
    save(figure, path)
