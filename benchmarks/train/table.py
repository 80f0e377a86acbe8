"""Rows as they stand in the table: with what is predicted, and of whole models by extrapolation."""

import torch

from benchmarks.common.harness import Table
from benchmarks.common.whole_models import (
    MODELS,
    SYSTEMS,
    WAYS,
    Job,
    planned,
    predict,
    predicted_columns,
)
from benchmarks.train.search import Case, identity
from coat_ds.plan.advice import largest_micro_batch

# dense BF16 GEMMs, by what the name of the device holds; FP8 rows are rated by the same figure
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12}
# what rows of several numbers of layers share
LINE = ("model", "way", "system", "micro_batch")


def published(row: dict, gpus: int) -> dict:
    """A row as it stands in the table: with speed, and with the predicted and the measured bytes."""
    model, way = MODELS[row["model"]], WAYS[row["way"]]
    made = {"model": row["model"], "way": row["way"], "gpus": gpus, **row}
    if "ms" not in row:
        return made
    layers, micro_batch, seconds = row["layers"], row["micro_batch"], 1e-3 * row["ms"]
    made["tokens_per_s_gpu"] = micro_batch * model.layer.sequence / way.tensor / seconds
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    if peak := next((value for part, value in PEAK_FLOPS.items() if part in name), None):
        made["mfu"] = model.flops(layers, micro_batch) / way.tensor / seconds / peak
    expected = predict(model, layers, way, gpus, SYSTEMS[row["system"]], micro_batch)
    made |= predicted_columns(expected)
    return {name: value for name, value in made.items() if value == value}


def largest(job: Job, gpus: int, limit: float) -> int:
    """The largest micro-batch within `limit` bytes, as `coat plan` has it; 0 if none."""
    parts = planned(MODELS[job.model], job.layers, WAYS[job.way], gpus, SYSTEMS[job.system], job.micro_batch)
    return largest_micro_batch(*parts, limit)


def extrapolate(
    model: str, way: str, system: str, micro_batch: int, gpus: int, rows: list[dict]
) -> dict | None:
    """The row of the whole model, on the line through the two largest numbers of layers.

    Where only one was measured, the peak alone: with what is predicted for the layers that lack.
    """
    layers = MODELS[model].layers
    points = {
        row["layers"]: row
        for row in rows
        if tuple(row[name] for name in LINE) == (model, way, system, micro_batch)
        and not row["limited"]
        and "ms" in row
    }
    if not points or layers in points:
        return None
    whole = identity(Case(Job(model, way, system, layers, micro_batch), micro_batch, False))
    *lower, (n1, high) = sorted(points.items())
    if lower:
        n0, low = lower[-1]
        linear = {
            name: value + (layers - n1) * (value - low[name]) / (n1 - n0)
            for name, value in high.items()
            if name in low and name.endswith(("ms", "_mb")) and "predicted" not in name
        }
        return whole | {"extrapolated_from": f"{n0} and {n1} layers"} | linear

    def peak_of(count: int) -> float:
        return predict(MODELS[model], count, WAYS[way], gpus, SYSTEMS[system], micro_batch).peak.total / 1e6

    if not high["peak_mb"]:
        return None
    peak = high["peak_mb"] + peak_of(layers) - peak_of(n1)
    return whole | {"extrapolated_from": f"{n1} layers and the plan", "peak_mb": peak}


def plan(jobs: list[Job], gpus: int, micro_batches: list[int], table: Table) -> None:
    """Adds what is predicted, measured nowhere."""
    for job in jobs:
        for micro_batch in micro_batches:
            model, way = MODELS[job.model], WAYS[job.way]
            expected = predict(model, job.layers, way, gpus, SYSTEMS[job.system], micro_batch)
            baseline = predict(model, job.layers, way, gpus, SYSTEMS["BF16"], micro_batch)
            table.add(
                model=job.model,
                way=job.way,
                gpus=gpus,
                system=job.system,
                layers=job.layers,
                micro_batch=micro_batch,
                **predicted_columns(expected),
                bf16_to_this=baseline.peak.total / expected.peak.total,
            )
