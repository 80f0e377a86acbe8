"""The loss of BF16 and of COAT on real text, over seeds, parts of COAT and sizes of models, at equal steps.

A run is named after what is trained and its seed: `bf16-seed2`, `coat-optimizer-seed1`; without a seed it is
number 1. `bf16-to-coat` and `coat-to-bf16` change over half-way, through a checkpoint. Each run leaves two
files in a folder next to the table: `NAME.jsonl` with a line for each step, and, when it is complete,
`NAME.json`. Runs with the same data and recipe that are complete there, or in `benchmarks/results`, are
not repeated.
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from benchmarks.common.environment import visible_gpus
from benchmarks.common.harness import RESULTS, Table, benchmark, reason
from benchmarks.common.spawn import PATIENCE
from benchmarks.converge import corpus
from benchmarks.converge.measure import PRETRAINING, make_run
from benchmarks.converge.recipe import (
    CONFIGURATIONS,
    RECIPES,
    RUNS,
    TINY,
    Recipe,
    Run,
    Setup,
    Task,
    conditions_of,
)
from benchmarks.converge.table import carry, complete_runs, differences, publish


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--recipe",
        choices=[*RECIPES, "moe"],
        default="125m",
        help="model, batch and text (default: %(default)s)",
    )
    runs = f"{' '.join(RUNS)}; of 1b: {' '.join(CONFIGURATIONS)}; of moe: the first six"
    run_options(parser, runs, "1.5e8, of 1b 1e8, of moe 4.9e6", "all of a step; of 1b 16", "runs/converge")
    text_options(parser)


def text_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text", type=Path, nargs="+", help="folders of text in place of the installed packages"
    )


def run_options(parser: argparse.ArgumentParser, runs: str, tokens: str, micro_batch: str, work: str) -> None:
    """Options of benchmarks that make runs, with the defaults that the help shows; `work` is one."""
    add = parser.add_argument
    add("--runs", nargs="+", help=f"in this order; default: {runs}")
    add("--gpus", type=int, default=1, help="this number of runs at once, each on a GPU of its own")
    add("--tokens", type=float, help=f"in a run (default {tokens})")
    add("--minutes", type=float, default=math.inf, help="stop then, to go on at the next call")
    add("--micro-batch", type=int, help=f"sequences in a pass (default: {micro_batch})")
    add("--lr", type=float, help="peak of the learning rate in place of the recipe's")
    add("--warmup", type=float, help="share of the steps until the peak, in place of the recipe's")
    add("--work", type=Path, default=Path(work), help="data, unfinished runs, checkpoints")
    add("--collect", action="store_true", help="train nothing: table and plot of the runs next to --output")


@benchmark(needs_gpu=False, options=options)
def converge(arguments, table: Table) -> None:
    """GPTs on the text of installed packages: BF16 over seeds, COAT over seeds and in parts.

    Recipe 125m: 12 layers, h 768, sequence 1024, peak 6e-4; 1b: 16 layers, h 2048, f 8192, 8 groups of 32
    heads, tied, sequence 2048, peak 2e-4. 64 sequences a step, byte-pair tokenizer of 32,768 trained on the
    spot. Recipe moe: transformers' Qwen3-MoE, 8 layers, h 512, 4 of 16 experts of 512 for a token, 300 steps
    of 32 sequences of 512, tokenizer of 8,192, peak 1e-3. Files are held out by the hash of their content.
    AdamW 0.9, 0.95, or 0.999 in runs named so, weight decay 0.1 of matrices, clip 1.0, peak after a tenth of
    the steps, of 1b after half of them, cosine to a tenth; BF16 weights and FP32 masters under ZeRO-1, a run
    on one GPU. A seed decides weights and the order of the data. Runs with the same data and recipe that are
    complete in benchmarks/results, next to --output or in --work are not repeated; --minutes stops in the
    middle of one, and the next call with the same --work goes on there. In the end it says of each kind of
    run whether what is claimed of COAT holds: a mean that is not above the spread of BF16's seeds, and at
    most 0.01 nat above their mean. Columns:
    - val_loss_start, val_loss: of 524,288 held-out tokens, nats per token, by the layers that were trained;
    - val_loss_bf16, val_loss_fp8: in the end, of the same weights in stock layers, and in COAT's;
    - to_bf16_mean, to_bf16_same_seed: relative distance to BF16's mean, and to BF16 of that seed;
    - train_s: without validations, with compiling kernels; tokens_per_s: median over twenty steps at a time,
      with reading the data; peak_mb: over what was held before the model, in 10^6 bytes;
    - saved_bytes_per_token_layer: kept for backward by the layers; state_bytes_per_param: of the optimizer;
    - manifest, tokenizer: the hashes of the list of files, which stays in --work, and of the tokenizer.
    Without a GPU, or with --quick, the quickstart's model for a few steps. On a CPU there are no peaks.
    """
    started, output = time.monotonic(), table.path.with_suffix("")
    if arguments.collect:
        publish(output, table)
        return
    mixture = arguments.recipe == "moe"
    if mixture:
        # its model needs transformers
        from benchmarks.converge import moe
    names = arguments.runs or {"125m": RUNS, "1b": CONFIGURATIONS, "moe": RUNS[:6]}[arguments.recipe]
    recipe = moe.RECIPE if mixture else RECIPES[arguments.recipe]
    if arguments.quick or not torch.cuda.is_available():
        recipe = TINY._replace(shape_file=None) if mixture else TINY
    data, identity = prepare_text(arguments, recipe)
    print(f"text ready after {time.monotonic() - started:.0f} s in {data}", flush=True)
    task = moe.MIXTURE if mixture else PRETRAINING
    setup, conditions = prepared(arguments, task, recipe, data, identity, output, started)
    make_runs([Run.parse(name) for name in names], arguments.gpus, setup, conditions, table, publish)


def make_runs(
    runs: list[Run],
    gpus: int,
    setup: Setup,
    conditions: dict,
    table: Table,
    publish: Callable[[Path, Table], None],
) -> None:
    """Makes those that are complete nowhere, collects in `setup.output` all that are complete, and publishes.

    Raises SystemExit, after that, if a run failed.
    """
    named, output = {run.name: run for run in runs}, setup.output
    known = complete_runs([output, RESULTS / output.name, setup.runs], conditions)
    for name in named.keys() & known.keys():
        print(f"{name}: complete in {known[name].parent}", flush=True)
    missing = [run for name, run in named.items() if name not in known]
    good = train_side_by_side(missing, gpus, setup, conditions, table.environment)
    known |= complete_runs([setup.runs], conditions)
    for stem in known.values():
        carry(stem, output)
    publish(output, table)
    if not good:
        raise SystemExit(
            f"some runs failed, as it says above. The others are in {output}; the same call makes those again"
        )


def prepare_text(arguments, recipe: Recipe, tokenizer: str | None = None) -> tuple[Path, dict[str, object]]:
    """The folder of the text as token ids, and its identity.

    tokenizer: the content of a tokenizer.json; without one, the recipe's is trained.
    Raises SystemExit if there is too little text.
    """
    roots = arguments.text or corpus.installed_roots()
    wanted = roots, recipe.vocabulary, recipe.text, tokenizer
    data = arguments.work / f"text-{corpus.name_of(*wanted)}"
    try:
        corpus.prepare(data, *wanted)
        return data, corpus.load(data, recipe.seq_length, 0).identity
    except ValueError as error:
        raise SystemExit(str(error)) from error


def prepared(
    arguments, task: Task, recipe: Recipe, data: Path, identity: dict, output: Path, started: float
) -> tuple[Setup, dict[str, object]]:
    """The folders, and what all runs share: the recipe and the identity of what they start from.

    Raises SystemExit if `output` holds runs that cannot be compared, or for a recipe that cannot be.
    """
    if arguments.tokens is not None:
        recipe = recipe._replace(tokens=int(arguments.tokens))
    given = {name: getattr(arguments, name) for name in ("micro_batch", "lr", "warmup")}
    recipe = recipe._replace(**{name: value for name, value in given.items() if value is not None})
    if not (recipe.lr > 0 and 0 <= recipe.warmup < 1):
        raise SystemExit(
            f"--lr {recipe.lr:g} --warmup {recipe.warmup:g}: a rate above 0, and a share from 0 to below 1"
        )
    if recipe.batch % recipe.micro_batch:
        raise SystemExit(
            f"--micro-batch: {recipe.micro_batch} does not divide the {recipe.batch} sequences of a step"
        )
    conditions = conditions_of(recipe) | identity
    print("  ".join(f"{k} {v}" for k, v in conditions.items()), flush=True)
    output.mkdir(parents=True, exist_ok=True)
    if others := [path for path in output.glob("*.json") if differences(path, conditions)]:
        raise SystemExit(
            f"{others[0]} was made with other {', '.join(differences(others[0], conditions))}: what cannot "
            "be compared would share a folder, give another with --output"
        )
    digest = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:8]
    deadline = started + 60 * arguments.minutes
    setup = Setup(task, recipe, data, arguments.work / f"runs-{digest}", output, deadline)
    setup.runs.mkdir(parents=True, exist_ok=True)
    return setup, conditions


def train_side_by_side(runs: list[Run], gpus: int, setup: Setup, conditions: dict, environment: dict) -> bool:
    """Makes runs until they are complete or time is over; each of several GPUs takes the next that waits.

    Returns whether none failed. Raises SystemExit if there are fewer GPUs.
    """
    if not runs:
        return True
    if gpus == 1:
        return train_each(runs, setup, conditions, environment)
    visible = visible_gpus() or [str(number) for number in range(gpus)]
    if len(visible) < gpus:
        raise SystemExit(f"--gpus {gpus}: found {len(visible)}")
    context, processes = multiprocessing.get_context("spawn"), []
    waiting = context.SimpleQueue()
    for run in [*runs, *[None] * gpus]:
        waiting.put(run)
    for number in range(gpus):
        # each process sees one GPU, and that from before it imports torch
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[number]
        arguments = (waiting, setup, conditions, environment)
        processes.append(context.Process(target=train_waiting, args=arguments))
        processes[-1].start()
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    for process in processes:
        process.join()
    return not any(process.exitcode for process in processes)


def train_waiting(waiting, setup: Setup, conditions: dict, environment: dict) -> None:
    """Makes the runs of a queue that ends with None, one for each process that reads it, which fails if one
    of its runs did."""
    # as torchrun has it: threads of several processes wait for each other
    torch.set_num_threads(1)
    if not train_each(iter(waiting.get, None), setup, conditions, environment):
        raise SystemExit(1)


def train_each(runs: Iterable[Run], setup: Setup, conditions: dict, environment: dict) -> bool:
    """Makes one run after another until time is over; the first goes one step at least. Returns whether none
    failed."""
    from coat_launch.process_group import start_process_group
    from megatron_ext.model import initialize_model_parallel

    start_process_group(PATIENCE)
    initialize_model_parallel()
    good = True
    for number, run in enumerate(runs):
        if number and time.monotonic() > setup.deadline:
            print(f"{run.name}: no time left", flush=True)
            continue
        try:
            make_run(run, setup, conditions, environment)
        # one that fails leaves the others standing
        except Exception as error:
            good = False
            traceback.print_exc()
            print(f"{run.name}: {reason(error)}", flush=True)
        carry(setup.runs / run.name, setup.output)
    torch.distributed.destroy_process_group()
    return good
