"""`coat plan` compared with measurements."""

import csv
import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import zero_gradients
from benchmarks.common.harness import read_rows
from benchmarks.common.whole_models import MODELS, SYSTEMS, WAYS, planned
from coat_ds import plan
from coat_ds.plan import Layout, Sizes, all_systems
from coat_ds.plan.memory import WORKSPACES
from coat_ds.plan.read import from_values

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
# of peaks
BOUND = 0.03

# before this commit COAT's layers were no units under ZeRO-3
NO_UNITS = {"da9ec18", "9851d86"}
# until then the steps of ZeRO 1 and 2 copied their gradients, but at these commits
COPIED_UNTIL, FLAT = "2026-11-27", {"c0a3b4c", "a342dac", "e2c1def"}
# Commits, layers and micro-batches over tensor parallelism, and in ZeRO-2, that "auto" launched then, and
# replays now.
LAUNCHED = {("c6ae134", 32, 4), ("758a4f1", 32, 4), ("758a4f1", 40, 3)}
LAUNCHED |= {("c0a3b4c", 32, 1), ("e2c1def", 32, 1)}
# rows that nothing can predict, and why
UNPREDICTED = {
    ("train_13b_4gpu", "zero3", "COAT", 40, 2): "extrapolated: layers of da9ec18, and those of 1edb649 added",
    ("train_13b_4gpu", "zero3", "COAT", 20, 2): "linear layers of da9ec18 saved their inputs under ZeRO-3",
    ("train_7b_2gpu", "zero2", "TE FP8, FP8 moments", 32, 4): "its loss is not finite, so no step was made",
}
UNPREDICTED |= {
    ("train_7b_4gpu", "zero3", f"COAT, {name}", 32, 4): "before da81a66 less was gathered ahead"
    for name in ("smallest", "recomputed attention", "smallest, recomputed attention")
}
# MB that an earlier case of the same process had left: Megatron's buffer for gathered hidden states, as large
# as BF16's 24 sequences wanted it, where 4 and 16 want less
_SEQUENCE = 2 * 2048 * 4096 / 1e6
LEFT = {
    ("train_7b_4gpu_h100", "tp4", "COAT", 32, size, "c6ae134"): (24 - size) * _SEQUENCE for size in (4, 16)
}


def measured() -> dict[tuple, dict]:
    """Rows with a peak, by file and case, less what an earlier case had left; of cases that were measured
    again, all."""
    found = {}
    for path in sorted(RESULTS.glob("train_*.csv")):
        for number, row in enumerate(read_rows(path)):
            if "peak_mb" in row:
                case = (path.stem, row["way"], row["system"], row["layers"], row["micro_batch"])
                case += (row["commit"][:7],)
                for name in ("peak_mb", "forward_peak_mb", "step_peak_mb"):
                    if name in row:
                        row[name] -= LEFT.get(case, 0)
                found[(*case, number)] = row
    return found


def is_flat(row: dict) -> bool:
    """Whether the row's code reduces gradients into the tensor that the step reads."""
    return row["date"] > COPIED_UNTIL or row["commit"][:7] in FLAT


def gpu_of(row: dict) -> plan.Gpu:
    return plan.GPUS["h100" if "H100" in row["device"] else "h200"]


def of_row(row: dict) -> tuple[Sizes, Layout, plan.System]:
    model, way, commit = MODELS[row["model"]], WAYS[row["way"]], row["commit"][:7]
    system = SYSTEMS[row["system"]]
    size, spread, plans = planned(model, row["layers"], way, row["gpus"], system, row["micro_batch"])
    launched = (commit, row["layers"], row["micro_batch"]) in LAUNCHED and way.stage < 3
    if launched and plans.coat.activations.cuda_graphs is None:
        activations = dataclasses.replace(plans.coat.activations, cuda_graphs=False)
        plans = dataclasses.replace(plans, coat=dataclasses.replace(plans.coat, activations=activations))
    spread = dataclasses.replace(spread, flat_gradients=is_flat(row))
    if way.stage == 3 and system.coat is not None and commit in NO_UNITS:
        plans = dataclasses.replace(plans, coat=dataclasses.replace(plans.coat, zero3_layer_units=False))
    return size, spread, plans


