"""Tables of docs/numerics.md, and of formats on docs/design.md."""

import statistics
from collections.abc import Sequence

from benchmarks.common.pairs import paired
from benchmarks.tables.blocks import Results, block, data, percent, table
from coat_launch.report import read_metrics

FASTEST, SMALLEST = '"fastest"', '"smallest"'
HEAD = (
    "trained",
    "first",
    "second",
    "seeds",
    "loss of the first",
    "of the second",
    "second above first, nats",
)


def _losses(rows: list[dict]) -> str:
    losses = [row["val_loss"] for row in rows]
    spread = f" ({min(losses):.4f} to {max(losses):.4f})" if len(losses) > 1 else ""
    return f"{statistics.mean(losses):.4f}{spread}"


def _compared(
    results: Results, title: str, file: str, names: Sequence[str], runs: tuple[str, str]
) -> list[str]:
    """A line of two runs of a file, over the seeds that both have."""
    found = [{row["seed"]: row for row in results.rows(file, run=run)} for run in runs]
    seeds = sorted(found[0].keys() & found[1].keys())
    first, second = ([rows[seed] for seed in seeds] for rows in found)
    apart = statistics.mean(b["val_loss"] - a["val_loss"] for a, b in zip(first, second, strict=True))
    return [data(file, title), *names, str(len(seeds)), _losses(first), _losses(second), f"{apart:+.4f}"]


@block("numerics.md", "pre-training")
def pre_training(results: Results) -> str:
    short, long = "125M, 150M tokens", "125M, 300M tokens"
    large = "1B, 46M tokens"
    cases = (
        (long, "converge_300m.csv", "COAT", "coat"),
        (short, "converge.csv", "COAT", "coat"),
        (short, "converge.csv", SMALLEST, "coat-smallest"),
        (short, "converge.csv", FASTEST, "coat-fastest"),
        (large, "converge_1b_warmup.csv", "COAT", "coat"),
        (large, "converge_1b_warmup.csv", SMALLEST, "coat-smallest"),
        (large, "converge_1b_warmup.csv", FASTEST, "coat-fastest"),
    )
    return table(
        ["trained", "compared with BF16", "seeds", "BF16", "the other", "above BF16, nats"],
        *(_compared(results, title, file, [name], ("bf16", run)) for title, file, name, run in cases),
    )


@block("finetune.md", "log-probabilities")
def log_probabilities(results: Results) -> str:
    rows = {(row["system"], row["form"]): row for row in results.rows("drift.csv")}
    forms = ("one by one", "padded", "packed")
    return table(
        [
            "layers",
            *(f"documents {form}: from FP32" for form in forms),
            "packed: from the same layers, one by one",
        ],
        *(
            [
                data("drift.csv", system),
                *(f"{rows[system, form]['from_fp32']:.3f}" for form in forms),
                f"{rows[system, 'packed']['from_one_by_one']:.3f}",
            ]
            for system in ("BF16", "COAT")
        ),
    )


@block("numerics.md", "other runs")
def other_runs(results: Results) -> str:
    """Longer runs, other settings and other models."""
    states = "125M, 150M tokens, β2 0.999"
    moments = tuple(f"coat{kind}-beta2-0.999" for kind in ("-fp32", "", "-paper"))
    switched = "125M, 150M tokens, switched half-way"
    lines = [
        _compared(results, "125M, 240M tokens", "converge_long.csv", ("BF16", "COAT"), ("bf16", "coat")),
        _compared(results, switched, "converge.csv", ("BF16", "BF16, then COAT"), ("bf16", "bf16-to-coat")),
        _compared(results, switched, "converge.csv", ("BF16", "COAT, then BF16"), ("bf16", "coat-to-bf16")),
        _compared(results, states, "converge_beta2_150m.csv", ("FP32 moments", "8-bit moments"), moments[:2]),
        _compared(results, states, "converge_beta2_150m.csv", ("FP32 moments", "the paper's"), moments[::2]),
    ]
    file = "layer_train.csv"
    pairs = paired(results.rows(file), ("steps",), ("layers", "evaluated"), ("BF16", "BF16"))
    ends = {row["layers"]: row for row in pairs if row["evaluated"] == "BF16"}
    lines.append(_of_pairs(data(file, "1M, the last 200 steps"), "BF16", "COAT", ends["BF16"], ends["COAT"]))
    file = "state_train.csv"
    rows = results.rows(file, phase="tail", moments="fp32, fp32")
    masters = {row["masters"]: row for row in paired(rows, ("phase",), ("masters",), ("exact",))}
    title = data(file, "1M, the last 200 steps, BF16 weights")
    names = "FP32 masters", '`"bf16_params": "stochastic"`'
    lines.append(_of_pairs(title, *names, masters["exact"], masters["stochastic"]))
    file = "vlm.csv"
    bf16, coat = ([results.row(file, run=run)] for run in ("bf16", "coat"))
    apart = coat[0]["val_loss"] - bf16[0]["val_loss"]
    read = "LLaVA that reads digits, 2,000 steps"
    lines.append([data(file, read), "BF16", "COAT", "1", _losses(bf16), _losses(coat), f"{apart:+.4f}"])
    head = "trained", "first", "second", "seeds", "loss of the first", "of the second"
    return table([*head, "second above first, nats"], *lines)


