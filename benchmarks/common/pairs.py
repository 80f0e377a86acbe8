"""Runs of the same seeds, compared pair by pair."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence


def paired(
    rows: Sequence[Mapping], within: Sequence[str], by: Sequence[str], baseline: Sequence[object]
) -> list[dict]:
    """Mean validation loss of each arm, and its distance to the baseline of the same seeds.

    within: columns whose rows are compared with each other only. by: columns that name an arm. baseline: of
    their values, those of the arm that others are compared with. `error` is the mean's standard error, absent
    where there are fewer than two pairs.
    """
    arms: dict[tuple, dict[int, float]] = defaultdict(dict)
    for row in rows:
        arms[*(row[k] for k in within), *(row[k] for k in by)][row["seed"]] = row["val_loss"]
    found = []
    for arm, losses in arms.items():
        base = arms.get((*arm[: len(within)], *baseline), {})
        apart = [loss - base[seed] for seed, loss in losses.items() if seed in base]
        row = dict(zip((*within, *by), arm, strict=True))
        row |= {"seeds": len(losses), "val_loss": statistics.mean(losses.values())}
        if apart:
            row["to_baseline"] = statistics.mean(apart)
        if len(apart) > 1:
            row["error"] = statistics.stdev(apart) / len(apart) ** 0.5
        found.append(row)
    return found
