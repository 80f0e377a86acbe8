"""What storing the moments costs over many steps, in which each error goes into the next step's moments."""

import argparse
import time
from pathlib import Path

import torch

from benchmarks.common.harness import Table, benchmark
from benchmarks.common.spawn import one_process
from benchmarks.common.training import train
from benchmarks.converge import text_options
from benchmarks.finetune import weights_option
from benchmarks.state_loop.loop import Blocks, Loop
from benchmarks.state_loop.models import MODELS, OF_A_CPU


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, help=f"default: all; without a GPU {' '.join(OF_A_CPU)}")
    add(
        "--after", type=int, nargs="+", help="steps before the codes start, once for each (default: by model)"
    )
    add("--steps", type=int, default=1000, help="steps of the codes (default %(default)s)")
    add("--work", type=Path, default=Path("runs/state_loop"), help="text as token ids")
    text_options(parser)
    weights_option(parser)


@benchmark(needs_gpu=False, options=options)
def state_loop(arguments, table: Table) -> None:
    """Errors of stored moments over many steps, on models that learn real text with FP32 moments.

    Blocks of every matrix keep two more kinds of moments: exact ones, for each beta2, from the first step
    on, and those of every code, which start from the exact ones after some steps and get the same gradients.
    Codes of other libraries are by formula (benchmarks/common/state_codes.py); a scale for a whole tensor is
    of the exact moments of that tensor. Models:
    - small: the quickstart's GPT on bytes;
    - rare: the same with 16,384 ids and 512 tokens a step: most rows of the embedding seldom get gradients;
    - outliers: small, with four channels after every norm 30 to 100 times as large, and the weights for them
      smaller by the same factor, at the start;
    - 125m: 12 layers, h 768, on bytes, after 300, 1,000 and 3,000 steps of 4,096;
    - smollm2: SmolLM2-135M-Instruct or --weights, after 300 steps of 4,096 tokens from pretrained weights.

    Columns:
    - kind: of matrices; rare rows: of embeddings, those with gradients in fewer than 1 of 50 steps;
    - stored: relative RMS error of the Adam update by moments that are encoded once;
    - applied: of the update of each step, before its moments are stored, over the last half of the steps;
    - drift: mean of ln(v / exact v) at the last step, over elements that ever had a gradient and whose v is
      not zero; what cannot decay is above zero;
    - stalled: the share of elements that ever had a gradient whose v is off by more than a third, and their
      update by more than 15 %, or is zero.
    The table is written after each age of a model.
    """
    # gradients are coarser in BF16, in which models are trained
    torch.set_float32_matmul_precision("high")
    default = MODELS if arguments.quick or torch.cuda.is_available() else OF_A_CPU
    with one_process():
        for name in arguments.models or default:
            known = MODELS[name]
            ages, steps = arguments.after or known.ages, arguments.steps
            if arguments.quick:
                ages, steps = [3, 5][: len(ages)], 4
            started = time.monotonic()
            try:
                pupil = known.build(arguments)
            except ValueError as error:
                raise SystemExit(str(error)) from error
            blocks = Blocks(pupil.model)
            loops = [Loop(blocks, age, steps) for age in ages]
            print(f"{name}: ready after {time.monotonic() - started:.0f} s", flush=True)

            @torch.no_grad()
            def look(step: int, name=name, blocks=blocks, loops=loops) -> None:
                g = blocks.step()
                for loop in loops:
                    loop.step(step, g)
                    if step == loop.end:
                        table.extend({"model": name, **row} for row in loop.rows())

            train(pupil.model, pupil.text, pupil.batch_size, max(ages) + steps, pupil.lr, look)
            print(f"{name}: {time.monotonic() - started:.0f} s in all", flush=True)
