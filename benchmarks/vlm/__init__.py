"""A vision-language model that learns to read, in BF16 and by COAT.

Runs are named and go on as in `benchmarks.converge`: `bf16-seed1`, `coat-seed2`, `coat-smallest`.
"""

import argparse
import functools
import time

import torch

from benchmarks.common.harness import Table, benchmark
from benchmarks.converge import make_runs, prepared, run_options
from benchmarks.converge.recipe import Recipe, Run, Setup, Task
from benchmarks.vlm import model, pictures, sizes
from benchmarks.vlm.sizes import Sizes
from benchmarks.vlm.table import publish

RUNS = ["bf16-seed1", "coat-seed1"]
BATCH, STEPS = 256, 2000


def recipe_of(of: Sizes, batch: int, steps: int) -> Recipe:
    return Recipe(
        None,
        vocabulary=pictures.VOCABULARY,
        seq_length=of.sequence,
        batch=batch,
        micro_batch=batch,
        held_out=of.held_out,
        tokens=steps * batch * of.sequence,
        text=0,
        lr=1e-3,
    )


def options(parser: argparse.ArgumentParser) -> None:
    tokens = recipe_of(sizes.FULL, BATCH, STEPS).tokens
    run_options(parser, " ".join(RUNS), f"{tokens:.2g}", f"all of a step, {BATCH}", "runs/vlm")


@benchmark(needs_gpu=False, options=options)
def vlm(arguments, table: Table) -> None:
    """A small LLaVA of transformers that learns to read numbers in pictures: BF16 and COAT.

    SigLIP's tower (6 layers, h 384), a projector and Llama's decoder (6 layers, h 512), random weights, 32M
    parameters. Pictures of 64 x 64 with a number of five digits in Pillow's font, in a random size at a
    random place; 64 patches, a question and the digits make 69 tokens; 256 pictures a step, 2,000 steps. No
    held-out number is in a training picture. The engine is DeepSpeed's, ZeRO-1, BF16 weights and FP32
    masters; the block in its JSON is all that differs. AdamW 0.9, 0.95, weight decay 0.1 of matrices, clip
    1.0, peak 1e-3 after a tenth of the steps, cosine to a tenth. A seed decides weights and the order of the
    pictures. Columns:
    - val_loss_start, val_loss: of held-out pictures, nats per digit; chance is 2.3;
    - exact, digits: share of held-out numbers that are read without a mistake, and of right digits;
    - tower_replaced, projector_replaced, decoder_replaced: how many modules of each kind COAT replaced; left:
      which stayed, and why;
    - *_saved_bytes_per_token_layer: kept for backward by the layers; the others: as in converge, tokens of
      pictures counted.
    Without a GPU, or with --quick, two digits and two layers for a few steps.
    """
    started, output = time.monotonic(), table.path.with_suffix("")
    if arguments.collect:
        publish(output, table)
        return
    runs = [Run.parse(name) for name in arguments.runs or RUNS]
    small = arguments.quick or not torch.cuda.is_available()
    of = sizes.QUICK if small else sizes.FULL
    recipe = recipe_of(of, *((16, 4) if small else (BATCH, STEPS)))
    data = arguments.work / f"pictures-{pictures.name_of(of)}"
    pictures.prepare(data, of)
    print(f"pictures ready after {time.monotonic() - started:.0f} s in {data}", flush=True)
    build, load = functools.partial(model.build, of), functools.partial(load_pictures, of)
    task = Task(build, load, model.loss, model.facts, model.scores)
    identity = pictures.identity(data) | {"sizes": str(tuple(of))}
    setup, conditions = prepared(arguments, task, recipe, data, identity, output, started)
    make_runs(runs, arguments.gpus, setup, conditions, table, publish)


def load_pictures(of: Sizes, setup: Setup, seed: int) -> pictures.PictureData:
    """As `Task.load`."""
    return pictures.load(setup.data, of, seed)
