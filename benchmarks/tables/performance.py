"""Tables of docs/performance.md."""

import functools
import statistics
from collections.abc import Iterable

from benchmarks.common.harness import read_rows
from benchmarks.common.whole_models import WAYS
from benchmarks.tables.blocks import Results, between, block, bullets, gb, percent, table

SYSTEMS = {
    "BF16": "BF16",
    "BF16, MLP recomputed": "BF16, feed-forward recomputed",
    "TE FP8": "TransformerEngine FP8",
    "COAT": "COAT",
    "COAT, smallest": "COAT, smallest",
}
SEVEN, ZERO3 = "train_7b_2gpu.csv", "train_7b_2gpu_zero3.csv"
# title, the files in which systems are looked for, the first that has one; and what the rows have
MODELS = (
    ("Llama-2-7B, 2 GPUs, ZeRO-1, 4 × 2048 tokens a rank", [SEVEN], {"way": "zero1", "micro_batch": 4}),
    ("the same, ZeRO-2", [SEVEN], {"way": "zero2", "micro_batch": 4}),
    ("ZeRO-2, fastest within 80 GB", [SEVEN], {"way": "zero2", "limited": True}),
    ("ZeRO-3, 4 × 2048", [ZERO3, SEVEN], {"way": "zero3", "micro_batch": 4}),
    ("ZeRO-3, fastest within 80 GB", [ZERO3], {"way": "zero3", "limited": True}),
    ("tensor parallel 2, sequence parallel, 4 × 2048", [SEVEN], {"way": "tp2", "micro_batch": 4}),
    ("the same, fastest within 80 GB", [SEVEN], {"way": "tp2", "limited": True}),
    ("one GPU, 4 × 2048", ["train_7b_1gpu.csv"], {"micro_batch": 4}),
    ("4 GPUs, ZeRO-3, 4 × 2048", ["train_7b_4gpu.csv"], {"micro_batch": 4}),
    ("Llama-3-8B, 2 GPUs, ZeRO-2, 1 × 8192 a rank", ["train_8b_2gpu.csv"], {"way": "zero2"}),
    ("tensor parallel 2, sequence parallel, 1 × 8192", ["train_8b_2gpu.csv"], {"way": "tp2"}),
    ("Llama-2-13B, 4 GPUs, ZeRO-3, 1 × 2048", ["train_13b_4gpu.csv"], {"layers": 40, "micro_batch": 1}),
    ("the same, 2 × 2048", ["train_13b_4gpu_two.csv"], {"micro_batch": 2}),
    (
        "tensor parallel 4, sequence parallel, 2 × 2048",
        ["train_13b_4gpu_tp4_two.csv"],
        {"way": "tp4", "micro_batch": 2},
    ),
    (
        "13B with 10 of 40 layers, 2 GPUs, ZeRO-3, 2 × 2048",
        ["train_13b_2gpu.csv"],
        {"layers": 10, "micro_batch": 2},
    ),
    ("13B with 20 of 40 layers, 4 GPUs, ZeRO-3, 2 × 2048", ["train_13b_4gpu.csv"], {"layers": 20}),
)


@block("performance.md", "whole models")
def whole_models(results: Results) -> str:
    head = ["tokens per second and GPU; peak GB", *SYSTEMS.values()]
    return _starred(table(head, *(_line(results, *model, SYSTEMS) for model in MODELS)))


def _starred(found: str) -> str:
    """A table, and what its stars say."""
    return found + ("\n\\* in another run than the row's COAT.\n" if "\\*" in found else "")


def _line(
    results: Results,
    title: str,
    files: list[str],
    where: dict,
    systems: Iterable[str],
    best: str = "tokens_per_s_gpu",
) -> list[str]:
    """Of a table with a column for each system. `best`: of which rows within a limit show the most."""
    wanted = {"limited": False} | where
    commit = results.row(files[0], system="COAT", **wanted)["commit"]
    return [title, *(_cell(results, files, system, wanted, commit, best) for system in systems)]


