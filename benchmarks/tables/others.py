"""Tables of the pages that have few."""

import contextlib
import io
import json

from benchmarks.tables.blocks import DOCS, Results, block, data, gb, percent, table
from coat_ds.cli import main


@block("optimizer.md", "memory and time")
def memory_and_time(results: Results) -> str:
    rows = {row["optimizer"]: row for row in results.rows("adamw_states.csv", params="flat")}
    states = [results.row("converge.csv", run=run)["state_bytes_per_param"] for run in ("bf16", "coat")]
    copied = rows["copy"]["ms"]
    newer = {row["optimizer"]: row for row in results.rows("adamw_torch214.csv", params="flat")}
    peer = results.row("adamw_te.csv", optimizer="TE fp8")
    made = table(
        ["", "AdamW", "COAT"],
        [
            "states, bytes per parameter (125M model, norms in FP32 included)",
            *(f"{size:.3f}" for size in states),
        ],
        [
            f"step, 2^29 FP32 parameters, one H200, ms (a copy of COAT's bytes: {copied:.2f})",
            *(f"{rows[name]['ms']:.2f}" for name in ("torch fused", "ours")),
        ],
        [
            "more memory in the step, MB",
            *(f"{rows[name]['peak_mb']:.3f}" for name in ("torch fused", "ours")),
        ],
    )
    torch = newer["ours"]["torch"].split("+")[0]
    return made + (
        f"\nWith torch {torch} and triton {newer['ours']['triton']}: "
        f"AdamW {newer['torch fused']['ms']:.2f} ms, COAT {newer['ours']['ms']:.2f} ms. "
        f"FusedAdam of TransformerEngine {peer['transformer_engine']} with FP8 moments: {peer['ms']:.0f} ms, "
        f"and {peer['peak_mb']:,.0f} MB more in the step.\n"
    )


@block("optimizer.md", "the optimizer in Megatron")
def megatrons_optimizer(results: Results) -> str:
    names = {
        "Megatron's Adam": "TE FusedAdam",
        "Megatron's Adam, precision aware, FP8 states": "TE FusedAdam, FP8 states",
        "COAT": "COAT",
        "COAT, precision aware": "COAT, precision aware",
    }
    rows = [results.row("megatron_step.csv", optimizer=name) for name in names]
    return table(
        [f"{rows[0]['parameters'] / 1e9:.2f} billion parameters, one H200", *names.values()],
        ["step, ms", *(f"{r['step_ms']:.3g}" for r in rows)],
        [
            "held with weights, FP32 gradients and masters, bytes per parameter",
            *(f"{r['held_bytes_per_parameter']:.1f}" for r in rows),
        ],
        [
            "more in the step, bytes per parameter",
            *(f"{r['step_peak_bytes_per_parameter']:.1f}" for r in rows),
        ],
    )


@block("install.md", "first step")
def first_step(results: Results) -> str:
    rows = results.rows("first_step.csv")
    parts = ("torch", "coat", "first_step")
    lines = [
        [
            r["way"],
            f"`{r['installed']}`",
            *(f"{r[f'{part}_s']:.0f} ({r[f'{part}_cpu_s']:.0f})" for part in parts),
        ]
        for r in rows
    ]
    versions = ", ".join(
        f"{name.replace('_', '-')} {found[0]}"
        for name in ("torch", "deepspeed", "megatron_core", "transformers")
        if (found := [r[name] for r in rows if r[name] != "absent"])
    )
    measured = f"{rows[0]['date']}, commit {rows[0]['commit']}, {versions}"
    return (
        table(
            [
                "way; seconds to install and run (CPU seconds in parentheses)",
                "installed",
                "torch",
                "COAT",
                "first step",
            ],
            *lines,
        )
        + f"\nTwo CPU cores, {measured}: `python -m benchmarks first_step`.\n"
    )


