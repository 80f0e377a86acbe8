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

from benchmarks.common.harness import Table
from benchmarks.common.plot import save
from benchmarks.converge.recipe import BF16, CHANGES, RUNS, VARIANTS, Recipe, Run
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
    """The file of a run: `stem` with `suffix` behind it. Names of runs have dots in them."""
    return stem.with_name(stem.name + suffix)


def differences(path: Path, conditions: dict) -> list[str]:
    """Conditions in which a complete run differs from these."""
    made = json.loads(path.read_text())["conditions"]
    return [name for name, value in conditions.items() if made.get(name) != value]


def rows_of(runs: dict[str, Path]) -> list[dict]:
    """A row for each complete run, in the order of RUNS, beside BF16."""
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
    """Of each kind of run: mean and spread of the validation losses, and the mean's distance to BF16's."""
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
    """Of a mean of losses from the mean and from the range of others, in nats."""

    mean: float
    base: float
    nats: float
    above: float
    """Over the highest of the others; 0 within their range and below it."""


def distance(losses: Sequence[float], others: Sequence[float]) -> Distance:
    """Of the mean of `losses`; NaN among them stays NaN."""
    mean, base = statistics.mean(losses), statistics.mean(others)
    return Distance(mean, base, mean - base, 0.0 if mean <= max(others) else mean - max(others))


def claims(rows: list[dict]) -> list[str]:
    """Of each kind of run but BF16, whether what is claimed of COAT holds; nothing without runs of BF16."""
    losses: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        losses[row["run"]].append(float(row["val_loss"]))
    others = losses.pop(BF16, [])
    if not others or not losses:
        return []
    spread = f"{min(others):.4f} to {max(others):.4f}" if len(others) > 1 else "none"
    said = [
        f"Claimed: not above the spread of BF16's seeds, and at most {CLAIM:g} nat above their mean, "
        f"{statistics.mean(others):.4f}. Spread of {_seeds(others)}: {spread}."
    ]
    for kind, values in losses.items():
        to = distance(values, others)
        # one seed has no spread
        above = to.above if len(others) > 1 else 0.0
        holds = "holds" if to.nats <= CLAIM and above == 0 else "does not hold"
        beyond = f", {above:.4f} above the spread" if above else ""
        said.append(f"{kind}, {_seeds(values)}: {to.mean:.4f}, {to.nats:+.4f} nat{beyond}: {holds}.")
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
    """Validation losses over tokens, and their distance to BF16 of the same seed."""
    colors = {kind: f"C{i}" for i, kind in enumerate([*VARIANTS, *CHANGES])}
    curves = curves_of(runs)
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    drawn = set()
    for name, curve in curves.items():
        run = Run.parse(name)
        style = {"color": colors[run.kind], "marker": ".", "alpha": 0.8}
        label = {} if run.kind in drawn else {"label": run.kind}
        drawn.add(run.kind)
        after = {x: y for x, y in curve.items() if x > 0}
        panels[0].plot(after.keys(), after.values(), **style, **label)
        same = curves.get(f"{BF16}-seed{run.seed}", {})
        if run.kind != BF16 and (shared := [x for x in after if x in same]):
            panels[1].plot(shared, [100 * (after[x] / same[x] - 1) for x in shared], **style)
    panels[0].set(xlabel="10^6 tokens", ylabel="validation loss, nats per token")
    panels[1].set(xlabel="10^6 tokens", ylabel="distance to BF16 of the same seed, %")
    panels[1].axhline(0, color="black", linewidth=0.8)
    for axes in panels:
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    save(figure, path)


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
