"""Tables of docs/models.md."""

from benchmarks.tables.blocks import Results, between, block, data, gb, table


@block("models.md", "gains")
def gains(results: Results) -> str:
    titles = {
        "llama3-8b": "Llama-3-8B",
        "qwen3-8b": "Qwen3-8B",
        "qwen3-30b": "Qwen3-30B, 128 experts",
        "olmoe": "OLMoE, 64 experts",
        "mixtral": "Mixtral, 8 experts",
        "gpt-oss-20b": "GPT-OSS-20B, 32 experts",
    }
    found = {title: results.rows("models_gpu.csv", shape=shape) for shape, title in titles.items()}
    for shape in ("qwen3-30b", "olmoe", "mixtral"):
        found[titles[shape]] += results.rows("models_gpu_32768.csv", shape=shape)
    found["Qwen3-0.6B, as CUDA graphs"] = results.rows("models_small_h100.csv")
    systems, lines = ("BF16", "BF16, Liger", "COAT"), []
    by_size = [
        (title, [row for row in rows if row["tokens"] == tokens])
        for title, rows in found.items()
        for tokens in sorted({row["tokens"] for row in rows})
    ]
    for title, rows in by_size:
        by_system, bf16 = {row["system"]: row for row in rows}, rows[0]
        cells = [
            f"{row[figure]:.1f}" if (row := by_system.get(system)) else "–"
            for figure in ("ms", "peak_gb")
            for system in systems
        ]
        gpu = bf16["device"].removeprefix("NVIDIA ").split()[0]
        lines.append([f"{bf16['layers']} layers of {title}, {bf16['tokens']:,.0f} tokens, {gpu}", *cells])
    heads = (f"{system}, {unit}" for unit in ("ms", "GB") for system in systems)
    small = found["Qwen3-0.6B, as CUDA graphs"]
    eager = next(row for row in small if row["system"] == "COAT, no CUDA graphs")
    return table(["one GPU", *heads], *lines) + (
        f"\nWithout CUDA graphs the small model waits for the CPU: COAT takes {eager['ms']:.1f} ms.\n"
    )


@block("models.md", "mixtures on two GPUs")
def mixtures_on_two_gpus(results: Results) -> str:
    file, lines = "expert_parallel_h200.csv", []
    models = {"qwen3-30b": "Qwen3-30B", "mixtral": "Mixtral"}
    ways = {"transformers": "`ep_size` of transformers", "AutoEP": "DeepSpeed's AutoEP"}
    for coat in results.rows(file, system="COAT"):
        where = {name: coat[name] for name in ("framework", "shape", "tokens")}
        bf16 = results.row(file, **where, system="BF16")
        name = f"{models[where['shape']]}, {ways.get(where['framework'], where['framework'])}"
        figures = (f"{row[key]:.1f}" for key in ("ms", "peak_gb") for row in (bf16, coat))
        lines.append([name, f"{where['tokens']:,}", *figures, f"{bf16['ms'] / coat['ms']:.2f}×"])
    heads = "tokens of a GPU", "BF16, ms", "COAT, ms", "BF16, GB", "COAT, GB", "faster"
    return table([data(file, "4 layers, 2 × H200"), *heads], *lines)


@block("models.md", "evaluation")
def evaluation(results: Results) -> str:
    lines, titles = [], {"llama3-8b": "Llama-3-8B", "qwen3-0.6b": "Qwen3-0.6B"}
    for shape, title in titles.items():
        # tests ran during the newer measurement: for single tokens, which wait for the CPU, the older counts
        for file, figure, what in (
            ("evaluation_h100.csv", "ms", "{tokens:,.0f} tokens, one H100"),
            ("evaluation.csv", "ms_next_token", "one more token for each of {rows:.0f} sequences, one H200"),
        ):
            rows = {row["system"]: row for row in results.rows(file, shape=shape)}
            found = [rows[system] for system in ("BF16", "COAT", "COAT, stock in evaluation")]
            name = f"{found[0]['layers']} layers of {title}, {what.format(**found[0])}"
            lines.append([name, *(f"{row[figure]:.1f}" for row in found)])
    return table(["without gradients: ms", "BF16", "COAT", 'COAT, "stock"'], *lines)


@block("models.md", "trainer")
def trainer(results: Results) -> str:
    """BF16 and COAT, of processes at the same place of a call."""
    lines = []
    for gpus, order in ((1, 1), (2, 2)):
        bf16, coat = (
            results.row("trainer.csv", system=system, gpus=gpus, order=order) for system in ("BF16", "COAT")
        )
        layers = "" if bf16["layers"] == 32 else f"{bf16['layers']} layers of "
        title = f"{layers}Llama-3-8B, {gpus} × H200, {bf16['micro_batch']} × {bf16['sequence']} tokens"
        speeds = [f"{row['tokens_per_s_gpu']:,.0f}" for row in (bf16, coat)]
        lines.append([title, *speeds, gb(bf16), gb(coat)])
    return table(["ZeRO-2", "BF16, tokens/s", "COAT, tokens/s", "BF16, peak GB", "COAT, peak GB"], *lines)


@block("models.md", "families")
def families(results: Results) -> str:
    rows = results.rows("models.csv")
    saved = between([row["COAT / BF16"] for row in rows], "{:.2f}")
    return (
        f"The layers of {len(rows)} small models of different families save {saved} of BF16's bytes "
        f"({data('models.csv', 'each family')}).\n"
    )
