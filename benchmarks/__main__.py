"""`python -m benchmarks NAME [options]`; most need a GPU."""

import argparse
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import (  # noqa: F401  (they register themselves)
    adamw,
    converge,
    evaluation,
    expert_parallel,
    experts,
    finetune,
    first_step,
    gradients,
    host_states,
    layer,
    log_probs,
    megatron_step,
    memorize,
    models,
    numerics,
    one_gpu,
    packed,
    report,
    reproduce,
    state_loop,
    train,
    trainer,
    verify,
    vlm,
    watch,
    zero,
    zero_gradients,
)
from benchmarks.common.harness import BENCHMARKS, Table


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line, with a command for each benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME", help="what to measure")
    for name, known in sorted(BENCHMARKS.items()):
        help = inspect.cleandoc(known.run.__doc__)
        sub = names.add_parser(
            name,
            help=help.splitlines()[0],
            description=help,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        default = f"results/{name}.csv" if known.writes_table else "RESULTS.md"
        sub.add_argument("--output", type=Path, help=f"file to write; benchmarks/{default} by default")
        sub.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
        if known.options is not None:
            known.options(sub)
    return parser


def main(words: Sequence[str] | None = None) -> None:
    arguments = build_parser().parse_args(words)
    chosen = BENCHMARKS[arguments.name]
    if chosen.needs_gpu and not torch.cuda.is_available():
        sys.exit(f"benchmarks {arguments.name}: needs a CUDA GPU, found none")
    if not chosen.writes_table:
        chosen.run(arguments, None)
        return
    table = Table(arguments.name, arguments.output)
    try:
        chosen.run(arguments, table)
    finally:
        table.write()
        if table.rows:
            print(f"wrote {table.path}")


if __name__ == "__main__":
    main()