def _cell(results: Results, files: list[str], system: str, where: dict, commit: str, best: str) -> str:
    for file in files:
        found = [r for r in read_rows(results.folder / file) if r["system"] == system]
        found = [r for r in found if all(r.get(k) == v for k, v in where.items())]
        if found:
            break
    else:
        return ""
    fits = [r for r in found if r.get("tokens_per_s_gpu")]
    if not fits or not where["limited"] and fits[-1] is not found[-1]:
        tried = ", ".join(str(size) for size in sorted({r["micro_batch"] for r in found}))
        return f"does not fit (tried: {tried})" if where["limited"] else "out of memory"
    row = max(fits, key=lambda r: r[best]) if where["limited"] else fits[-1]
    size = row["micro_batch"]
    batch = f"{size} sequence{'s' * (size > 1)}: " if where["limited"] else ""
    elsewhere = "" if row["commit"] == commit else " \\*"
    return f"{batch}{row['tokens_per_s_gpu']:,.0f}; {gb(row)}{elsewhere}"


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


@block("performance.md", "notes on whole models")
def notes(results: Results) -> str:
    runs = tensor_parallel_runs(results)
    graphs = results.rows("train_7b_2gpu_graphs.csv", way="tp2", system="COAT, graphs")
    without = results.row("train_7b_2gpu_graphs.csv", way="tp2", system="COAT")
    four = {r["system"]: r for r in results.rows("train_7b_4gpu.csv", way="zero3", micro_batch=4)}
    recomputed = four["COAT, recomputed attention"], four["COAT, smallest, recomputed attention"]
    said = [f"{r['tokens_per_s_gpu']:,.0f} tokens per second in {gb(r)} GB" for r in recomputed]
    more = graphs[-1]["peak_mb"] / without["peak_mb"] - 1
    times = ", ".join(f"{ms:.0f}" for ms in sorted(coat["ms"] for _, coat in runs))
    repeated = []
    for system in ("BF16", "COAT"):
        where = {"way": "zero2", "system": system, "micro_batch": 4, "limited": False}
        speeds = [results.row(f, **where)["tokens_per_s_gpu"] for f in (SEVEN, "train_7b_2gpu_blocks.csv")]
        repeated.append(max(speeds) / min(speeds) - 1)
    return bullets(
        f"Measured again on another day, BF16 and COAT under ZeRO-2 came within {percent(max(repeated), 1)}.",
        "Over tensor parallelism at this size the CPUs of the two ranks decide: COAT's 4 × 2048 took "
        f"{times} ms in {len(runs)} runs, BF16's {between([bf16['ms'] for bf16, _ in runs], '{:.0f}')}. "
        f'`"cuda_graphs": true` took {between([g["ms"] for g in graphs], "{:.0f}")} ms, for '
        f"{percent(more)} more memory.",
        f'`"attention_format": "recompute"` on four GPUs: {said[0]}; with "smallest", {said[1]}.',
    )


# the paper's rows of several GPUs
SEVERAL = (("7B", 2, "2 × 2048"), ("13B", 2, "1 × 1024"), ("7B", 4, "2 × 2048"), ("13B", 4, "1 × 2048"))
# rows of the paper's table 6, by our names of shapes
PAPERS = {
    "llama-2-7b": "h 4096, 4 × 2048",
    "paper-h4096-s4096": "h 4096, 4 × 4096",
    "paper-h2048-s4096": "h 2048, 4 × 4096",
}
ADAMW = {
    "ours": "COAT",
    "torch fused": "torch's fused",
    "flashoptim": "FlashOptim",
    "torchao 8-bit": "torchao's 8-bit",
}
LAYERS = {
    "BF16 torch.compile": "BF16, `torch.compile`",
    "torchao tensorwise": "torchao FP8, `torch.compile`",
    "TE delayed, cached": "TE delayed, weights cached",
    "ours": "COAT",
    "ours, cache fp8": "COAT, weights cached",
    "ours, fastest": "COAT, fastest",
}


