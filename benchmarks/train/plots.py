"""Peak memory against speed."""

from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.common.plot import save
from benchmarks.common.whole_models import MODELS, SYSTEMS


def plot(rows: list[dict], path: Path) -> None:
    """Peak memory against speed, a panel for each model and way; hollow where a system takes its largest."""
    shown = [
        row for row in rows if row.get("peak_mb") and row.get("tokens_per_s_gpu") and not row.get("note")
    ]
    titles = ("model", "way", "gpus", "layers", "device")
    panels = list(dict.fromkeys(tuple(row[name] for name in titles) for row in shown))
    if not panels:
        return
    columns = min(3, len(panels))
    figure, grid = plt.subplots(
        -(-len(panels) // columns),
        columns,
        figsize=(4.2 * columns + 2.5, 3.6 * -(-len(panels) // columns)),
        layout="constrained",
        squeeze=False,
    )
    points = {}
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for panel, axes in zip(panels, grid.flat, strict=False):
        for row in shown:
            if tuple(row[name] for name in titles) != panel:
                continue
            # more systems than matplotlib's own ten colors
            color = plt.colormaps["tab20"](list(SYSTEMS).index(row["system"]))
            at = (row["peak_mb"] / 1e3, row["tokens_per_s_gpu"])
            style = {"facecolors": "none"} if row["limited"] else {"facecolors": color}
            point = axes.scatter(*at, marker="o", edgecolors=color, **style)
            if not row["limited"]:
                points.setdefault(row["system"], point)
            axes.annotate(str(row["micro_batch"]), at, xytext=(4, 4), textcoords="offset points", size=7)
        model, way, gpus, layers, device = panel
        whole = "" if layers == MODELS[model].layers else f" of {MODELS[model].layers}"
        name = device.removeprefix("NVIDIA ").split()[0]
        axes.set(title=f"{model}, {way}, {gpus} × {name}, {layers}{whole} layers", xlabel="peak, GB")
        axes.set(ylabel="tokens/s and GPU")
        # from zero, with room for the number behind the last point
        axes.set(xlim=(0, 1.1 * axes.dataLim.xmax), ylim=(0, 1.1 * axes.dataLim.ymax))
        axes.title.set_size("medium")
    figure.legend(points.values(), points, loc="outside right upper", fontsize="small")
    save(figure, path)
