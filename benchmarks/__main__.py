"""`python -m benchmarks NAME [options]`; most need a GPU."""

import argparse
import sys
from pathlib import Path

import torch

from benchmarks import adamw, adamw_cpu, state_error  # noqa: F401  (they register themselves)
from benchmarks.harness import BENCHMARKS, Table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=sorted(BENCHMARKS), help="what to measure")
    parser.add_argument("--output", type=Path, help="CSV file; benchmarks/results/NAME.csv by default")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    arguments = parser.parse_args()
    chosen = BENCHMARKS[arguments.name]
    if chosen.needs_gpu and not torch.cuda.is_available():
        sys.exit(f"benchmarks {arguments.name}: needs a CUDA GPU, found none")
    table = Table(arguments.name, arguments.output)
    try:
        chosen.run(arguments, table)
    finally:
        table.write()


if __name__ == "__main__":
    main()
