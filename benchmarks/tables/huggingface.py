"""Tables of docs/models.md."""

from benchmarks.tables.blocks import Results, block, gb, table


@block("models.md", "gains")
def gains(results: Results) -> str:
    lines = []
    titles = {
        "llama3-8b": "Llama-3-8B",
        "qwen3-8b": "Qwen3-8B",
        "qwen3-30b": "Qwen3-30B, 128 experts",
    }
    for shape, title in titles.items():
        rows = {r["system"]: r for r in results.rows("models_gpu.csv", shape=shape)}
        cells = [
            f"{rows[s]['ms']:.1f}; {rows[s]['peak_gb']:.1f}" if s in rows else "not run"
            for s in ("BF16", "BF16, Liger", "COAT")
        ]
        bf16 = rows["BF16"]
        lines.append([f"{bf16['layers']} layers of {title}, {bf16['tokens']:,.0f} tokens", *cells])
    return table(["one H200: ms; peak GB above the weights", "BF16", "BF16, Liger", "COAT"], *lines)


@block("models.md", "small models")
def small_models(results: Results) -> str:
    rows = {row["system"]: row for row in results.rows("models_small_h100.csv")}
    systems = {"BF16": "BF16", "COAT, no CUDA graphs": "COAT, eager", "COAT": "COAT"}
    found, first = [rows[system] for system in systems], rows["BF16"]
    title = f"{first['layers']} layers of Qwen3-0.6B, {first['tokens']:,.0f} tokens, one H100"
    return table(
        [title, *systems.values()],
        ["forward and backward, ms", *(f"{row['ms']:.1f}" for row in found)],
        ["peak GB above the weights, with what graphs hold", *(f"{row['peak_gb']:.1f}" for row in found)],
    )


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
    rows, ordinals = results.rows("trainer.csv"), ("", "first", "second", "third")
    names = ["BF16", *(name for name in dict.fromkeys(row["system"] for row in rows) if name != "BF16")]

    def of(gpus: int) -> str:
        found = [row for row in rows if row["gpus"] == gpus]
        first = found[0]
        lines = [
            [r["system"], ordinals[r["order"]], f"{r['ms']:.0f}", f"{r['tokens_per_s_gpu']:,.0f}", gb(r)]
            for name in names
            for r in found
            if r["system"] == name
        ]
        layers = "" if first["layers"] == 32 else f"{first['layers']} layers of "
        title = (
            f"{layers}Llama-3-8B under Trainer, ZeRO-{first['stage']}, {gpus} × H200, "
            f"{first['micro_batch']} × {first['sequence']} tokens"
        )
        return table(
            [title, "process of its call", "ms a step", "tokens per second and GPU", "peak GB"], *lines
        )

    return of(1) + "\n" + of(2)


FAMILIES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "mistral": "Mistral, sliding window",
    "qwen3": "Qwen3",
    "gemma2": "Gemma 2, eager attention",
    "gemma3": "Gemma 3",
    "phi3": "Phi-3",
    "llava": "LLaVA, image and text layers",
    "gpt2": "GPT-2",
    "gpt_neox": "GPT-NeoX",
    "opt": "OPT",
    "mixtral": "Mixtral, 4 experts",
    "qwen3_moe": "Qwen3-MoE, 4 experts",
    "qwen3_moe_grouped": "Qwen3-MoE, 24 experts",
    "bert": "BERT",
    "vit": "ViT",
    "siglip": "SigLIP",
}


@block("models.md", "families")
def families(results: Results) -> str:
    rows = {row["family"]: row for row in results.rows("models.csv")}
    if rows.keys() != FAMILIES.keys():
        raise ValueError(f"models.csv: expected the families {', '.join(FAMILIES)}; found {', '.join(rows)}")
    lines = [
        [
            name,
            f"{rows[family]['BF16 bytes']:,.0f}",
            f"{rows[family]['COAT / BF16']:.2f}×",
            f"{rows[family]['COAT, 8-bit attention / BF16']:.2f}×",
        ]
        for family, name in FAMILIES.items()
    ]
    return table(
        ["saved by the layers of a small model, bytes a token", "BF16", "COAT", "COAT, 8-bit attention"],
        *lines,
    )
