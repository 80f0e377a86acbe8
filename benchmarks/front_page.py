"""The README's table and picture: one model in BF16, in TransformerEngine's FP8 and with COAT."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from benchmarks.common.harness import RESULTS, read_rows
from benchmarks.converge.table import summary
from benchmarks.tables import filled

README = RESULTS.parents[1] / "README.md"
PICTURE = RESULTS.parents[1] / "docs/images/memory_and_speed.png"

MODELS, WAY, LOSSES = "train_7b_2gpu.csv", "zero2", "converge_300m.csv"
# a system of the whole models: its name here, its color, its runs to convergence
SHOWN = {
    "BF16": ("BF16", "#80868b", "bf16"),
    "TE FP8": ("TransformerEngine FP8", "#4f76a3", None),
    "COAT": ("COAT", "#d9480f", "coat"),
}
LIMIT_GB = 80
# the paper's GPUs
H100S = {"Llama-2-7B": "train_7b_4gpu_h100.csv", "Llama-2-13B": "train_13b_4gpu_h100.csv"}


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


def largest(results: Path, system: str) -> str:
    """The fastest micro-batch that was found within the limit of memory."""
    tried = [
        row
        for row in read_rows(results / MODELS)
        if row["way"] == WAY and row["limited"] and row["system"] == system
    ]
    fitting = [row for row in tried if row.get("tokens_per_s_gpu")]
    if not fitting:
        return "does not fit" if tried else "not measured"
    best = max(fitting, key=lambda row: row["tokens_per_s_gpu"])
    return f"{best['micro_batch']} sequences: {best['tokens_per_s_gpu']:,.0f} tokens/s"


def gains(results: Path, file: str) -> tuple[float, float]:
    """COAT's speed over BF16's under ZeRO-3: at the same micro-batch, and at the fastest that each has place
    for."""

    def fastest(system: str, limited: bool) -> float:
        where = (system, "zero3", limited)
        found = [r for r in read_rows(results / file) if (r["system"], r["way"], r["limited"]) == where]
        return max(row["tokens_per_s_gpu"] for row in found)

    equal, largest = (fastest("COAT", limited) / fastest("BF16", limited) for limited in (False, True))
    return equal, largest


def on_h100s(results: Path) -> str:
    """What COAT gains on the paper's GPUs."""
    equal, largest = zip(*(gains(results, file) for file in H100S.values()), strict=True)
    first, second = H100S
    return (
        f"[On four H100s](docs/performance.md#h100s) under ZeRO-3 COAT trains {first} {equal[0]:.1f} and "
        f"{second} {equal[1]:.1f} times as fast as BF16; at the fastest micro-batch that each has place for, "
        f"{largest[0]:.1f} and {largest[1]:.1f} times."
    )


def loss(results: Path, run: str | None) -> str:
    """Validation loss of the small model: the mean over seeds, and their spread."""
    found = {row["run"]: row for row in summary(read_rows(results / LOSSES))}
    if run not in found:
        return "not measured"
    row = found[run]
    if row["seeds"] == 1:
        return f"{row['val_loss']:.4f} (one seed)"
    return f"{row['val_loss']:.4f} ({row['seeds']} seeds: {row['lowest']:.4f} to {row['highest']:.4f})"


def table(results: Path) -> str:
    """What stands between the marks of the README: the table and its line of conditions."""
    rows = measured(results)
    base = rows["BF16"]
    lines = [
        "| Llama-2-7B | peak memory per GPU | tokens per second and GPU "
        f"| fastest micro-batch within {LIMIT_GB} GB | loss of a 125M model |",
        "|---|---|---|---|---|",
    ]
    for system, row in rows.items():
        name, _, run = SHOWN[system]
        lines.append(
            f"| {name} | {row['peak_mb'] / 1e3:.1f} GB ({row['peak_mb'] / base['peak_mb']:.2f}×) "
            f"| {row['tokens_per_s_gpu']:,.0f} ({row['tokens_per_s_gpu'] / base['tokens_per_s_gpu']:.2f}×) "
            f"| {largest(results, system)} | {loss(results, run)} |"
        )
    small = next(row for row in read_rows(results / LOSSES) if row["run"] == "coat")
    lines += [
        "",
        f"{base['gpus']} × {base['device']}, DeepSpeed ZeRO-{WAY[-1]}, {base['micro_batch']} × 2048 tokens a "
        f"GPU, torch {base['torch']}, triton {base['triton']}, {base['date']}, commit {base['commit']}; "
        'TransformerEngine with delayed scaling; COAT is `{"enabled": true}`. Loss: validation loss after '
        f"{small['tokens'] / 1e6:.0f} million tokens. {on_h100s(results)}",
    ]
    return "\n".join(lines) + "\n"


def page(readme: str, results: Path) -> str:
    """The README with the table of `results` between its marks. Raises ValueError if they are missing."""
    return filled(readme, {"front page": table(results)}, README.name)


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
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write(results: Path) -> None:
    """Fills the README's table and draws its picture."""
    README.write_text(page(README.read_text(), results))
    plot(results, PICTURE)
