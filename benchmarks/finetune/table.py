"""Rows of complete runs, what they come down to, and their plot."""

import json
import statistics
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.common.harness import Table
from benchmarks.common.plot import save
from benchmarks.converge.recipe import BF16, Recipe, Run
from benchmarks.converge.table import beside, curves_of

# what is compared, as `benchmarks.converge.recipe.VARIANTS` calls it
SYSTEMS = (BF16, "coat", "coat-fastest", "coat-smallest", "coat-recomputed-attention", "coat-e4m3")
COLORS = {system: f"C{i}" for i, system in enumerate(SYSTEMS)}


def parse(name: str) -> Run:
    """A run by its name, as `hf-coat-fastest-seed2`. Raises ValueError, naming the known ones."""
    kind, _, seed = name.partition("-seed")
    path, _, system = kind.partition("-")
    if path not in ("hf", "megatron") or system not in SYSTEMS or not (seed or "1").isdigit():
        raise ValueError(
            f"--runs {name}: expected hf- or megatron-, one of {', '.join(SYSTEMS)}, and -seedN or nothing"
        )
    return Run(kind, (system,), int(seed or 1))


def rows_of(runs: dict[str, Path]) -> list[dict]:
    """A row for each complete run, by path, system and seed, with the losses of BF16 on the same path."""
    found = {name: json.loads(beside(path, ".json").read_text()) for name, path in runs.items()}

    def place(name: str) -> tuple:
        run = parse(name)
        return run.kind.partition("-")[0], SYSTEMS.index(run.variants[0]), run.seed

    rows = []
    for name in sorted(found, key=place):
        run, one = parse(name), found[name]
        path = run.kind.partition("-")[0]
        conditions = dict(one["conditions"])
        steps = Recipe(**{field: conditions[field] for field in Recipe._fields}).steps
        row = {"path": path, "system": run.variants[0], "seed": run.seed, "steps": steps}
        row |= {"tokens": conditions.pop("tokens"), **one["result"]}
        if (same := found.get(f"{path}-{BF16}-seed{run.seed}")) is not None:
            row["over_bf16_same_seed"] = one["result"]["val_loss"] - same["result"]["val_loss"]
        rows.append(row | conditions | one["environment"])
    return rows


def summary(rows: list[dict]) -> list[dict]:
    """For each path and system, over seeds: the losses, their distance above BF16's, and the task."""
    groups: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for row in rows:
        groups[row["path"], row["system"]].append(row)
    lines = []
    for (path, system), group in groups.items():
        losses = [float(row["val_loss"]) for row in group]
        line = {"path": path, "system": system, "seeds": len(group)}
        line |= {"val_loss": statistics.mean(losses), "lowest": min(losses), "highest": max(losses)}
        if (base := groups.get((path, BF16))) is not None:
            line["nats_over_bf16"] = line["val_loss"] - statistics.mean(float(r["val_loss"]) for r in base)
        for name in ("cloze_start", "cloze"):
            line[name] = statistics.mean(float(row[name]) for row in group)
        lines.append(line)
    return lines


def plot(runs: dict[str, Path], path: Path) -> None:
    """For each path: validation losses over tokens, less BF16's of the same seed, and the task."""
    rows = rows_of(runs)
    paths = list(dict.fromkeys(row["path"] for row in rows))
    figure, panels = plt.subplots(
        len(paths), 3, figsize=(14, 4 * len(paths)), layout="constrained", squeeze=False
    )
    curves = curves_of(runs)
    for axes, way in zip(panels, paths, strict=True):
        drawn = set()
        for name, curve in curves.items():
            run = parse(name)
            if not run.kind.startswith(way):
                continue
            system = run.variants[0]
            style = {"color": COLORS[system], "marker": ".", "alpha": 0.8}
            label = {} if system in drawn else {"label": system}
            drawn.add(system)
            axes[0].plot(curve.keys(), curve.values(), **style, **label)
            same = curves.get(f"{way}-{BF16}-seed{run.seed}", {})
            if system != BF16 and (shared := [x for x in curve if x in same]):
                axes[1].plot(shared, [curve[x] - same[x] for x in shared], **style)
        if not axes[1].lines:
            axes[1].text(0.5, 0.5, f"no run of {BF16}", ha="center", transform=axes[1].transAxes)
        for line in summary([row for row in rows if row["path"] == way]):
            ends = [line["cloze_start"], line["cloze"]]
            axes[2].plot(("before", "after"), ends, color=COLORS[line["system"]], marker="o", alpha=0.8)
        axes[0].set(title=way, xlabel="10^6 tokens", ylabel="validation loss, nats per token")
        axes[1].set(xlabel="10^6 tokens", ylabel="nats above BF16 of the same seed")
        axes[1].axhline(0, color="black", linewidth=0.8)
        axes[2].set(ylabel="cloze, share of right answers (chance: 0.25)")
        axes[0].legend(fontsize="small")
    for one in panels.flat:
        one.grid(alpha=0.3)
    save(figure, path)


def publish(folder: Path, table: Table) -> None:
    """Adds a row for each complete run in the folder, and draws them all."""
    runs = {path.stem: path.with_suffix("") for path in sorted(folder.glob("*.json"))}
    rows = rows_of(runs)
    for row in rows:
        table.add(**row)
    for line in summary(rows):
        print("  ".join(f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items()))
    if rows:
        plot(runs, table.path.with_suffix(".png"))
