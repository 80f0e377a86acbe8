"""Tables of docs/performance.md, and of runs within 80 GB on docs/fit.md."""

import functools
from collections.abc import Iterable

from benchmarks.common.harness import read_rows
from benchmarks.tables.blocks import Results, between, block, data, gb, table

SEVEN, SEVEN_ZERO3 = "train_7b_2gpu.csv", "train_7b_2gpu_zero3.csv"
NOT_MEASURED = "–"
# title, file, and what its rows at the same micro-batch have
SAME_BATCH = (
    ("7B, 2 × H200, ZeRO-2, 4 × 2048", SEVEN, {"way": "zero2", "micro_batch": 4}),
    ("7B, 2 × H200, ZeRO-3, 4 × 2048", SEVEN_ZERO3, {"micro_batch": 4}),
    ("7B, 4 × H200, ZeRO-3, 4 × 2048", "train_7b_4gpu.csv", {"micro_batch": 4}),
    ("8B, 2 × H200, ZeRO-2, 1 × 8192", "train_8b_2gpu.csv", {"way": "zero2"}),
    ("13B, 4 × H200, ZeRO-3, 2 × 2048", "train_13b_4gpu_two.csv", {"micro_batch": 2}),
    ("7B, 4 × H100, ZeRO-3, 2 × 2048", "train_7b_4gpu_h100.csv", {"way": "zero3", "micro_batch": 2}),
    ("13B, 4 × H100, ZeRO-3, 1 × 2048", "train_13b_4gpu_h100.csv", {"way": "zero3", "micro_batch": 1}),
    ("7B, 2 × H200, tensor parallel 2, 4 × 2048", SEVEN, {"way": "tp2", "micro_batch": 4}),
    ("7B, 4 × H100, tensor parallel 4, 4 × 2048", "train_7b_4gpu_tp4_h100.csv", {"micro_batch": 4}),
    ("13B, 4 × H100, tensor parallel 4, 1 × 2048", "train_13b_4gpu_tp4_h100.csv", {"micro_batch": 1}),
)
# title, file, and what its rows within 80 GB have
WITHIN_80_GB = (
    ("7B, 2 × H200, ZeRO-2", SEVEN, {"way": "zero2"}),
    ("7B, 2 × H200, ZeRO-3", SEVEN_ZERO3, {"way": "zero3"}),
    ("7B, 2 × H100, ZeRO-3", "train_7b_2gpu_h100.csv", {"way": "zero3"}),
    ("7B, 4 × H100, ZeRO-3", "train_7b_4gpu_h100.csv", {"way": "zero3"}),
    ("13B, 4 × H100, ZeRO-3", "train_13b_4gpu_h100.csv", {"way": "zero3"}),
)
LAYERS = {
    "BF16": "BF16",
    "BF16 torch.compile": "BF16, `torch.compile`",
    "torchao tensorwise": "torchao FP8, `torch.compile`",
    "TE delayed, cached": "TransformerEngine, weights cached",
    "ours": "COAT",
}


def _gains(pairs: Iterable[Iterable[dict]], peak: str = "peak_mb") -> list[str]:
    """Speed and peak memory of a pair's second system over its first: the least and the most of the pairs."""
    pairs = [*pairs]
    speeds = between([base["ms"] / own["ms"] for base, own in pairs], "{:.2f}×")
    return [speeds, between([own[peak] / base[peak] for base, own in pairs], "{:.2f}×")]


def _of(results: Results, file: str, systems: Iterable[str] = ("BF16", "COAT"), **where) -> list[dict]:
    return [results.row(file, system=system, **where) for system in systems]


def fastest(results: Results, file: str, system: str, **where) -> dict:
    """The row of the fastest micro-batch that fits within 80 GB."""
    rows = results.rows(file, system=system, limited=True, **where)
    return max(rows, key=lambda row: row.get("tokens_per_s_gpu", 0))


def tensor_parallel_runs(results: Results) -> list[tuple[dict, dict]]:
    """BF16 and COAT of each run of Llama-2-7B over tensor parallelism on two GPUs, 4 × 2048."""
    rows = [
        row
        for path in sorted(results.folder.glob("train_7b_2gpu*.csv"))
        for row in read_rows(path)
        if (row["way"], row["micro_batch"], row["limited"]) == ("tp2", 4, False)
    ]
    commits = dict.fromkeys(row["commit"] for row in rows)
    runs = ({row["system"]: row for row in rows if row["commit"] == commit} for commit in commits)
    found = ((run.get("BF16"), run.get("COAT", run.get("COAT, no graphs"))) for run in runs)
    return [(bf16, coat) for bf16, coat in found if bf16 and coat]


CASES_NOT_MEASURED = [
    [
        "RTX 40, RTX 50, L40S, B200",
        "kernels compile; none has run there",
        "not measured",
        "[versions](install.md)",
    ],
    ["LoRA", "not measured on a GPU", "activations only", "[LoRA](finetune.md#lora)"],
    ["several nodes with GPUs", "not measured", "not measured", "[several nodes](several_nodes.md)"],
]