ROWS = measured()


def test_plan_is_compared_with_all_that_was_measured():
    assert len(ROWS) >= 75
    assert UNPREDICTED.keys() <= {key[:5] for key in ROWS} and LEFT.keys() <= {key[:6] for key in ROWS}


@pytest.mark.parametrize("key", [key for key in ROWS if key[:5] not in UNPREDICTED], ids=str)
def test_plan_peak_is_within_three_per_cent(key):
    row = ROWS[key]
    found = plan.predict(*of_row(row)).peak.total / 1e6
    assert found == pytest.approx(row["peak_mb"], rel=BOUND)


def test_plan_peaks_are_mostly_within_half_a_per_cent():
    """The bound of three leaves room for what a commit forgot to free; physics is nearer."""
    errors = sorted(
        abs(plan.predict(*of_row(row)).peak.total / 1e6 / row["peak_mb"] - 1)
        for key, row in ROWS.items()
        if key[:5] not in UNPREDICTED
    )
    assert errors[int(0.9 * len(errors))] < 0.005


def test_plan_predicts_each_phase_that_was_measured():
    """Forward's peak and the step's, not the largest of all alone."""
    looked = 0
    for key, row in ROWS.items():
        if key[:5] in UNPREDICTED or "forward_peak_mb" not in row or row["commit"][:7] == "1edb649":
            continue
        moments = {moment.moment: moment.total / 1e6 for moment in plan.predict(*of_row(row)).moments}
        if "module by module" not in row["system"]:
            # The plan takes a layer beyond `max_live` for gathered, DeepSpeed a part of one: half a layer of
            # 13B, in two copies of 2 bytes, is 0.6 GB of 34
            bound = 0.02 if row["way"] == "zero3" else 0.01
            assert moments["loss"] == pytest.approx(row["forward_peak_mb"], rel=bound), key
            looked += 1
        # at da9ec18 COAT's gradients were FP32 in ZeRO-3's step, and 515274f kept inputs of layers
        if row["commit"][:7] not in ("da9ec18", "515274f"):
            assert moments["step"] == pytest.approx(row["step_peak_mb"], rel=0.01), key
    assert looked > 40


# runs of benchmarks that plan's table does not have: their files, and who makes the layers, by a row's path
RUNS = {"bf16": "BF16", "coat": "COAT"} | {
    f"coat-{name.replace(' ', '-')}": f"COAT, {name}"
    for name in ("fastest", "smallest", "recomputed attention")
}
MAKERS = {"hf": "transformers", "megatron": "megatron"}
SMALL = Sizes(layers=12, hidden=768, ffn=2048, heads=12, groups=4, head_dim=64, vocabulary=32768)
SHAPES = {
    "converge.csv": SMALL,
    "converge_300m.csv": SMALL,
    "converge_1b_warmup.csv": Sizes(
        layers=16, hidden=2048, ffn=8192, heads=32, groups=8, head_dim=64, vocabulary=32768, tied=True
    ),
    "finetune.csv": Sizes(
        layers=30, hidden=576, ffn=1536, heads=9, groups=3, head_dim=64, vocabulary=49152, tied=True
    ),
}


@pytest.mark.parametrize("file", SHAPES)
def test_plan_of_runs_to_convergence_is_within_one_per_cent(file):
    """Of 1B parameters in four micro-batches, of 135M in two, whose small layers are recorded as CUDA graphs.
    Rows of one system differ by 1 % there."""
    looked = set()
    for row in read_rows(RESULTS / file):
        name = row.get("system", row.get("run"))
        size = dataclasses.replace(SHAPES[file], maker=MAKERS[row.get("path", "megatron")])
        assert size.parameters == row["parameters"]
        spread = Layout(
            micro_batch=row["micro_batch"],
            sequence=row["seq_length"],
            accumulation=row["batch"] // row["micro_batch"],
            stage=1,
        )
        if name in RUNS:
            found = plan.predict(size, spread, SYSTEMS[RUNS[name]].planned()).peak
            assert found.total / 1e6 == pytest.approx(row["peak_mb"], rel=0.01), row
            looked.add((row.get("path"), name))
    assert looked >= {(row.get("path"), name) for name in ("bf16", "coat")}


