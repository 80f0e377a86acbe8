"""RESULTS.md from the files in benchmarks/results alone: the same bytes for the same files."""

import functools
import inspect
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks import front_page, loss_picture, tables
from benchmarks.common.harness import BENCHMARKS, RESULTS, benchmark, read_rows
from benchmarks.common.pairs import paired
from benchmarks.converge.table import claims, summary
from benchmarks.finetune.table import summary as finetuned

PAGE = RESULTS.parent / "RESULTS.md"
SHARED = (
    *("date", "device", "driver", "cuda", "torch", "triton"),
    *("deepspeed", "megatron_core", "transformer_engine", "torchao"),
)
CONDITIONS = (*SHARED, "commit", "command")


class Section(NamedTuple):
    """The files NAME.csv and NAME_*.csv, but those of a longer name that stands here as well."""

    name: str
    title: str
    text: str | None = None
    """In place of what the benchmark of that name says about itself."""
    columns: tuple[str, ...] | None = None
    """Those shown, where there are many; the rest is in the file."""
    where: dict[str, object] = {}
    """Rows shown, by the value of columns."""
    over_seeds: Callable[[list[dict]], list[dict]] | None = None
    """What is shown in place of the rows of single runs."""


_CASE = ("model", "way", "gpus", "system", "layers", "micro_batch")
SECTIONS = [
    Section(
        "converge",
        "Convergence",
        columns=(
            *("run", "seed", "tokens", "steps", "val_loss_start", "val_loss"),
            *("val_loss_bf16", "val_loss_fp8", "to_bf16_mean", "to_bf16_same_seed"),
            *("train_s", "tokens_per_s", "peak_mb"),
            *("state_bytes_per_param", "saved_bytes_per_token_layer", "note"),
        ),
    ),
    Section(
        "finetune",
        "Fine-tuning a pretrained model",
        columns=(
            *("path", "system", "seed", "tokens", "steps", "val_loss_start", "val_loss"),
            *("val_loss_bf16_start", "val_loss_bf16", "val_loss_fp8_start", "val_loss_fp8"),
            "over_bf16_same_seed",
            *("cloze_start", "cloze", "questions"),
            *("peak_mb", "state_bytes_per_param", "saved_bytes_per_token_layer", "note"),
        ),
    ),
    Section(
        "vlm",
        "A vision-language model",
        columns=(
            *("run", "seed", "steps", "val_loss_start", "val_loss", "exact", "digits", "peak_mb"),
            *("state_bytes_per_param", "tower_saved_bytes_per_token_layer"),
            *("decoder_saved_bytes_per_token_layer", "tower_replaced", "projector_replaced"),
            *("decoder_replaced", "left", "note"),
        ),
    ),
    Section(
        "train",
        "Whole models",
        columns=(
            *_CASE,
            *("limited", "tokens_per_s_gpu", "mfu", "ms", "compute_ms", "peak_mb", "all_predicted_mb"),
            *("weights_mb", "after_backward_mb", "masters_mb", "states_mb", "saved_mb", "copies_mb"),
            *("forward_peak_mb", "backward_peak_mb", "step_peak_mb", "loss", "extrapolated_from", "note"),
        ),
    ),
    Section(
        "train_plan",
        "Memory on paper",
        "Predicted as by `coat plan` (coat_ds/plan/memory.py); none of it was measured. A role's column is "
        "the most that it takes at any moment, `all` the peak. `bf16_to_this`: how many times less than "
        "BF16.",
        columns=(
            *_CASE,
            *("weights_predicted_mb", "gradients_predicted_mb", "masters_predicted_mb"),
            *("states_predicted_mb", "saved_predicted_mb", "logits_predicted_mb", "copies_predicted_mb"),
            *("gathered_predicted_mb", "buffers_predicted_mb", "temporaries_predicted_mb"),
            *("all_predicted_mb", "bf16_to_this"),
        ),
    ),
    Section(
        "pretrain",
        "Short runs of the entry point",
        "`launch/pretrain_gpt.py --compare`.",
    ),
    Section("layer", "A decoder layer"),
    Section("models", "Models of transformers, converted"),
    Section("evaluation", "Models of transformers, evaluated"),
    Section("trainer", "Models of transformers under Trainer"),
    Section("megatron_main", "Megatron-LM's own loop"),
    Section("watch", "Watching a run"),
    Section(
        "parallel",
        "Tensor and sequence parallel layers",
        "Layers of Llama-2-7B's shape over two ranks, 4 x 2048 tokens. With `tensor_parallel` 1 each rank "
        "does the whole work. `gather_mb`, `sum_mb`: what a rank sends in one forward and backward.",
    ),
    Section("zero", "ZeRO", where={"rank": 0}),
    Section("zero_gradients", "ZeRO with gradients in FP32 or a second copy"),
    Section(
        "recompute",
        "Recompute",
        "24 layers of Megatron's GPTModel, h 2048, 4 x 2048 tokens, under Megatron's kinds of recompute. "
        "FP8 inputs: what is recomputed from is kept in FP8 groups of 128. `grad_error`: of all gradients "
        "together, to the first row's.",
    ),
    Section("first_step", "From an empty environment to the first step"),
    Section("adamw", "The optimizer's step"),
    Section(
        "host_states",
        "The step of states in host memory",
        "`to_link`: over the time of the same bytes copied in both directions at once.",
    ),
    Section("one_gpu", "Full fine-tuning on one GPU, states in host memory"),
    Section(
        "state_error",
        "Errors of stored moments",
        "Relative RMS errors on the moments of the quickstart's GPT after 300 steps, stored once in groups "
        "of 128. `kept`: of the update where plain FP8 (E4M3) makes no second moment zero; "
        "`kept_rms_ratio`, `kept_mse_ratio`: over that of plain FP8, and its square; `flushed`: the share "
        "of second moments that become zero.",
        where={"kind": "all"},
    ),
    Section("state_loop", "Errors of stored moments over many steps", where={"kind": "all"}),
    Section(
        "state_train",
        "Losses with stored moments and weights",
        "Quickstart's GPT on weights rounded to BF16, over seeds. `quickstart`: its 120 steps; `tail` and "
        "`plateau` go on, with FP32 moments and exact masters before, at falling learning rates. "
        "`to_baseline`: validation loss less that of FP32 moments and exact masters of the same seed; "
        "`error`: its standard error.",
        over_seeds=functools.partial(
            paired,
            within=("phase", "steps", "beta2"),
            by=("moments", "masters", "bytes"),
            baseline=("fp32, fp32", "exact", 10),
        ),
    ),
    Section(
        "layer_train",
        "Losses with COAT's layers",
        "Quickstart's GPT goes on near the end of its training, over seeds. `layers`: those that trained; "
        "`evaluated`: those that computed `val_loss`. `to_baseline`: less the loss of BF16 layers of the "
        "same seed; `error`: its standard error.",
        over_seeds=functools.partial(
            paired, within=("phase", "steps"), by=("layers", "evaluated"), baseline=("BF16", "BF16")
        ),
    ),
    Section("numerics", "Errors of a layer"),
    Section("reproduce", "Beside the paper"),
    Section("verify", "Headline figures, measured again"),
]
NOT_MEASURED = (
    "Nothing above four GPUs, nor on more than one node.",
    "No pre-training longer than 300 million tokens (125M parameters) or 46 million tokens (1B parameters, "
    "three seeds), and none of a larger model: their runs here have random tokens and a few steps.",
    "The fastest micro-batch of 13B over tensor parallelism: a few were tried.",
    "Nothing on a data set that others use.",
    "Nothing with torch newer than 2.14.1, and with that no more than a layer, the optimizer and Llama-2-7B "
    "under ZeRO-3.",
    'Largest micro-batches under ZeRO-1, and of "smallest" but under ZeRO-2 and, on four H100s, ZeRO-3.',
    "No GPUs but H200s, and one, two and four H100s. On H200s, 80 GB are a limit that torch's allocator was "
    "given.",
    "No downstream task but last words of held-out sentences, after fine-tuning a model of 135M parameters.",
)