@block("performance.md", "will it be faster")
def will_it_be_faster(results: Results) -> str:
    cases = {title: _of(results, file, **where, limited=False) for title, file, where in SAME_BATCH}
    zero = [pair for title, pair in cases.items() if title[:2] in ("7B", "8B") and "H200, ZeRO" in title]
    # the first process of a machine is slower than the second
    zero += [_of(results, "trainer.csv", order=2)]
    h100s = [pair for title, pair in cases.items() if "H100, ZeRO-3" in title]
    parallel = [pair for title, pair in cases.items() if "H100, tensor" in title]
    te = _of(results, SEVEN, ("TE FP8", "COAT"), way="zero2", micro_batch=4, limited=False)
    best = functools.partial(_fastest_over, results)
    seven, thirteen = "train_7b_4gpu_h100.csv", "train_13b_4gpu_h100.csv"
    recomputed = best(thirteen, "BF16, MLP recomputed")
    alone = results.row("train_7b_1gpu_h100.csv", system="COAT", layers=32, micro_batch=1, limited=False)
    layer = {row["layer"]: row["ms"] for row in results.rows("layer_7b.csv")}
    experts = [_of(results, "models_gpu.csv", shape=shape) for shape in ("qwen3-30b", "olmoe", "mixtral")]
    two = _of(results, "train_7b_2gpu_h100.csv", micro_batch=2, limited=False)
    states = results.row("adamw_states.csv", params="flat", optimizer="ours")["state_bytes"]
    same = "[same batch](#same-batch)"
    return table(
        ["your case", "speed over BF16", "peak memory over BF16", "data"],
        ["7B or 8B, all weights, ZeRO, two H200s", *_gains(zero), same],
        ["7B, ZeRO-3, two 80 GB H100s", *_gains([two]), data("train_7b_2gpu_h100.csv")],
        ["7B and 13B, ZeRO-3, four 80 GB H100s", *_gains(h100s), same],
        [
            "the same, each system at its fastest batch",
            f"7B {best(seven)}; 13B {best(thirteen)}, {recomputed} over BF16 with recompute",
            "80 GB for both",
            "[80 GB](fit.md#within-80-gb)",
        ],
        ["7B on one 80 GB H100", "BF16 does not fit", f"{gb(alone)} GB", data("train_7b_1gpu_h100.csv")],
        [
            "tensor parallelism, two H200s, four runs",
            *_gains(tensor_parallel_runs(results)),
            data("train_7b_2gpu_graphs.csv"),
        ],
        ["tensor parallelism, four H100s", *_gains(parallel), same],
        [
            "small layers as CUDA graphs (Qwen3-0.6B; not under ZeRO-3, dropout, recompute)",
            *_gains([_of(results, "models_small_h100.csv")], "peak_gb"),
            data("models_small_h100.csv"),
        ],
        [
            "experts (four layers of Qwen3-30B, OLMoE, Mixtral; one H200, no ZeRO)",
            *_gains(experts, "peak_gb"),
            data("models_gpu.csv"),
        ],
        ["you have TransformerEngine FP8 (7B, ZeRO-2): over it", *_gains([te]), data(SEVEN)],
        [
            "you compile BF16",
            f"one layer {layer['BF16 torch.compile'] / layer['ours']:.2f}×; whole models not measured",
            "as the layer",
            "[one layer](#where-the-gain-comes-from)",
        ],
        [
            "A100 or older: 8-bit optimizer states only; layers stay in BF16, activations too",
            "not measured; no gain from FP8",
            f"states take {states:.2f} instead of 8 bytes per parameter",
            data("adamw_states.csv"),
        ],
        *CASES_NOT_MEASURED,
    )


def _fastest_over(results: Results, file: str, base: str = "BF16") -> str:
    speeds = (fastest(results, file, s, way="zero3")["tokens_per_s_gpu"] for s in ("COAT", base))
    return f"{next(speeds) / next(speeds):.1f}×"


@block("performance.md", "same batch")
def same_batch(results: Results) -> str:
    systems = ("BF16", "TE FP8", "COAT")
    lines = []
    for title, file, where in SAME_BATCH:
        commit = results.row(file, system="COAT", limited=False, **where)["commit"]
        found = {r["system"]: r for r in results.rows(file, limited=False, commit=commit, **where)}
        speeds = [_speed(found.get(system)) for system in systems]
        peaks = [gb(row) if (row := found.get(s)) and "peak_mb" in row else NOT_MEASURED for s in systems]
        lines.append([data(file, title), *speeds, *peaks])
    names = ("BF16", "TransformerEngine", "COAT")
    units = ("tokens/s", "peak GB")
    return table(["", *(f"{name}, {unit}" for unit in units for name in names)], *lines)


def _speed(row: dict | None) -> str:
    if row is None:
        return NOT_MEASURED
    return f"{row['tokens_per_s_gpu']:,.0f}" if row.get("tokens_per_s_gpu") else "out of memory"


