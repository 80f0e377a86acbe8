"""Complete runs: where they lie, their rows, what they come down to, and their plot."""

import json
import math
import shutil
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.common.harness import Table
from benchmarks.common.plot import save
from benchmarks.converge.recipe import BF16, CHANGES, REMOVED, RUNS, VARIANTS, Recipe, Run
from coat_launch.report import read_metrics

# nats that COAT's mean loss may be above BF16's
CLAIM = 0.01


def complete_runs(folders: list[Path], conditions: dict) -> dict[str, Path]:
    """Where each complete run under these conditions lies, without suffix, the first folder first."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            if different := differences(path, conditions):
                print(f"{path}: other {', '.join(different)}; not counted", flush=True)
            else:
                found.setdefault(path.stem, path.with_suffix(""))
    return found


def beside(stem: Path, suffix: str) -> Path:
    """The file of a run: `stem` followed by `suffix`. Names of runs have dots in them."""
    return stem.with_name(stem.name + suffix)


def differences(path: Path, conditions: dict) -> list[str]:
    """Conditions in which a complete run differs from these."""
    made = json.loads(path.read_text())["conditions"]
    return [name for name, value in conditions.items() if made.get(name) != value]


def rows_of(runs: dict[str, Path]) -> list[dict]:
    """A row for each complete run, in the order of RUNS, with its distance to BF16."""
    results = {name: json.loads(beside(path, ".json").read_text()) for name, path in runs.items()}
    loss = {name: found["result"]["val_loss"] for name, found in results.items()}
    baseline = [value for name, value in loss.items() if Run.parse(name).kind == BF16]
    rows = []
    for name in sorted(results, key=lambda name: (RUNS.index(name) if name in RUNS else len(RUNS), name)):
        run, found = Run.parse(name), results[name]
        row = {"run": run.kind, "seed": run.seed, "steps": Recipe(**_recipe(found)).steps}
        row |= {"tokens": found["conditions"]["tokens"], **found["result"]}
        if baseline:
            row["to_bf16_mean"] = loss[name] / statistics.mean(baseline) - 1
        if (same := loss.get(f"{BF16}-seed{run.seed}")) is not None:
            row["to_bf16_same_seed"] = loss[name] / same - 1
        rows.append(row | {k: v for k, v in found["conditions"].items() if k != "tokens"})
        rows[-1] |= found["environment"]
    return rows


def _recipe(found: dict) -> dict:
    return {name: found["conditions"][name] for name in Recipe._fields}


def summary(rows: list[dict]) -> list[dict]:
    """For each kind of run: mean and spread of the validation losses, and the mean's distance to BF16's."""
    losses: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        losses[row["run"]].append(float(row["val_loss"]))
    baseline = statistics.mean(losses[BF16]) if losses[BF16] else math.nan
    return [
        {
            "run": kind,
            "seeds": len(values),
            "val_loss": statistics.mean(values),
            "lowest": min(values),
            "highest": max(values),
            "to_bf16": statistics.mean(values) / baseline - 1,
        }
        for kind, values in losses.items()
        if values
    ]


class Distance(NamedTuple):
    """Distance of a mean of losses from the mean and from the range of other losses, in nats."""

    mean: float
    base: float
    nats: float
    above: float
    """Over the highest of the others; 0 within their range and below it."""


def distance(losses: Sequence[float], others: Sequence[float]) -> Distance:
    """The distance of the mean of `losses` from `others`; a NaN among them stays NaN."""
    mean, base = statistics.mean(losses), statistics.mean(others)
    return Distance(mean, base, mean - base, 0.0 if mean <= max(others) else mean - max(others))


def claims(rows: list[dict]) -> list[str]:
    """For each kind of run except BF16, whether COAT's claim holds; nothing without runs of BF16."""
    of_seeds: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        of_seeds[row["run"]][row["seed"]] = float(row["val_loss"])
    base = of_seeds.pop(BF16, {})
    if not base or not of_seeds:
        return []
    others = list(base.values())
    spread = f"{min(others):.4f} to {max(others):.4f}" if len(others) > 1 else "none"
    said = [
        f"Claimed: not above the spread of BF16's seeds, and at most {CLAIM:g} nat above their mean, "
        f"{statistics.mean(others):.4f}. Spread of {_seeds(others)}: {spread}."
    ]
    for kind, losses in of_seeds.items():
        values = list(losses.values())
        to = distance(values, others)
        # one seed has no spread
        above = to.above if len(others) > 1 else 0.0
        holds = "holds" if to.nats <= CLAIM and above == 0 else "does not hold"
        beyond = f", {above:.4f} above the spread" if above else ""
        same = [loss - base[seed] for seed, loss in losses.items() if seed in base]
        # a few of BF16's seeds may lie far from the mean of all
        few = 0 < len(same) < len(base)
        paired = f", {statistics.mean(same):+.4f} to BF16 of the same seeds" if few else ""
        said.append(f"{kind}, {_seeds(values)}: {to.mean:.4f}, {to.nats:+.4f} nat{paired}{beyond}: {holds}.")
    return said