@block("performance.md", "layer")
def layer(results: Results) -> str:
    seven, eight, gpt = (
        {row["layer"]: row for row in results.rows(f"layer_{name}.csv")} for name in ("7b", "8b", "gpt")
    )

    def line(title: str, rows: dict, form: str) -> list[str]:
        return [title, *(form.format(**rows[name]) for name in LAYERS)]

    both = "{ms:.2f}; {saved_h:.1f}"
    biased = [gpt["ours"]["ms"] / gpt["TE delayed"]["ms"] - 1]
    biased.append(gpt["ours, cache fp8"]["ms"] / gpt["TE delayed, cached"]["ms"] - 1)
    return (
        table(
            ["", *LAYERS.values()],
            line("Llama-2-7B, 4 × 2048 tokens: ms; saved, h bytes a token", seven, both),
            line("its peak, MB; FP8 weights held beside it, MB", seven, "{peak_mb:,.0f}; {weights_mb:,.0f}"),
            line("Llama-3-8B, 8192 tokens", eight, both),
            line("GPT style (LayerNorm, GELU, biases), 4 × 2048", gpt, both),
        )
        + f"\nWith biases, as in GPT style layers, TransformerEngine is {percent(biased[0])} faster than "
        f"COAT, {percent(biased[1])} where both keep quantized weights.\n"
    )


@block("performance.md", "H100s")
def h100s(results: Results) -> str:
    saved = results.row("reproduce_h100.csv", table=2, system="COAT", figure="saved_h")

    def layer(shape: str) -> list[str]:
        rows = [results.row("layer_h100.csv", shape=shape, layer=n) for n in ("BF16", "TE delayed", "ours")]
        paper = results.row("reproduce_h100.csv", table=6, row=PAPERS[shape], system="COAT", figure="ms")
        base = rows[0]["ms"]
        here = [f"{row['ms']:.2f} ({row['ms'] / base:.2f}); {row['saved_h']:.1f}" for row in rows]
        return [*here, f"{paper['paper']:.2f} ({paper['paper_to_bf16']:.2f}); {saved['paper']:.1f}"]

    def model(title: str, **where) -> list[str]:
        return _line(results, title, ["train_7b_1gpu_h100.csv"], where, ("BF16", "TE FP8", "COAT"))

    paper = functools.partial(_of_paper, results, "7B, 1 × 2048", 1)
    steps = {name: results.row("adamw_h100.csv", params="flat", optimizer=name) for name in ADAMW}
    said = ", ".join(f"{ADAMW[name]} {row['ms']:.2f} ms" for name, row in steps.items())
    return (
        _starred(
            table(
                ["", "BF16", "TransformerEngine FP8", "COAT", "the paper's COAT"],
                ["layer, h 4096, 4 × 2048: ms (over BF16); saved, h bytes a token", *layer("llama-2-7b")],
                ["layer, h 4096, 4 × 4096", *layer("paper-h4096-s4096")],
                ["layer, h 2048, 4 × 4096", *layer("paper-h2048-s4096")],
                [
                    *model(
                        "Llama-2-7B, ZeRO-1, 1 × 2048: tokens per second; peak GB", layers=32, micro_batch=1
                    ),
                    f"{paper('tokens_per_s_gpu'):,.0f}; {paper('peak_mb') / 1e3:.1f}",
                ],
                [*model("12 of its 32 layers, 2 × 2048", layers=12, micro_batch=2), ""],
                [*model("the same, fastest within 80 GB", layers=12, limited=True), ""],
            )
        )
        + f"\nAdamW over 2^29 parameters: {said}. COAT's takes {steps['ours']['to_copy']:.3f} of the time "
        "of a copy of its bytes.\n"
    )


def _of_paper(results: Results, row: str, gpus: int, figure: str) -> float:
    """Of the paper's COAT."""
    where = {"table": 7, "row": row, "gpus": gpus, "system": "COAT", "figure": figure}
    return float(results.row("reproduce_h100.csv", **where)["paper"])


def _waits(results: Results, model: str, micro_batch: int) -> str:
    """For how much of a step over tensor parallelism the GPU computes."""
    file = f"train_{model.lower()}_4gpu_tp4_h100.csv"
    rows = {
        name: results.row(file, micro_batch=micro_batch, limited=False, system=system)
        for name, system in (("BF16", "BF16"), ("TransformerEngine", "TE FP8"), ("COAT", "COAT"))
    }
    shares = (f"{row['compute_ms']:.0f} of {name}'s {row['ms']:.0f} ms" for name, row in rows.items())
    said = f"Llama-2-{model} over tensor parallel 4, {micro_batch} × 2048: the GPU computes for "
    return said + ", ".join(shares) + "."


