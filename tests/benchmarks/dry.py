"""Dry runs of benchmarks."""

import csv
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments):
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def rows_of(path):
    return list(csv.DictReader(path.open()))
