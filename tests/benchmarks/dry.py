"""Dry runs of benchmarks."""

import contextlib
import csv
import io
import subprocess
import sys
from pathlib import Path

from benchmarks.__main__ import main

ROOT = Path(__file__).parents[2]


def run(*arguments):
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def run_here(*arguments):
    """The same within this process, to save the imports: for commands that start no training and change
    nothing."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
            err.write("" if isinstance(end.code, int) else str(end.code))
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def rows_of(path, name, *arguments):
    """The rows that a benchmark writes into the file."""
    result = run(name, *arguments, "--output", str(path))
    assert result.returncode == 0, result.stderr
    return list(csv.DictReader(path.open()))