@block("fit.md", "plan of 13B")
def plan_of_13b(results: Results) -> str:
    """What `coat plan` predicts: the only table that is not of the results."""
    options = "--vocabulary 32000 --gpus 4 --stage 3 --fit 80GB --json"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["plan", str(DOCS.parent / "configs/model_llama2_13b.json"), *options.split()])
    plan = json.loads(printed.getvalue())
    roles = ("masters", "states", "saved", "gathered")
    shown = ("BF16", "BF16, recompute", "COAT", "COAT, recompute", "COAT, streamed states", "COAT, offload")
    lines = []
    for row in plan["systems"]:
        chosen = row["system"] == plan["recommended"]["system"]
        if not chosen and row["system"] not in shown:
            continue
        lines.append(
            [
                f"**{row['system']}**" if chosen else row["system"],
                *(f"{row['roles'][role] / 1e9:.1f}" for role in roles),
                f"{row['peak_bytes'] / 1e9:.1f}",
                str(row["largest_micro_batch"]),
                f"{row['tokens_per_second_and_gpu']:,.0f}",
            ]
        )
    return table(["", *roles, "peak", "largest", "tokens/s"], *lines)


@block("fit.md", "one GPU")
def one_gpu(results: Results) -> str:
    ways = {
        "streamed, release": "in host memory; backward applies gradients",
        "resident, release": "on the GPU; backward applies gradients",
        "ZeRO-Offload": "DeepSpeed ZeRO-Offload, BF16",
    }
    models = {
        "llama2-7b": "Llama-2-7B",
        "llama2-13b": "Llama-2-13B",
        "qwen3-14b": "Qwen3-14B",
        "qwen3-32b": "Qwen3-32B",
    }
    order = [*models]
    lines = []
    for row in sorted(
        results.rows("one_gpu_h200.csv"), key=lambda row: (order.index(row["model"]), -row["layers"])
    ):
        whole = row["layers"] in (32, 40, 64)
        sequences = row["micro_batch"] * row["accumulation"]
        hidden = row.get("not_hidden_s")
        lines.append(
            [
                models[row["model"]] if whole else f"{row['layers']} layers of {models[row['model']]}",
                f"{sequences:.0f} × {row['sequence']:,.0f}",
                ways[row["system"]],
                f"{row['tokens_per_s']:,.0f}",
                f"{row['step_s']:.2f}",
                f"{hidden:.2f}" if hidden is not None else "–",
                f"{row['peak_gb']:.1f}",
                f"{row['host_gb']:.1f}",
            ]
        )
    heads = "tokens a step", "states", "tokens/s", "s a step", "s not hidden", "GPU GB", "host GB"
    return table([data("one_gpu_h200.csv", "model"), *heads], *lines)


@block("huggingface.md", "packed")
def packed(results: Results) -> str:
    layers = {"llama3-8b": "Llama-3-8B", "qwen3-8b": "Qwen3-8B"}
    documents = {
        "8 x 1024": "8 documents of 1,024 tokens",
        "log-normal": "32,768 tokens, lengths log-normal",
    }
    lines = []
    for layer, name in layers.items():
        for given, described in documents.items():
            stock, ours = (
                results.row("packed_8b_h200.csv", layer=layer, documents=given, system=system)
                for system in ("BF16 varlen", "COAT")
            )
            lines.append(
                [
                    f"{name}, {described}",
                    f"{stock['ms']:.1f}",
                    f"{ours['ms']:.1f}",
                    f"{stock['ms'] / ours['ms']:.2f}",
                    f"{stock['saved_mib']:,.0f}",
                    f"{ours['saved_mib']:,.0f}",
                ]
            )
    head = ["BF16, ms", "COAT, ms", "times as fast", "BF16 saves, MiB", "COAT saves, MiB"]
    return table([data("packed_8b_h200.csv", "a layer"), *head], *lines)


@block("fit.md", "stage 2")
def stage_2(results: Results) -> str:
    found = (results.row("train_7b_1gpu_zero2.csv", way=way, system="COAT") for way in ("zero1", "zero2"))
    peaks = [gb(row) for row in found]
    return (
        "Use ZeRO-2 if the data-parallel size is 1. ZeRO-1 keeps two copies of every gradient after "
        "backward, each as large as the weights. Llama-2-7B with 1 × 2048 tokens on one "
        f"GPU took {peaks[0]} GB in stage 1 and {peaks[1]} GB in stage 2.\n"
    )