@block("fit.md", "80 GB")
def within_80_gb(results: Results) -> str:
    systems = {
        "BF16": "BF16",
        "BF16, MLP recomputed": "BF16, feed-forward recomputed",
        "TE FP8": "TransformerEngine",
        "COAT": "COAT",
        "COAT, smallest": 'COAT, "smallest"',
    }

    def cell(file: str, system: str, where: dict) -> str:
        rows = [r for r in read_rows(results.folder / file) if r["system"] == system]
        rows = [r for r in rows if all(r.get(name) == value for name, value in where.items())]
        if not any(r["limited"] for r in rows):
            # not tried within a limit: at one sequence it already failed
            failed = any("note" in r and r["micro_batch"] == 1 for r in rows)
            return "out of memory" if failed else NOT_MEASURED
        row = fastest(results, file, system, **where)
        return f"{_speed(row)} ({row['micro_batch']})" if row.get("tokens_per_s_gpu") else "out of memory"

    lines = (
        [data(file, title), *(cell(file, system, where) for system in systems)]
        for title, file, where in WITHIN_80_GB
    )
    return table(["tokens/s (sequences of 2048 a GPU)", *systems.values()], *lines)


@block("performance.md", "layer")
def layer(results: Results) -> str:
    files = {
        "layer_7b.csv": ("llama-2-7b", "7B, H200"),
        "layer_8b.csv": ("llama-3-8b", "8B, H200"),
        "layer_gpt.csv": ("gpt", "GPT with biases, H200"),
    }
    found = {
        file: {row["layer"]: row for row in results.rows(file, shape=shape)}
        for file, (shape, _) in files.items()
    }
    lines = (
        [
            title,
            *(f"{rows[name]['ms']:.2f}" for rows in found.values()),
            f"{found['layer_7b.csv'][name]['saved_h']:.1f}",
        ]
        for name, title in LAYERS.items()
    )
    heads = (f"{data(file, title)}, ms" for file, (_, title) in files.items())
    return table(["", *heads, "saved, h bytes per token (7B)"], *lines)


@block("performance.md", "where the gain comes from")
def where_the_gain_comes_from(results: Results) -> str:
    where = {"way": "zero2", "micro_batch": 4, "limited": False}
    rows = _of(results, SEVEN, ("BF16", "TE FP8", "COAT"), **where)
    alone = {row["layer"]: row["ms"] for row in results.rows("layer_7b.csv")}
    layers = [
        row["layers"] * alone[name] for row, name in zip(rows, ("BF16", "TE delayed", "ours"), strict=True)
    ]
    others = [row["compute_ms"] - own for row, own in zip(rows, layers, strict=True)]

    def said(values: Iterable[float]) -> str:
        return "{:.0f}, {:.0f} and {:.0f} ms".format(*values)

    return (
        f"With BF16, TransformerEngine and COAT a step of 7B takes {said(row['ms'] for row in rows)}. "
        f"Its {rows[0]['layers']} layers, each as measured alone, take "
        f"{said(layers)} of it. All other computation on the GPU takes {said(others)}. "
        f"({data(SEVEN, 'ZeRO-2, two H200s')}, {data('layer_7b.csv')})\n"
    )


EXPERTS = {
    "mixtral": "Mixtral, 8 experts",
    "gpt_oss_20b": "GPT-OSS-20B, 32",
    "olmoe": "OLMoE, 64",
    "qwen3_30b": "Qwen3-30B, 128",
    "deepseek_v3_ep32": "DeepSeek-V3, one of 32 GPUs, 8",
}


@block("performance.md", "experts")
def experts_of_a_layer(results: Results) -> str:
    """A line for each model and number of its tokens, with balanced loads."""
    file, lines = "experts_h200.csv", []
    names = (
        "transformers, BF16 grouped_mm",
        "TransformerEngine FP8",
        "torchao FP8",
        "COAT",
        "COAT, weights cached",
    )
    for model, title in EXPERTS.items():
        for tokens in sorted({row["tokens"] for row in results.rows(file, model=model)}):
            found = {
                row["layer"]: row for row in results.rows(file, model=model, tokens=tokens, skewed=False)
            }
            times = [
                f"{row['ms']:.1f}" if "ms" in (row := found.get(name, {})) else NOT_MEASURED for name in names
            ]
            stock, ours = found[names[0]], found["COAT"]
            faster = f"{stock['ms'] / ours['ms']:.2f}×"
            saved, peak = (f"{ours[key] / stock[key]:.2f}" for key in ("saved_mb", "peak_mb"))
            lines.append([title, f"{tokens:,}", *times, faster, saved, peak])
    head = [
        data(file, "model, experts"),
        "tokens of a GPU",
        "BF16 grouped, ms",
        "TransformerEngine",
        "torchao",
        "COAT",
    ]
    return table([*head, "weights cached", "over BF16", "saved bytes", "peak"], *lines)
