"""The README's table and picture: one model in BF16, in TransformerEngine's FP8 and with COAT."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from benchmarks.common.harness import RESULTS, read_rows
from benchmarks.common.plot import save
from benchmarks.converge.table import summary
from benchmarks.tables import filled

README = RESULTS.parents[1] / "README.md"
PICTURE = RESULTS.parents[1] / "docs/images/memory_and_speed.png"

MODELS, WAY, LOSSES = "train_7b_2gpu.csv", "zero2", "converge_300m.csv"
# a system of the whole models: its name here, its color
SHOWN = {
    "BF16": ("BF16", "#80868b"),
    "TE FP8": ("TransformerEngine FP8", "#4f76a3"),
    "COAT": ("COAT", "#d9480f"),
}
LIMIT_GB = 80
# the larger model, on GPUs that hold 80 GB
LARGER, RECOMPUTED = "train_13b_4gpu_h100.csv", "BF16, MLP recomputed"


def measured(results: Path) -> dict[str, dict]:
    """The row of each system at equal micro-batch. Raises ValueError unless one run measured them all."""
    rows = {
        row["system"]: row
        for row in read_rows(results / MODELS)
        if row["way"] == WAY and not row["limited"] and row["system"] in SHOWN
    }
    if missing := SHOWN.keys() - rows.keys():
        raise ValueError(
            f"{MODELS}: expected rows of {', '.join(sorted(missing))} with way {WAY}, found none"
        )
    if len({(row["commit"], row["command"], row["micro_batch"]) for row in rows.values()}) > 1:
        raise ValueError(f"{MODELS}: the rows of {', '.join(SHOWN)} with way {WAY} are of several runs")
    return {system: rows[system] for system in SHOWN}


def fastest(results: Path, system: str) -> float | None:
    """Tokens per second of the larger model at the fastest batch that a GPU holds; None if none fits.

    Raises ValueError if the system was not measured.
    """
    rows = [r for r in read_rows(results / LARGER) if (r["system"], r["way"]) == (system, "zero3")]
    if not rows:
        raise ValueError(f"{LARGER}: expected rows of {system} with way zero3, found none")
    return max((r["tokens_per_s_gpu"] for r in rows if r.get("tokens_per_s_gpu")), default=None)


def losses(results: Path) -> str:
    """Validation losses of the small model, means over seeds."""
    rows = {row["run"]: row for row in summary(read_rows(results / LOSSES))}
    bf16, coat = (rows[run] for run in ("bf16", "coat"))
    return f"BF16 {bf16['val_loss']:.4f}, COAT {coat['val_loss']:.4f} (means of {coat['seeds']} seeds)"


def table(results: Path) -> str:
    """What stands between the marks of the README: the table, and a line of conditions."""
    rows = measured(results)
    base, slowest = rows["BF16"], fastest(results, "BF16")
    lines = [
        "| | 7B: peak GB | 7B: tokens/s | 13B: tokens/s |",
        "|---|---|---|---|",
    ]
    for system, row in rows.items():
        speed = fastest(results, system)
        larger = f"{speed:,.0f} ({speed / slowest:.1f}×)" if speed else "out of memory"
        lines.append(
            f"| {SHOWN[system][0]} | {row['peak_mb'] / 1e3:.1f} ({row['peak_mb'] / base['peak_mb']:.2f}×) "
            f"| {row['tokens_per_s_gpu']:,.0f} ({row['tokens_per_s_gpu'] / base['tokens_per_s_gpu']:.2f}×) "
            f"| {larger} |"
        )
    recomputed = fastest(results, RECOMPUTED)
    lines.insert(3, f"| BF16, MLP recomputed | – | – | {recomputed:,.0f} ({recomputed / slowest:.1f}×) |")
    small = next(row for row in read_rows(results / LOSSES) if row["run"] == "coat")
    lines += [
        "",
        f"Per GPU, Megatron's GPTModel under DeepSpeed. Llama-2-7B: {base['gpus']} H200s, ZeRO-{WAY[-1]}, "
        f"{base['micro_batch']} × 2048 tokens. Llama-2-13B: 4 H100s of {LIMIT_GB} GB, ZeRO-3, each at its "
        "fastest batch. BF16 is not compiled. Loss of a 125M model after "
        f"{small['tokens'] / 1e6:.0f} million tokens: {losses(results)}.",
    ]
    return "\n".join(lines) + "\n"


def page(readme: str, results: Path) -> str:
    """The README with the table of `results` between its marks. Raises ValueError if they are missing."""
    return filled(readme, {"front page": table(results)}, README.name)


def drawn(results: Path) -> dict[str, list[float]]:
    """What the picture shows: peak in MB, and tokens per second."""
    return {name: [row["peak_mb"], row["tokens_per_s_gpu"]] for name, row in measured(results).items()}


def plot(results: Path, path: Path) -> None:
    """Bars of peak memory and of speed."""
    rows = measured(results)
    base, last = rows["BF16"], list(SHOWN)[-1]
    panels = (
        (
            "Peak GB per GPU",
            "less is better",
            {s: row["peak_mb"] / 1e3 for s, row in rows.items()},
            "{:.0f} GB",
        ),
        (
            "Tokens/s per GPU",
            "more is better",
            {s: row["tokens_per_s_gpu"] for s, row in rows.items()},
            "{:,.0f}",
        ),
    )
    figure, grid = plt.subplots(1, 2, figsize=(10, 3.1), layout="constrained")
    for axes, (title, unit, values, form) in zip(grid, panels, strict=True):
        for place, (system, value) in enumerate(values.items()):
            axes.barh(place, value, color=SHOWN[system][1], height=0.68)
            said = form.format(value)
            if system != "BF16":
                change = 100 * (value / values["BF16"] - 1)
                said += f"  ({'+' if change > 0 else '−'}{abs(change):.0f} %)"
            weight = "bold" if system == last else "normal"
            start = 0.02 * max(values.values())
            axes.text(start, place, said, va="center", color="white", weight=weight, fontsize="large")
        names = [SHOWN[system][0] for system in values] if axes is grid[0] else [""] * len(values)
        axes.set_yticks(range(len(values)), names, fontsize="large")
        axes.invert_yaxis()
        axes.set_title(f"{title}: {unit}", loc="left", weight="bold", fontsize="large", pad=10)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.tick_params(length=0, colors="#5f6368")
        axes.tick_params(axis="y", labelcolor="black")
        axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    grid[0].axvline(LIMIT_GB, color="black", linestyle="--", linewidth=1.2)
    grid[0].text(LIMIT_GB + 1.5, len(rows) - 1, f"an {LIMIT_GB} GB GPU\nends here", va="center")
    figure.suptitle(
        f"Training Llama-2-7B on two H200s (ZeRO-{WAY[-1]}, {base['micro_batch']} × 2048 tokens a GPU)",
        fontsize="large",
    )
    save(figure, path, drawn(results), dpi=150)


def write(results: Path) -> None:
    """Fills the README's table and draws its picture."""
    README.write_text(page(README.read_text(), results))
    plot(results, PICTURE)