def _smaller(results: Results, model: str, system: str) -> str:
    """The fastest micro-batch that was tried within 80 GB over tensor parallelism."""
    rows = results.rows(f"train_{model.lower()}_4gpu_tp4_h100.csv", system=system, limited=True)
    row = max(rows, key=lambda row: row.get("tokens_per_s_gpu", 0))
    speed = f"{row['tokens_per_s_gpu']:,.0f} tokens per second and GPU"
    return f'"{system.split(", ")[1]}" of {model} with {row["micro_batch"]} sequences {speed} in {gb(row)} GB'


@block("performance.md", "several H100s")
def several_h100s(results: Results) -> str:
    systems = SYSTEMS | {"COAT, fastest": "COAT, fastest"}
    lines = []
    for model, gpus, tokens in SEVERAL:
        files = [f"train_{model.lower()}_{gpus}gpu_h100.csv"]
        paper = functools.partial(_of_paper, results, f"{model}, {tokens}", gpus)
        where = {"way": "zero3", "micro_batch": int(tokens.split()[0])}
        equal = _line(results, f"Llama-2-{model}, {gpus} GPUs, ZeRO-3, {tokens}", files, where, systems)
        where = {"way": "zero3", "limited": True}
        fastest = _line(results, "the same, fastest within 80 GB", files, where, systems)
        largest = (
            f"{paper('largest_micro_batch'):.0f} × {tokens.split()[-1]}: {paper('tokens_per_s_gpu'):,.0f}"
        )
        lines += [[*equal, f"{paper('peak_mb') / 1e3:.1f} GB"], [*fastest, largest]]
    for model, tokens in (("7B", 4), ("13B", 1)):
        files = [f"train_{model.lower()}_4gpu_tp4_h100.csv"]
        for title, where in (
            (f"Llama-2-{model}, tensor parallel 4, {tokens} × 2048", {"micro_batch": tokens}),
            ("the same, largest within 80 GB", {"limited": True}),
        ):
            line = _line(results, title, files, {"way": "tp4", **where}, systems, "micro_batch")
            lines.append([*line, ""])
    smaller = (_smaller(results, *case) for case in (("7B", "COAT, smallest"), ("13B", "COAT, fastest")))
    said = f"Over tensor parallel 4 smaller micro-batches may be faster: {'; '.join(smaller)}."
    waits = bullets(*(_waits(results, *case) for case in (("7B", 4), ("13B", 1))), said)
    head = ["tokens per second and GPU; peak GB", *systems.values(), "the paper's COAT"]
    return f"{_starred(table(head, *lines))}\n{waits}"


@block("performance.md", "leave room")
def leave_room(results: Results) -> str:
    """Where torch's allocator gives memory back."""
    files = ("train_13b_4gpu_tp4_flushes.csv", "train_13b_4gpu_tp4_zero2.csv")
    rows = [row for file in files for row in results.rows(file) if "ms" in row and row["micro_batch"] > 3]
    rows.sort(key=lambda row: (WAYS[row["way"]].stage, row["system"], row["micro_batch"]))
    lines = [
        [
            f"{row['system']}, ZeRO-{WAYS[row['way']].stage}",
            str(row["micro_batch"]),
            gb(row),
            f"{row['flushes']:.0f}",
            percent(max(0, row["ms"] - row["busy_ms"]) / row["ms"]),
            f"{row['tokens_per_s_gpu']:,.0f}",
        ]
        for row in rows
    ]
    where = {"micro_batch": 1, "limited": False}
    one, two = (results.row(files[1], system="COAT", way=way, **where) for way in ("tp4", "tp4_zero2"))
    fast = results.row(files[1], system="COAT, fastest", way="tp4", **where)
    said = (
        f"One sequence: {one['ms']:.0f} ms and {gb(one)} GB in ZeRO-1, {two['ms']:.0f} ms and {gb(two)} GB "
        f'in ZeRO-2; "fastest" in ZeRO-1 {fast["ms"]:.0f} ms and {gb(fast)} GB.'
    )
    free = [row for row in rows if not row["limited"]]
    sizes = " and ".join(str(row["micro_batch"]) for row in free)
    most = max(row["reserved_mb"] for row in free) / 1e3
    unlimited = f"{sizes} sequences ran without the limit; torch took {most:.0f} GB at most."
    head = ["", "sequences", "peak GB", "memory given back, in 8 steps", "the GPU waits"]
    return f"{table([*head, 'tokens per second and GPU'], *lines)}\n{bullets(said, unlimited)}"


