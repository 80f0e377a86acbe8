"""Tables of docs/numerics.md."""

import statistics
from collections.abc import Callable

import torch

from benchmarks.common.pairs import paired
from benchmarks.tables.blocks import Results, between, block, bullets, percent, table
from coat_kernels.fp8 import E4M3, E5M2, Fp8Format, round_to_fp8
from coat_kernels.groups import dequantize_groups_reference, quantize_groups_reference
from coat_kernels.tensorwise.scale import tensor_scale_reference
from coat_launch.report import read_metrics


@block("numerics.md", "saved formats")
def saved_formats(_: Results) -> str:
    """By the references, of a million normal values."""
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))

    def error(name: str) -> str:
        codes = quantize_groups_reference(x, 16, name)
        return percent(((dequantize_groups_reference(codes, 16) - x).norm() / x.norm()).item(), 1)

    return table(
        ["`saved_format`", "what it is", "error of normal values, RMS"],
        ["`sqrt8` (default)", "signed integers whose squares are the values", error("sqrt8")],
        ["`e4m3`", "the paper's FP8; more room for outliers in a group", error("e4m3")],
    )


@block("numerics.md", "kept of a layer")
def kept(results: Results) -> str:
    rows = {row["layer"]: row for row in results.rows("layer_7b.csv")}
    said = ("BF16", "BF16"), ("TransformerEngine FP8", "TE delayed"), ("COAT", "ours")
    sizes = ", ".join(f"{name} {rows[layer]['saved_h']:.1f}" for name, layer in said)
    return f"What is kept of a layer, in units of h bytes per token (Llama-2-7B): {sizes}.\n"


@block("numerics.md", "attention formats")
def attention_formats(results: Results) -> str:
    rows = {row["layer"]: row for row in results.rows("layer_7b_blocks.csv")}

    def error(name: str) -> str:
        found = results.row("numerics.csv", data="trained", layer=name, figure="RMS error")
        return f"{found['linear_qkv']:.2f}"

    shown = (
        ("`bf16` (default)", "ours", error("ours")),
        ("`sqrt8`", "ours, 8-bit attention", error("ours, 8-bit attention")),
        (
            "`recompute`: saves the output alone, makes the others again",
            "ours, recomputed attention",
            "as with `bf16`",
        ),
    )
    return table(
        ["", "h bytes", "ms of the layer", "error of `linear_qkv`'s gradient"],
        *([name, f"{rows[row]['saved_h']:.1f}", f"{rows[row]['ms']:.1f}", said] for name, row, said in shown),
    )


OPERATIONS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@block("numerics.md", "errors of a layer")
def errors(results: Results) -> str:
    def ratios(layer: str, data: str, names: tuple[str, ...] = OPERATIONS) -> list[float]:
        row = results.row("numerics.csv", data=data, layer=layer, figure="to TE current")
        return [row[name] for name in names]

    def output(data: str) -> str:
        spread = results.row("numerics.csv", data=data, layer="ours", figure="standard error")["y"]
        return f"{ratios('ours', data, ('y',))[0]:.3f} ± {spread:.3f}"

    def gradients(layer: str) -> str:
        trained, outliers = (between(ratios(layer, data), "{:.2f}") for data in ("trained", "outliers"))
        return f"{trained} times, {outliers} beside outliers"

    return bullets(
        f"Output: {output('trained')} times over the layers of partly trained models, {output('outliers')} "
        "beside outliers.",
        f"Gradients of the linear layers' weights, E5M2 as in both: {gradients('ours')}.",
        f'With `"backward_format": "e4m3"`: {gradients("ours, gradients E4M3")}.',
        f'With `"fast_accumulation": "all"`: {gradients("ours, all fast")}.',
    )