@block("watch.md", "the cost")
def cost_of_watching(results: Results) -> str:
    names = {"h 1024": "8 layers of h 1024, as CUDA graphs", "h 4096": "2 layers of Llama-2-7B"}
    lines = []
    for layers, name in names.items():
        off, watched = (results.row("watch.csv", layers=layers, every=every) for every in (0.0, 100.0))
        usual, slowest = watched["median_ms"], watched["slowest_ms"]
        lines.append(
            [
                name,
                *(f"{ms:.1f}" for ms in (usual, slowest)),
                percent((slowest / usual - 1) / watched["every"], 1),
                *(f"{row['peak_mb'] / 1e3:.1f}" for row in (off, watched)),
            ]
        )
    head = ["", "a step, ms", "the step that is watched, ms", "cost of a reading every 100 steps"]
    return table([*head, "peak of memory, GB", "with readings, GB"], *lines)


FASTER_NOT_MEASURED = [
    [
        "several processes share the CPU",
        "`OMP_NUM_THREADS=1`; torchrun sets it",
        "",
        "slow AdamW on the CPU",
    ],
    [
        "slow generation",
        '`"evaluation": "stock"`',
        "[BF16's time](models.md#evaluation-and-generation)",
        "",
    ],
]


@block("faster.md", "keys")
def faster(results: Results) -> str:
    """What to change for speed, by what a reader sees; gains and costs as far as they were measured."""
    layer = {row["layer"]: row for row in results.rows("layer_7b_blocks.csv")}
    ours, fast = layer["ours"], layer["ours, fastest"]
    seven = whole_7b(results)
    eager, graphs = (
        results.row("train_7b_4gpu_graphs.csv", system=system, way="zero1", micro_batch=1)
        for system in ("COAT", "COAT, graphs")
    )
    masked, bare = (
        results.row("packed_8b_h200.csv", layer="llama3-8b", documents="log-normal", system=system)
        for system in ("BF16 sdpa", "COAT")
    )
    recompute = {row["recompute"]: row for row in results.rows("recompute.csv")}
    full, without = (recompute[n] for n in ("BF16, full", "COAT"))
    most, fewer = (
        results.row("train_13b_4gpu_tp4_flushes.csv", system="COAT", micro_batch=size) for size in (29, 26)
    )
    return table(
        ["you see", "change", "gain", "cost"],
        [
            "gradient checkpointing, which BF16 needed",
            "switch it off",
            f"{without['tokens_per_s']:,.0f} tokens/s; BF16 with it {full['tokens_per_s']:,.0f} "
            f"({data('recompute.csv', '24 layers of h 2048')})",
            f"{without['kept_mb']:,.0f} MB saved instead of {full['kept_mb']:,.0f}",
        ],
        [
            "the GPU waits for the CPU: few tokens, small layers",
            '`"cuda_graphs": true` ([when](#cuda-graphs))',
            f"{graphs['ms']:.0f} ms a step instead of {eager['ms']:.0f} "
            f"({data('train_7b_4gpu_graphs.csv', '7B, ZeRO-1, 1 × 2048')})",
            f"{gb(graphs)} GB instead of {gb(eager)}",
        ],
        ["batches of many lengths", "pad them to one length", "layers run as CUDA graphs", "padding"],
        [
            "packed documents or windows, with a mask",
            "[leave the mask out](huggingface.md#packed-batches-and-windows)",
            f"{bare['ms']:.1f} ms a layer; BF16 with a mask {masked['ms']:.1f} "
            f"({data('packed_8b_h200.csv', 'Llama-3-8B, 32,768 tokens')})",
            "",
        ],
        [
            "memory is left, ZeRO-0 to 2",
            '"fastest"',
            f"a {data('layer_7b_blocks.csv', 'layer')} {percent(1 - fast['ms'] / ours['ms'])} faster; "
            f"{data('train_7b_2gpu.csv', '7B')}'s step no faster",
            f"{gb(seven['COAT, fastest'])} GB instead of {gb(seven['COAT'])}; "
            "[loss](numerics.md#pre-training)",
        ],
        [
            "the largest batch is slower than a smaller one",
            "a smaller batch, or ZeRO-2",
            f"{fewer['tokens_per_s_gpu']:,.0f} tokens/s with {fewer['micro_batch']} sequences, "
            f"{most['tokens_per_s_gpu']:,.0f} with {most['micro_batch']} "
            f"({data('train_13b_4gpu_tp4_flushes.csv', '13B')})",
            "",
        ],
        *FASTER_NOT_MEASURED,
    )