def test_plan_peaks_of_gradients_in_fp32():
    """Peaks of the fullest rank, over the workspaces of GEMMs, which were there before."""
    rows = [row for row in read_rows(RESULTS / "zero_gradients.csv") if "peak_mb" in row]
    for case in zero_gradients.CASES:
        key = case.stage, case.micro_batches, json.dumps(case.keys)
        ranks = [row for row in rows if (row["stage"], row["micro_batches"], row["keys"]) == key]
        flat = "fp32" in key[2] or is_flat(ranks[0])
        found = zero_gradients.predicted(case, zero_gradients.FULL, ranks[0]["ranks"], flat_gradients=flat)
        for part, name in (("all", "peak_mb"), ("step", "step_peak_mb")):
            planned = found[f"{part}_predicted_mb"] - WORKSPACES / 1e6
            assert planned == pytest.approx(max(row[name] for row in ranks), rel=0.01), (key, name)


def test_plan_of_a_step_in_which_the_allocator_gives_memory_back():
    """Of the eight that are timed. In a search the limit is 80 GB, else what the GPU has."""
    looked = {True: 0, False: 0}
    for key, row in ROWS.items():
        if "flushes" in row:
            limit = 80e9 if row["limited"] else gpu_of(row).memory
            too_full = plan.predict(*of_row(row)).with_room > limit
            assert (row["flushes"] >= 8) == too_full, key
            looked[too_full] += 1
    assert looked[True] >= 3 and looked[False] >= 20


def test_plan_of_a_transformers_model_under_trainer():
    """On one GPU, and on the first of several, whose part of the gradients is the first layers': not what the
    head's rank has."""
    shape = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    rows = read_rows(RESULTS / "trainer.csv")
    assert len([row for row in rows if row["gpus"] == 1]) >= 3
    for row in rows:
        model = from_values({"model_type": "llama", "num_hidden_layers": row["layers"], **shape})
        assert model.parameters == row["parameters"]
        spread = Layout(
            micro_batch=row["micro_batch"], sequence=row["sequence"], gpus=row["gpus"], stage=row["stage"]
        )
        spread = dataclasses.replace(spread, flat_gradients=is_flat(row))
        found, alone = plan.predict(model, spread, all_systems()[row["system"]]), row["gpus"] == 1
        largest = max(m.total for m in found.moments if alone or m.moment in ("loss", "step")) / 1e6
        assert largest == pytest.approx(row["peak_mb"], rel=0.01 if alone else BOUND), row


def test_plan_of_megatrons_own_loop():
    """Its first step, in MiB; BF16."""
    with (RESULTS / "megatron_main.csv").open(newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["system"] == "BF16")
    count = {name: int(row[name]) for name in ("gpus", "tensor", "pipeline", "micro_batch", "sequence")}
    model = Sizes(
        layers=8, hidden=2048, ffn=5632, heads=16, groups=16, head_dim=128, vocabulary=-(-32000 // 256) * 256
    )
    spread = Layout(
        framework="megatron", fp32_gradients=True, accumulation=int(row["micro_batches"]), **count
    )
    found = plan.predict(model, spread, all_systems()["BF16"]).peak.total
    assert found / 2**20 == pytest.approx(float(row["peak_mib_after_first"]), rel=BOUND)


def test_plan_roofline_is_below_every_measured_time():
    looked = 0
    for key, row in ROWS.items():
        if "compute_ms" not in row or key[:5] in UNPREDICTED:
            continue
        model, spread, system = of_row(row)
        time = plan.step_time(model, spread, system, gpu_of(row))
        busy = time.compute + time.optimizer
        assert 0.1 * row["compute_ms"] < busy < row["compute_ms"], key
        assert time.total < row["ms"], key
        # rates are those of 8,192 tokens: products of fewer are slower
        many = spread.micro_batch * spread.sequence >= 8192
        if many and row["way"] in ("zero1", "zero2") and row["system"].startswith("COAT"):
            assert busy > 0.8 * row["compute_ms"], key
        looked += 1
    assert looked > 30