def section_of(path: Path) -> Section | None:
    """The section of a file: the longest name that begins its name."""
    fitting = [s for s in SECTIONS if path.stem == s.name or path.stem.startswith(f"{s.name}_")]
    return max(fitting, key=lambda section: len(section.name), default=None)


def cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int) and abs(value) >= 100_000:
        return f"{value:,}"
    return str(value).replace("|", "\\|")


def markdown(rows: list[dict], columns: list[str] | None = None) -> list[str]:
    """A table of the columns that any row fills."""
    columns = [
        c for c in columns or dict.fromkeys(k for row in rows for k in row) if any(c in r for r in rows)
    ]
    lines = [[cell(row.get(c, "")) for c in columns] for row in rows]
    lines = [columns, ["---"] * len(columns), *lines]
    return ["| " + " | ".join(line) + " |" for line in lines] + [""]


def conditions(rows: list[dict]) -> list[str]:
    """What all rows of a table were measured under, every commit and command."""
    seen = {name: list(dict.fromkeys(str(row[name]) for row in rows if name in row)) for name in CONDITIONS}
    shared = "; ".join(f"{name} {', '.join(seen[name])}" for name in SHARED if seen[name])
    commands = ", ".join(f"`{command.strip()}`" for command in seen["command"])
    return [f"Conditions: {shared}; commit {', '.join(seen['commit'])}; {commands}.", ""]


def converged(rows: list[dict]) -> list[str]:
    """Losses over seeds, and what is claimed of them."""
    lines = ["Validation loss over the seeds of each kind of run:", "", *markdown(summary(rows))]
    first, *more = claims(rows) or [""]
    return lines + ([first, "", *(f"- {text}" for text in more), ""] if first else [])