@block("performance.md", "tensor parallelism")
def tensor_parallelism(results: Results) -> str:
    rows = [
        results.row("parallel.csv", tensor_parallel=2, sequence_parallel=sequence, layer=name)
        for sequence in (False, True)
        for name in ("BF16", "COAT")
    ]
    count = rows[0]["layers"]
    return table(
        [
            f"{count} Llama-2-7B layers over 2 GPUs",
            "BF16",
            "COAT",
            "BF16, sequence parallel",
            "COAT, the same",
        ],
        ["forward and backward, ms", *(f"{r['ms']:.1f}" for r in rows)],
        ["saved, MB a rank", *(f"{r['saved_mb']:,.0f}" for r in rows)],
        ["peak, MB a rank", *(f"{r['peak_mb']:,.0f}" for r in rows)],
        ["gathered, MB a rank and pass", *(f"{r['gather_mb']:,.0f}" for r in rows)],
    )


@block("performance.md", "tensor parallelism of four")
def tensor_parallelism_of_four(results: Results) -> str:
    """Where layers are launched and where they are replayed."""
    systems = {"BF16": "BF16", "COAT": "COAT, layers launched", "COAT, graphs": "COAT, layers replayed"}
    file = "train_7b_4gpu_tp4.csv"
    lines = []
    for size in sorted({row["micro_batch"] for row in results.rows(file)}):
        rows = [results.row(file, micro_batch=size, system=system) for system in systems]
        lines.append([f"{size} × 2048", *(f"{r['ms']:.0f} ms; {gb(r)} GB" for r in rows)])
    return table(["Llama-2-7B over 4 GPUs, a step", *systems.values()], *lines)


NEWEST = {
    "BF16 torch.compile": "BF16, `torch.compile`",
    "TE delayed, cached": "TransformerEngine delayed, weights cached",
    "TE current, cached": "TransformerEngine current, weights cached",
    "TE blockwise, cached": "TransformerEngine blockwise, weights cached",
    "ours": "COAT",
    "ours, cache fp8": "COAT, weights cached",
    "ours, fastest": "COAT, fastest",
}


@block("performance.md", "newest stack")
def newest_stack(results: Results) -> str:
    files = "layer_torch211.csv", "layer_torch214.csv"
    heads, columns = [], []
    for file in files:
        rows = {name: results.row(file, layer=name) for name in NEWEST}
        base = rows["BF16 torch.compile"]
        heads.append(f"torch {base['torch'].split('+')[0]}, TransformerEngine {base['transformer_engine']}")
        columns.append([f"{row['ms']:.2f} ({row['ms'] / base['ms']:.3f})" for row in rows.values()])
    lines = zip(NEWEST.values(), *columns, strict=True)
    whole = [results.row("train_7b_4gpu_torch214.csv", system=name) for name in ("BF16", "TE FP8", "COAT")]
    speeds = [f"{row['tokens_per_s_gpu']:,.0f} in {gb(row)} GB" for row in whole]
    return (
        table(["a layer of Llama-2-7B, 4 × 2048: ms (over BF16)", *heads], *lines)
        + "\n"
        + bullets(
            "Llama-2-7B, 4 GPUs, ZeRO-3, 4 × 2048 tokens with the newer of both, tokens per second and GPU: "
            f"BF16 {speeds[0]}, TransformerEngine FP8 {speeds[1]}, COAT {speeds[2]}."
        )
    )