def _of_pairs(title: str, first: str, second: str, base: dict, row: dict) -> list[str]:
    losses = (f"{found['val_loss']:.4f}" for found in (base, row))
    apart = f"{row['to_baseline']:+.5f} ± {row['error']:.5f}"
    return [title, first, second, str(row["seeds"]), *losses, apart]


@block("numerics.md", "fine-tuning")
def fine_tuning(results: Results) -> str:
    """A line for each path and system, over its seeds; above BF16 of the same path and seeds."""
    lines_of = (
        ("hf", "bf16", "BF16, transformers"),
        ("hf", "coat", "COAT, transformers"),
        ("hf", "coat-fastest", FASTEST),
        ("hf", "coat-smallest", SMALLEST),
        ("megatron", "bf16", "BF16, Megatron"),
        ("megatron", "coat", "COAT, Megatron"),
    )
    rows = results.rows("finetune.csv")
    lines = [_fine_tuned(rows, *line) for line in lines_of]
    mixture = results.rows("finetune_moe.csv")
    tokens = f"{mixture[0]['tokens'] / 1e6:.1f}M tokens"
    lines += [
        _fine_tuned(mixture, "hf", "bf16", f"BF16, {data('finetune_moe.csv', f'four experts, {tokens}')}"),
        _fine_tuned(mixture, "hf", "coat", "COAT, four experts"),
    ]
    title = data("finetune.csv", f"SmolLM2-135M, {rows[0]['tokens'] / 1e6:.0f}M tokens")
    head = title, "seeds", "loss before", "after"
    return table([*head, "above BF16 in COAT's layers", "in stock layers", "last words right"], *lines)


def _fine_tuned(rows: list[dict], path: str, system: str, name: str) -> list[str]:
    """The line of a path and system."""
    bf16 = {(row["path"], row["seed"]): row["val_loss"] for row in rows if row["system"] == "bf16"}
    found = [row for row in rows if (row["path"], row["system"]) == (path, system)]

    def above(column: str) -> str:
        nats = [row[column] - bf16[row["path"], row["seed"]] for row in found if column in row]
        seeds = "" if len(nats) == len(found) else f" ({len(nats)} seeds)"
        return f"{statistics.mean(nats):+.4f}{seeds}"

    stock, fp8 = ("val_loss", "val_loss_fp8") if system == "bf16" else ("val_loss_bf16", "val_loss")
    words = percent(statistics.mean(row["cloze"] for row in found), 1)
    before = f"{statistics.mean(row['val_loss_start'] for row in found):.4f}"
    return [name, str(len(found)), before, _losses(found), above(fp8), above(stock), words]


@block("numerics.md", "one billion parameters")
def one_billion(results: Results) -> str:
    """How far apart seeds are, what stock layers change, and what a fast warm-up does."""
    rows = results.rows("converge_1b_warmup.csv")
    worth = max(abs(row["val_loss_bf16"] - row["val_loss"]) for row in rows if "val_loss_bf16" in row)
    seeds = [row["val_loss"] for row in rows if row["run"] == "bf16"]
    fast = {row["run"]: row["val_loss"] for row in results.rows("converge_1b.csv")}
    apart = [fast[f"coat{kind}"] - fast["bf16"] for kind in ("", "-smallest", "-fastest")]

    def norm(folder: str) -> float:
        lines = read_metrics(results.folder / folder / "bf16-seed1.jsonl")
        return max(line["grad_norm"] for line in lines if "grad_norm" in line)

    return (
        f"At 1B, BF16's own seeds end {max(seeds) - min(seeds):.3f} nat apart. Evaluating COAT's weights in "
        f"stock layers changes their losses by at most {worth:.4f} nat. A faster warm-up is unstable in "
        f"BF16, too: its norms of gradients reach {norm('converge_1b'):.0f} instead of "
        f"{norm('converge_1b_warmup'):.0f}. One run each of COAT, {SMALLEST} and {FASTEST} then ended "
        f"{apart[0]:+.3f}, {apart[1]:+.3f} and {apart[2]:+.3f} nat from BF16 "
        f"({data('converge_1b.csv', 'data')}).\n"
    )


@block("design.md", "moments")
def moments(results: Results) -> str:
    codes = {
        "ratio8, log8": "COAT's default (`ratio8`, `log8`)",
        "fp8_expanded, fp8_expanded": "the paper's (`fp8_expanded`)",
        "FlashOptim": "FlashOptim",
        "bitsandbytes 8-bit": "bitsandbytes 8-bit, torchao 8-bit",
        "torchao FP8": "torchao FP8",
        "TransformerEngine FP8": "TransformerEngine FP8, one scale a tensor",
        "bf16, bf16": "BF16",
    }
    lines = []
    for code, name in codes.items():
        where = {"model": "small", "kind": "all", "code": code}
        rows = [results.row("state_loop.csv", beta2=beta, **where) for beta in (0.95, 0.999)]
        lines.append([name, f"{rows[0]['bytes']:.2f}", *(percent(row["applied"], 1) for row in rows)])
    head = f"{data('state_loop.csv', 'moments')}, 1,000 steps of a GPT of 1M parameters"
    return table([head, "bytes per parameter", "error of updates, β2 0.95", "β2 0.999"], *lines)
