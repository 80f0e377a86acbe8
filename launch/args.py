"""The command line of the entry point."""

import argparse
import math
from collections.abc import Callable

from coat_launch import config_path

RUNS = ("bf16", "coat")
SHAPE_FLAGS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")


def number(kind: type, least: float, below: float = math.inf) -> Callable[[str], float]:
    """A converter for argparse."""

    def convert(text: str) -> float:
        value = kind(text)
        if not least <= value < below:
            limit = "" if below == math.inf else f", below {below}"
            raise argparse.ArgumentTypeError(f"expected a number of at least {least}{limit}, found {text}")
        return value

    # argparse names it where the text is no number
    convert.__name__ = kind.__name__
    return convert


def path(text: str) -> str:
    # a shell variable that is not set leaves an empty path, which pathlib reads as the current folder
    if not text:
        raise argparse.ArgumentTypeError("found an empty path: name one, or drop the option")
    return text


positive = number(int, 1)


def parse_args(argv: list[str] | None = None, description: str | None = None) -> argparse.Namespace:
    """The arguments, sys.argv's by default, with dependent defaults filled in. Exits, as argparse does, for
    arguments that do not fit together.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    _add_model_and_data(parser.add_argument_group("model and data").add_argument)
    _add_training(parser.add_argument_group("training").add_argument)
    _add_output(parser.add_argument_group("output").add_argument)
    args = parser.parse_args(argv)
    args.eval_interval = args.eval_interval or max(1, args.steps // 5)
    if args.compare and (args.variant or args.resume):
        parser.error("--compare makes both runs: drop --variant, and the folder of --resume")
    return args


def _add_model_and_data(add: Callable) -> None:
    add("--model-config", default=config_path("model_quickstart.json"), help="JSON file with the shape")
    for flag in SHAPE_FLAGS:
        add("--" + flag.replace("_", "-"), type=positive, help="in place of the model config's")
    add(
        "--data",
        nargs="+",
        type=path,
        default=[],
        metavar="PATH",
        help="text files, .jsonl files with a text in each line, or folders of them; without it, the Python "
        "standard library's sources. Every process tokenises at its start: for many gigabytes take "
        "Megatron-LM's own script",
    )
    add("--tokenizer", metavar="JSON", help="Hugging Face tokenizer.json; bytes without it")
    add("--seq-length", type=positive, default=128, help="tokens per sequence (default %(default)s)")


def _add_training(add: Callable) -> None:
    add("--steps", type=positive, default=120, help="optimizer steps (default %(default)s)")
    add("--micro-batch-size", type=positive, help="sequences per rank and pass; else the JSON's, else 4")
    add("--global-batch-size", type=positive, help="sequences per step, by accumulation; else the JSON's")
    add("--lr", type=number(float, 0), help='peak learning rate (default: the JSON\'s; 2e-3 for its "auto")')
    add(
        "--warmup-steps",
        type=number(int, 0),
        help="linear warmup, then cosine to 10%% (default a tenth of --steps)",
    )
    add(
        "--distributed-timeout",
        type=positive,
        default=600,
        metavar="SECONDS",
        help="seconds until a rank that does not answer ends the run (default %(default)s)",
    )
    # torch's limit is twice this, and Megatron adds a few thousands
    add("--seed", type=number(int, 0, 2**63), default=1234, help="of weights, order and split of the data")
    add("--deepspeed-config", default=config_path("ds_zero1_coat.json"), help="DeepSpeed JSON")
    # not --run, which torchrun reads as an abbreviation of its own options
    add("--variant", choices=RUNS, help="override the JSON: bf16 disables the coat block")
    add("--compare", action="store_true", help="both runs, one after the other, and a table")
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)


def _add_output(add: Callable) -> None:
    add(
        "--output",
        type=path,
        default="runs/gpt",
        help="folder for metrics, plot, summary, checkpoints (default %(default)s)",
    )
    add("--eval-interval", type=positive, help="steps between validations (default a fifth of --steps)")
    add("--eval-batches", type=positive, default=8, help="global batches per validation (default 8)")
    add("--save-interval", type=positive, help="steps between checkpoints in OUTPUT/<run>/checkpoints")
    add(
        "--resume",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="go on from the newest checkpoint in this folder (or from this checkpoint). Without a "
        "value: in OUTPUT/<run>/checkpoints, and start where there is none yet",
    )
    add("--keep-checkpoints", type=positive, metavar="N", help="remove all but the newest N (default: none)")