@block("numerics.md", "stored once")
def stored_once(results: Results) -> str:
    codes = {
        ("ratio8", "log8"): "`ratio8`, `log8` (default)",
        ("fp8_expanded", "log8"): "`fp8_expanded`, `log8`",
        ("fp8_expanded", "fp8_expanded"): "`fp8_expanded` (the paper's)",
        ("fp8", "fp8"): "`fp8`",
        ("fp8_e5m2", "fp8_e5m2"): "`fp8_e5m2`",
        ("bf16", "bf16"): "`bf16`",
    }
    rows = (results.row("state_error.csv", m=m, v=v, kind="all") for m, v in codes)
    names = ("exp_avg", "root", "update")
    lines = ([*(percent(row[name], 1) for name in names)] for row in rows)
    head = ["", "first moment", "root of the second", "update"]
    return table(head, *([name, *line] for name, line in zip(codes.values(), lines, strict=True)))


@block("numerics.md", "many steps")
def many_steps(results: Results) -> str:
    codes = {
        "ratio8, log8": "`ratio8`, `log8` (default)",
        "fp8_expanded, fp8_expanded": "`fp8_expanded` (the paper's)",
        "FlashOptim": "FlashOptim's",
        "bitsandbytes 8-bit": "bitsandbytes' 8 bits, torchao's alike",
        "torchao FP8": "torchao's FP8",
        "TransformerEngine FP8": "TransformerEngine's FP8, a scale for each tensor",
        "bf16, bf16": "BF16 to nearest",
    }
    # of a larger model and of a pretrained one
    others = {
        "125M after 3,000 steps, 0.95": ("state_loop_125m.csv", {"model": "125m", "after": 3000}),
        "SmolLM2, 0.95": ("state_loop_smollm2.csv", {"model": "smollm2"}),
    }
    betas = (0.95, 0.99, 0.999)
    lines = []
    for code, name in codes.items():
        of = {"kind": "all", "code": code}
        rows = [results.row("state_loop.csv", model="small", beta2=beta, **of) for beta in betas]
        beside = [results.row(file, beta2=0.95, **of, **where) for file, where in others.values()]
        errors = (percent(row["applied"], 1) for row in (*rows, *beside))
        lines.append([name, f"{rows[0]['bytes']:.2f}", *errors, percent(rows[-1]["stalled"], 1)])
    head = ["", "bytes", *(f"β2 {beta}" for beta in betas), *others]
    return table([*head, f"second moments off by more than a third, at {betas[-1]}"], *lines)


@block("numerics.md", "models")
def models(results: Results) -> str:
    """Of what `state_loop` was run on."""
    shown = {
        "the quickstart's GPT": ("state_loop.csv", "small", "all", 300),
        "with 16,384 ids and 512 tokens a step: all": ("state_loop.csv", "rare", "all", 300),
        "rows of its embedding hit in fewer than 1 of 50 steps": ("state_loop.csv", "rare", "rare rows", 300),
        "with four channels 30 to 100 times as large": ("state_loop.csv", "outliers", "all", 300),
        "125M parameters": ("state_loop_125m.csv", "125m", "all", 300),
        "after 1,000 steps": ("state_loop_125m.csv", "125m", "all", 1000),
        "after 3,000 steps": ("state_loop_125m.csv", "125m", "all", 3000),
        "its feed-forward layers": ("state_loop_125m.csv", "125m", "MLP", 3000),
        "SmolLM2-135M-Instruct, pretrained": ("state_loop_smollm2.csv", "smollm2", "all", 300),
    }
    codes = {"ratio8, log8": "default", "fp8_expanded, fp8_expanded": "paper's"}
    columns = [(beta, code) for beta in (0.95, 0.999) for code in codes]
    lines = []
    for name, (file, model, kind, after) in shown.items():
        of = {"model": model, "kind": kind, "after": after}
        rows = [results.row(file, code=code, beta2=beta, **of) for beta, code in columns]
        lines.append([name, *(f"{percent(r['stored'], 2)}; {percent(r['applied'], 1)}" for r in rows)])
    return table(["stored once; applied", *(f"{codes[code]}, {beta}" for beta, code in columns)], *lines)


