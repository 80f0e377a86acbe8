"""Tables of the pages that have one each."""

from benchmarks.tables.blocks import Results, block, data, gb, percent, table


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
            f"step, 2^29 FP32 parameters, one H200, ms (a copy of as many bytes as COAT's: {copied:.2f})",
            *(f"{rows[name]['ms']:.2f}" for name in ("torch fused", "ours")),
        ],
        [
            "more memory in the step, MB",
            *(f"{rows[name]['peak_mb']:.3f}" for name in ("torch fused", "ours")),
        ],
    )
    torch = newer["ours"]["torch"].split("+")[0]
    return made + (
        f"\nWith torch {torch} and triton {newer['ours']['triton']} AdamW takes "
        f"{newer['torch fused']['ms']:.2f} ms and COAT {newer['ours']['ms']:.2f}. FusedAdam of "
        f"TransformerEngine {peer['transformer_engine']} with FP8 moments takes {peer['ms']:.0f} ms, and "
        f"{peer['peak_mb']:,.0f} MB more in the step, for one tensor of that size.\n"
    )


@block("megatron.md", "the optimizer")
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
        table(["seconds (processor seconds)", "installed", "torch", "COAT", "first step"], *lines)
        + f"\nTwo CPU cores, {measured}: `python -m benchmarks first_step`.\n"
    )


@block("deepspeed.md", "stage 2")
def stage_2(results: Results) -> str:
    rows = [
        results.row("train_7b_1gpu_zero2.csv", way=way, system=system)
        for system in ("COAT", "COAT, smallest")
        for way in ("zero1", "zero2")
    ]
    peaks = [f"{row['peak_mb'] / 1e3:.1f}" for row in rows]
    return (
        "**Where nothing divides gradients take stage 2**: on one GPU, or over tensor parallelism alone. "
        "When backward is done stage 1 holds all gradients and a copy of them, as many bytes as the weights "
        f"have. Llama-2-7B with 1 × 2048 tokens on one GPU took {peaks[0]} GB in stage 1 and {peaks[1]} in "
        f'stage 2, "smallest" {peaks[2]} and {peaks[3]}.\n'
    )


@block("deepspeed.md", "offload")
def offload(results: Results) -> str:
    ours, theirs = (
        results.row("adamw_cpu.csv", optimizer=name) for name in ("ours, C++", "DeepSpeedCPUAdam")
    )
    return (
        "**Offload.** Offloaded steps run in C++, which is compiled when it is first needed: "
        f"{ours['ns_per_parameter']:.1f} ns per parameter on {ours['threads']} CPU cores, beside "
        f"{theirs['ns_per_parameter']:.1f} of DeepSpeedCPUAdam, in {ours['state_bytes_per_parameter']:.2f} "
        f"bytes of state instead of {theirs['state_bytes_per_parameter']:.0f} "
        "(`python -m benchmarks adamw_cpu`).\n"
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


@block("faster.md", "keys")
def keys(results: Results) -> str:
    """What to change, by what a reader sees; gains and costs as far as they were measured."""
    layer = {row["layer"]: row for row in results.rows("layer_7b_blocks.csv")}
    ours, sqrt8, fast = (layer[name] for name in ("ours", "ours, 8-bit attention", "ours, fastest"))
    again = layer["ours, recomputed attention"]
    seven = {
        system: results.row("train_7b_2gpu.csv", system=system, way="zero2", micro_batch=4, limited=False)
        for system in ("COAT", "COAT, fastest", "COAT, smallest")
    }
    coat, smallest = seven["COAT"], seven["COAT, smallest"]
    eager, graphs = (
        results.row("train_7b_4gpu_graphs.csv", system=system, way="zero1", micro_batch=1)
        for system in ("COAT", "COAT, graphs")
    )
    recompute = {row["recompute"]: row for row in results.rows("recompute.csv")}
    full, compressed, without = (recompute[n] for n in ("BF16, full", "BF16, full, FP8 inputs", "COAT"))
    most, fewer = (
        results.row("train_13b_4gpu_tp4_flushes.csv", system="COAT", micro_batch=size) for size in (29, 26)
    )

    def slower(row: dict, base: dict) -> str:
        return percent(row["ms"] / base["ms"] - 1)

    def saved(row: dict) -> str:
        return f"{row['saved_h']:.1f} h bytes per token instead of {ours['saved_h']:.1f}"

    layers, whole = data("layer_7b_blocks.csv", "layer"), data("train_7b_2gpu.csv", "7B")
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
        ["batches of many lengths", "pad or pack them to one length", "layers run as CUDA graphs", "padding"],
        [
            "memory is left, ZeRO-0 to 2",
            '"fastest"',
            f"a {layers} {percent(1 - fast['ms'] / ours['ms'])} faster; {whole}'s step no faster",
            f"{gb(seven['COAT, fastest'])} GB instead of {gb(coat)}; [loss](numerics.md#pre-training)",
        ],
        [
            "the largest batch is slower than a smaller one",
            "a smaller batch, or ZeRO-2",
            f"{fewer['tokens_per_s_gpu']:,.0f} tokens/s with {fewer['micro_batch']} sequences, "
            f"{most['tokens_per_s_gpu']:,.0f} with {most['micro_batch']} "
            f"({data('train_13b_4gpu_tp4_flushes.csv', '13B')})",
            "",
        ],
        [
            "several processes share the CPU",
            "`OMP_NUM_THREADS=1`; torchrun sets it",
            "",
            "slow AdamW on the CPU",
        ],
        [
            "out of memory",
            '`"attention_format": "sqrt8"`',
            saved(sqrt8),
            f"a {layers} {slower(sqrt8, ours)} slower",
        ],
        [
            "out of memory",
            '`"attention_format": "recompute"`',
            saved(again),
            f"a {layers} {slower(again, ours)} slower",
        ],
        [
            "out of memory",
            '"smallest" (DeepSpeed)',
            f"{gb(smallest)} GB instead of {gb(coat)} ({whole})",
            f"{slower(smallest, coat)} slower; [loss](numerics.md#pre-training)",
        ],
        [
            "out of memory with gradient checkpointing",
            '`"checkpointing": {"compress": true}`',
            f"{compressed['kept_mb']:,.0f} MB saved instead of {full['kept_mb']:,.0f}",
            f"{percent(1 - compressed['tokens_per_s'] / full['tokens_per_s'])} slower",
        ],
        ["out of memory on one GPU", "ZeRO-2 instead of ZeRO-1", "[how much](deepspeed.md#zero)", ""],
        ["slow generation", '`"evaluation": "stock"`', "[BF16's time](huggingface.md#what-it-gains)", ""],
    )
