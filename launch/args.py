"""The command line of the entry point."""

import argparse
import math
from collections.abc import Callable

from coat_launch import config_path

RUNS = ("bf16", "coat")
SHAPE_FLAGS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
# a longer series of steps with a loss or gradients that are not finite ends the run
MAX_FAILURES = 10


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text}")
    return value


def rate(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number, 0 or more, found {text}")
    return value


def parse_args(argv: list[str] | None = None, description: str | None = None) -> argparse.Namespace:
    """The arguments, sys.argv's by default, with dependent defaults filled in. Exits, as argparse does, for
    arguments that do not fit together.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    _add_model(parser.add_argument_group("model").add_argument)
    _add_data(parser.add_argument_group("data").add_argument)
    _add_training(parser.add_argument_group("training").add_argument)
    _add_output(parser.add_argument_group("output").add_argument)
    args = parser.parse_args(argv)
    args.eval_interval = args.eval_interval or max(1, args.steps // 5)
    args.warmup_given = args.warmup_steps is not None
    args.warmup_steps = args.steps // 10 if args.warmup_steps is None else args.warmup_steps
    _check(args, parser.error)
    return args


def _add_model(add: Callable) -> None:
    add("--model-config", default=config_path("model_quickstart.json"), help="JSON file with the shape")
    for flag in SHAPE_FLAGS:
        add("--" + flag.replace("_", "-"), type=positive, help="in place of the model config's")


def _add_data(add: Callable) -> None:
    add(
        "--data",
        nargs="+",
        default=[],
        metavar="PATH",
        help="text files, .jsonl files with a text in each line, folders of them, or Megatron indexed "
        "datasets; without it, the Python standard library's sources. Every process tokenises text at its "
        "start: use the indexed format for many gigabytes",
    )
    add("--tokenizer", metavar="JSON", help="Hugging Face tokenizer.json; bytes without it")
    add("--vocab-size", type=positive, help="number of ids of indexed data without --tokenizer")
    add("--seq-length", type=positive, default=128, help="tokens per sequence (default %(default)s)")


def _add_training(add: Callable) -> None:
    add("--steps", type=positive, default=120, help="optimizer steps (default %(default)s)")
    add("--micro-batch-size", type=positive, help="sequences per rank and pass; else the JSON's, else 4")
    add("--global-batch-size", type=positive, help="sequences per step, by accumulation; else the JSON's")
    add("--lr", type=rate, help='peak learning rate (default: the JSON\'s; 2e-3 for its "auto")')
    add("--warmup-steps", type=int, help="linear warmup, then cosine to 10%% (default a tenth of --steps)")
    add(
        "--tensor-model-parallel-size",
        type=positive,
        default=1,
        help="ranks that share each layer (default %(default)s)",
    )
    add(
        "--sequence-parallel",
        action="store_true",
        help="split the sequence between the layers over the same ranks",
    )
    add(
        "--non-finite",
        choices=("stop", "skip"),
        default="stop",
        help="at a loss that is NaN or infinite: stop, or log a line and skip the step, and stop after "
        f"{MAX_FAILURES} in a row (default %(default)s)",
    )
    add(
        "--distributed-timeout",
        type=positive,
        default=600,
        metavar="SECONDS",
        help="seconds until a rank that does not answer ends the run (default %(default)s)",
    )
    add("--seed", type=int, default=1234, help="weights, order and split of the data (default %(default)s)")
    add("--deepspeed-config", default=config_path("ds_zero1_coat.json"), help="DeepSpeed JSON")
    # not --run, which torchrun reads as an abbreviation of its own options
    add("--variant", choices=RUNS, help="override the JSON: bf16 disables the coat block")
    add("--compare", action="store_true", help="both runs, one after the other, and a table")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)


def _add_output(add: Callable) -> None:
    add(
        "--output",
        default="runs/gpt",
        help="folder for metrics, plot, summary, checkpoints (default %(default)s)",
    )
    add("--eval-interval", type=positive, help="steps between validations (default a fifth of --steps)")
    add(
        "--eval-batches", type=positive, default=8, help="global batches per validation (default %(default)s)"
    )
    add("--save-interval", type=positive, help="steps between checkpoints in OUTPUT/<run>/checkpoints")
    add(
        "--load",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="go on from the newest whole checkpoint in this folder (or from this checkpoint), without a "
        "value in OUTPUT/<run>/checkpoints",
    )
    add("--resume", action="store_true", help="as --load, but start where there is no checkpoint yet")
    add("--keep-checkpoints", type=positive, metavar="N", help="remove all but the newest N (default: none)")


def _check(args: argparse.Namespace, refuse: Callable[[str], object]) -> None:
    if args.compare and args.variant:
        refuse("--compare makes both runs: drop --variant")
    if args.compare and args.load:
        refuse("--compare resumes each run from its own folder: give --load without one")
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        refuse("--sequence-parallel: needs --tensor-model-parallel-size above 1, found 1")
    if args.sequence_parallel and args.seq_length % args.tensor_model_parallel_size:
        refuse(
            f"--sequence-parallel: --seq-length {args.seq_length} does not divide by "
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size}"
        )
    if args.resume and args.load is not None:
        refuse("--resume is --load that may find nothing: give one of them")
    # a shell variable that is not set leaves an empty path, which pathlib reads as the current folder
    for name, paths in (("data", args.data), ("output", [args.output])):
        if "" in paths:
            refuse(f"--{name}: found an empty path. Name one, or drop the option")
    for name in ("warmup_steps", "seed"):
        if (value := getattr(args, name)) < 0:
            refuse(f"--{name.replace('_', '-')}: expected 0 or more, found {value}")
    # torch's limit is twice this, and Megatron adds a few thousands
    if args.seed >= 2**63:
        refuse(f"--seed: expected a number below 2^63, found {args.seed}. Give a smaller one")