@block("numerics.md", "masters")
def masters(results: Results) -> str:
    """Paired by seed; beside FP32 moments unless a name says otherwise."""
    rows = results.rows("state_train.csv")
    arms = {
        ("fp32, fp32", "exact"): "`exact`",
        ("fp32, fp32", "stochastic"): "`stochastic`",
        ("ratio8, log8", "stochastic"): "`stochastic`, with the default states",
        ("fp32, fp32", "nearest"): "`nearest`",
    }
    apart = {
        (row["phase"], row["moments"], row["masters"]): row
        for row in paired(rows, ("phase",), ("moments", "masters"), next(iter(arms)))
    }

    def cell(phase: str, arm: tuple[str, str]) -> str:
        row = apart[phase, *arm]
        if arm == next(iter(arms)):
            return "0"
        return f"{1e3 * row['to_baseline']:+.2f} ± {1e3 * row['error']:.2f}"

    phases = {
        phase: {row["steps"] for row in rows if row["phase"] == phase} for phase in ("quickstart", "tail")
    }
    ((start,), (tail,)) = phases.values()
    head = f"{start:.0f} steps from the start", f"{tail:.0f} more at rates down to a thousandth"
    lines = (
        [name, "2" if arm[1] == "exact" else "0", *(cell(phase, arm) for phase in phases)]
        for arm, name in arms.items()
    )
    return table(["", "bytes beside the weight", *head], *lines)


@block("numerics.md", "layers near the end")
def layers_near_the_end(results: Results) -> str:
    """Beside what BF16's weights lose in BF16 layers, in thousandths of a nat."""
    rows = paired(results.rows("layer_train.csv"), ("steps",), ("layers", "evaluated"), ("BF16", "BF16"))
    found = {(row["layers"], row["evaluated"]): row for row in rows}

    def cell(*of: str) -> str:
        return f"{1e3 * found[of]['to_baseline']:+.2f} ± {1e3 * found[of]['error']:.2f}"

    evaluated = "BF16", "COAT"
    base = found["BF16", "BF16"]
    return table(
        [f"{base['steps']:.0f} steps, {base['seeds']} seeds", *(f"in {name}'s layers" for name in evaluated)],
        *(
            [name, *(cell(name, by) for by in evaluated)]
            for name in dict.fromkeys(row["layers"] for row in rows)
        ),
    )


def longest(results: Results) -> str:
    """A sentence on the runs with most tokens."""
    rows = {run: results.rows("converge_300m.csv", run=run) for run in ("bf16", "coat")}

    def each(run: str, column: str) -> str:
        return ", ".join(f"{row[column]:.4f}" for row in rows[run])

    bf16, coat = (statistics.mean(row["val_loss"] for row in found) for found in rows.values())
    seeds = ", ".join(f"{row['seed']:.0f}" for row in rows["coat"])
    return (
        f"Over {rows['bf16'][0]['tokens'] / 1e6:.0f} million, seeds {seeds}: BF16 "
        f"{each('bf16', 'val_loss')}; COAT {each('coat', 'val_loss')}, {100 * (coat / bf16 - 1):+.2f} % on "
        f"average. In stock layers COAT's weights are at {each('coat', 'val_loss_bf16')}; in COAT's "
        f"BF16's are at {each('bf16', 'val_loss_fp8')}."
    )