FIT_NOT_MEASURED = [
    [
        "`states`",
        '`"optimizer": {"offload": "cpu"}` in the block',
        "all of them",
        "[copies in each step](#states-in-host-memory)",
    ],
    [
        "`gradients`, `weights`",
        "a higher ZeRO `stage`",
        "2 bytes per parameter each, divided by the GPUs",
        "more communication",
    ],
    [
        "`gradients`, on one GPU",
        "ZeRO-2 instead of ZeRO-1",
        "[a copy of the gradients](#zero-stage-on-one-gpu)",
        "none",
    ],
    [
        "`gathered`",
        "`stage3_max_live_parameters` and `stage3_max_reuse_distance` of 2.5e8",
        "the defaults hold 1e9 parameters of 2 bytes",
        "more gathers",
    ],
    [
        "`masters` and `states`",
        '`"offload_optimizer": {"device": "cpu"}`',
        "all of both",
        "[more copies in each step](#masters-in-host-memory)",
    ],
    [
        "masters in Megatron",
        "`--use-precision-aware-optimizer`",
        "[2 bytes per parameter](optimizer.md#memory-and-time)",
        "none",
    ],
    [
        "LoRA: inputs of adapters",
        "`autocast_adapter_dtype=False`",
        "[their FP32 copies](finetune.md#lora)",
        "none",
    ],
]


@block("fit.md", "keys")
def fit(results: Results) -> str:
    """What to change for memory, by the column of `coat plan` that is too large."""
    layer = {row["layer"]: row for row in results.rows("layer_7b_blocks.csv")}
    ours = layer["ours"]
    stock = results.row("layer_7b.csv", layer="BF16")
    states = [results.row("converge.csv", run=run)["state_bytes_per_param"] for run in ("bf16", "coat")]
    seven = whole_7b(results)
    coat, smallest = seven["COAT"], seven["COAT, smallest"]
    recompute = {row["recompute"]: row for row in results.rows("recompute.csv")}
    full, compressed = (recompute[n] for n in ("BF16, full", "BF16, full, FP8 inputs"))

    def attention(name: str) -> tuple[str, str]:
        row = layer[name]
        slower = percent(row["ms"] / ours["ms"] - 1)
        gain = f"{ours['saved_h']:.1f} → {row['saved_h']:.1f} h bytes per token and layer"
        return gain, f"a {data('layer_7b_blocks.csv', 'layer')} {slower} slower"

    return table(
        ["too large", "change", "gain", "cost"],
        [
            "`states`",
            '`"coat": {"enabled": true}`',
            f"{states[0]:.1f} → {states[1]:.1f} bytes per parameter of the shard",
            "[loss](numerics.md)",
        ],
        [
            "`saved`",
            "the same",
            f"{stock['saved_h']:.1f} → {ours['saved_h']:.1f} h bytes per token and layer "
            f"({data('layer_7b.csv', '7B')})",
            "[loss](numerics.md)",
        ],
        ["`saved`", '`"attention_format": "sqrt8"`', *attention("ours, 8-bit attention")],
        ["`saved`", '`"attention_format": "recompute"`', *attention("ours, recomputed attention")],
        [
            "`saved`",
            "[activation checkpointing](#activation-checkpointing)",
            "only the input of each decoder layer is saved",
            "a second forward pass",
        ],
        [
            "`saved`, with activation checkpointing",
            '`"fp8_activation_checkpointing": true`',
            f"{full['kept_mb']:,.0f} → {compressed['kept_mb']:,.0f} MB "
            f"({data('recompute.csv', '24 layers of h 2048')})",
            f"{percent(1 - compressed['tokens_per_s'] / full['tokens_per_s'])} slower",
        ],
        [
            "`masters`",
            '[BF16 masters](#bf16-masters); with 8-bit attention this is "smallest"',
            f'4 → 2 bytes per parameter of the shard; "smallest" {gb(coat)} → {gb(smallest)} GB '
            f"({data('train_7b_2gpu.csv', '7B')})",
            f"{percent(smallest['ms'] / coat['ms'] - 1)} slower; [loss](numerics.md#pre-training)",
        ],
        *FIT_NOT_MEASURED,
    )


def whole_7b(results: Results) -> dict[str, dict]:
    return {
        system: results.row("train_7b_2gpu.csv", system=system, way="zero2", micro_batch=4, limited=False)
        for system in ("COAT", "COAT, fastest", "COAT, smallest")
    }