def _seeds(values: Sequence[float]) -> str:
    return f"{len(values)} seed{'s' * (len(values) > 1)}"


def curves_of(runs: dict[str, Path]) -> dict[str, dict[float, float]]:
    """The validation losses of each run, by 10^6 tokens."""
    curves = {}
    for name, stem in runs.items():
        made = json.loads(beside(stem, ".json").read_text())["conditions"]
        per_step = made["batch"] * made["seq_length"] / 1e6
        lines = [r for r in read_metrics(beside(stem, ".jsonl")) if "val_loss" in r]
        curves[name] = {per_step * r["step"]: r["val_loss"] for r in lines}
    return curves


def plot(runs: dict[str, Path], path: Path) -> None:
    """Validation losses over tokens, and their distance to those of BF16 of the same seed, or of FP32 moments
    where there is no BF16: single seeds, and bold their mean."""
    curves = curves_of(runs)
    order = [*VARIANTS, *CHANGES, *REMOVED]
    kinds = sorted({Run.parse(name).kind for name in curves}, key=order.index)
    base = next((kind for kind in kinds if kind == BF16 or "-fp32" in kind), None)
    figure, panels = plt.subplots(
        1, 2 if base else 1, figsize=(14, 5.5), layout="constrained", squeeze=False, sharex=True
    )
    losses, *distances = panels[0]
    for i, kind in enumerate(kinds):
        color = plt.cm.tab20(2 * i if i < 10 else 2 * i - 19)
        own = {
            run.seed: {x: y for x, y in curve.items() if x > 0}
            for run, curve in ((Run.parse(name), curve) for name, curve in curves.items())
            if run.kind == kind
        }
        label = f"{kind}, {_seeds(list(own))}"
        _lines(losses, list(own.values()), color, label)
        for axes in distances:
            apart = []
            for seed, curve in own.items():
                same = curves.get(f"{base}-seed{seed}", {})
                apart.append({x: 100 * (y / same[x] - 1) for x, y in curve.items() if x in same})
            if kind != base and any(apart):
                _lines(axes, [curve for curve in apart if curve], color)
    losses.set(xlabel="10^6 tokens", ylabel="validation loss, nats per token", yscale="log")
    losses.yaxis.set_major_formatter("{x:g}")
    losses.yaxis.set_minor_formatter("{x:g}")
    losses.legend(fontsize="small")
    for axes in distances:
        what = "BF16" if base == BF16 else "FP32 moments"
        axes.set(xlabel="10^6 tokens", ylabel=f"distance to {what} of the same seed, %")
        _narrow(axes)
        axes.axhline(0, color="black", linewidth=0.8)
    for axes in panels[0]:
        axes.grid(alpha=0.3)
    save(figure, path)


def _lines(axes: Axes, curves: list[dict[float, float]], color, label: str | None = None) -> None:
    """Draws the curve of each seed, and their mean where all of them have a value."""
    if len(curves) > 1:
        for curve in curves:
            axes.plot(curve.keys(), curve.values(), color=color, linewidth=0.8, alpha=0.5)
    shared = [x for x in curves[0] if all(x in curve for curve in curves)]
    mean = [statistics.mean(curve[x] for curve in curves) for x in shared]
    axes.plot(shared, mean, color=color, linewidth=2, marker=".", label=label)


def _narrow(axes: Axes) -> None:
    """Limits the axis to values after the first third; earlier ones are large, and say little of the end."""
    points = [point for line in axes.lines for point in line.get_xydata()]
    last = max((x for x, _ in points), default=0)
    late = [y for x, y in points if x > last / 3]
    if late:
        axes.set_ylim(min(*late, 0) - 0.05, max(*late, 0) + 0.05)


def publish(folder: Path, table: Table) -> None:
    """Adds a row for each complete run in the folder, and draws them all."""
    runs = {path.stem: path.with_suffix("") for path in sorted(folder.glob("*.json"))}
    rows = rows_of(runs)
    for row in rows:
        table.add(**row)
    for row in summary(rows):
        print("  ".join(f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    print(*claims(rows), sep="\n")
    if rows:
        plot(runs, table.path.with_suffix(".png"))


def carry(stem: Path, folder: Path) -> None:
    """Copies a run's files, complete or not, into a folder."""
    for suffix in (".jsonl", ".json"):
        source, target = beside(stem, suffix), beside(folder / stem.name, suffix)
        if source.exists() and not (target.exists() and target.samefile(source)):
            shutil.copyfile(source, target)