@block("numerics.md", "convergence")
def convergence(results: Results) -> str:
    def losses(file: str, run: str) -> list[float]:
        return [row["val_loss"] for row in results.rows(file, run=run)]

    base = statistics.mean(losses("converge.csv", "bf16"))

    def line(name: str, run: str) -> list[str]:
        found = losses("converge.csv", run)
        mean, seeds = statistics.mean(found), len(found)
        spread = f" ({min(found):.4f} to {max(found):.4f})" if seeds > 1 else ""
        beside = "" if run == "bf16" else f"{100 * (mean / base - 1):+.2f} %"
        return [name, str(seeds), f"{mean:.4f}{spread}", beside]

    long, today, papers = (
        results.row("converge_long.csv", run=run)["val_loss"] for run in ("bf16", "coat", "coat-paper")
    )
    first = {
        run: results.row("converge.csv", run=run, seed=1)["val_loss"]
        for run in ("bf16", "coat", "coat-activations")
    }
    tokens = [
        results.row(f, run=r)["tokens"] for f, r in (("converge.csv", "bf16"), ("converge_long.csv", "bf16"))
    ]
    late = "val_loss_step_684"
    states, fp32 = (
        results.rows("converge_beta2.csv", run=f"coat-optimizer{kind}-beta2-0.999") for kind in ("", "-fp32")
    )
    beta2 = [statistics.mean(row[late] for row in rows) for rows in (states, fp32)]
    kinds = {"today's states": "", "FP32 moments": "-fp32", "the paper's states": "-paper"}
    whole = {
        name: results.rows("converge_beta2_150m.csv", run=f"coat{kind}-beta2-0.999")
        for name, kind in kinds.items()
    }
    return (
        table(
            [f"{tokens[0] / 1e6:.0f} million tokens", "seeds", "validation loss", "to BF16's mean"],
            line("BF16", "bf16"),
            line("COAT with the paper's states (`fp8_expanded`)", "coat-paper"),
            line("COAT with today's default states (`ratio8`, `log8`)", "coat"),
            line("COAT's layers beside stock AdamW", "coat-activations"),
            line("from BF16 to COAT in the middle, the paper's states", "bf16-to-coat"),
            line("from COAT to BF16 in the middle, the paper's states", "coat-to-bf16"),
            line('"fastest", the paper\'s states', "coat-fastest"),
            line('"smallest": 8-bit attention, `"bf16_params": "stochastic"`', "coat-smallest"),
        )
        + f"\nOver {tokens[1] / 1e6:.0f} million tokens, seed 1: BF16 {long:.4f}, COAT {today:.4f} "
        f"({100 * (today / long - 1):+.2f} %), with the paper's states {papers:.4f} "
        f"({100 * (papers / long - 1):+.2f} %). Of this seed BF16 is low: over {tokens[0] / 1e6:.0f} million "
        f"COAT ends {100 * (first['coat'] / first['bf16'] - 1):.2f} % above it, and its layers beside stock "
        f"AdamW {100 * (first['coat-activations'] / first['bf16'] - 1):.2f} %."
        f"\n\n{longest(results)}"
        "\n\nAt β2 0.999 and activations in BF16, "
        f"{late.rpartition('_')[2]} of {states[0]['steps']:.0f} steps and {len(states)} seeds: today's "
        f"states {beta2[0]:.4f}, FP32 moments {beta2[1]:.4f}; single pairs are "
        f"{between([a[late] - b[late] for a, b in zip(states, fp32, strict=True)], '{:+.3f}')} apart.\n\n"
        + table(
            [
                f"β2 0.999, FP8 layers, {whole['FP32 moments'][0]['tokens'] / 1e6:.0f} million tokens",
                "mean",
                "by seed",
            ],
            *(
                [
                    name,
                    f"{statistics.mean(row['val_loss'] for row in rows):.4f}",
                    ", ".join(f"{row['val_loss']:.4f}" for row in rows),
                ]
                for name, rows in whole.items()
            ),
        )
    )


def of_steps(results: Results, run: str, name: str) -> dict[int, float]:
    """What a run of convergence, `folder/run`, wrote down under a name, by step."""
    lines = read_metrics(results.folder / f"{run}.jsonl")
    return {line["step"]: line[name] for line in lines if name in line}