@block("performance.md", "small layers")
def small_layers(results: Results) -> str:
    def median(file: str, **where) -> float:
        return statistics.median(r["tokens_per_s"] for r in results.rows(file, **where))

    bf16, coat = (median("pretrain_125m_graphs.csv", run=run) for run in ("bf16", "coat"))
    main = [results.row("megatron_main.csv", system=system) for system in ("BF16", "COAT")]
    long = {run: results.row("converge.csv", run=run, seed=1) for run in ("bf16", "coat-paper")}
    speed = {run: median("converge.csv", run=run) for run in long}
    memory = {run: gb(row) for run, row in long.items()}
    beside = {run: results.row("converge_300m.csv", run=run, seed=3) for run in ("bf16", "coat")}
    return bullets(
        f"A 125M model with 8 × 1024 tokens a pass trains {coat / bf16:.1f} times as fast as BF16 "
        f"({coat:,.0f} and {bf16:,.0f} tokens per second, medians of seeds).",
        f"{main[0]['layers']} layers of h {main[0]['hidden']} in Megatron-LM's own loop over TP "
        f"{main[0]['tensor']} × PP {main[0]['pipeline']}: {main[0]['ms'] / main[1]['ms']:.1f} times "
        f"({main[1]['ms']:.0f} and {main[0]['ms']:.0f} ms an iteration).",
        f"The 125M model with 64 × 1024 tokens a pass: {memory['bf16']} GB and {speed['bf16']:,.0f} tokens "
        f"per second in BF16, {memory['coat-paper']} GB and {speed['coat-paper']:,.0f} with COAT and "
        "the paper's states. With today's, BF16 beside it on the other GPU of a machine: "
        f"{gb(beside['coat'])} GB and {beside['coat']['tokens_per_s']:,.0f}, BF16 "
        f"{beside['bf16']['tokens_per_s']:,.0f}.",
    )


@block("performance.md", "graphs of 7B")
def graphs_of_7b(results: Results) -> str:
    """Where layers are replayed that are no longer small."""
    lines = []
    for gpus, stage, size in ((1, 2, 1), (4, 2, 1), (4, 1, 1), (1, 2, 2), (4, 2, 2), (4, 1, 2)):
        where = {"way": f"zero{stage}", "micro_batch": size}
        found = (
            results.row(f"train_7b_{gpus}gpu_graphs.csv", system=system, **where)
            for system in ("COAT", "COAT, graphs")
        )
        title = f"{gpus} GPU{'s' * (gpus > 1)}, ZeRO-{stage}, {size} × 2048"
        lines.append([title, *(f"{r['ms']:.0f} ms; {gb(r)} GB" for r in found)])
    return table(["Llama-2-7B, a step", "layers launched", "layers replayed"], *lines)


@block("performance.md", "recompute")
def recompute(results: Results) -> str:
    names = {
        "BF16": "BF16",
        "BF16, mlp": "BF16, feed-forward recomputed",
        "BF16, full": "BF16, full recompute",
        "BF16, full, FP8 inputs": "the same, COAT's FP8 inputs",
        "COAT": "COAT",
    }
    rows = [results.row("recompute.csv", recompute=name) for name in names]
    return table(
        [f"{rows[0]['layers']} layers of h {rows[0]['hidden']}, 8,192 tokens", *names.values()],
        ["kept for backward, MB", *(f"{r['kept_mb']:,.0f}" for r in rows)],
        ["tokens per second", *(f"{r['tokens_per_s']:,.0f}" for r in rows)],
    )


@block("performance.md", "zero")
def zero(results: Results) -> str:
    stages = range(4)

    def held(optimizer: str) -> list[str]:
        rows = (results.row("zero.csv", stage=s, optimizer=optimizer, rank=0) for s in stages)
        return [f"{row['held_mb']:,.0f}" for row in rows]

    parameters = results.row("zero.csv", stage=0, rank=0)["parameters"]
    return table(
        [
            f"{parameters / 1e6:.0f}M parameters, 2 GPUs: held after a step, MB a rank",
            *map("stage {}".format, stages),
        ],
        ["stock AdamW", *held("stock AdamW")],
        ["COAT", *held("COAT")],
    )
