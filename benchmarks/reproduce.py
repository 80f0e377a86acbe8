"""The tables of the paper (COAT, ICLR 2025, arXiv 2410.19313), measured here, with the paper's figures."""

import argparse
import csv
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common.commands import Commands, Needs, NotRunnable
from benchmarks.common.harness import Table, benchmark
from benchmarks.report import markdown

PAPER = Path(__file__).parent / "paper_results.csv"
# what the paper's systems are called by the benchmarks
SYSTEMS = {
    "layer": {"BF16": "BF16", "TransformerEngine": "TE delayed", "COAT": "ours"},
    "train": {"BF16": "BF16", "TransformerEngine": "TE FP8", "COAT": "COAT"},
}
# of the row at the largest micro-batch within 80 GB; the others are of the row at equal micro-batch
LARGEST = {"largest_micro_batch": "micro_batch", "tokens_per_s_gpu": "tokens_per_s_gpu"}
ABOUT = ("table", "row", "gpus", "command", "system", "why")


def load() -> list[dict[str, str]]:
    """Lines of paper_results.csv, without empty cells."""
    with PAPER.open(newline="") as file:
        return [{k: v for k, v in line.items() if v} for line in csv.DictReader(file)]


def measured(line: dict[str, str], rows: list[dict]) -> dict[str, float | str]:
    """What `rows` have of the paper's system: figures by the paper's columns, or text why there is none."""
    kind = line["command"].split()[0]
    name = SYSTEMS[kind][line["system"]]
    own = [row for row in rows if row.get("layer" if kind == "layer" else "system") == name]
    own = [row for row in own if "extrapolated_from" not in row]
    equal = next((row for row in own if not row.get("limited")), {"note": "not measured"})
    # at the largest that fits and not at the fastest, as in the paper
    fitting = [row for row in own if row.get("limited") and "note" not in row]
    largest = max(fitting, key=lambda row: row["micro_batch"], default=None)
    found: dict[str, float | str] = {}
    for column in line.keys() - set(ABOUT):
        row, own_column = (largest, LARGEST[column]) if column in LARGEST else (equal, column)
        if row is None:
            notes = [row["note"] for row in own if "note" in row]
            found[column] = notes[-1] if notes else "not measured"
        else:
            found[column] = row.get(own_column, row.get("note", "not measured"))
    return found


def compared(line: dict[str, str], commands: Commands) -> Iterator[dict]:
    """A row for each of the paper's figures in this line: with the one found here, or why there is none."""
    columns = [name for name in line if name not in ABOUT]
    why, found = line.get("why", ""), {}
    try:
        if "command" in line:
            found = measured(line, commands.rows(line["command"], Needs(int(line["gpus"]))))
    except NotRunnable as error:
        why = str(error)
        if rows := commands.earlier_rows(line["command"]):
            found = measured(line, rows)
    except RuntimeError as error:
        why = str(error)
    for column in columns:
        here = found.get(column, "")
        # why a row has no figure
        reason, here = (here, "") if isinstance(here, str) else (why, here)
        yield {
            **{name: line.get(name, "") for name in ("table", "row", "gpus", "system")},
            "figure": column,
            "paper": line[column],
            "here": here,
            "reason": reason or why,
        }


def add_ratios(rows: list[dict]) -> None:
    """Adds to the paper's figures and to ours their ratio to BF16's of the same table's row."""
    base = {(r["table"], r["row"], r["gpus"], r["figure"]): r for r in rows if r["system"] == "BF16"}
    for row in rows:
        own = base.get((row["table"], row["row"], row["gpus"], row["figure"]), {})
        for name in ("paper", "here"):
            row[f"{name}_to_bf16"] = ratio(row[name], own.get(name, ""))
        # the last column
        row["reason"] = row.pop("reason")


def ratio(figure: float | str, base: float | str) -> float | str:
    """Empty where one of them is no number."""
    try:
        return float(figure) / float(base)
    except (ValueError, ZeroDivisionError):
        return ""


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--paper", action="store_true", required=True, help="the tables of the paper")
    add("--tables", nargs="+", help="only these, by the paper's numbers; 0 are rows that it does not have")
    add("--minutes", type=float, default=math.inf, help="start no command after that")
    add(
        "--work",
        type=Path,
        help="folder of measurements; those that it holds are not repeated, and are "
        "shown where there is no time to go on with them",
    )


@benchmark(needs_gpu=False, options=options)
def reproduce(arguments, table: Table) -> None:
    """The paper's tables on the GPUs that there are, compared with the paper's figures (H100s, FSDP).

    Figures of the paper are in paper_results.csv. Table 2: activations of a layer in h bytes per token. 6:
    time and activations of a layer. 7: whole models: states, activations and peak at equal micro-batch, then
    the largest micro-batch within 80 GB and its speed. 3 and 4: losses, which are not measured. 0: a model
    with fewer layers, which one GPU of 80 GB holds in BF16. Here models are Megatron's under DeepSpeed's
    ZeRO-3, on one GPU ZeRO-1. The paper's BF16 layer keeps more than today's: norms in FP32 and an unfused
    SwiGLU. Columns: figures as `layer` and `train` have them (mb are 10^6 bytes); X_to_bf16: over BF16's, the
    paper's and this machine's; reason: why there is no figure here. With --quick tiny models: figures mean
    nothing.
    """
    deadline = time.monotonic() + 60 * arguments.minutes
    lines = load()
    known = sorted({line["table"] for line in lines})
    if unknown := set(arguments.tables or known) - set(known):
        raise SystemExit(f"--tables {' '.join(sorted(unknown))}: expected some of {', '.join(known)}")
    chosen = [line for line in lines if arguments.tables is None or line["table"] in arguments.tables]
    with (
        tempfile.TemporaryDirectory() as temporary,
        Commands(arguments.work or Path(temporary), deadline, arguments.quick) as commands,
    ):
        wanted = (line for line in chosen if "command" in line)
        commands.want_all((line["command"], Needs(int(line["gpus"]))) for line in wanted)
        for line in chosen:
            table.rows += compared(line, commands)
            add_ratios(table.rows)
            # what follows may be cut off
            table.write()
    print("", *markdown(table.rows), sep="\n")