@block("numerics.md", "one billion parameters")
def one_billion(results: Results) -> str:
    """Two warm-ups: a slow one over seeds, not all of them of each kind, and a fast one of one seed."""
    names = {"bf16": "BF16", "coat": "COAT", "coat-fastest": '"fastest"', "coat-smallest": '"smallest"'}
    fast = {run: [results.row("converge_1b.csv", run=run, seed=1)] for run in names}
    names["coat-no-masters"] = '`"bf16_params": "stochastic"` alone'
    slow = {run: results.rows("converge_1b_warmup.csv", run=run) for run in names}
    losses = {run: of_steps(results, f"converge_1b/{run}-seed1", "loss") for run in fast}
    spans = (10, 31), (32, max(losses["bf16"]))

    def head(rows: list[dict]) -> list[str]:
        steps, seeds = int(rows[0]["warmup"] * rows[0]["steps"]), ", ".join(f"{r['seed']:.0f}" for r in rows)
        columns = f"validation loss, seed {seeds}", "to BF16, nats", "tokens per second", "peak memory"
        return [f"peak of {rows[0]['lr']:g} after {steps} steps", *columns]

    def line(rows: dict[str, list[dict]], run: str) -> list[str]:
        def to_bf16(over: Callable, name: str, form: str) -> str:
            """Of BF16's devices alone."""
            devices = {row["device"] for row in rows["bf16"]}
            own, base = (
                [row[name] for row in rows[kind] if row["device"] in devices] for kind in (run, "bf16")
            )
            return f"{form.format(over(own))} ({over(own) / over(base):.2f}×)" if own else ""

        base = {row["seed"]: row["val_loss"] for row in rows["bf16"]}
        nats = (f"{row['val_loss'] - base[row['seed']]:+.4f}" for row in rows[run])
        return [
            names[run],
            ", ".join(f"{row['val_loss']:.4f}" for row in rows[run]),
            "" if run == "bf16" else ", ".join(nats),
            to_bf16(statistics.mean, "tokens_per_s", "{:,.0f}"),
            to_bf16(lambda mb: max(mb) / 1e3, "peak_mb", "{:.1f} GB"),
        ]

    def apart(run: str, first: int, last: int) -> str:
        """In training, the mean over these steps."""
        steps = range(first, last + 1)
        nats = statistics.mean(losses[run][step] - losses["bf16"][step] for step in steps)
        return "" if run == "bf16" else f"{nats:+.2f}"

    def first_norms(run: str) -> list[str]:
        """Of the same weights and batch: steps have not been taken yet."""
        norms = (
            of_steps(results, f"{folder}/{run}-seed1", "grad_norm")
            for folder in ("converge_1b_warmup", "converge_1b")
        )
        return [f"{norm[1]:.5f}" for norm in norms]

    return (
        table(head(slow["bf16"]), *(line(slow, run) for run in slow))
        + "\n"
        + table(
            [*head(fast["bf16"]), *(f"in training, steps {first} to {last}" for first, last in spans)],
            *([*line(fast, run), *(apart(run, *span) for span in spans)] for run in fast),
        )
        + "\nThe norm of the first gradient of seed 1, in both runs: "
        + "; ".join(f"{names[run]} {', '.join(first_norms(run))}" for run in ("bf16", "coat"))
        + ".\n\nIn stock layers weights of the slow warm-up, where that was measured: "
        + "; ".join(
            f"{names[run]} "
            + ", ".join(
                f"{row['val_loss_bf16']:.4f} ({row['val_loss_bf16'] - row['val_loss']:+.4f})" for row in rows
            )
            for run, rows in slow.items()
            if "val_loss_bf16" in rows[0]
        )
        + ".\n"
    )


@block("numerics.md", "norms")
def norms(results: Results) -> str:
    """What rounding takes from normal values, and COAT's norms over BF16's: the median of the second half."""
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))

    def taken(fmt: Fp8Format) -> str:
        """Of the projection of rounded values on the values."""
        scale = tensor_scale_reference(x.abs().max().view(1), fmt)
        rounded = round_to_fp8(x / scale, fmt).float() * scale
        return percent(1 - (x @ rounded / (x @ x)).item(), 2)

    def ratios(folder: str) -> str:
        found = []
        for seed in (1, 2, 3):
            own, base = (
                of_steps(results, f"{folder}/{run}-seed{seed}", "grad_norm") for run in ("coat", "bf16")
            )
            late = [step for step in base if 2 * step > max(base)]
            found.append(statistics.median(own[step] / base[step] for step in late))
        return between(found, "{:.2f}")

    return (
        f"Along their own direction normal values shrink by {taken(E5M2)} in E5M2 and by {taken(E4M3)} in "
        "E4M3, each time they are rounded. COAT's norms over BF16's of the same seed, in the second half of "
        f"three runs each: 125M parameters {ratios('converge')}, "
        f"one billion {ratios('converge_1b_warmup')}.\n"
    )