def compared(rows: list[dict]) -> list[str]:
    """Every system compared with BF16: at equal batch, and each at its own largest micro-batch."""
    groups: dict[tuple, dict[tuple, dict]] = defaultdict(dict)
    for row in rows:
        if "ms" in row:
            groups[tuple(row[k] for k in ("model", "way", "gpus", "layers"))][
                row["system"], row["limited"]
            ] = row
    ratios = []
    for group, by_system in groups.items():
        largest: dict[str, dict] = {}
        for (system, limited), row in by_system.items():
            if limited and row["micro_batch"] > largest.get(system, {}).get("micro_batch", 0):
                largest[system] = row
        for (system, limited), row in by_system.items():
            base = by_system.get(("BF16", False))
            if limited or base is None or system == "BF16":
                continue
            ratio = dict(zip(("model", "way", "gpus", "layers"), group, strict=True)) | {"system": system}
            ratio["speed, equal batch"] = row["tokens_per_s_gpu"] / base["tokens_per_s_gpu"]
            if row.get("peak_mb") and base.get("peak_mb"):
                ratio["memory, equal batch"] = base["peak_mb"] / row["peak_mb"]
            if system in largest and "BF16" in largest:
                ratio["largest micro-batch"] = largest[system]["micro_batch"]
                ratio["BF16's"] = largest["BF16"]["micro_batch"]
                ratio["speed, each at its largest"] = (
                    largest[system]["tokens_per_s_gpu"] / largest["BF16"]["tokens_per_s_gpu"]
                )
            ratios.append(ratio)
    if not ratios:
        return []
    lines = ["Times BF16's speed, and times less memory than BF16 (goals: 1.45 and 1.8 at equal batch):", ""]
    return lines + markdown(ratios)


def body(section: Section, paths: list[Path], plots: list[Path]) -> list[str]:
    """A section: what was measured, each table with its conditions and its plot, and plots of several."""
    known = BENCHMARKS.get(section.name)
    lines = [f"## {section.title}", ""]
    text = section.text or (inspect.cleandoc(known.run.__doc__) if known else "")
    # lists begin after an empty line
    lines += [re.sub(r"\n- ", "\n\n- ", text, count=1), ""] if text else []
    for path in paths:
        rows = read_rows(path)
        if not rows:
            continue
        lines += [f"### [{path.name}](results/{path.name})", ""]
        if section.name == "converge":
            lines += converged(rows)
        if section.name == "finetune":
            lines += ["Over the seeds of each path and system:", "", *markdown(finetuned(rows))]
        if section.name == "train":
            lines += compared(rows)
        rows_of_arms = section.over_seeds(rows) if section.over_seeds else rows
        shown = [row for row in rows_of_arms if all(row.get(k) == v for k, v in section.where.items())]
        if section.where:
            lines += [f"Rows with {', '.join(f'{k} {v}' for k, v in section.where.items())}.", ""]
        names = section.columns or [k for k in dict.fromkeys(k for row in shown for k in row)]
        lines += markdown(shown, [name for name in names if name not in CONDITIONS])
        lines += conditions(rows)
        lines += [line for plot in plots if plot.stem == path.stem for line in _embed(plot)]
    stems = [path.stem for path in paths]
    return lines + [line for plot in plots if plot.stem not in stems for line in _embed(plot)]


def _embed(plot: Path) -> list[str]:
    return [f"![{plot.stem}](results/{plot.name})", ""]


def build(results: Path) -> str:
    """The page, of the CSV files in `results`."""
    files: dict[str, list[Path]] = defaultdict(list)
    plots: dict[str, list[Path]] = defaultdict(list)
    for found, suffix in ((files, "csv"), (plots, "png")):
        for path in sorted(results.glob(f"*.{suffix}")):
            section = section_of(path)
            found[section.name if section else path.stem].append(path)
    known = {section.name: section for section in SECTIONS}
    lines = [
        "# Results",
        "",
        "Made by `python -m benchmarks report` from the files in `benchmarks/results`; nothing is written "
        "by hand. Sizes in `mb` are 10^6 bytes.",
        "",
    ]
    for name in (*known, *sorted(files.keys() - known.keys())):
        if files[name]:
            lines += body(known.get(name) or Section(name, name), files[name], plots[name])
    lines += ["## Not measured", ""]
    lines += [f"- {text}" for text in NOT_MEASURED]
    lines += [f"- {known[name].title}: no results yet." for name in known if not files[name]]
    for path in sorted(path for paths in files.values() for path in paths):
        for row in read_rows(path):
            if "note" in row:
                which = ", ".join(f"{k} {cell(v)}" for k, v in row.items() if k not in (*CONDITIONS, "note"))
                lines += [f"- {path.stem}: {which}: {row['note']}."]
    return "\n".join(lines) + "\n"


@benchmark(needs_gpu=False, writes_table=False)
def report(arguments, _) -> None:
    """RESULTS.md from the files in benchmarks/results: tables, plots, conditions, and what is missing.

    The same files give the same page. Without --output the README's table and picture and the tables
    of docs/ are made as well.
    """
    page = arguments.output or PAGE
    page.write_text(build(RESULTS))
    print(f"wrote {page}")
    if arguments.output is None:
        front_page.write(RESULTS)
        loss_picture.plot(RESULTS, loss_picture.PICTURE)
        tables.write()
        pages = ", ".join(map(str, tables.BLOCKS))
        print(f"wrote {front_page.README}, the pictures of docs/images, and the tables of docs/: {pages}")
