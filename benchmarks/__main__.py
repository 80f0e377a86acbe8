"""`python -m benchmarks NAME [options]`; without a GPU only the list of names."""

import argparse
import sys
from pathlib import Path

import torch

from benchmarks import adamw  # noqa: F401  (registers itself)
from benchmarks.harness import BENCHMARKS, Table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=sorted(BENCHMARKS), help="what to measure")
    parser.add_argument("--output", type=Path, help="CSV file; benchmarks/results/NAME.csv by default")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(f"benchmarks {arguments.name}: needs a CUDA GPU, found none")
    table = Table(arguments.name, arguments.output)
    try:
        BENCHMARKS[arguments.name](arguments, table)
    finally:
        table.write()


if __name__ == "__main__":
    main()