@block("numerics.md", "fine-tuning")
def fine_tuning(results: Results) -> str:
    """A line for each path and system, over its seeds."""
    paths = {"hf": "transformers' model", "megatron": "Megatron's"}
    names = {"bf16": "BF16", "coat": "COAT"}
    names |= {f"coat-{kind}": f"COAT, {kind.replace('-', ' ')}" for kind in ("fastest", "smallest")}
    names["coat-recomputed-attention"] = "COAT, recomputed attention"
    found = results.rows("finetune.csv")
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in found:
        groups.setdefault((row["path"], row["system"]), []).append(row)
    bf16 = {(row["path"], row["seed"]): row["val_loss"] for row in found if row["system"] == "bf16"}

    def above(rows: list[dict], layers: str) -> str:
        """What the losses in these layers are above BF16's of the same path and seed."""
        # the first runs were measured only in the layers that were trained
        trained = "bf16" if rows[0]["system"] == "bf16" else "fp8"
        name = "val_loss" if layers == trained else f"val_loss_{layers}"
        nats = [
            row[name] - bf16[place]
            for row in rows
            if name in row and (place := (row["path"], row["seed"])) in bf16
        ]
        if not nats:
            return "not measured"
        seeds = "" if len(nats) == len(rows) else f" ({len(nats)} of {len(rows)} seeds)"
        return f"{statistics.mean(nats):.4f}{seeds}"

    def mean(rows: list[dict], name: str, shown: Callable[[float], str] = "{:.4f}".format) -> str:
        return shown(statistics.mean(row[name] for row in rows))

    lines = []
    for (path, system), rows in groups.items():
        after = mean(rows, "val_loss")
        if len(rows) > 1:
            after += f" ({between([row['val_loss'] for row in rows], '{:.4f}')})"
        losses = [mean(rows, "val_loss_start"), after, above(rows, "bf16"), above(rows, "fp8")]
        shares = [mean(rows, name, lambda x: percent(x, 1)) for name in ("cloze_start", "cloze")]
        sizes = [_thousands(rows[0][name]) for name in ("saved_bytes_per_token_layer", "peak_mb")]
        lines.append([f"{names[system]}, {paths[path]}", str(len(rows)), *losses, *shares, *sizes])
    head = (
        f"SmolLM2-135M, {found[0]['tokens'] / 1e6:.0f} million tokens",
        *("seeds", "loss before", "after", "above BF16, in stock layers", "above BF16, in COAT's layers"),
        *("last words before", "after", "kept, kB a token and layer", "peak GB"),
    )
    return table(head, *lines)


@block("numerics.md", "vision-language")
def vision_language(results: Results) -> str:
    rows = [results.row("vlm.csv", run=run) for run in ("bf16", "coat")]

    def cells(name: str, shown: Callable[[float], str]) -> list[str]:
        return [shown(row[name]) for row in rows]

    return table(
        [f"{rows[0]['steps']:,.0f} steps of {rows[0]['batch']:.0f} pictures", "BF16", "COAT"],
        ["loss of held-out pictures, nats a digit", *cells("val_loss", "{:.4f}".format)],
        ["numbers read without a mistake", *cells("exact", lambda x: percent(x, 1))],
        ["kept, kB a token and layer of the tower", *cells("tower_saved_bytes_per_token_layer", _thousands)],
        ["of the decoder", *cells("decoder_saved_bytes_per_token_layer", _thousands)],
        ["peak GB", *cells("peak_mb", _thousands)],
    )


def _thousands(x: float) -> str:
    return f"{x / 1e3:.1f}"
